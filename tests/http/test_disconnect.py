"""`app.http.body`: cancellation of the work for clients that have gone."""

import asyncio
from typing import Any

import pytest

from app.http.body import ClientGoneError, UntilDisconnect


async def _never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_work_is_cancelled() -> None:
    """The work ends with the connection of its client."""
    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]
    ended = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    with pytest.raises(ClientGoneError):
        async with UntilDisconnect(receive):
            await work()

    assert ended == ["cancelled"]


async def test_the_task_continues_after_the_block() -> None:
    """The cancellation ends at the block's edge."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        async with UntilDisconnect(receive):
            await asyncio.sleep(60)
    await asyncio.sleep(0)

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_finished_work_is_not_disturbed() -> None:
    """Work that ends first is not cancelled, and no watcher stays behind."""
    async with UntilDisconnect(_never):
        await asyncio.sleep(0.1)
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_other_errors_come_through() -> None:
    """An error of the work is the error of the block."""
    with pytest.raises(KeyError):
        async with UntilDisconnect(_never):
            raise KeyError


async def test_a_cancellation_from_outside_stays_one() -> None:
    """A task that is cancelled by others is cancelled."""

    async def work() -> None:
        async with UntilDisconnect(_never):
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.1)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
