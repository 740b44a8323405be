"""`app.http.ranges`: inclusive text, half-open values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadHeaderError
from app.http.ranges import UnsatisfiableError, content_range, parse_range, resolve_range
from app.model import ByteRange


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", ByteRange(0, 1)),
        ("bytes=8-99", ByteRange(8, 10)),
        ("bytes=9-", ByteRange(9, 10)),
        ("bytes=-3", ByteRange(7, 10)),
        ("bytes=-99", ByteRange(0, 10)),
        ("Bytes= 2-3 ", ByteRange(2, 4)),
        ("bytes=0-999999999999999999", ByteRange(0, 10)),
    ],
)
def test_resolves(header: str, expected: ByteRange) -> None:
    """A range is clamped to the ten bytes there are."""
    request = parse_range(header)

    assert request is not None
    assert resolve_range(request, 10) == expected


@pytest.mark.parametrize("header", ["bytes=0-1,4-5", "bytes=0-,0-", "lines=1-2", "lines"])
def test_asks_for_everything(header: str) -> None:
    """Several ranges, and units that are not ours, are answered with the whole body."""
    assert parse_range(header) is None


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-12", "bytes=-0"])
def test_is_unsatisfiable(header: str) -> None:
    """No byte of ten lies in the range."""
    with pytest.raises(UnsatisfiableError):
        resolve_range(parse_range(header) or ByteRange(0, 1), 10)


def test_nothing_of_an_empty_entity_is_satisfiable() -> None:
    """An empty entity has no last bytes."""
    with pytest.raises(UnsatisfiableError):
        resolve_range(parse_range("bytes=-5") or ByteRange(0, 1), 0)


@pytest.mark.parametrize(
    "header", ["bytes=", "bytes=-", "bytes=a-b", "bytes=5-2", "bytes", "bytes=+1-2", "bytes=٣-٤"]
)
def test_is_malformed(header: str) -> None:
    """What is no range is a fault of the client."""
    with pytest.raises(BadHeaderError):
        parse_range(header)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 40))
def test_agrees_with_slicing(first: int, last: int, length: int) -> None:
    """An inclusive range takes what a slice of the body takes."""
    body = bytes(range(length))
    try:
        part = resolve_range(parse_range(f"bytes={first}-{last}") or ByteRange(0, 0), length)
    except (BadHeaderError, UnsatisfiableError):
        assert not body[first : last + 1]
    else:
        assert body[part.start : part.stop] == body[first : last + 1]


def test_content_range_is_inclusive() -> None:
    """The last byte is named, not the one after it."""
    assert content_range(ByteRange(2, 5), 9) == "bytes 2-4/9"
