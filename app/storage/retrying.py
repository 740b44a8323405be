"""Patience with a store: a wrapper that tries again what may yet succeed."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from app.errors import (
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
)
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.contract import Found, Listed, NotModified, ObjectReader, Stat

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0


class RetryingStore:
    """Repeats throttled, failed and truncated reads, with full jitter, within *deadline_s*.

    A silence is not repeated: the store's own time-out was patience enough. Once the first
    bytes of a stream or a listing are handed on nothing is repeated either.
    """

    def __init__(
        self,
        inner: ObjectReader,
        deadline_s: float,
        *,
        attempts: int = 4,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._inner = inner
        self._deadline_s = deadline_s
        self._attempts = attempts
        self._sleep = sleep
        self._uniform = uniform

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read, repeatedly if need be."""
        return await self._patiently(
            ref,
            lambda: self._inner.get(ref, request, if_match=if_match, if_none_match=if_none_match),
        )

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Open, repeatedly if need be."""
        async with AsyncExitStack() as stack:

            async def enter() -> AsyncIterator[bytes]:
                opened = self._inner.stream(ref, byte_range, if_match=if_match)
                return await stack.enter_async_context(opened)

            yield await self._patiently(ref, enter)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask, repeatedly if need be."""
        return await self._patiently(ref, lambda: self._inner.stat(ref))

    async def list(self, prefix: ObjectRef, *, delimiter: str = "") -> AsyncIterator[Listed]:
        """List; only up to the first entry is repeated."""

        async def begin() -> tuple[Listed | None, AsyncIterator[Listed]]:
            listing = self._inner.list(prefix, delimiter=delimiter)
            return await anext(listing, None), listing

        first, rest = await self._patiently(prefix, begin)
        if first is not None:
            yield first
            async for each in rest:
                yield each

    async def reach(self, root: ObjectRef) -> None:
        """Ask, repeatedly if need be."""
        await self._patiently(root, lambda: self._inner.reach(root))

    async def aclose(self) -> None:
        """Close the inner store."""
        await self._inner.aclose()

    async def _patiently[T](self, ref: ObjectRef, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._repeat(call)
        except TimeoutError as error:
            reason = f"no answer within {self._deadline_s:g} s"
            raise StorageTimeoutError(ref, reason) from error

    async def _repeat[T](self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(self._attempts - 1):
            try:
                return await call()
            except StorageError as error:
                if not _may_pass(error):
                    raise
            longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
            await self._sleep(self._uniform(0, longest))
        return await call()


def _may_pass(error: StorageError) -> bool:
    """Tell whether the same call can succeed in a moment."""
    if isinstance(error, StorageUnavailableError):
        return not error.lasting
    return isinstance(error, StorageThrottledError | TruncatedReadError)
