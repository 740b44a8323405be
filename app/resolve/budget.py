"""Limit on the bytes in flight between clients and stores."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NamedTuple

from app.errors import BusyError


class _Waiting(NamedTuple):
    nbytes: int
    held_nbytes: int
    turn: asyncio.Future[None]


class ByteBudget:
    """Bytes in flight: *max_bytes* and the excess of one holder at most.

    A holder that has nothing yet waits until its bytes fit, or nobody holds any; first come, first
    served. A holder that wants more gets it as long as all others together hold no more than
    *max_bytes*. So the last one that grew can always grow again: one holder after the other comes
    to its end, and they never wait for one another.
    """

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        self.max_bytes = max_bytes
        self._wait_s = wait_s
        self._held = 0
        self._waiting: list[_Waiting] = []

    @property
    def held_bytes(self) -> int:
        """Bytes in flight now."""
        return self._held

    async def acquire(self, nbytes: int, *, held_nbytes: int = 0) -> None:
        """Reserve *nbytes* until they are released, for a caller that has *held_nbytes* already.

        Raises: `BusyError` if they do not fit within *wait_s*.
        """
        if self._fits(nbytes, held_nbytes) and (held_nbytes or not self._waiting):
            self._held += nbytes
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = _Waiting(nbytes, held_nbytes, turn)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._held -= nbytes
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

    def _fits(self, nbytes: int, held_nbytes: int) -> bool:
        if held_nbytes:
            return self._held - held_nbytes <= self.max_bytes
        return not self._held or self._held + nbytes <= self.max_bytes

    def _admit(self) -> None:
        """Wake up those that fit now, the ones that hold the most before all others."""
        while self._waiting:
            first = max(self._waiting, key=lambda each: each.held_nbytes)
            if not self._fits(first.nbytes, first.held_nbytes):
                return
            self._waiting.remove(first)
            self._held += first.nbytes
            if not first.turn.done():
                first.turn.set_result(None)
