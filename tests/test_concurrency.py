"""Bounded fan-out, threads and batches."""

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.concurrency import BatchExecutor, SingleFlight, bounded_gather, run_in_thread, take
from tests.resolve.stores import settle
from tests.storage.http1.scripted import until


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


class Worker:
    """Notes what it is called with, and waits until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.calls: list[list[int]] = []

    def __call__(self, items: Sequence[int]) -> list[int | Exception]:
        """Give ten times each item; negative ones fail."""
        self.calls.append(list(items))
        assert self.may_go_on.wait(30)
        return [ValueError(item) if item < 0 else 10 * item for item in items]


@pytest.fixture
def threads() -> Generator[ThreadPoolExecutor]:
    """Open some threads."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


async def test_what_waits_is_taken_together(threads: ThreadPoolExecutor) -> None:
    """Who comes while all are busy is done with the others that do, a few at a time, in order."""
    worker = Worker()
    executor = BatchExecutor[int, int](threads, worker, concurrency=2, batch_size=3)

    tasks = [asyncio.create_task(executor.run(item)) for item in range(9)]
    await until(lambda: len(worker.calls) == 2)
    assert sorted(worker.calls) == [[0], [1]]
    worker.may_go_on.set()

    assert await asyncio.gather(*tasks) == [10 * item for item in range(9)]
    assert sorted(worker.calls[2:]) == [[2, 3, 4], [5, 6, 7], [8]]


async def test_a_failure_is_told_to_one(threads: ThreadPoolExecutor) -> None:
    """What was done together with what failed is done."""
    worker = Worker()
    worker.may_go_on.set()
    executor = BatchExecutor[int, int](threads, worker, concurrency=1, batch_size=9)

    told = await asyncio.gather(*map(executor.run, (1, 2, -3, 4)), return_exceptions=True)

    assert told[:2] + told[3:] == [10, 20, 40]
    assert isinstance(told[2], ValueError)
    assert len(worker.calls) == 2


async def test_a_call_that_fails_is_told_to_all(threads: ThreadPoolExecutor) -> None:
    """Nobody waits for ever for what has broken off, and what comes later is done."""

    def call(items: Sequence[int]) -> list[int | Exception]:
        return [1 // item for item in items]

    executor = BatchExecutor[int, int](threads, call, concurrency=1, batch_size=9)

    told = await asyncio.gather(*map(executor.run, (1, 1, 0)), return_exceptions=True)

    assert told[0] == 1
    assert [type(each) for each in told[1:]] == [ZeroDivisionError] * 2
    assert await executor.run(1) == 1


async def test_who_leaves_takes_it_back(threads: ThreadPoolExecutor) -> None:
    """What nobody waits for any more is not begun; what is under way is ended."""
    worker = Worker()
    executor = BatchExecutor[int, int](threads, worker, concurrency=1, batch_size=9)
    tasks = [asyncio.create_task(executor.run(item)) for item in range(4)]
    await until(lambda: worker.calls == [[0]])

    for task in tasks[0], tasks[2]:
        task.cancel()
    worker.may_go_on.set()

    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in told[::2]] == [asyncio.CancelledError] * 2
    assert told[1::2] == [10, 30]
    assert worker.calls == [[0], [1, 3]]


async def test_nobody_waits_for_what_is_closed(threads: ThreadPoolExecutor) -> None:
    """At the end what has not begun is cancelled."""
    worker = Worker()
    executor = BatchExecutor[int, int](threads, worker, concurrency=1, batch_size=9)
    tasks = [asyncio.create_task(executor.run(item)) for item in range(3)]
    await until(lambda: worker.calls == [[0]])

    executor.close()
    worker.may_go_on.set()

    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert told[0] == 0
    assert [type(each) for each in told[1:]] == [asyncio.CancelledError] * 2


async def test_nobody_waits_for_threads_that_have_ended() -> None:
    """Who asks after the end is told, and who had to wait until then as well."""
    worker, threads = Worker(), ThreadPoolExecutor(1)
    executor = BatchExecutor[int, int](threads, worker, concurrency=1, batch_size=1)
    first = asyncio.create_task(executor.run(0))
    await until(lambda: worker.calls == [[0]])
    threads.shutdown(wait=False)

    second = asyncio.create_task(executor.run(1))
    worker.may_go_on.set()

    assert await first == 0
    with pytest.raises(RuntimeError):
        await second
    with pytest.raises(RuntimeError):
        await executor.run(2)


class _Call:
    """A call that waits to be told how it ends."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.end = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self) -> int:
        """Wait, then give the number of this call."""
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


async def test_callers_of_one_key_share_a_call() -> None:
    """A hundred callers make one call and hear its result."""
    flights, call = SingleFlight[str](), _Call()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(flights.run("a", call)) for _ in range(100)]
        await settle()
        call.end.set()

    assert [task.result() for task in tasks] == [1] * 100


async def test_keys_do_not_wait_for_each_other() -> None:
    """A call that hangs holds up no other key."""
    flights, stuck, free = SingleFlight[str](), _Call(), _Call()
    waiting = asyncio.create_task(flights.run("a", stuck))
    await settle()
    free.end.set()

    assert await flights.run("b", free) == 1
    assert not waiting.done()
    stuck.end.set()
    await waiting


async def test_a_finished_call_is_not_shared() -> None:
    """A later caller starts a new call."""
    flights, call = SingleFlight[str](), _Call()
    call.end.set()

    assert [await flights.run("a", call), await flights.run("a", call)] == [1, 2]


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_when_one_leaves_the_others_go_on(leaver: int) -> None:
    """Whichever caller is cancelled, the others get the result of the same call."""
    flights, call = SingleFlight[str](), _Call()
    tasks = [asyncio.create_task(flights.run("a", call)) for _ in range(3)]
    await settle()
    tasks.pop(leaver).cancel()
    await settle()
    call.end.set()

    assert await asyncio.gather(*tasks) == [1, 1]
    assert call.cancelled == 0


async def test_when_all_leave_the_call_is_cancelled() -> None:
    """Without callers the call is cancelled, and the table is empty."""
    flights, call = SingleFlight[str](), _Call()
    tasks = [asyncio.create_task(flights.run("a", call)) for _ in range(3)]
    await settle()
    for task in tasks:
        task.cancel()
    await settle()

    assert (call.begun, call.cancelled, len(flights)) == (1, 1, 0)


async def test_who_comes_after_all_have_left_makes_a_new_call() -> None:
    """A call that is being cancelled is not joined."""
    flights, call = SingleFlight[str](), _Call()
    first = asyncio.create_task(flights.run("a", call))
    await settle()
    first.cancel()
    second = asyncio.create_task(flights.run("a", call))
    await settle()
    call.end.set()

    assert await second == 2


async def test_a_failure_is_heard_by_all() -> None:
    """Every caller gets the exception of the call."""
    flights, call = SingleFlight[str](), _Call()
    call.failure = LookupError("for the test")
    tasks = [asyncio.create_task(flights.run("a", call)) for _ in range(3)]
    await settle()
    call.end.set()

    heard = await asyncio.gather(*tasks, return_exceptions=True)
    assert heard == [call.failure] * 3


async def test_who_hears_a_failure_can_try_again_at_once() -> None:
    """The first to get the error starts a new call before the others get it."""
    flights, call = SingleFlight[str](), _Call()
    call.failure = LookupError("for the test")

    async def stubborn() -> int:
        try:
            return await flights.run("a", call)
        except LookupError:
            call.failure = None
            return await flights.run("a", call)

    tasks = [asyncio.create_task(stubborn()) for _ in range(3)]
    await settle()
    call.end.set()

    assert await asyncio.gather(*tasks) == [2, 2, 2]


@pytest.mark.parametrize("fails", [False, True])
async def test_nothing_is_left_in_the_table(fails: bool) -> None:  # noqa: FBT001
    """After success or failure the key is removed."""
    flights, call = SingleFlight[str](), _Call()
    call.failure = LookupError("for the test") if fails else None
    tasks = [asyncio.create_task(flights.run("a", call)) for _ in range(3)]
    await settle()
    assert len(flights) == 1
    call.end.set()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert len(flights) == 0
