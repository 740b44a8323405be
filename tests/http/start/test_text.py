"""`app.http.start.text`: what others wrote, made fit for a page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.start.text import (
    spell_nbytes,
    spell_path,
    spell_seconds,
    spell_shape,
    visible,
)

TIMES = " \N{MULTIPLICATION SIGN} "


@given(st.text(st.characters(), max_size=300))
def test_text_is_visible_and_can_be_sent(text: str) -> None:
    """Nothing turns lines around, ends them, or has no bytes, as half a surrogate pair."""
    shown = visible(text)

    assert shown.isprintable()
    assert shown.encode().decode() == shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é🧊 שלום", "plain é🧊 שלום"),
        ("two\nlines", "two\\nlines"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("\ud800", "\\ud800"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a" * 201, "a" * 200 + "…"),
    ],
)
def test_visible(text: str, expected: str) -> None:
    """Letters of all scripts stay as they are, and what is none is written out."""
    assert visible(text) == expected


def test_a_path_is_spelled_by_segments() -> None:
    """The names of refs keep what is encoded in them; the rest is encoded once."""
    assert spell_path("@branch.a%2Fb/x y/100%/#") == "@branch.a%2Fb/x%20y/100%25/%23"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (None, ""),
        ((), "scalar"),
        ((0,), "0"),
        ((3, 2), f"3{TIMES}2"),
        ((1,) * 13, TIMES.join(["1"] * 12 + ["…"])),
    ],
)
def test_shape(shape: tuple[int, ...] | None, expected: str) -> None:
    """Shapes of many dimensions are cut."""
    assert spell_shape(shape) == expected


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (2**60, "1024.0 PiB"),
    ],
)
def test_nbytes(nbytes: int, expected: str) -> None:
    """The unit is the largest that fits."""
    assert spell_nbytes(nbytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.9, "0 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h")],
)
def test_seconds(seconds: float, expected: str) -> None:
    """Two units are enough."""
    assert spell_seconds(seconds) == expected
