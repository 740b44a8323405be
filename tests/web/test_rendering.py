"""`shardgate.web.rendering`: texts, shapes and sizes, as pages have them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardgate.server.request import quote_key
from shardgate.web.rendering import format_nbytes, format_shape, visible

TIMES = " \N{MULTIPLICATION SIGN} "


@given(st.text(st.characters(), max_size=300))
@example("plain é🧊 שלום")
def test_visible_text_is_printable(text: str) -> None:
    """`visible` escapes what is not printable, keeps other letters, and cuts at 200 characters."""
    shown = visible(text)

    assert shown.isprintable()
    assert shown.encode().decode() == shown
    assert shown == text or not text.isprintable() or len(text) > 200
    for odd in ("\n", "\u202e", "\ud800", "\x1b"):
        assert visible(f"a{odd}b") == "a" + odd.encode("unicode_escape").decode() + "b"
    assert visible("a" * 201) == "a" * 200 + "…"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_shape(None), ""),
        (format_shape(()), "scalar"),
        (format_shape((0,)), "0"),
        (format_shape((3, 2)), f"3{TIMES}2"),
        (format_shape((1,) * 13), TIMES.join(["1"] * 12 + ["…"])),
        (format_nbytes(0), "0 bytes"),
        (format_nbytes(1023), "1,023 bytes"),
        (format_nbytes(1536), "1.5 KiB"),
        (format_nbytes(2**50 * 3), "3.0 PiB"),
        (format_nbytes(2**80), "over 1,024 EiB"),
        (format_nbytes(10**400), "over 1,024 EiB"),
        (format_nbytes(1), "1 byte"),
        (quote_key("@branch.a%2Fb/x y/100%/#"), "@branch.a%2Fb/x%20y/100%25/%23"),
    ],
)
def test_shapes_sizes_and_keys_are_formatted(shown: str, expected: str) -> None:
    """A long shape is cut, a size has the largest unit that fits, and a key is percent-encoded."""
    assert shown == expected
