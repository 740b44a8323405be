"""One call at a time for each key, shared by all who wait for it."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any


class _Flight[T]:
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiters = 0


class SingleFlight[K: Hashable]:
    """Shares calls that are under way.

    When a caller leaves, the others go on; when all have left, the call is cancelled; when it
    fails, all hear it and the next caller tries again.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[Any]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        """Tell whether a call of *key* is under way."""
        return key in self._flights

    async def run[T](self, key: K, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the call of *key* that is under way, or for a new *call*."""
        if key not in self._flights:
            self._flights[key] = _Flight(asyncio.create_task(call()))
        flight: _Flight[T] = self._flights[key]
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.task.done() or flight.waiters == 0:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.task.cancel()


class Apart[K: Hashable]:
    """Lets each make its own call: what is told was asked for after the caller came."""

    def __contains__(self, _: K) -> bool:
        """Tell that there is no call to join."""
        return False

    async def run[T](self, _: K, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make a new *call*."""
        return await call()
