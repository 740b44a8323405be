"""Waiting for several things at a time, and computing where it holds nothing up."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

_AT_A_TIME: Final = 8

aside = asyncio.to_thread
"""Calls a function in a thread; see `Aside`."""


async def abreast[A, T](call: Callable[[A], Awaitable[T]], each: Sequence[A], /) -> list[T]:
    """Give what *call* returns of each, in their order; a few are waited for at a time.

    Raises: what the first call raises that fails.
    """
    results: dict[int, T] = {}
    waiting = iter(enumerate(each))

    async def work() -> None:
        for at, one in waiting:
            results[at] = await call(one)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_AT_A_TIME, len(each))):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [results[at] for at in range(len(each))]
