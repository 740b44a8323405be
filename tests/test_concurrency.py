"""`shardgate.concurrency`: bounded concurrency, threads, shared calls and deadlines."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import pytest

from shardgate.concurrency import (
    Deadline,
    Deadlines,
    SingleFlight,
    bounded_gather,
    run_in_thread,
    take,
)
from tests.support.read.stores import settle


async def test_gathered_results_are_in_order() -> None:
    """Results of `bounded_gather` are in the order of the calls, whichever ends first."""

    async def call(number: int) -> int:
        await asyncio.sleep(0.001 * (5 - number))
        return number * number

    assert await bounded_gather(call, range(5)) == [0, 1, 4, 9, 16]
    assert await bounded_gather(call, []) == []


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (100, 20)])
async def test_gathered_calls_are_bounded(limit: int, most: int) -> None:
    """`bounded_gather` runs as many calls at once as its limit, if there are as many."""
    running = seen = 0

    async def call(_: int) -> None:
        nonlocal running, seen
        running += 1
        seen = max(seen, running)
        await asyncio.sleep(0)
        running -= 1

    await bounded_gather(call, range(20), limit=limit)

    assert seen == most


async def test_call_that_is_cancelled_by_itself_cancels_the_caller() -> None:
    """A call of `bounded_gather` that ends by being cancelled has no result to return."""
    flights = SingleFlight[int]()

    async def call(number: int) -> None:
        await flights.run(number, lambda: asyncio.sleep(60))

    gathering = asyncio.create_task(bounded_gather(call, range(3)))
    await settle()
    await flights.aclose()

    with pytest.raises(asyncio.CancelledError):
        await gathering


async def test_first_error_cancels_the_other_calls() -> None:
    """The first error of `bounded_gather` is raised by itself, and cancels the other calls."""
    cancelled = []

    async def call(number: int) -> None:
        if number == 2:
            raise ValueError("the third")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    with pytest.raises(ValueError, match="the third"):
        await bounded_gather(call, range(100), limit=4)

    assert sorted(cancelled) == [0, 1, 3]


async def test_gathered_calls_yield_to_the_event_loop() -> None:
    """Calls of `bounded_gather` that never wait yield to the event loop."""
    done: list[int] = []

    async def call(number: int) -> None:
        if number == 0:
            asyncio.get_running_loop().call_soon(done.append, -1)
        done.append(number)

    await bounded_gather(call, range(1000), limit=1)

    assert done.index(-1) < 100


async def test_only_long_calls_run_in_a_thread() -> None:
    """`run_in_thread` runs a call in a thread, unless `is_long` is false."""
    here = threading.get_ident()

    assert await run_in_thread(threading.get_ident, is_long=False) == here
    assert await run_in_thread(threading.get_ident) != here


async def test_a_stream_is_taken_in_parts() -> None:
    """`take` returns parts of a stream, the last one shorter, and then none."""

    async def stream() -> AsyncIterator[int]:
        for number in range(5):
            yield number

    numbers = stream()

    assert [await take(numbers, 3) for _ in range(3)] == [[0, 1, 2], [3, 4], []]


class _Flight:
    """A call that waits until it is ended, which the callers of a key share."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.end = asyncio.Event()
        self.failure: Exception | None = None
        self.table = SingleFlight[str]()

    async def __call__(self) -> int:
        """Wait, then return the number of this call."""
        self.begun += 1
        number = self.begun
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return number

    async def start(self, count: int) -> list[asyncio.Task[int]]:
        """Start *count* callers of one key."""
        tasks = [asyncio.create_task(self.table.run("a", self)) for _ in range(count)]
        await settle()
        return tasks


@pytest.fixture
async def flight() -> _Flight:
    """Return a call that waits."""
    return _Flight()


@pytest.mark.parametrize("failure", [None, LookupError("for the test")])
async def test_callers_of_one_key_share_a_call(flight: _Flight, failure: Exception | None) -> None:
    """Concurrent callers of one key get the result or the error of one call."""
    flight.failure = failure
    tasks = await flight.start(100)
    assert "a" in flight.table
    flight.end.set()

    assert await asyncio.gather(*tasks, return_exceptions=True) == [failure or 1] * 100
    assert (flight.begun, "a" in flight.table) == (1, False)


async def test_other_keys_and_later_callers_do_not_share(flight: _Flight) -> None:
    """A running call blocks no other key, and a finished one is not shared."""
    free = _Flight()
    (waiting,) = await flight.start(1)
    free.end.set()

    assert [await flight.table.run("b", free) for _ in range(2)] == [1, 2]
    assert not waiting.done()
    flight.end.set()
    await waiting


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_cancelled_caller_does_not_cancel_the_call(flight: _Flight, leaver: int) -> None:
    """If one caller is cancelled, the others get the result of the same call."""
    tasks = await flight.start(3)
    tasks.pop(leaver).cancel()
    await settle()
    flight.end.set()

    assert await asyncio.gather(*tasks) == [1, 1]
    assert flight.cancelled == 0


async def test_call_without_callers_is_cancelled(flight: _Flight) -> None:
    """A call is cancelled with its last caller, and not joined by later ones."""
    for task in await flight.start(3):
        task.cancel()
    await settle()
    assert (flight.begun, flight.cancelled, "a" in flight.table) == (1, 1, False)
    (leaving,) = await flight.start(1)
    leaving.cancel()
    late = asyncio.create_task(flight.table.run("a", flight))
    await settle()
    flight.end.set()

    assert await late == 3


async def test_a_call_that_has_just_failed_is_not_joined() -> None:
    """A call that has failed is not joined, even before the event loop has reported it."""
    table = SingleFlight[str]()

    async def fail() -> None:
        raise ValueError

    async def succeed() -> int:
        return 1

    table.start("key", fail)
    await asyncio.sleep(0)
    assert "key" in table
    assert await table.run("key", succeed) == 1


async def test_caller_can_retry_after_an_error(flight: _Flight) -> None:
    """A caller that gets an error can call again at once, and the other callers share that call."""
    flight.failure = LookupError("for the test")

    async def stubborn() -> int:
        try:
            return await flight.table.run("a", flight)
        except LookupError:
            flight.failure = None
            return await flight.table.run("a", flight)

    tasks = [asyncio.create_task(stubborn()) for _ in range(3)]
    await settle()
    flight.end.set()

    assert await asyncio.gather(*tasks) == [2, 2, 2]


@pytest.mark.parametrize("failure", [None, LookupError("for the test")])
async def test_call_without_waiting_callers_ends(
    flight: _Flight, failure: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that was started ahead ends without callers, and its failure is not logged."""
    flight.failure = failure
    flight.table.start("a", flight)
    await settle()
    flight.end.set()
    await settle()
    gc.collect()

    assert (flight.begun, flight.cancelled, "a" in flight.table) == (1, 0, False)
    assert not caplog.records


async def test_block_beyond_its_deadline_times_out() -> None:
    """A block beyond its deadline raises TimeoutError.

    One that ends in time, or is cancelled by others, does not.
    """
    deadlines = Deadlines(0.05)

    with pytest.raises(TimeoutError), Deadline(deadlines):
        await asyncio.sleep(5)
    with Deadline(deadlines):
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError), Deadline(deadlines):
        raise asyncio.CancelledError
    assert not deadlines.running
