"""One call for each key, shared by those who wait."""

import asyncio

import pytest

from app.resolve.flight import SingleFlight
from tests.resolve.stores import settle


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
    """Who comes after the end makes a new call."""
    flights, call = SingleFlight[str](), _Call()
    call.end.set()

    assert [await flights.run("a", call), await flights.run("a", call)] == [1, 2]


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_when_one_leaves_the_others_go_on(leaver: int) -> None:
    """Whoever leaves, the first caller too, those who stay get the result of the same call."""
    flights, call = SingleFlight[str](), _Call()
    tasks = [asyncio.create_task(flights.run("a", call)) for _ in range(3)]
    await settle()
    tasks.pop(leaver).cancel()
    await settle()
    call.end.set()

    assert await asyncio.gather(*tasks) == [1, 1]
    assert call.cancelled == 0


async def test_when_all_leave_the_call_is_cancelled() -> None:
    """Nobody waits, so that nothing is done; the table is empty at once."""
    flights, call = SingleFlight[str](), _Call()
    tasks = [asyncio.create_task(flights.run("a", call)) for _ in range(3)]
    await settle()
    for task in tasks:
        task.cancel()
    await settle()

    assert (call.begun, call.cancelled, len(flights)) == (1, 1, 0)


async def test_who_comes_after_all_have_left_makes_a_new_call() -> None:
    """A call that is being cancelled is joined by nobody."""
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


async def test_after_a_failure_the_next_caller_tries_again() -> None:
    """A failure is not kept."""
    flights, call = SingleFlight[str](), _Call()
    call.end.set()
    call.failure = LookupError("for the test")
    with pytest.raises(LookupError):
        await flights.run("a", call)
    call.failure = None

    assert await flights.run("a", call) == 2


async def test_who_hears_a_failure_can_try_again_at_once() -> None:
    """The first to hear it makes a new call although the others have not heard it yet."""
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
    """However a call ends, its key is forgotten."""
    flights, call = SingleFlight[str](), _Call()
    call.failure = LookupError("for the test") if fails else None
    tasks = [asyncio.create_task(flights.run("a", call)) for _ in range(3)]
    await settle()
    assert len(flights) == 1
    call.end.set()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert len(flights) == 0
