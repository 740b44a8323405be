"""`app.http.payload`: how a body is wrapped."""

import pytest

from app.errors import UnknownCodingError
from app.http.payload import Coding


@pytest.mark.parametrize(
    ("encoding", "signed", "coding"),
    [
        (None, None, (False, False)),
        ("identity", None, (False, False)),
        ("", None, (False, False)),
        ("gzip", None, (True, False)),
        ("X-GZip", None, (True, False)),
        ("aws-chunked", None, (False, True)),
        ("gzip,aws-chunked", None, (True, True)),
        ("aws-chunked, gzip", None, (True, True)),
        (None, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", (False, True)),
        ("gzip", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", (True, True)),
        (None, "UNSIGNED-PAYLOAD", (False, False)),
    ],
)
def test_codings(encoding: str | None, signed: str | None, coding: tuple[bool, bool]) -> None:
    """A body is gzip or not, and framed or not."""
    given = {b"content-encoding": encoding, b"x-amz-content-sha256": signed}
    headers = {name: value.encode() for name, value in given.items() if value is not None}

    assert Coding.parse(headers) == coding


@pytest.mark.parametrize("encoding", [b"br", b"deflate", b"gzip, gzip", b"zstd, aws-chunked"])
def test_other_codings_are_refused(encoding: bytes) -> None:
    """What cannot be undone for whoever reads it is not stored."""
    with pytest.raises(UnknownCodingError):
        Coding.parse({b"content-encoding": encoding})
