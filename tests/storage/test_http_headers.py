"""Ranges and versions in HTTP headers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import RangeNotSatisfiedError
from shardgate.model import ByteRange, ETag, ObjectRef, SuffixRange
from shardgate.storage.contract import clamp
from shardgate.storage.http_headers import (
    content_coding,
    is_derived,
    parse_content_range,
    parse_date,
    parse_unsatisfied,
    read_headers,
    version_of,
)

REF = ObjectRef("memory://bucket", "key")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("bytes 0-0/1", (ByteRange(0, 1), 1)),
        ("bytes 5-8/10", (ByteRange(5, 9), 10)),
        ("bytes 5-8/9", (ByteRange(5, 9), 9)),
        ("bytes 5-8/8", None),
        ("bytes 5-4/8", None),
        ("bytes 5-8/*", (ByteRange(5, 9), None)),
        ("bytes 5-4/*", None),
        ("bytes 5-8/**", None),
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
    """A valid Content-Range is parsed, with its size or only the size for 416; others are not."""
    assert parse_content_range(text.encode()) == parsed
    assert parse_unsatisfied(text.encode()) == (8 if text == "bytes */8" else None)


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_clamped_range_equals_a_slice(size: int, start: int, length: int) -> None:
    """A clamped range is that of a slice, or raises where a slice would be empty."""
    data = bytes(range(size))
    try:
        found = clamp(REF, ByteRange(start, start + length), size, None)
    except RangeNotSatisfiedError:
        assert start > size or (length and start == size)
    else:
        assert data[found.start : found.stop] == data[start : start + length]
        assert found.stop <= size
    if size and length:
        suffix = clamp(REF, SuffixRange(length), size, None)
        assert data[suffix.start : suffix.stop] == data[-length:]


@pytest.mark.parametrize(
    ("etag", "is_strong"),
    [
        ('"abc"', True),
        ('"a-1!"', True),
        *((each, False) for each in ('""', 'W/"abc"', "abc", '"a"b"', '"a', '"a b"', "")),
    ],
)
def test_only_a_strong_etag_is_a_version(etag: str, *, is_strong: bool) -> None:
    """A strong ETag is the version; any other is replaced by a derived one, known as such."""
    found = version_of({b"etag": etag.encode(), b"last-modified": b"now"}, 5)

    assert (found == etag) is is_strong
    assert is_derived(found) is not is_strong
    assert version_of({b"etag": found.encode()}, 5) == found


def test_a_derived_version_changes_with_each_fact() -> None:
    """A derived version differs by weak ETag, date and size."""
    facts = [
        ({}, 1),
        ({}, 2),
        ({b"etag": b'W/"a"'}, 1),
        ({b"etag": b'W/"b"'}, 1),
        ({b"last-modified": b"Mon"}, 1),
    ]

    assert len({version_of(headers, size) for headers, size in facts}) == len(facts)


@pytest.mark.parametrize(
    ("coding", "expected"),
    [
        (b"gzip", "gzip"),
        (b"x-gzip", "gzip"),
        (b"GZIP", "gzip"),
        (b"aws-chunked, gzip", "gzip"),
        (b"gzip,aws-chunked", "gzip"),
        (b"gzip,  x-compress", "gzip, compress"),
        (b"Br", "br"),
        (b"aws-chunked", ""),
        (b"identity", ""),
        (b"UTF-8", ""),
        (b"none", ""),
        (b"", ""),
    ],
)
def test_coding_has_one_spelling(coding: bytes, expected: str) -> None:
    """The coding of an object leaves out framing and charset, and has the registered names."""
    assert content_coding({b"content-encoding": coding}) == expected
    assert content_coding({}) == ""


@pytest.mark.parametrize(
    "text",
    [
        "Fri, 31 Dec 9999 23:59:59 -1200",
        "Mon, 01 Jan 2020 00:00:00 +99999999999999999999",
        f"Mon, {'9' * 5000} Jan 2020 00:00:00 GMT",
        f"Mon, 01 Jan {'9' * 5000} 00:00:00 GMT",
    ],
)
def test_date_out_of_bounds_is_none(text: str) -> None:
    """A date before the year 1, behind the year 9999 or with a huge number is no date."""
    assert parse_date(text) is None


@pytest.mark.parametrize("seconds", ["9" * 11, "9" * 12, "9" * 5000])
def test_condition_of_a_derived_version_of_any_time_is_sent_or_left_out(seconds: str) -> None:
    """A version that names a time far ahead makes a header with a date, or none."""
    lines = read_headers(None, ETag(f'"~{seconds}-1"'), None)

    assert lines in (b"", b"If-Unmodified-Since: Wed, 16 Nov 5138 09:46:39 GMT\r\n")
