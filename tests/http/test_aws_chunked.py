"""`app.http.aws_chunked`: frames as botocore and others write them."""

import io

import pytest
from botocore.httpchecksum import AwsChunkedWrapper, Crc32Checksum

from app.errors import BadBodyError
from app.http.aws_chunked import decode

SIGNATURE = b";chunk-signature=" + b"a" * 64
TRAILED = b"3\r\nabc\r\n0\r\nx-amz-checksum-crc32:NSRBwg==\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "body", "trailers"),
    [
        (b"0\r\n\r\n", b"", {}),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc", {}),
        (b"3%b\r\nabc\r\n2%b\r\nde\r\n0%b\r\n\r\n" % ((SIGNATURE,) * 3), b"abcde", {}),
        (b"00A\r\n0123456789\r\n0\r\n\r\n", b"0123456789", {}),
        (b"4\r\n\r\n0\r\n"[:-3] + b"\r\n\r\n0\r\n\r\n", b"\r\n\r\n", {}),
        (TRAILED, b"abc", {b"x-amz-checksum-crc32": b"NSRBwg=="}),
        (b"0\r\nA:1\nB: 2 \n\r\n", b"", {b"a": b"1", b"b": b"2"}),
    ],
)
def test_frames(data: bytes, body: bytes, trailers: dict[bytes, bytes]) -> None:
    """Signed or not, with trailers or without, the body is what is between the frames."""
    assert decode(data, len(body)) == (body, trailers)


def test_frames_of_botocore() -> None:
    """What botocore sends over TLS is understood, whatever the size of its chunks."""
    body = bytes(range(256)) * 100
    for size in (1, 7, 1000, len(body)):
        wrapper = AwsChunkedWrapper(
            io.BytesIO(body), Crc32Checksum, "x-amz-checksum-crc32", chunk_size=size
        )
        framed = decode(wrapper.read(), len(body))

        assert framed.body == body
        assert set(framed.trailers) == {b"x-amz-checksum-crc32"}


@pytest.mark.parametrize("length", range(len(TRAILED)))
def test_no_part_of_a_body_passes_for_it(length: int) -> None:
    """Wherever it is cut, it is refused."""
    with pytest.raises(BadBodyError):
        decode(TRAILED[:length], 3)


@pytest.mark.parametrize(
    "data",
    [
        b"abc",
        b"3\nabc\n0\n\n",
        b"-3\r\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"2\r\nabc\r\n0\r\n\r\n",
        b"4\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabcX\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\nno trailer\r\n\r\n",
        b"3" + b";" * 2000 + b"\r\nabc\r\n0\r\n\r\n",
        b"2\r\nab\r\n0\r\n\r\n",
        b"4\r\nabcd\r\n0\r\n\r\n",
        b"ffffffffffff\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_malformed_frames_are_refused(data: bytes) -> None:
    """Nor is more or less taken than was told."""
    with pytest.raises(BadBodyError):
        decode(data, 3)
