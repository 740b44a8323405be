"""Trying again what may yet succeed: with pauses that double, of which chance takes a part."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from app.errors import (
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
)
from app.model import ObjectRef

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0


def may_pass(error: StorageError) -> bool:
    """Tell whether the same call can succeed in a moment; a silence was patience enough."""
    if isinstance(error, StorageUnavailableError):
        return not error.lasting
    return isinstance(error, StorageThrottledError | TruncatedReadError)


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long a call is tried."""

    deadline_s: float
    """For all attempts and the pauses between them."""
    attempts: int = 4
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[float, float], float] = random.uniform

    async def run[T](
        self,
        ref: ObjectRef,
        call: Callable[[], Awaitable[T]],
        *,
        may_pass: Callable[[StorageError], bool] = may_pass,
    ) -> T:
        """Give what *call* gives in the end.

        Raises: `StorageTimeoutError` at the deadline, else what the last attempt raised.
        """
        try:
            async with asyncio.timeout(self.deadline_s):
                return await self._repeat(call, may_pass)
        except TimeoutError as error:
            raise StorageTimeoutError(ref, f"no answer within {self.deadline_s:g} s") from error

    async def _repeat[T](
        self, call: Callable[[], Awaitable[T]], may_pass: Callable[[StorageError], bool]
    ) -> T:
        for attempt in range(self.attempts - 1):
            try:
                return await call()
            except StorageError as error:
                if not may_pass(error):
                    raise
            longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
            await self.sleep(self.uniform(0, longest))
        return await call()
