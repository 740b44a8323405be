"""Limits on the bytes held in memory for bodies in flight and for decoding."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from shardgate.concurrency import largest_share
from shardgate.errors import BusyError


class _Waiter(NamedTuple):
    nbytes: int
    held_nbytes: int
    turn: asyncio.Future[None]


class _Total:
    """Bytes and waiters of all shares of a budget."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        self.waiting = 0
        self.shares: list[ByteBudget] = []

    def admit(self) -> None:
        """Wake the waiters that fit now: holders that grow, then those of the least used share."""
        for share in self.shares:
            share.admit_growing()
        for share in sorted(self.shares, key=lambda each: each.own_bytes):
            if not share.admit_entering():
                return


class ByteBudget:
    """Budget of *max_bytes*, which one holder at a time may exceed.

    A holder of nothing waits until its bytes fit or no other holds any, in the order of arrival. A
    holder of some bytes gets more as long as all others together hold at most *max_bytes*. So the
    holder that grew last can always grow again, holders finish one after the other, and there is
    no deadlock.

    Holders of one kind have a `share` with a bound of its own. A holder of nothing waits for both
    bounds, unless its share is empty and the others leave a quarter of the whole. A share that is
    exceeded counts as full for the others, so that the argument holds across shares too.
    """

    def __init__(self, max_bytes: int, *, wait_s: float, total: _Total | None = None) -> None:
        self.max_bytes = max_bytes
        self.own_bytes = 0
        """Bytes held in this share."""
        self._wait_s = wait_s
        self._total = total or _Total(max_bytes)
        self._total.shares.append(self)
        self._growing: list[_Waiter] = []
        self._entering: list[_Waiter] = []

    @property
    def held_bytes(self) -> int:
        """Bytes held in all shares."""
        return self._total.held

    def share(self, max_bytes: int, *, wait_s: float | None = None) -> "ByteBudget":
        """Return a share of up to *max_bytes*, where one waits as long as here, or *wait_s*."""
        wait_s = self._wait_s if wait_s is None else wait_s
        return ByteBudget(max_bytes, wait_s=wait_s, total=self._total)

    async def acquire(self, nbytes: int, *, held_nbytes: int = 0) -> None:
        """Reserve *nbytes*; raise `BusyError` if they do not fit within *wait_s*."""
        total = self._total
        if (held_nbytes or not total.waiting) and self._fits(nbytes, held_nbytes):
            self.own_bytes += nbytes
            total.held += nbytes
            return
        waiting = self._growing if held_nbytes else self._entering
        turn = asyncio.get_running_loop().create_future()
        waiter = _Waiter(nbytes, held_nbytes, turn)
        waiting.append(waiter)
        total.waiting += 1
        total.admit()  # others may wait for another share only
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            is_admitted = waiter not in waiting
            if not is_admitted:
                waiting.remove(waiter)
                total.waiting -= 1
            self.release(nbytes if is_admitted else 0)
            if isinstance(error, TimeoutError):
                raise BusyError(f"no room for {nbytes} more bytes in flight") from None
            raise

    def take(self, nbytes: int) -> bool:
        """Reserve *nbytes* if they fit at once; return whether they do."""
        fits = not self._total.waiting and self._fits(nbytes, 0)
        if fits:
            self.own_bytes += nbytes
            self._total.held += nbytes
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
        self.own_bytes -= nbytes
        self._total.held -= nbytes
        if self._total.waiting:
            self._total.admit()

    def admit_growing(self) -> None:
        """Wake the holders that can grow now, those that hold the most bytes first."""
        while self._growing:
            first = max(self._growing, key=lambda each: each.held_nbytes)
            if not self._fits(first.nbytes, first.held_nbytes):
                return
            self._admit(first, self._growing)

    def admit_entering(self) -> bool:
        """Wake the holders of nothing that fit; return `False` if one waits for other shares."""
        while self._entering:
            first = self._entering[0]
            if not self._fits(first.nbytes, 0):
                return 0 < self.own_bytes > self.max_bytes - first.nbytes
            self._admit(first, self._entering)
        return True

    def _fits(self, nbytes: int, held_nbytes: int) -> bool:
        total = self._total
        mine = self.own_bytes + nbytes
        if mine <= self.max_bytes and total.held + nbytes <= total.max_bytes:
            return True
        others = sum(
            min(each.own_bytes, each.max_bytes) for each in total.shares if each is not self
        )
        if not self.own_bytes and others <= largest_share(total.max_bytes):
            return True
        # A holder of some bytes asks for room for those of all others only.
        mine = self.own_bytes + (-held_nbytes if held_nbytes else nbytes)
        return mine <= self.max_bytes and mine + others <= total.max_bytes

    def _admit(self, waiter: _Waiter, waiting: list[_Waiter]) -> None:
        waiting.remove(waiter)
        self.own_bytes += waiter.nbytes
        self._total.held += waiter.nbytes
        self._total.waiting -= 1
        if not waiter.turn.done():
            waiter.turn.set_result(None)


class BucketBudgets(dict[str, ByteBudget]):
    """Shares of *whole* by bucket, three quarters each, so that no store that hangs takes all.

    Buckets other than *buckets* have a share together: those of sessions and virtual references.
    One bucket alone has no bound of its own.
    """

    def __init__(self, whole: ByteBudget, buckets: Collection[str] = ()) -> None:
        names = set(buckets)

        def share() -> ByteBudget:
            return whole.share(largest_share(whole.max_bytes)) if len(names) > 1 else whole

        super().__init__((name, share()) for name in names)
        self._others = share()

    def __missing__(self, _: str) -> ByteBudget:
        """Return the share of all other buckets."""
        return self._others


@dataclass(eq=False, slots=True)
class ByteReservation:
    """Bytes of a budget and open streams, held for one body until they are released together."""

    budget: ByteBudget
    _nbytes: int = field(default=0, init=False)
    _streams: AsyncExitStack | None = field(default=None, init=False)

    async def reserve(self, nbytes: int) -> None:
        """Hold exactly *nbytes* of the budget. Raises: `BusyError`."""
        if nbytes > self._nbytes:
            await self.budget.acquire(nbytes - self._nbytes, held_nbytes=self._nbytes)
        elif nbytes < self._nbytes:
            self.budget.release(self._nbytes - nbytes)
        self._nbytes = nbytes

    def take(self, nbytes: int) -> bool:
        """Hold *nbytes* more of the budget if they fit at once; return whether they do."""
        fits = self.budget.take(nbytes)
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
            nbytes = self._nbytes
            self._nbytes = 0
            self.budget.release(nbytes)
