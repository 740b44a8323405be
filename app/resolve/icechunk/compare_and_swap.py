"""Retry loop around a compare-and-swap."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from app.errors import BusyError
from app.storage.contract import Conflict


class Backoff(NamedTuple):
    """Pauses between attempts: none before the first retry, then doubled up to a longest one."""

    first_s: float
    longest_s: float


async def retry_conflicts[T](
    attempt: Callable[[], Awaitable[T | Conflict]],
    what: object,
    *,
    attempts: int,
    backoff: Backoff | None = None,
) -> T:
    """Call *attempt* until it returns anything but a `Conflict`, and return that.

    Raises: `BusyError`, which names *what* was to be replaced, after *attempts* conflicts.
    """
    for number in range(attempts):
        if backoff is not None and number > 1:
            await asyncio.sleep(min(backoff.longest_s, backoff.first_s * 2 ** (number - 2)))
        result = await attempt()
        if not isinstance(result, Conflict):
            return result
    raise BusyError(f"{what}: gave up after {attempts} compare-and-swap conflicts")
