"""Work on many things that lets others have their turn in between."""

import asyncio
from collections.abc import Callable
from typing import Final

_AT_A_TIME: Final = 64
"""So many things take a few milliseconds, whatever is done with each."""


async def breathe(number: int) -> None:
    """Let others go on, now and then: *number* counts what has been done."""
    if number % _AT_A_TIME == _AT_A_TIME - 1:
        await asyncio.sleep(0)


async def aside[*Ts, T](count: int, call: Callable[[*Ts], T], /, *args: *Ts) -> T:
    """Call in a thread where *args* are of many things."""
    return await asyncio.to_thread(call, *args) if count > _AT_A_TIME else call(*args)
