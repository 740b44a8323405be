"""Ranges and references: what they refuse, and how they compose."""

import pytest

from shardgate.model import ByteRange, SuffixRange, is_key


@pytest.mark.parametrize(("start", "stop"), [(-1, 0), (2, 1), (-2, -1)])
def test_range_that_does_not_ascend_from_0_is_refused(start: int, stop: int) -> None:
    """A byte range begins at 0 or later, and does not end before it begins."""
    with pytest.raises(ValueError, match=rf"not a byte range: \[{start}, {stop}\)"):
        ByteRange(start, stop)


@pytest.mark.parametrize("length", [0, -1])
def test_suffix_without_bytes_is_refused(length: int) -> None:
    """A suffix range has at least one byte."""
    with pytest.raises(ValueError, match=f"not a suffix range: {length} bytes"):
        SuffixRange(length)


@pytest.mark.parametrize("text", ["/a", "a//b", "a/../b", ".", "a\0", "\ud800", "é" * 513])
def test_text_that_no_request_can_name_is_no_key(text: str) -> None:
    """A key has no odd segment, control character or half of a surrogate pair, and 1,024 bytes."""
    assert not is_key(text)


def test_range_inside_of_another_is_translated() -> None:
    """A range inside of another is translated to the outer sequence, up to its end."""
    outer = ByteRange(10, 20)

    assert outer.narrow(ByteRange(2, 10)) == ByteRange(12, 20)
    with pytest.raises(ValueError, match=r"\[2, 11\) reaches past the end of \[10, 20\)"):
        outer.narrow(ByteRange(2, 11))
