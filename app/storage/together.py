"""Calls that go on side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable


async def together[T](limit: int, calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Await *calls*, at most *limit* at a time; when one fails the others are cancelled."""
    gate = asyncio.Semaphore(limit)

    async def run(call: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await call()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(call)) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
