"""What it takes to hold an entity's bytes ready for a client."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final

from app.errors import DamagedError, VersionChangedError
from app.resolve.budget import ByteBudget
from app.resolve.entity import Choice, Opened
from app.resolve.fetch import ReadCache

_ATTEMPTS: Final = 16
"""How often a look-up is begun while its object keeps changing, as a shard does that many write."""


class Held:
    """What one answer holds until its client has taken it: bytes in flight, open streams."""

    __slots__ = ("_budget", "_nbytes", "_streams")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._nbytes = 0
        self._streams: AsyncExitStack | None = None

    async def reserve(self, nbytes: int) -> None:
        """Hold *nbytes* of the budget, neither more nor less.

        Raises: `BusyError`.
        """
        if nbytes > self._nbytes:
            await self._budget.acquire(nbytes - self._nbytes, held_nbytes=self._nbytes)
        elif nbytes < self._nbytes:
            self._budget.release(self._nbytes - nbytes)
        self._nbytes = nbytes

    async def grow(self, nbytes: int) -> None:
        """Hold *nbytes* of the budget more.

        Raises: `BusyError`.
        """
        await self.reserve(self._nbytes + nbytes)

    async def enter[T](self, stream: AbstractAsyncContextManager[T]) -> T:
        """Hold *stream* open."""
        if self._streams is None:
            self._streams = AsyncExitStack()
        return await self._streams.enter_async_context(stream)

    async def release(self) -> None:
        """Hold nothing any more."""
        try:
            if self._streams is not None:
                await self._streams.aclose()
        finally:
            nbytes, self._nbytes = self._nbytes, 0
            self._budget.release(nbytes)


class Opening[C: Choice]:
    """Tries until the object holds still, and holds what that took while the block lasts."""

    __slots__ = ("_attempt", "_fetch", "_held")

    def __init__(
        self,
        attempt: Callable[[Held], Awaitable[Opened[C] | None]],
        fetch: ReadCache,
        held: Held,
    ) -> None:
        self._attempt = attempt
        self._fetch = fetch
        self._held = held

    async def __aenter__(self) -> Opened[C] | None:
        attempts = 1
        while True:
            began_at = self._fetch.clock()
            try:
                return await self._attempt(self._held)
            except VersionChangedError as changed:
                await self._held.release()
                self._fetch.forget(changed.ref, began_at)
                if attempts == _ATTEMPTS:
                    raise
            except DamagedError as damaged:
                await self._held.release()
                self._fetch.forget(damaged.ref, began_at)
                raise
            except BaseException:
                await self._held.release()
                raise
            attempts += 1

    async def __aexit__(self, *_: object) -> None:
        await self._held.release()
