"""Bounded fan-out, threads and batches."""

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
from tests.read.stores import settle


async def test_results_come_in_the_order_of_what_was_asked_for() -> None:
    """Whichever is the first to be done."""

    async def call(number: int) -> int:
        await asyncio.sleep(0.001 * (5 - number))
        return number * number

    assert await bounded_gather(call, range(5)) == [0, 1, 4, 9, 16]
    assert await bounded_gather(call, []) == []


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (100, 20)])
async def test_no_more_are_waited_for_limit_than_was_said(limit: int, most: int) -> None:
    """Nor fewer, as long as there are more."""
    running = seen = 0

    async def call(_: int) -> None:
        nonlocal running, seen
        running += 1
        seen = max(seen, running)
        await asyncio.sleep(0)
        running -= 1

    await bounded_gather(call, range(20), limit=limit)

    assert seen == most


async def test_the_first_error_is_raised_by_itself_and_ends_the_others() -> None:
    """Whoever asked need not know of groups, and nothing goes on behind their back."""
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


async def test_others_have_their_turn_in_between() -> None:
    """Also where no call waits for anything."""
    done: list[int] = []

    async def call(number: int) -> None:
        if number == 0:
            asyncio.get_running_loop().call_soon(done.append, -1)
        done.append(number)

    await bounded_gather(call, range(1000), limit=1)

    assert done.index(-1) < 100


async def test_only_what_may_take_long_goes_to_a_thread() -> None:
    """A thread costs more than a short call."""
    here = threading.get_ident()

    assert await run_in_thread(threading.get_ident, is_long=False) == here
    assert await run_in_thread(threading.get_ident) != here


async def test_a_stream_is_taken_in_parts() -> None:
    """The last one is shorter, and then nothing is left."""

    async def stream() -> AsyncIterator[int]:
        for number in range(5):
            yield number

    numbers = stream()

    assert [await take(numbers, 3) for _ in range(3)] == [[0, 1, 2], [3, 4], []]


class _Flight:
    """A call that waits until it is told to end, of which the callers of a key share one."""

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
        """Let *count* callers wait for one key."""
        tasks = [asyncio.create_task(self.table.run("a", self)) for _ in range(count)]
        await settle()
        return tasks


@pytest.fixture
async def flight() -> _Flight:
    """Return a call that waits."""
    return _Flight()


@pytest.mark.parametrize("failure", [None, LookupError("for the test")])
async def test_callers_of_one_key_share_a_call(flight: _Flight, failure: Exception | None) -> None:
    """Every caller gets the result or the error of the one call, and the table is empty then."""
    flight.failure = failure
    tasks = await flight.start(100)
    assert len(flight.table) == 1
    flight.end.set()

    assert await asyncio.gather(*tasks, return_exceptions=True) == [failure or 1] * 100
    assert (flight.begun, len(flight.table)) == (1, 0)


async def test_only_callers_at_the_same_time_share(flight: _Flight) -> None:
    """A call that hangs holds up no other key, and a finished one is not shared."""
    free = _Flight()
    (waiting,) = await flight.start(1)
    free.end.set()

    assert [await flight.table.run("b", free) for _ in range(2)] == [1, 2]
    assert not waiting.done()
    flight.end.set()
    await waiting


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_when_one_leaves_the_others_go_on(flight: _Flight, leaver: int) -> None:
    """When any caller is cancelled, the others get the result of the same call."""
    tasks = await flight.start(3)
    tasks.pop(leaver).cancel()
    await settle()
    flight.end.set()

    assert await asyncio.gather(*tasks) == [1, 1]
    assert flight.cancelled == 0


async def test_when_all_leave_the_call_is_cancelled(flight: _Flight) -> None:
    """The table is empty, and a call that is being cancelled is not joined."""
    for task in await flight.start(3):
        task.cancel()
    await settle()
    assert (flight.begun, flight.cancelled, len(flight.table)) == (1, 1, 0)
    (leaving,) = await flight.start(1)
    leaving.cancel()
    late = asyncio.create_task(flight.table.run("a", flight))
    await settle()
    flight.end.set()

    assert await late == 3


async def test_a_call_that_has_just_failed_is_not_joined() -> None:
    """Not even before the event loop has told of its end."""
    table = SingleFlight[str]()

    async def fail() -> None:
        raise ValueError

    async def succeed() -> int:
        return 1

    table.start("key", fail)
    await asyncio.sleep(0)
    assert "key" in table
    assert await table.run("key", succeed) == 1


async def test_a_caller_that_gets_an_error_can_try_again_at_once(flight: _Flight) -> None:
    """The first to get the error starts a new call before the others get it."""
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
async def test_a_call_goes_on_though_nobody_waits(
    flight: _Flight, failure: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that was started ahead ends by itself, and nothing is logged of its failure."""
    flight.failure = failure
    flight.table.start("a", flight)
    await settle()
    flight.end.set()
    await settle()
    gc.collect()

    assert (flight.begun, flight.cancelled, len(flight.table)) == (1, 0, 0)
    assert not caplog.records


async def test_a_block_that_lasts_too_long_is_ended() -> None:
    """It raises `TimeoutError`; one that ends in time, or is cancelled by others, does not."""
    deadlines = Deadlines(0.05)

    with pytest.raises(TimeoutError), Deadline(deadlines):
        await asyncio.sleep(5)
    with Deadline(deadlines):
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError), Deadline(deadlines):
        raise asyncio.CancelledError
    assert not deadlines.running
