"""`shardgate.server.body`: bodies are bounded, in time, decoded and checked."""

import gzip
from collections.abc import Sequence
from typing import Any

import pytest

from shardgate import errors
from shardgate.errors import BadBodyError, DigestError, LengthRequiredError
from shardgate.read.budget import ByteBudget, ByteReservation
from shardgate.server.body import (
    ClientGoneError,
    ContentCoding,
    IncomingBody,
    check_digests,
    decode_aws_chunked,
    read_payload,
)

MIB = 1024**2


class Client:
    """Sends *pieces*, and records each request for one with the bytes held then."""

    def __init__(self, pieces: Sequence[bytes], budget: ByteBudget | None = None) -> None:
        self._pieces = list(pieces)
        self._budget = budget
        self.asked: list[int] = []

    async def receive(self) -> dict[str, Any]:
        """Return the next piece."""
        self.asked.append(self._budget.held_bytes if self._budget else 0)
        if not self._pieces:
            return {"type": "http.disconnect"}
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}


def incoming(client: Client, length: int) -> IncomingBody:
    """Return a body that announces *length* bytes."""
    given = {b"content-length": b"%d" % length}
    return IncomingBody(client.receive, given, timeout_s=1)


async def read(client: Client, length: int, budget: ByteBudget | None = None) -> bytes:
    """Read a body that announces *length* bytes."""
    held = ByteReservation(budget or ByteBudget(10 * MIB, wait_s=0.01))
    try:
        return await incoming(client, length).read(length, held)
    finally:
        await held.release()


async def test_body_is_counted_once_it_has_arrived() -> None:
    """A client that announces a long body holds only the bytes that it has sent."""
    budget = ByteBudget(100 * MIB, wait_s=0.01)
    client = Client([bytes(MIB)] * 4, budget)

    assert len(await read(client, 4 * MIB, budget)) == 4 * MIB
    assert client.asked == [0, MIB, 2 * MIB, 3 * MIB]
    assert budget.held_bytes == 0


async def test_body_without_room_is_not_read_further() -> None:
    """A body whose first piece exceeds the budget raises BusyError, and is not read further."""
    budget = ByteBudget(100 * MIB, wait_s=0.01)
    await budget.acquire(100 * MIB)
    client = Client([b"ab", b"c"])

    with pytest.raises(errors.BusyError):
        await read(client, 3, budget)
    assert client.asked == [0]


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        *(
            (pieces, BadBodyError)
            for pieces in ([b"abcd"], [b"ab"], [b"abc", b"d"], [b"a", b"b"], [b""])
        ),
        ([], ClientGoneError),
    ],
)
async def test_body_of_other_length_is_refused(pieces: list[bytes], error: type[Exception]) -> None:
    """A body that is longer or shorter than announced is refused.

    A body of zero bytes is not read.
    """
    with pytest.raises(error):
        await read(Client(pieces), 3)
    client = Client(pieces)
    assert await read(client, 0) == b""
    assert client.asked == []


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, LengthRequiredError),
        ({b"transfer-encoding": b"chunked"}, LengthRequiredError),
        ({b"transfer-encoding": b"chunked", b"content-length": b"3"}, LengthRequiredError),
        ({b"content-length": b"-3"}, LengthRequiredError),
        ({b"content-length": b"3, 3"}, LengthRequiredError),
        ({b"content-length": b"5"}, errors.TooLargeError),
    ],
)
def test_length_is_required_and_bounded(given: dict[bytes, bytes], error: type[Exception]) -> None:
    """A missing or invalid Content-Length, or one above the limit, is refused before reading."""
    with pytest.raises(error):
        IncomingBody(None, given, timeout_s=1).length(4)


async def test_chunked_body_is_bounded() -> None:
    """A body with chunked transfer coding is read without a length, up to the limit."""
    for pieces in ([b"abc", b"de"], [b"abcd", b"ef"]):
        given = {b"transfer-encoding": b"chunked"}
        body = IncomingBody(Client(pieces).receive, given, timeout_s=1)
        held = ByteReservation(ByteBudget(MIB, wait_s=1))
        if sum(map(len, pieces)) > 5:
            with pytest.raises(BadBodyError):
                await body.read_framed(5, held)
        else:
            assert await body.read_framed(5, held) == b"abcde"


@pytest.mark.parametrize(
    ("encoding", "signed", "coding"),
    [
        (None, None, ("", False)),
        ("identity", None, ("", False)),
        ("", None, ("", False)),
        ("gzip", None, ("gzip", False)),
        ("X-GZip", None, ("gzip", False)),
        ("br", None, ("br", False)),
        ("gzip, gzip", None, ("gzip, gzip", False)),
        ("aws-chunked", None, ("", True)),
        ("gzip,aws-chunked", None, ("gzip", True)),
        ("aws-chunked, zstd", None, ("zstd", True)),
        (None, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", ("", True)),
        ("gzip", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", ("gzip", True)),
        (None, "UNSIGNED-PAYLOAD", ("", False)),
        *((other, None, None) for other in ("b r", "br;q=1", '"gzip"', "\xe9")),
    ],
)
def test_content_coding_is_parsed(
    encoding: str | None, signed: str | None, coding: tuple[str, bool] | None
) -> None:
    """A content coding is a list of names beside the framing; any other value is refused."""
    given = {b"content-encoding": encoding, b"x-amz-content-sha256": signed}
    headers = {name: value.encode() for name, value in given.items() if value is not None}

    if coding is None:
        with pytest.raises(errors.UnknownCodingError):
            ContentCoding.parse(headers)
    else:
        assert ContentCoding.parse(headers) == coding


async def test_decoded_bytes_are_counted() -> None:
    """The budget counts a body and its frames, and compressed bytes and their inflated ones."""
    body = gzip.compress(bytes(MIB))
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    given = {
        b"content-encoding": b"gzip, aws-chunked",
        b"content-length": b"%d" % len(framed),
        b"x-amz-decoded-content-length": b"%d" % len(body),
    }
    budget = NotingBudget(10 * MIB, wait_s=1)
    arriving = incoming(Client([framed]), len(framed))
    payload = await read_payload(arriving, given, ByteReservation(budget), most_nbytes=2 * MIB)

    assert payload == (body, "gzip")
    assert budget.held == [len(framed), len(framed) + len(body), len(body) + MIB]


class NotingBudget(ByteBudget):
    """Records the held bytes whenever they have grown."""

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        super().__init__(max_bytes, wait_s=wait_s)
        self.held: list[int] = []

    async def acquire(self, nbytes: int, *, held_nbytes: int = 0) -> None:
        """Acquire, and record."""
        await super().acquire(nbytes, held_nbytes=held_nbytes)
        self.held.append(self.held_bytes)


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
def test_frames_are_decoded(data: bytes, body: bytes, trailers: dict[bytes, bytes]) -> None:
    """aws-chunked frames, signed or not, with trailers or without, decode to their body."""
    assert decode_aws_chunked(data, len(body)) == (body, trailers)


@pytest.mark.parametrize(
    "data",
    [
        *(b"abc", b"3\nabc\n0\n\n", b"-3\r\nabc\r\n0\r\n\r\n", b"0x3\r\nabc\r\n0\r\n\r\n"),
        *(b"2\r\nabc\r\n0\r\n\r\n", b"4\r\nabc\r\n0\r\n\r\n", b"3\r\nabcX\r\n0\r\n\r\n"),
        b"3\r\nabc\r\n0\r\nno trailer\r\n\r\n",
        b"3" + b";" * 2000 + b"\r\nabc\r\n0\r\n\r\n",
        *(b"2\r\nab\r\n0\r\n\r\n", b"4\r\nabcd\r\n0\r\n\r\n", b"ffffffffffff\r\nabc\r\n0\r\n\r\n"),
        *(TRAILED[:length] for length in range(len(TRAILED))),
    ],
)
def test_malformed_frames_are_refused(data: bytes) -> None:
    """Malformed or truncated frames, and those of another length, are refused."""
    with pytest.raises(BadBodyError):
        decode_aws_chunked(data, 3)


BODY = b"123456789"

TOLD = {  # of the catalogue of CRCs, and of OpenSSL
    b"content-md5": b"JfnnlDI7RTiF9RgfG2JNCw==",
    b"x-amz-checksum-crc32": b"y/Q5Jg==",
    b"x-amz-checksum-crc32c": b"4waSgw==",
    b"x-amz-checksum-sha1": b"98O8HYCOBHMq32eZZczDTKeuNEE=",
    b"x-amz-checksum-sha256": b"FeKw08M4keuw8e9gnsQZQgwg4yDOlMZfvIwzEkSOsiU=",
    b"x-amz-content-sha256": b"15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
}


@pytest.mark.parametrize("name", TOLD)
def test_digest_is_checked(name: bytes) -> None:
    """A digest header must be that of the body, in its one spelling; otherwise DigestError."""
    told = {name: TOLD[name]}
    check_digests(BODY, BODY, told)

    with pytest.raises(DigestError, match=name.decode()):
        check_digests(BODY + b"0", BODY + b"0", told)
    for value in (b"", b"y/Q5Jg", b"cbf43926", b"y/Q5Jg== x"):
        with pytest.raises(DigestError):
            check_digests(BODY, BODY, {b"x-amz-checksum-crc32": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-amz-checksum-crc64nvme", b"AAAAAAAAAAA="),
        (b"x-amz-checksum-of-the-future", b"x"),
        (b"x-amz-content-sha256", b"UNSIGNED-PAYLOAD"),
        (b"x-amz-content-sha256", b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
    ],
)
def test_unknown_digest_is_ignored(name: bytes, value: bytes) -> None:
    """Unknown digests and unsigned payloads are not checked.

    The signed digest covers the body with its frames, others the decoded body.
    """
    signed, md5 = b"x-amz-content-sha256", b"content-md5"

    check_digests(BODY, BODY, {name: value})
    check_digests(BODY, b"x", {signed: TOLD[signed]})
    check_digests(b"x", BODY, {md5: TOLD[md5]})
