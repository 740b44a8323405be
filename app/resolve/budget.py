"""A bound on the bytes that are read from stores and not yet taken by clients."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NamedTuple

from app.errors import BusyError


class _Waiting(NamedTuple):
    nbytes: int
    beside: int
    turn: asyncio.Future[None]


class ByteBudget:
    """Lets holders wait, first come first served, until their bytes fit below *max_bytes*.

    Who holds something and wants more comes before who holds nothing. What is larger than
    everything is let through alone; so is one of those who want more where nobody else holds
    anything, or they would wait for one another.
    """

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        self.max_bytes = max_bytes
        self._wait_s = wait_s
        self._held = 0
        self._stuck = 0
        """Bytes that those who wait hold already."""
        self._growing: deque[_Waiting] = deque()
        self._waiting: deque[_Waiting] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes in flight now."""
        return self._held

    async def acquire(self, nbytes: int, *, beside: int = 0) -> None:
        """Count *nbytes* as in flight until they are released, *beside* what the caller holds.

        Raises: `BusyError` if they do not fit within *wait_s*.
        """
        if not self._growing and not self._waiting and self._fits(nbytes):
            self._held += nbytes
            return
        turn = asyncio.get_running_loop().create_future()
        (self._growing if beside else self._waiting).append(_Waiting(nbytes, beside, turn))
        self._stuck += beside
        self._admit()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._held -= nbytes
            else:
                self._stuck -= beside
            turn.cancel()
            self._admit()
            if isinstance(error, TimeoutError):
                raise BusyError(f"no room for {nbytes} more bytes in flight") from None
            raise

    @asynccontextmanager
    async def room(self, nbytes: int) -> AsyncGenerator[None]:
        """Count *nbytes* while the block lasts; see `acquire`."""
        await self.acquire(nbytes)
        try:
            yield
        finally:
            self.release(nbytes)

    def release(self, nbytes: int) -> None:
        """Count *nbytes* no more."""
        self._held -= nbytes
        self._admit()

    def _fits(self, nbytes: int) -> bool:
        return self._held == self._stuck or self._held + nbytes <= self.max_bytes

    def _admit(self) -> None:
        while (queue := self._growing or self._waiting) and (
            queue[0].turn.done() or self._fits(queue[0].nbytes)
        ):
            nbytes, beside, turn = queue.popleft()
            if not turn.done():
                self._held += nbytes
                self._stuck -= beside
                turn.set_result(None)
