"""Limits on the bytes held in memory for bodies in flight and for decoding."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from app.errors import BusyError


class _Waiter(NamedTuple):
    nbytes: int
    held_nbytes: int
    turn: asyncio.Future[None]


class ByteBudget:
    """Budget of *max_bytes*, which one holder at a time may exceed.

    A holder of nothing waits until its bytes fit or nobody holds any, in the order of arrival. A
    holder of some bytes gets more as long as all others together hold at most *max_bytes*. So the
    holder that grew last can always grow again, holders finish one after the other, and there is
    no deadlock.
    """

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        self.max_bytes = max_bytes
        self._wait_s = wait_s
        self._held = 0
        self._waiting: list[_Waiter] = []

    @property
    def held_bytes(self) -> int:
        return self._held

    async def acquire(self, nbytes: int, *, held_nbytes: int = 0) -> None:
        """Reserve *nbytes*; raise `BusyError` if they do not fit within *wait_s*."""
        if self._fits(nbytes, held_nbytes) and (held_nbytes or not self._waiting):
            self._held += nbytes
            return
        turn = asyncio.get_running_loop().create_future()
        waiter = _Waiter(nbytes, held_nbytes, turn)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self._held -= nbytes
            self._admit()
            if isinstance(error, TimeoutError):
                raise BusyError(f"no room for {nbytes} more bytes in flight") from None
            raise

    def take(self, nbytes: int) -> bool:
        """Reserve *nbytes* if they fit at once; return whether they do."""
        fits = not self._waiting and self._fits(nbytes, 0)
        if fits:
            self._held += nbytes
        return fits

    @asynccontextmanager
    async def room(self, nbytes: int) -> AsyncGenerator[None]:
        """Reserve *nbytes* for the duration of the block; see `acquire`."""
        await self.acquire(nbytes)
        try:
            yield
        finally:
            self.release(nbytes)

    def release(self, nbytes: int) -> None:
        self._held -= nbytes
        if self._waiting:
            self._admit()

    def _fits(self, nbytes: int, held_nbytes: int) -> bool:
        if held_nbytes:
            return self._held - held_nbytes <= self.max_bytes
        return not self._held or self._held + nbytes <= self.max_bytes

    def _admit(self) -> None:
        """Wake the waiters that fit now, those that hold the most bytes first."""
        while self._waiting:
            first = max(self._waiting, key=lambda each: each.held_nbytes)
            if not self._fits(first.nbytes, first.held_nbytes):
                return
            self._waiting.remove(first)
            self._held += first.nbytes
            if not first.turn.done():
                first.turn.set_result(None)


class ByteReservation:
    """Bytes of a budget and open streams, held for one body until they are released together."""

    __slots__ = ("_budget", "_nbytes", "_streams")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._nbytes = 0
        self._streams: AsyncExitStack | None = None

    async def reserve(self, nbytes: int) -> None:
        """Hold exactly *nbytes* of the budget. Raises: `BusyError`."""
        if nbytes > self._nbytes:
            await self._budget.acquire(nbytes - self._nbytes, held_nbytes=self._nbytes)
        elif nbytes < self._nbytes:
            self._budget.release(self._nbytes - nbytes)
        self._nbytes = nbytes

    def take(self, nbytes: int) -> bool:
        """Hold *nbytes* more of the budget if they fit at once; return whether they do."""
        fits = self._budget.take(nbytes)
        if fits:
            self._nbytes += nbytes
        return fits

    async def grow(self, nbytes: int) -> None:
        """Hold *nbytes* more of the budget. Raises: `BusyError`."""
        await self.reserve(self._nbytes + nbytes)

    async def enter[T](self, stream: AbstractAsyncContextManager[T]) -> T:
        """Enter *stream*, and exit it on release."""
        if self._streams is None:
            self._streams = AsyncExitStack()
        return await self._streams.enter_async_context(stream)

    async def release(self) -> None:
        """Close all streams and return all bytes."""
        try:
            if self._streams is not None:
                await self._streams.aclose()
        finally:
            nbytes, self._nbytes = self._nbytes, 0
            self._budget.release(nbytes)
