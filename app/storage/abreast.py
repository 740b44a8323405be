"""Waiting for several things at a time, and computing where it holds nothing up."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

_AT_A_TIME: Final = 8
_IN_A_ROW: Final = 64
"""So many things take a few milliseconds, whatever is done with each."""
_LARGE_NBYTES: Final = 1024**2
"""What is done with fewer takes about a millisecond."""


async def abreast[A, T](
    call: Callable[[A], Awaitable[T]], each: Sequence[A], /, *, at_a_time: int = _AT_A_TIME
) -> list[T]:
    """Give what *call* returns of each, in their order; *at_a_time* are waited for.

    Raises: what the first call raises that fails; the others are cancelled.
    """
    results: dict[int, T] = {}
    waiting = iter(enumerate(each))

    async def work() -> None:
        for at, one in waiting:
            results[at] = await call(one)
            await breathe(at)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_a_time, len(each))):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [results[at] for at in range(len(each))]


async def aside[*Ts, T](call: Callable[[*Ts], T], /, *args: *Ts, is_long: bool = True) -> T:
    """Give what *call* returns, called in a thread where it may compute for long."""
    return await asyncio.to_thread(call, *args) if is_long else call(*args)


async def breathe(number: int) -> None:
    """Let others go on, now and then: *number* counts what has been done."""
    if number % _IN_A_ROW == _IN_A_ROW - 1:
        await asyncio.sleep(0)


async def take[T](stream: AsyncIterator[T], count: int) -> list[T]:
    """Give the next *count* of *stream*, fewer at its end."""
    taken: list[T] = []
    while len(taken) < count:
        try:
            taken.append(await anext(stream))
        except StopAsyncIteration:
            break
        await breathe(len(taken))
    return taken


def is_many(count: int) -> bool:
    """Tell whether to do something with each of *count* things may take long."""
    return count > _IN_A_ROW


def is_large(nbytes: int) -> bool:
    """Tell whether to do something with all of *nbytes* may take long."""
    return nbytes >= _LARGE_NBYTES
