"""A store that tells of its reads: for metrics, and for counting in tests."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.contract import Found, Listed, NotModified, ObjectReader, Stat

type ReadMethod = Literal["get", "stream", "stat", "list", "reach"]


class OnRead(Protocol):
    """Hears of one finished call, also of one that failed: then *nbytes* counts what arrived."""

    def __call__(
        self,
        method: ReadMethod,
        ref: ObjectRef,
        request: ByteRequest | None,
        seconds: float,
        nbytes: int,
        /,
    ) -> None:
        """Take note; it is called on the event loop."""
        ...


class TracedStore:
    """Calls *on_read* at the end of each call of *inner*, with its seconds and bytes."""

    def __init__(self, inner: ObjectReader, on_read: OnRead) -> None:
        self._inner = inner
        self._on_read = on_read

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read, and tell."""
        began, nbytes = time.perf_counter(), 0
        try:
            found = await self._inner.get(
                ref, request, if_match=if_match, if_none_match=if_none_match
            )
            nbytes = len(found.data) if isinstance(found, Found) else 0
            return found
        finally:
            self._on_read("get", ref, request, time.perf_counter() - began, nbytes)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Stream, and tell when the context ends."""
        began, nbytes = time.perf_counter(), 0

        async def counted(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            nonlocal nbytes
            async for piece in pieces:
                nbytes += len(piece)
                yield piece

        try:
            async with self._inner.stream(ref, byte_range, if_match=if_match) as pieces:
                yield counted(pieces)
        finally:
            self._on_read("stream", ref, byte_range, time.perf_counter() - began, nbytes)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask, and tell."""
        began = time.perf_counter()
        try:
            return await self._inner.stat(ref)
        finally:
            self._on_read("stat", ref, None, time.perf_counter() - began, 0)

    async def list(self, prefix: ObjectRef, *, delimiter: str = "") -> AsyncIterator[Listed]:
        """List, and tell at the end."""
        began = time.perf_counter()
        try:
            async for each in self._inner.list(prefix, delimiter=delimiter):
                yield each
        finally:
            self._on_read("list", prefix, None, time.perf_counter() - began, 0)

    async def reach(self, root: ObjectRef) -> None:
        """Ask, and tell."""
        began = time.perf_counter()
        try:
            await self._inner.reach(root)
        finally:
            self._on_read("reach", root, None, time.perf_counter() - began, 0)

    async def aclose(self) -> None:
        """Close the inner store."""
        await self._inner.aclose()
