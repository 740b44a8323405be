"""A bound on the bytes that are read from stores and not yet taken by clients."""

import asyncio
from collections import deque

from app.errors import BusyError


class ByteBudget:
    """Lets holders wait, first come first served, until their bytes fit below *max_bytes*.

    What is larger than everything is let through alone.
    """

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes in flight now."""
        return self._held

    async def acquire(self, nbytes: int) -> None:
        """Count *nbytes* as in flight until they are released.

        Raises: `BusyError` if they do not fit within *wait_s*.
        """
        if not self._waiting and self._fits(nbytes):
            self._held += nbytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._held -= nbytes
            turn.cancel()
            self._admit()
            if isinstance(error, TimeoutError):
                raise BusyError(f"no room for {nbytes} more bytes in flight") from None
            raise

    def release(self, nbytes: int) -> None:
        """Count *nbytes* no more."""
        self._held -= nbytes
        self._admit()

    def _fits(self, nbytes: int) -> bool:
        return self._held == 0 or self._held + nbytes <= self._max_bytes

    def _admit(self) -> None:
        while self._waiting and (
            self._waiting[0][1].cancelled() or self._fits(self._waiting[0][0])
        ):
            nbytes, turn = self._waiting.popleft()
            if not turn.done():
                self._held += nbytes
                turn.set_result(None)
