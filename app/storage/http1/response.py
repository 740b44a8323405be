"""One answer, to be waited for."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Final, Protocol

from app.storage.http1.errors import CutOffError, NoAnswerError
from app.storage.http1.parser import AnswerParser

_BUFFERED_BYTES: Final = 512 * 1024
"""So much of a body is taken in before anybody asks for it."""


class Carrier(Protocol):
    """The connection that an answer comes over."""

    def pause(self) -> None:
        """Let nothing more arrive for now."""
        ...

    def resume(self) -> None:
        """Let more arrive."""
        ...

    def end(self, response: "Response", /) -> None:
        """Hear that an incomplete answer is no longer wanted."""
        ...


class Response:
    """Status and headers, and a body to be taken whole or piece by piece."""

    __slots__ = ("_carrier", "_enough", "_failure", "_parser", "_waiter")

    def __init__(self, carrier: Carrier, *, is_bodiless: bool, is_eager: bool) -> None:
        """Begin to listen; see `Client.send`."""
        self._carrier = carrier
        self._parser = AnswerParser(is_bodiless=is_bodiless)
        self._enough = _BUFFERED_BYTES if is_eager else 0
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def status(self) -> int:
        """The status code."""
        return self._parser.status

    @property
    def headers(self) -> dict[bytes, bytes]:
        """By name in lower case; of a repeated one, the last."""
        return self._parser.headers

    @property
    def length(self) -> int | None:
        """How many bytes the body, or that of a GET, is announced to have."""
        return self._parser.length

    @property
    def has_begun(self) -> bool:
        """Whether any of it has arrived."""
        return self._parser.has_begun

    @property
    def is_complete(self) -> bool:
        """Whether all of it has arrived."""
        return self._parser.is_complete

    @property
    def is_reusable(self) -> bool:
        """Whether all of it has arrived, and another answer may follow on the connection."""
        return self._parser.is_complete and self._parser.is_reusable

    async def begin(self) -> None:
        """Wait for the head; what befalls the body later is raised where it is read.

        Raises: `NoAnswerError`, `BadAnswerError`, `OSError`, `TimeoutError`.
        """
        await self._arrival(self._enough)
        if not self._parser.has_head and self._failure is not None:
            raise self._failure

    async def read(self) -> bytes:
        """Read what there still is of the body.

        Raises: `CutOffError`, `BadAnswerError`, `TimeoutError`.
        """
        await self._arrival(sys.maxsize)
        if self._failure is not None:
            raise self._failure
        return self._parser.take()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Pass the body on as it arrives.

        Raises: `CutOffError`, `BadAnswerError`, `TimeoutError`.
        """
        while True:
            await self._arrival(1)
            if self._parser.buffered:
                yield self._parser.take()
            elif self._failure is not None:
                raise self._failure
            else:
                return

    def release(self) -> None:
        """Want no more of it: the connection closes unless the answer is complete."""
        if not self.is_complete:
            self._carrier.end(self)

    def feed(self, data: bytes) -> None:
        """Take what arrived.

        Raises: `BadAnswerError`, after which no more may come.
        """
        self._parser.feed(data)
        self._wake()

    def close(self, error: Exception | None) -> None:
        """Hear that the connection closed, with *error* or as it should."""
        if self._parser.is_until_close and error is None:
            self._parser.is_complete = True
            self._wake()
        elif self._parser.has_head:
            self.fail(CutOffError("the connection closed in the middle"))
        else:
            self.fail(error or NoAnswerError("the connection closed without an answer"))

    def fail(self, error: Exception) -> None:
        """Let whoever waits, now or later, hear *error*."""
        if not self.is_complete and self._failure is None:
            self._failure = error
            self._wake()

    async def _arrival(self, enough: int) -> None:
        """Wait until *enough* of the body lies here or no more will come."""
        if not self._is_enough(enough):
            self._enough = enough
            self._waiter = asyncio.get_running_loop().create_future()
            self._carrier.resume()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _is_enough(self, enough: int) -> bool:
        return (
            self._parser.is_complete
            or self._failure is not None
            or (self._parser.has_head and self._parser.buffered >= enough)
        )

    def _wake(self) -> None:
        if self._waiter is None:
            if self._parser.buffered > _BUFFERED_BYTES and not self.is_complete:
                self._carrier.pause()
        elif self._is_enough(self._enough) and not self._waiter.done():
            self._waiter.set_result(None)
