"""From what came over the wire to the bytes that are to be stored."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from app.concurrency import run_in_thread
from app.errors import BadBodyError, LengthRequiredError, TooLargeError, UnknownCodingError
from app.formats.compression import inflated_nbytes
from app.http import aws_chunked
from app.http.bodies import LENGTH, Incoming
from app.http.checksums import check
from app.http.credentials.seals import Seal
from app.resolve.budget import ByteReservation

_IN_THREAD_NBYTES: Final = 128 * 1024
"""Checksums of more are computed off the event loop."""
_FRAMES_NBYTES: Final = 16 * 1024
_DECODED_LENGTH: Final = b"x-amz-decoded-content-length"
_NO_CODING: Final = frozenset({b"", b"identity"})
_GZIP: Final = frozenset({b"gzip", b"x-gzip"})


class Payload(NamedTuple):
    """The bytes that were sent, without what is of the transfer only."""

    body: bytes
    is_gzip: bool


class Coding(NamedTuple):
    """What a body is wrapped in."""

    is_gzip: bool
    is_framed: bool
    """Whether it is ``aws-chunked``."""

    @classmethod
    def parse(cls, given: Mapping[bytes, bytes]) -> "Coding":
        """Read Content-Encoding; old clients tell of frames by x-amz-content-sha256 only.

        Raises: `UnknownCodingError`.
        """
        is_framed = given.get(b"x-amz-content-sha256", b"").startswith(b"STREAMING-")
        listed = given.get(b"content-encoding", b"").lower().split(b",")
        codings = [each.strip() for each in listed if each.strip() not in _NO_CODING]
        if b"aws-chunked" in codings:
            codings.remove(b"aws-chunked")
            is_framed = True
        if codings and (len(codings) > 1 or codings[0] not in _GZIP):
            raise UnknownCodingError("a body may come with Content-Encoding: gzip, or none")
        return cls(bool(codings), is_framed)


async def read_payload(
    incoming: Incoming, given: Mapping[bytes, bytes], held: ByteReservation, *, most_nbytes: int
) -> Payload:
    """Read and check a body of up to *most_nbytes*.

    Raises: `UnknownCodingError`, `DigestError`, `SignatureError`, and what `Incoming` raises.
    """
    coding = Coding.parse(given)
    if not coding.is_framed:
        body = await incoming.read(incoming.length(most_nbytes), held)
        await run_in_thread(check, body, body, given, is_long=len(body) > _IN_THREAD_NBYTES)
        return await _counted(Payload(body, coding.is_gzip), held, most_nbytes)
    length = _decoded_length(given, most_nbytes)
    received = await incoming.read_framed(_framed_nbytes(length), held)
    await held.reserve(len(received) + length)
    is_long = len(received) > _IN_THREAD_NBYTES
    body = await run_in_thread(_unframe, received, length, given, incoming.seal, is_long=is_long)
    del received
    return await _counted(Payload(body, coding.is_gzip), held, most_nbytes)


async def _counted(payload: Payload, held: ByteReservation, most_nbytes: int) -> Payload:
    """Reserve what *payload* takes, once more for what it says to hold if it is gzip."""
    nbytes = len(payload.body)
    if payload.is_gzip:
        nbytes += min(inflated_nbytes(payload.body), most_nbytes)
    await held.reserve(nbytes)
    return payload


def _decoded_length(given: Mapping[bytes, bytes], most_nbytes: int) -> int:
    told = given.get(_DECODED_LENGTH, b"")
    if not LENGTH.fullmatch(told):
        raise LengthRequiredError("the request does not tell x-amz-decoded-content-length")
    if (length := int(told)) > most_nbytes:
        raise TooLargeError(f"the body is larger than {most_nbytes} bytes")
    return length


def _framed_nbytes(length: int) -> int:
    """Bound what *length* bytes take with their frames."""
    return length + length // 8 + _FRAMES_NBYTES


def _unframe(
    received: bytes, length: int, given: Mapping[bytes, bytes], seal: Seal | None
) -> bytes:
    chain = None if seal is None else seal.chain()
    body, trailers = aws_chunked.decode(received, length, chain)
    announced = {name.strip() for name in given.get(b"x-amz-trailer", b"").lower().split(b",")}
    if not announced - {b""} <= trailers.keys():
        raise BadBodyError("a trailer is missing that x-amz-trailer announces")
    check(received, body, {**trailers, **given})
    return body
