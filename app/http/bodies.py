"""The body of a request: announced, bounded, in time, and never left where an answer should be."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from io import BytesIO
from types import MappingProxyType
from typing import Any, Final

from app.errors import BadBodyError, LengthRequiredError, SlowBodyError, TooLargeError
from app.http.answer import Body, Headers, Write
from app.http.credentials.seals import Seal, seal_of
from app.http.disconnect import ClientGoneError
from app.resolve.budget import ByteReservation

SLOWEST_NBYTES_PER_S: Final = 16 * 1024
"""Who sends less, over all but the first while, holds memory for nothing."""

_AHEAD_NBYTES: Final = 1024**2
"""So much more is held than has arrived."""
_LINGER_S: Final = 2.0
"""Closed at once, a connection on which bytes still arrive takes the answer away with it."""
_LINGER_NBYTES: Final = 64 * 1024**2
LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_NO_SCOPE: Final[Mapping[str, Any]] = MappingProxyType({})
_CLOSE: Final = (b"connection", b"close")


class Incoming:
    """The body of the request *scope* with the headers *given*, which *receive* brings."""

    def __init__(
        self,
        receive: Any,
        given: Mapping[bytes, bytes],
        *,
        timeout_s: float,
        scope: Mapping[str, Any] = _NO_SCOPE,
    ) -> None:
        self.receive = receive
        self._scope = scope
        self._timeout_s = timeout_s
        self._length = given.get(b"content-length")
        self._is_chunked = b"transfer-encoding" in given
        self._is_expecting = b"expect" in given
        self.is_unread = is_announced(given)
        """Whether some of it may still arrive."""

    @property
    def seal(self) -> Seal | None:
        """What its frames are signed with; it is known once who asks is."""
        return seal_of(self._scope)

    def length(self, most_nbytes: int) -> int:
        """Tell how many bytes are announced, of which nothing has been asked for yet.

        Raises: `LengthRequiredError`, `TooLargeError`.
        """
        if self._is_chunked or self._length is None or not LENGTH.fullmatch(self._length):
            raise LengthRequiredError("the request does not tell its Content-Length")
        if (length := int(self._length)) > most_nbytes:
            raise TooLargeError(f"the body is larger than {most_nbytes} bytes")
        return length

    async def read(self, length: int, held: ByteReservation) -> bytes:
        """Read the *length* bytes; what has arrived is *held*.

        Raises: `BusyError`, `SlowBodyError`, `BadBodyError` for another length,
        `ClientGoneError`.
        """
        body = await _joined(self._arriving(length, held))
        if len(body) != length:
            raise BadBodyError(f"the body has not the {length} bytes that were announced")
        return body

    async def read_framed(self, most_nbytes: int, held: ByteReservation) -> bytes:
        """Read a body that tells itself where it ends, of which no length need be announced.

        Raises: what `read` and `length` do.
        """
        if not self._is_chunked or self._length is not None:
            return await self.read(self.length(most_nbytes), held)
        return await _joined(self._arriving(most_nbytes, held))

    async def _arriving(self, most_nbytes: int, held: ByteReservation) -> AsyncIterator[bytes]:
        """Give up to *most_nbytes* as they arrive."""
        arrived = reserved = 0
        waited_s = 0.0
        is_more = self.is_unread
        while is_more:
            if arrived >= reserved:
                reserved = min(most_nbytes, arrived + _AHEAD_NBYTES)
                await held.reserve(reserved)
            left_s = self._timeout_s + arrived / SLOWEST_NBYTES_PER_S - waited_s
            began_at = asyncio.get_running_loop().time()
            message = await self._next(min(left_s, self._timeout_s))
            waited_s += asyncio.get_running_loop().time() - began_at
            arrived += len(message["body"])
            is_more = message["more_body"]
            if arrived > most_nbytes:
                break
            yield message["body"]
        self.is_unread = is_more
        if arrived > most_nbytes:
            raise BadBodyError(f"the body has more than {most_nbytes} bytes")

    async def drain(self) -> None:
        """Let the rest arrive, a while and up to a bound, and drop it."""
        if self._is_expecting:
            return
        dropped = 0
        with suppress(TimeoutError, ClientGoneError):
            async with asyncio.timeout(_LINGER_S):
                while self.is_unread and dropped < _LINGER_NBYTES:
                    message = await self._next(_LINGER_S)
                    dropped += len(message["body"])
                    self.is_unread = message["more_body"]

    async def _next(self, longest_s: float) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(longest_s):
                message = await self.receive()
        except TimeoutError:
            raise SlowBodyError("the body did not arrive in time") from None
        if message["type"] != "http.request":
            raise ClientGoneError
        return {"body": message.get("body", b""), "more_body": message.get("more_body", False)}


async def _joined(pieces: AsyncIterator[bytes]) -> bytes:
    """Join *pieces* as they arrive, so that they are not in memory twice at the end."""
    body = BytesIO()
    async for piece in pieces:
        body.write(piece)
    return body.getvalue()


def is_announced(given: Mapping[bytes, bytes]) -> bool:
    """Tell whether a request with the headers *given* has a body."""
    return b"transfer-encoding" in given or given.get(b"content-length", b"").strip(b"0") != b""


def lingering_writer(send: Any, incoming: Incoming) -> Write:
    """Write to an ASGI server; a connection on which *incoming* is unread is closed then."""

    async def write(status: HTTPStatus, headers: Headers, body: Body) -> None:
        is_last = incoming.is_unread
        if is_last:
            headers.append(_CLOSE)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if isinstance(body, bytes):
            await send({"type": "http.response.body", "body": body, "more_body": is_last})
        else:
            async for piece in body:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            is_last = True
        if incoming.is_unread:
            await incoming.drain()
        if is_last:
            await send({"type": "http.response.body", "body": b""})

    return write
