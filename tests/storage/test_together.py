"""What is asked for one by one is done together."""

import asyncio
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.storage.together import Together
from tests.storage.http1.scripted import until


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
    together = Together[int, int](threads, worker, at_once=2, most=3)

    tasks = [asyncio.create_task(together.do(item)) for item in range(9)]
    await until(lambda: len(worker.calls) == 2)
    assert sorted(worker.calls) == [[0], [1]]
    worker.may_go_on.set()

    assert await asyncio.gather(*tasks) == [10 * item for item in range(9)]
    assert sorted(worker.calls[2:]) == [[2, 3, 4], [5, 6, 7], [8]]


async def test_a_failure_is_told_to_one(threads: ThreadPoolExecutor) -> None:
    """What was done together with what failed is done."""
    worker = Worker()
    worker.may_go_on.set()
    together = Together[int, int](threads, worker, at_once=1, most=9)

    told = await asyncio.gather(*map(together.do, (1, 2, -3, 4)), return_exceptions=True)

    assert told[:2] + told[3:] == [10, 20, 40]
    assert isinstance(told[2], ValueError)
    assert len(worker.calls) == 2


async def test_a_call_that_fails_is_told_to_all(threads: ThreadPoolExecutor) -> None:
    """Nobody waits for ever for what has broken off, and what comes later is done."""

    def call(items: Sequence[int]) -> list[int | Exception]:
        return [1 // item for item in items]

    together = Together[int, int](threads, call, at_once=1, most=9)

    told = await asyncio.gather(*map(together.do, (1, 1, 0)), return_exceptions=True)

    assert told[0] == 1
    assert [type(each) for each in told[1:]] == [ZeroDivisionError] * 2
    assert await together.do(1) == 1


async def test_who_leaves_takes_it_back(threads: ThreadPoolExecutor) -> None:
    """What nobody waits for any more is not begun; what is under way is ended."""
    worker = Worker()
    together = Together[int, int](threads, worker, at_once=1, most=9)
    tasks = [asyncio.create_task(together.do(item)) for item in range(4)]
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
    together = Together[int, int](threads, worker, at_once=1, most=9)
    tasks = [asyncio.create_task(together.do(item)) for item in range(3)]
    await until(lambda: worker.calls == [[0]])

    together.close()
    worker.may_go_on.set()

    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert told[0] == 0
    assert [type(each) for each in told[1:]] == [asyncio.CancelledError] * 2


async def test_nobody_waits_for_threads_that_have_ended() -> None:
    """Who asks after the end is told, and who had to wait until then as well."""
    worker, threads = Worker(), ThreadPoolExecutor(1)
    together = Together[int, int](threads, worker, at_once=1, most=1)
    first = asyncio.create_task(together.do(0))
    await until(lambda: worker.calls == [[0]])
    threads.shutdown(wait=False)

    second = asyncio.create_task(together.do(1))
    worker.may_go_on.set()

    assert await first == 0
    with pytest.raises(RuntimeError):
        await second
    with pytest.raises(RuntimeError):
        await together.do(2)
