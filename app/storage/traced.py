"""A store that tells of what it is asked: for metrics, and for counting in tests."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from app.storage.contract import Conflict, Expected, Found, Listed, NotModified, ObjectStore, Stat
from app.storage.writes import given_nbytes

type Method = Literal["get", "stream", "stat", "list", "reach", "safety", "put", "delete"]


class OnCall(Protocol):
    """Hears of one finished call, also of one that failed.

    *nbytes* counts what arrived, and of a put the new bytes that were to go up.
    """

    def __call__(
        self,
        method: Method,
        ref: ObjectRef,
        request: ByteRequest | None,
        seconds: float,
        nbytes: int,
        /,
    ) -> None:
        """Take note; it is called on the event loop."""
        ...


class TracedStore:
    """Calls *on_call* at the end of each call of *inner*, with its seconds and bytes."""

    def __init__(self, inner: ObjectStore, on_call: OnCall) -> None:
        self._inner = inner
        self._on_call = on_call

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
            self._on_call("get", ref, request, time.perf_counter() - began, nbytes)

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
            self._on_call("stream", ref, byte_range, time.perf_counter() - began, nbytes)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask, and tell."""
        began = time.perf_counter()
        try:
            return await self._inner.stat(ref)
        finally:
            self._on_call("stat", ref, None, time.perf_counter() - began, 0)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List, and tell at the end."""
        began = time.perf_counter()
        try:
            async for each in self._inner.list(prefix, delimiter=delimiter, after=after):
                yield each
        finally:
            self._on_call("list", prefix, None, time.perf_counter() - began, 0)

    async def reach(self, root: ObjectRef) -> None:
        """Ask, and tell."""
        began = time.perf_counter()
        try:
            await self._inner.reach(root)
        finally:
            self._on_call("reach", root, None, time.perf_counter() - began, 0)

    async def demand_safety(self, root: ObjectRef) -> None:
        """Ask, and tell."""
        began = time.perf_counter()
        try:
            await self._inner.demand_safety(root)
        finally:
            self._on_call("safety", root, None, time.perf_counter() - began, 0)

    def keeps_gzip(self, ref: ObjectRef) -> bool:
        """Ask."""
        return self._inner.keeps_gzip(ref)

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        is_gzip: bool = False,
    ) -> ETag | Conflict:
        """Write, and tell."""
        began = time.perf_counter()
        try:
            return await self._inner.put(ref, pieces, expected=expected, is_gzip=is_gzip)
        finally:
            nbytes = given_nbytes(pieces)
            self._on_call("put", ref, None, time.perf_counter() - began, nbytes)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove, and tell."""
        began = time.perf_counter()
        try:
            return await self._inner.delete(ref, expected=expected)
        finally:
            self._on_call("delete", ref, None, time.perf_counter() - began, 0)

    async def aclose(self) -> None:
        """Close the inner store."""
        await self._inner.aclose()
