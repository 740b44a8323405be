"""Several things waited for at a time."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from app.storage.abreast import abreast, aside, take


async def test_results_come_in_the_order_of_what_was_asked_for() -> None:
    """Whichever is the first to be done."""

    async def call(number: int) -> int:
        await asyncio.sleep(0.001 * (5 - number))
        return number * number

    assert await abreast(call, range(5)) == [0, 1, 4, 9, 16]
    assert await abreast(call, []) == []


@pytest.mark.parametrize(("at_a_time", "most"), [(1, 1), (3, 3), (100, 20)])
async def test_no_more_are_waited_for_at_a_time_than_was_said(at_a_time: int, most: int) -> None:
    """Nor fewer, as long as there are more."""
    running = seen = 0

    async def call(_: int) -> None:
        nonlocal running, seen
        running += 1
        seen = max(seen, running)
        await asyncio.sleep(0)
        running -= 1

    await abreast(call, range(20), at_a_time=at_a_time)

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
        await abreast(call, range(100), at_a_time=4)

    assert sorted(cancelled) == [0, 1, 3]


async def test_others_have_their_turn_in_between() -> None:
    """Also where no call waits for anything."""
    done: list[int] = []

    async def call(number: int) -> None:
        if number == 0:
            asyncio.get_running_loop().call_soon(done.append, -1)
        done.append(number)

    await abreast(call, range(1000), at_a_time=1)

    assert done.index(-1) < 100


async def test_only_what_may_take_long_goes_to_a_thread() -> None:
    """A thread costs more than a short call."""
    here = threading.get_ident()

    assert await aside(threading.get_ident, is_long=False) == here
    assert await aside(threading.get_ident) != here


async def test_a_stream_is_taken_in_parts() -> None:
    """The last one is shorter, and then nothing is left."""

    async def stream() -> AsyncIterator[int]:
        for number in range(5):
            yield number

    numbers = stream()

    assert [await take(numbers, 3) for _ in range(3)] == [[0, 1, 2], [3, 4], []]
