"""Bounded fan-out, single flight, batches, retries, worker threads, yields to the event loop."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self, cast

from shardgate.errors import BusyError

# Items between two yields; processing so many takes a few milliseconds at most.
_YIELD_EVERY: Final = 64
# Most attempts of a compare-and-swap; each that fails was overtaken by a write that succeeded.
_SWAPS: Final = 100
_SWEEP_S: Final = 1.0


async def bounded_gather[A, T](
    call: Callable[[A], Awaitable[T]], items: Sequence[A], /, *, limit: int = 8
) -> list[T]:
    """Return *call* of all *items* in order, *limit* at a time; cancel the rest after an error."""
    results: dict[int, T] = {}
    waiting = iter(enumerate(items))

    async def work() -> None:
        for at, item in waiting:  # which all workers share
            results[at] = await call(item)
            await yield_to_loop(at)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(items))):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # callers catch errors, not groups of them
    if len(results) < len(items):  # a group passes over a call that was cancelled by itself
        raise asyncio.CancelledError
    return [results[at] for at in range(len(items))]


class Backoff(NamedTuple):
    """Pauses before all but the first *at_once* attempts: doubled up to a longest, with jitter."""

    first_s: float
    longest_s: float
    at_once: int = 2
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[float, float], float] = random.uniform

    async def pause(self, number: int) -> None:
        """Wait before attempt *number*, counted from 0."""
        if number >= self.at_once:
            longest_s = min(self.longest_s, self.first_s * 2 ** (number - self.at_once))
            await self.sleep(self.uniform(0, longest_s))


async def retry_conflicts[T, C](
    attempt: Callable[[], Awaitable[T | C]],
    conflict: type[C],
    what: object,
    *,
    backoff: Backoff | None = None,
) -> T:
    """Call *attempt*, a compare-and-swap, until its result is not a *conflict*; return that.

    Raises: `BusyError`, which names *what* was to be replaced, after 100 conflicts.
    """
    for number in range(_SWAPS):
        if backoff is not None:
            await backoff.pause(number)
        result = await attempt()
        if not isinstance(result, conflict):
            return cast("T", result)
    raise BusyError(f"{what}: gave up after {_SWAPS} compare-and-swap conflicts")


class Deadlines:
    """Cancels blocks that last longer than *longest_s*, up to a second late.

    One timer serves all blocks; `asyncio.timeout` takes 5 µs to set one for each.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self.running: dict[Deadline, float] = {}
        """Blocks, oldest first, with the times when they began."""
        self.is_sweeping = False

    def sweep(self) -> None:
        """Cancel the blocks whose time is over, and look again in a second if there are others."""
        loop = asyncio.get_running_loop()
        for deadline, began_at in list(self.running.items()):
            if began_at > loop.time() - self._longest_s:
                break  # all others began later
            del self.running[deadline]
            deadline.cancel()
        self.is_sweeping = bool(self.running)
        if self.is_sweeping:
            self.sweep_later(loop)

    def sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the timer."""
        self.is_sweeping = True
        loop.call_later(min(_SWEEP_S, self._longest_s), self.sweep)


@dataclass(eq=False, slots=True)
class Deadline:
    """A block of the current task that *deadlines* cancels. Raises: `TimeoutError` if it did."""

    deadlines: Deadlines
    _is_cancelled: bool = field(default=False, init=False)
    _task: "asyncio.Task[object]" = field(init=False)
    _cancelling: int = field(init=False)
    """Requests to cancel the task that came before the block."""

    def __enter__(self) -> Self:
        self._task = cast("asyncio.Task[object]", asyncio.current_task())
        self._cancelling = self._task.cancelling()
        loop = self._task.get_loop()
        self.deadlines.running[self] = loop.time()
        if not self.deadlines.is_sweeping:
            self.deadlines.sweep_later(loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.deadlines.running.pop(self, None)
        if self._is_cancelled:
            # Somebody else may have cancelled the task as well; see `asyncio.timeout`.
            is_ours = self._task.uncancel() <= self._cancelling
            if is_ours and kind is asyncio.CancelledError:
                raise TimeoutError

    def cancel(self) -> None:
        """Cancel the block."""
        self._is_cancelled = True
        self._task.cancel()


async def run_in_thread[*Ts, T](call: Callable[[*Ts], T], /, *args: *Ts, is_long: bool = True) -> T:
    """Return the result of *call*, run in a thread if *is_long*, else at once."""
    return await asyncio.to_thread(call, *args) if is_long else call(*args)


async def yield_to_loop(number: int) -> None:
    """Yield to the event loop once every 64 items; *number* is the index of the item."""
    if number % _YIELD_EVERY == _YIELD_EVERY - 1:
        await asyncio.sleep(0)


async def divide(body: bytes | memoryview, nbytes: int) -> AsyncIterator[memoryview]:
    """Yield *body* in pieces of *nbytes*, and yield to the event loop after each."""
    view = memoryview(body)
    for at in range(0, len(view), nbytes):
        yield view[at : at + nbytes]
        await asyncio.sleep(0)


async def take[T](stream: AsyncIterator[T], count: int) -> list[T]:
    """Return the next *count* items of *stream*, fewer at its end."""
    taken: list[T] = []
    while len(taken) < count:
        try:
            taken.append(await anext(stream))
        except StopAsyncIteration:
            break
        await yield_to_loop(len(taken))
    return taken


def largest_share(most: int) -> int:
    """Return three quarters of *most*; one kind of work gets no more, so that others go on."""
    return most - most // 4


def is_many(count: int) -> bool:
    """Return whether processing *count* items may hold up the event loop."""
    return count > _YIELD_EVERY


def is_large(nbytes: int) -> bool:
    """Return whether processing *nbytes* bytes may hold up the event loop."""
    return nbytes >= 1024**2  # hashing or copying fewer takes about a millisecond


def resolve[T](done: "asyncio.Future[T]", outcome: T | Exception) -> None:
    """Pass *outcome* to the caller that waits for *done*, unless it has left."""
    if done.done():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
        done.exception()  # else asyncio logs it if no caller waits
    else:
        done.set_result(outcome)


class BatchQueue[T]:
    """Requests that wait while a batch of earlier ones is under way; together they are the next."""

    def __init__(self) -> None:
        self.requests: list[T] = []
        self._expected = 1
        self._is_full = asyncio.Event()

    def add(self, request: T) -> None:
        """Put *request* behind all others."""
        self.requests.append(request)
        if len(self.requests) >= self._expected:
            self._is_full.set()

    def take(self, most: int = sys.maxsize) -> list[T]:
        """Remove and return up to *most* requests; as many are expected again once answered."""
        taken, self.requests = self.requests[:most], self.requests[most:]
        self._expected = len(taken)
        return taken

    async def fill(self, longest_s: float) -> None:
        """Wait until all answered clients may have sent their next request, at most *longest_s*.

        Many clients send one request after another. Without a pause, a batch would get only the
        requests that arrived during the last one: half of them, twice as often.
        """
        self._is_full.clear()
        self._expected += len(self.requests)
        if len(self.requests) < self._expected:
            with suppress(TimeoutError):
                async with asyncio.timeout(longest_s):
                    await self._is_full.wait()


class _Flight[T]:
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiters = 0


class SingleFlight[K: Hashable]:
    """Shares calls in progress between all callers with the same key.

    When a caller is cancelled, the others keep waiting; when all callers are cancelled, the call
    is cancelled, unless it *outlasts* them; when the call fails, all callers get the error and the
    next caller starts anew.
    """

    def __init__(self, *, outlasts: bool = False) -> None:
        self._flights: dict[K, _Flight[Any]] = {}
        self._outlasts = outlasts

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def run[T](self, key: K, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the call of *key* in progress, or start *call*."""
        known = self._flights.get(key)
        if known is None or known.task.done():
            self.start(key, call)
        flight: _Flight[T] = self._flights[key]
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)  # others may wait for it, too
        finally:
            flight.waiters -= 1
            if not (self._outlasts or flight.waiters or flight.task.done()):
                self._remove(key, flight)
                flight.task.cancel()

    def start(self, key: K, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Start *call* before any caller waits for it."""
        flight = self._flights[key] = _Flight(asyncio.create_task(call()))
        flight.task.add_done_callback(lambda _: self._remove(key, flight))

    async def aclose(self) -> None:
        """Cancel all calls, and wait until they have ended."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remove(self, key: K, flight: _Flight[Any]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # else asyncio logs it if no caller waits
