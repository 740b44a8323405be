"""`app.http.s3_parts`: the list of parts, from whoever sends it."""

import pytest

from app.errors import BadBodyError, BadPartError, PartOrderError
from app.http.s3_parts import parse_number, parse_parts

A = "a" * 32
B = "b" * 32


def part(number: object, etag: str, more: str = "") -> str:
    """Write one part."""
    return f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>{more}</Part>"


def complete(inside: str, start: str = "") -> bytes:
    """Write a list."""
    return f"<CompleteMultipartUpload{start}>{inside}</CompleteMultipartUpload>".encode()


@pytest.mark.parametrize(
    "inside",
    [
        part(1, f'"{A}"') + part(3, B),
        part(1, f"&quot;{A}&quot;") + "\n " + part(3, f"\n{B}\n "),
        part(1, A, "<ChecksumCRC32>AAAAAA==</ChecksumCRC32>") + part("03", B),
        f"<Part><ETag>{A}</ETag><PartNumber>1</PartNumber></Part>" + part(3, B),
    ],
)
@pytest.mark.parametrize("start", ["", ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'])
def test_parts(inside: str, start: str) -> None:
    """With or without quotes, checksums and the namespace."""
    assert parse_parts(complete(inside, start)) == [(1, A), (3, B)]


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        ("", BadBodyError),
        ("<Part/>", BadBodyError),
        ("<Other/>", BadBodyError),
        (part(0, A), BadBodyError),
        (part(10_001, A), BadBodyError),
        (part("+1", A), BadBodyError),
        (part("٣", A), BadBodyError),
        (part("9" * 5000, A), BadBodyError),
        (f"<Part><ETag>{A}</ETag></Part>", BadBodyError),
        (part(1, A, "<a><b/></a>"), BadBodyError),
        ("<Part><PartNumber>1</PartNumber></Part>", BadPartError),
        (part(1, "../" + A), BadPartError),
        (part(1, f'"{A}-2"'), BadPartError),
        (part(1, A.upper()), BadPartError),
        (part(2, A) + part(1, B), PartOrderError),
        (part(1, A) + part(1, A), PartOrderError),
    ],
)
def test_anything_else_is_refused(inside: str, error: type[Exception]) -> None:
    """Other elements, numbers and ETags, and parts in another order."""
    with pytest.raises(error):
        parse_parts(complete(inside))


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"<a>" * 10_000, b"<!DOCTYPE a [<!ENTITY x 'y'>]>" + complete(part(1, A))]
)
def test_what_is_no_list_is_refused(body: bytes) -> None:
    """A DTD is not even read."""
    with pytest.raises(BadBodyError):
        parse_parts(body)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("10000", 10_000), ("0", None), ("10001", None), ("", None), ("-1", None),
     ("1.0", None), (" 1", None)],
)  # fmt: skip
def test_numbers(text: str, number: int | None) -> None:
    """From one to ten thousand, as in S3."""
    assert parse_number(text) == number
