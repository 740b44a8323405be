"""Request bodies: read in time and within bounds, decoded, checked."""

import asyncio
import base64
import hashlib
import re
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import Any, Final, NamedTuple, Protocol

import crc32c
from fastapi import Request
from pydantic import BaseModel, ValidationError

from shardgate.concurrency import run_in_thread
from shardgate.errors import (
    BadBodyError,
    DigestError,
    LengthRequiredError,
    ShardgateError,
    SignatureError,
    SlowBodyError,
    TooLargeError,
    UnknownCodingError,
)
from shardgate.formats.compression import announced_nbytes
from shardgate.read.budget import ByteBudget, ByteReservation
from shardgate.storage.http_headers import content_coding

_IN_THREAD_NBYTES: Final = 128 * 1024  # checksums of longer bodies are computed off the event loop
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_DECODED_LENGTH: Final = b"x-amz-decoded-content-length"
_CODINGS: Final = re.compile(r"([!#$%&'*+.^_`|~0-9a-z-]+(, |$))*")
_CRC_NBYTES: Final = 4
_SHA256: Final = re.compile(rb"[0-9a-f]{64}")
# Holds a digest of the body as it was sent, or a word for the way in which it was signed.
_CONTENT_SHA256: Final = b"x-amz-content-sha256"


class FrameSignatures(Protocol):
    """Signatures of the frames of an aws-chunked body."""

    signs_trailers: bool
    """Whether trailers are signed too; if not, there must be none."""

    def check_chunk(self, data: bytes | memoryview, signature: bytes) -> None:
        """Check the *signature* of the next frame. Raises: `SignatureError`."""

    def check_trailers(self, lines: bytes, signature: bytes) -> None:
        """Check the *signature* of trailers, lines of ``name:value``. Raises: `SignatureError`."""


class IncomingBody:
    """Body of a request with *headers*, read from the ASGI callable *receive*."""

    def __init__(self, receive: Any, headers: Mapping[bytes, bytes], *, timeout_s: float) -> None:
        self.receive = receive
        self.headers = headers
        self.signatures: FrameSignatures | None = None
        """Signatures of its frames, if any; set once the caller is authenticated."""
        self.received_nbytes = 0
        """Bytes read so far, frames included, without those that are dropped."""
        self._timeout_s = timeout_s
        self._length = headers.get(b"content-length")
        self._is_chunked = b"transfer-encoding" in headers
        self._is_expecting = b"expect" in headers
        self.is_unread = has_body(headers)
        """Whether some of it may still arrive."""

    def length(self, most_nbytes: int) -> int:
        """Return the Content-Length. Raises: `LengthRequiredError`, `TooLargeError`."""
        text = None if self._is_chunked else self._length
        return _parse_length(text, "Content-Length", most_nbytes)

    async def read(self, length: int, held: ByteReservation) -> bytes:
        """Read the *length* bytes, reserved in *held* once they have arrived.

        Raises: `BusyError`, `SlowBodyError`, `ClientGoneError`, `BadBodyError` for another length.
        """
        body = await self._read(length, held)
        if len(body) != length:
            raise BadBodyError(f"the body has not the {length} bytes of its Content-Length")
        return body

    async def read_framed(self, most_nbytes: int, held: ByteReservation) -> bytes:
        """Read an aws-chunked body, which may lack Content-Length. Raises: see `read`, `length`."""
        if not self._is_chunked or self._length is not None:
            return await self.read(self.length(most_nbytes), held)
        return await self._read(most_nbytes, held)

    async def _read(self, most_nbytes: int, held: ByteReservation) -> bytes:
        """Read up to *most_nbytes* into one buffer, so that memory never holds them twice."""
        body = BytesIO()
        waited_s = 0.0
        while self.is_unread:
            arrived = body.tell()
            # A client that is slower than 16 KiB/s on average holds memory in vain.
            left_s = self._timeout_s + arrived / (16 * 1024) - waited_s
            began_at = asyncio.get_running_loop().time()
            piece, self.is_unread = await self._next(min(left_s, self._timeout_s))
            waited_s += asyncio.get_running_loop().time() - began_at
            if arrived + len(piece) > most_nbytes:
                raise BadBodyError(f"the body has more than {most_nbytes} bytes")
            await held.reserve(arrived + len(piece))
            body.write(piece)
            self.received_nbytes = body.tell()
        return body.getvalue()

    async def drain(self) -> None:
        """Read and drop the rest, for a bounded time and up to a bounded size."""
        if self._is_expecting:  # the client sends the body only if it is told to
            return
        # A connection closed at once, while bytes still arrive, would lose the response.
        longest_s = 2.0
        dropped = 0
        with suppress(TimeoutError, ClientGoneError):
            async with asyncio.timeout(longest_s):
                while self.is_unread and dropped < 64 * 1024**2:
                    piece, self.is_unread = await self._next(longest_s)
                    dropped += len(piece)

    async def _next(self, longest_s: float) -> tuple[bytes, bool]:
        try:
            async with asyncio.timeout(longest_s):
                message = await self.receive()
        except TimeoutError:
            raise SlowBodyError("the body did not arrive in time") from None
        if message["type"] != "http.request":
            raise ClientGoneError
        return message.get("body", b""), message.get("more_body", False)


def _parse_length(text: bytes | None, name: str, most_nbytes: int) -> int:
    if text is None or not _LENGTH.fullmatch(text):
        raise LengthRequiredError(f"the request has no valid {name}")
    if int(text) > most_nbytes:
        raise TooLargeError(f"the body is larger than {most_nbytes} bytes")
    return int(text)


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request with *headers* has a body."""
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"").strip(b"0") != b""


class Payload(NamedTuple):
    """Bytes to store, without the transfer coding."""

    body: bytes
    coding: str
    """Content coding, which the bytes still have; empty for none."""


class ContentCoding(NamedTuple):
    """Codings of a body."""

    name: str
    """That of the object, see `content_coding`."""
    is_framed: bool
    """Whether it is ``aws-chunked``."""

    @classmethod
    def parse(cls, headers: Mapping[bytes, bytes]) -> "ContentCoding":
        """Parse Content-Encoding and x-amz-content-sha256. Raises: `UnknownCodingError`."""
        is_framed = headers.get(_CONTENT_SHA256, b"").startswith(b"STREAMING-")
        if (listed := headers.get(b"content-encoding")) is None:
            return cls("", is_framed)
        is_framed |= b"aws-chunked" in map(bytes.strip, listed.lower().split(b","))
        name = content_coding(headers)
        if not _CODINGS.fullmatch(name):
            raise UnknownCodingError(f"Content-Encoding: {name[:80]!r} is no list of codings")
        return cls(name, is_framed)


async def read_payload(
    incoming: IncomingBody,
    headers: Mapping[bytes, bytes],
    held: ByteReservation,
    *,
    most_nbytes: int,
) -> Payload:
    """Read and check a body of up to *most_nbytes*.

    Raises: `UnknownCodingError`, `DigestError`, `SignatureError`, and see `IncomingBody`.
    """
    coding = ContentCoding.parse(headers)
    if coding.is_framed:
        name = _DECODED_LENGTH.decode()
        length = _parse_length(headers.get(_DECODED_LENGTH), name, most_nbytes)
        # Lines of frames, and trailers, add less than an eighth to all but short bodies.
        framed = await incoming.read_framed(length + length // 8 + 16 * 1024, held)
        await held.reserve(len(framed) + min(length, len(framed)))
        is_long = len(framed) > _IN_THREAD_NBYTES
        body = await run_in_thread(
            _unframe, framed, length, headers, incoming.signatures, is_long=is_long
        )
        del framed
    else:
        body = await incoming.read(incoming.length(most_nbytes), held)
        if not _DIGEST_NAMES.isdisjoint(headers):
            is_long = len(body) > _IN_THREAD_NBYTES
            await run_in_thread(check_digests, body, body, headers, is_long=is_long)
    if coding.is_framed or coding.name:
        # What a coded body says to hold is reserved as well: it is inflated before it is stored.
        inflated = min(announced_nbytes(coding.name, body), most_nbytes) if coding.name else 0
        await held.reserve(len(body) + inflated)
    return Payload(body, coding.name)


def _unframe(
    framed: bytes, length: int, headers: Mapping[bytes, bytes], chain: FrameSignatures | None
) -> bytes:
    body, trailers = decode_aws_chunked(framed, length, chain)
    announced = {name.strip() for name in headers.get(b"x-amz-trailer", b"").lower().split(b",")}
    if not announced - {b""} <= trailers.keys():
        raise BadBodyError("a trailer is missing that x-amz-trailer announces")
    check_digests(framed, body, {**trailers, **headers})
    return body


_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,12}")
_CRLF: Final = b"\r\n"


def decode_aws_chunked(
    data: bytes, length: int, chain: FrameSignatures | None = None
) -> tuple[bytes, Mapping[bytes, bytes]]:
    """Return the *length* bytes that are framed in *data*, and the trailers by name.

    A frame is ``size;chunk-signature=…`` in hexadecimal, CRLF, as many bytes, CRLF; an empty one
    is the last, and trailers may follow it. Signatures are checked by *chain*, if there is one.

    Raises: `BadBodyError`, `SignatureError`.
    """
    pieces = []
    at = 0
    view = memoryview(data)
    while True:
        size, signature, at = _parse_frame_line(data, at)
        piece = view[at : at + size]
        if chain is not None:
            chain.check_chunk(piece, signature)
        if size == 0:
            break
        at += size
        if len(piece) < size or data[at : at + len(_CRLF)] != _CRLF:
            raise BadBodyError("a frame of the aws-chunked body has another size than announced")
        at += len(_CRLF)
        pieces.append(piece)
    body = b"".join(pieces)
    if len(body) != length:
        raise BadBodyError(f"the body has not the bytes of {_DECODED_LENGTH.decode()}")
    trailers = _parse_trailers(data[at:])
    if chain is not None:
        _check_trailers(chain, trailers)
    return body, dict(trailers)


def _parse_frame_line(data: bytes, at: int) -> tuple[int, bytes, int]:
    """Return the size of the frame at *at*, its signature if any, and where its bytes begin."""
    end = data.find(_CRLF, at, at + 1024)
    line = data[at : max(at, end)]  # empty if there is no end
    size, _, extension = line.partition(b";")
    if not _SIZE.fullmatch(size):
        raise BadBodyError("the aws-chunked body is truncated, or malformed")
    return int(size, 16), extension.removeprefix(b"chunk-signature="), end + len(_CRLF)


def _parse_trailers(data: bytes) -> Sequence[tuple[bytes, bytes]]:
    if not (data == _CRLF or data.endswith(b"\n" + _CRLF)) or len(data) > 16 * 1024:
        raise BadBodyError("the trailers of the aws-chunked body are truncated, or too long")
    trailers = []
    for line in data.split(b"\n"):
        if line.strip():
            name, colon, value = line.partition(b":")
            if not colon:
                raise BadBodyError("a trailer of the aws-chunked body is malformed")
            trailers.append((name.strip().lower(), value.strip()))
    return trailers


def _check_trailers(chain: FrameSignatures, trailers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check the signature of the trailers, which is the last of them."""
    if not chain.signs_trailers:
        if trailers:
            raise SignatureError("SignatureDoesNotMatch", "the trailers are not signed")
        return
    if not trailers or trailers[-1][0] != b"x-amz-trailer-signature":
        raise SignatureError("SignatureDoesNotMatch", "the trailers end without a signature")
    *signed, (_, signature) = trailers
    chain.check_trailers(b"".join(b"%b:%b\n" % trailer for trailer in signed), signature)


# Algorithms of the libraries in use; other checksums are not checked.
_DIGESTS: Final[Mapping[bytes, Callable[[bytes], bytes]]] = {
    b"content-md5": lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
    b"x-amz-checksum-crc32": lambda data: zlib.crc32(data).to_bytes(_CRC_NBYTES, "big"),
    b"x-amz-checksum-crc32c": lambda data: crc32c.crc32c(data).to_bytes(_CRC_NBYTES, "big"),
    b"x-amz-checksum-sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
    b"x-amz-checksum-sha256": lambda data: hashlib.sha256(data).digest(),
    b"x-amz-checksum-sha512": lambda data: hashlib.sha512(data).digest(),
}
_DIGEST_NAMES: Final = frozenset({*_DIGESTS, _CONTENT_SHA256})


def check_digests(framed: bytes, body: bytes, headers: Mapping[bytes, bytes]) -> None:
    """Check *body*, *framed* with its frames, against *headers*. Raises: `DigestError`."""
    for name, compute in _DIGESTS.items():
        if name in headers and base64.b64encode(compute(body)) != headers[name].strip():
            raise DigestError(f"the body does not match {name.decode()}")
    signed = headers.get(_CONTENT_SHA256, b"")
    if _SHA256.fullmatch(signed) and hashlib.sha256(framed).hexdigest().encode() != signed:
        raise DigestError(f"the body does not match {_CONTENT_SHA256.decode()}")


class RequestDocument(BaseModel, use_attribute_docstrings=True, extra="forbid", strict=True):
    """JSON body of a request to a route; unknown members are refused."""


class RequestBodyReader:
    """Reads bodies of requests to ``/api``, whose bytes count as in flight in *budget*."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget

    @asynccontextmanager
    async def read_body(self, request: Request, most_nbytes: int) -> AsyncGenerator[bytes]:
        """Hold the body of *request*, of up to *most_nbytes*, while the block lasts.

        Raises: `LengthRequiredError`, `TooLargeError`, `UnknownCodingError`, `SlowBodyError`,
        `DigestError`, `SignatureError`, `BusyError`.
        """
        incoming: IncomingBody = request.scope["body"]
        held = ByteReservation(self._budget)
        try:
            if ContentCoding.parse(incoming.headers).name:
                raise UnknownCodingError("the body must come without Content-Encoding")
            payload = await read_payload(incoming, incoming.headers, held, most_nbytes=most_nbytes)
            yield payload.body
        except ShardgateError:
            await incoming.drain()
            raise
        finally:
            await held.release()

    async def read_document[M: RequestDocument](
        self, request: Request, model: type[M], most_nbytes: int = 64 * 1024
    ) -> M:
        """Read the body as *model*, or its defaults. Raises: `BadBodyError`, see `read_body`."""
        try:
            incoming: IncomingBody = request.scope["body"]
            if not incoming.is_unread:
                # There is no body, but its digest may be signed, and then has to be that of none.
                check_digests(b"", b"", incoming.headers)
                if incoming.signatures is not None:
                    raise BadBodyError("the signed aws-chunked body is empty")
                return model.model_validate_json(b"{}")
            async with self.read_body(request, most_nbytes) as body:
                return model.model_validate_json(body)
        except ValidationError as error:
            raise BadBodyError(first_fault(error)) from None


def first_fault(error: ValidationError) -> str:
    """Return the place and the reason of the first fault of a document."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}"


class ClientGoneError(Exception):
    """The client closed its connection before its response was ready."""
