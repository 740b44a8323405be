"""Patience with a store: a wrapper that tries again what may yet succeed."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.contract import Found, Listed, NotModified, ObjectStore, Stat
from app.storage.passing import WritesPass
from app.storage.patience import Patience


class RetryingStore(WritesPass):
    """Repeats throttled, failed and truncated reads, with full jitter, within *deadline_s*.

    A silence is not repeated: the store's own time-out was patience enough. Once the first
    bytes of a stream are handed on nothing is repeated either. Writes are the store's own: only
    it can find out what became of one that failed.
    """

    def __init__(
        self,
        inner: ObjectStore,
        deadline_s: float,
        *,
        attempts: int = 4,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        super().__init__(inner)
        self._inner = inner
        self._patience = Patience(deadline_s, attempts, sleep, uniform)

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read, repeatedly if need be."""
        return await self._patience.run(
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

            yield await self._patience.run(ref, enter)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask, repeatedly if need be."""
        return await self._patience.run(ref, lambda: self._inner.stat(ref))

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List, and go on behind the last key where that broke off."""
        listing: AsyncIterator[Listed] | None = None
        last = after

        async def step() -> Listed | None:
            nonlocal listing
            listing = listing or self._inner.list(prefix, delimiter=delimiter, after=last)
            try:
                return await anext(listing, None)
            except BaseException:
                listing = None
                raise

        while (found := await self._patience.run(prefix, step)) is not None:
            last = found.ref.key
            yield found

    async def reach(self, root: ObjectRef) -> None:
        """Ask, repeatedly if need be."""
        await self._patience.run(root, lambda: self._inner.reach(root))

    async def aclose(self) -> None:
        """Close the inner store."""
        await self._inner.aclose()
