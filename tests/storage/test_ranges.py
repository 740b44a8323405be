"""Ranges and versions as HTTP writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import RangeNotSatisfiedError, VersionChangedError
from app.model import ByteRange, ByteRequest, ETag, ObjectRef, SuffixRange
from app.storage.ranges import (
    clamp,
    is_derived,
    is_gzip,
    parse_content_range,
    parse_unsatisfied,
    range_header,
    version,
)

REF = ObjectRef("memory://bucket", "key")


@pytest.mark.parametrize(
    ("request_", "header"),
    [(ByteRange(0, 1), "bytes=0-0"), (ByteRange(5, 9), "bytes=5-8"), (SuffixRange(3), "bytes=-3")],
)
def test_http_ranges_include_their_end(request_: ByteRequest, header: str) -> None:
    """HTTP names the last byte, we the one after it."""
    assert range_header(request_) == header


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("bytes 0-0/1", (ByteRange(0, 1), 1)),
        ("bytes 5-8/10", (ByteRange(5, 9), 10)),
        ("bytes 5-8/9", (ByteRange(5, 9), 9)),
        ("bytes 5-8/8", None),
        ("bytes 5-4/8", None),
        ("bytes 5-8/*", None),
        ("bytes */8", None),
        ("bytes=5-8/9", None),
        (" bytes 5-8/9", None),
        ("bytes 5-8/9\n", None),
        ("bytes +5-8/9", None),
        ("bytes ٣-8/9", None),
        ("bytes 0-0/99999999999999999999", None),
        ("", None),
    ],
)
def test_content_range_is_parsed_strictly(text: str, parsed: tuple[ByteRange, int] | None) -> None:
    """Only a range that lies in its whole is one."""
    assert parse_content_range(text.encode()) == parsed


@pytest.mark.parametrize(
    ("text", "size"), [("bytes */0", 0), ("bytes */17", 17), ("bytes */*", None), ("", None)]
)
def test_a_416_tells_the_size(text: str, size: int | None) -> None:
    """The size is known, or it is not."""
    assert parse_unsatisfied(text.encode()) == size


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_a_clamped_range_is_what_slicing_gives(size: int, start: int, length: int) -> None:
    """Clamping agrees with Python's slices, or raises where a slice would be empty."""
    data = bytes(range(size))
    try:
        found = clamp(REF, ByteRange(start, start + length), size, None)
    except RangeNotSatisfiedError:
        assert start > size or (length and start == size)
    else:
        assert data[found.start : found.stop] == data[start : start + length]
        assert found.stop <= size


@given(st.integers(1, 50), st.integers(1, 60))
def test_a_clamped_suffix_is_what_slicing_gives(size: int, length: int) -> None:
    """A suffix agrees with Python's slices."""
    data = bytes(range(size))

    found = clamp(REF, SuffixRange(length), size, None)

    assert data[found.start : found.stop] == data[-length:]


def test_a_pinned_range_outside_is_of_another_version() -> None:
    """Who names a version knows its size."""
    with pytest.raises(VersionChangedError):
        clamp(REF, ByteRange(5, 6), 5, ETag('"1"'))


@pytest.mark.parametrize("etag", ['"abc"', '"a-1!"'])
def test_a_strong_etag_is_taken(etag: str) -> None:
    """A strong ETag is the version as it is."""
    assert version({b"etag": etag.encode(), b"last-modified": b"now"}, 5) == etag


@pytest.mark.parametrize("etag", ['""', 'W/"abc"', "abc", '"a"b"', '"a', '"a b"', ""])
def test_another_etag_is_made_strong(etag: str) -> None:
    """What is no strong ETag becomes one of ours, which is known as such."""
    derived = version({b"etag": etag.encode()}, 5)

    assert is_derived(derived)
    assert version({b"etag": derived.encode()}, 5) == derived


def test_a_derived_version_changes_with_each_fact() -> None:
    """Weak ETag, date and size all tell versions apart."""
    facts = [
        ({}, 1),
        ({}, 2),
        ({b"etag": b'W/"a"'}, 1),
        ({b"etag": b'W/"b"'}, 1),
        ({b"last-modified": b"Mon"}, 1),
    ]

    assert len({version(headers, size) for headers, size in facts}) == len(facts)


@pytest.mark.parametrize(
    ("coding", "expected"),
    [
        (b"gzip", True),
        (b"x-gzip", True),
        (b"GZIP", True),
        (b"aws-chunked, gzip", True),
        (b"gzip,aws-chunked", True),
        (b"gzip, gzip", False),
        (b"br", False),
        (b"aws-chunked", False),
        (b"identity", False),
        (b"", False),
    ],
)
def test_gzip_alone_is_a_coding_that_is_known(coding: bytes, *, expected: bool) -> None:
    """How an upload was framed does not count."""
    assert is_gzip({b"content-encoding": coding}) is expected
    assert not is_gzip({})
