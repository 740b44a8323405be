"""A store that tells of what it is asked: for metrics and traces, and for counting in tests."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self, get_args

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from app.storage.contract import (
    NO_HEADERS,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    ObjectStore,
    Stat,
)
from app.storage.writes import given_nbytes

type Method = Literal["get", "stream", "stat", "list", "reach", "safety", "put", "delete"]

METHODS: Final[tuple[str, ...]] = get_args(Method.__value__)


class Call(NamedTuple):
    """A finished call, also one that failed."""

    method: Method
    ref: ObjectRef
    request: ByteRequest | None
    seconds: float
    nbytes: int
    """What arrived, and of a put the new bytes that were to go up."""
    error: BaseException | None


type OnCall = Callable[[Call], None]
"""Hears of each call, on the event loop, where the caller's context variables are."""


class _Calling:
    """A call under way."""

    __slots__ = ("_began", "_method", "_on_call", "_ref", "_request", "nbytes")

    def __init__(
        self, on_call: OnCall, method: Method, ref: ObjectRef, request: ByteRequest | None = None
    ) -> None:
        self._on_call = on_call
        self._method: Method = method
        self._ref = ref
        self._request = request
        self.nbytes = 0

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._began
        call = Call(self._method, self._ref, self._request, seconds, self.nbytes, error)
        self._on_call(call)


class TracedStore:
    """Calls *on_call* at the end of each call of *inner*."""

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
        with _Calling(self._on_call, "get", ref, request) as calling:
            found = await self._inner.get(
                ref, request, if_match=if_match, if_none_match=if_none_match
            )
            calling.nbytes = len(found.data) if isinstance(found, Found) else 0
            return found

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Stream, and tell when the context ends."""

        async def counted(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in pieces:
                calling.nbytes += len(piece)
                yield piece

        with _Calling(self._on_call, "stream", ref, byte_range) as calling:
            async with self._inner.stream(ref, byte_range, if_match=if_match) as pieces:
                yield counted(pieces)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask, and tell."""
        with _Calling(self._on_call, "stat", ref):
            return await self._inner.stat(ref)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List, and tell at the end."""
        with _Calling(self._on_call, "list", prefix):
            async for each in self._inner.list(prefix, delimiter=delimiter, after=after):
                yield each

    async def reach(self, root: ObjectRef) -> None:
        """Ask, and tell."""
        with _Calling(self._on_call, "reach", root):
            await self._inner.reach(root)

    async def demand_safety(self, root: ObjectRef) -> None:
        """Ask, and tell."""
        with _Calling(self._on_call, "safety", root):
            await self._inner.demand_safety(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:
        """Ask."""
        return self._inner.keeps_headers(ref)

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Write, and tell."""
        with _Calling(self._on_call, "put", ref) as calling:
            calling.nbytes = given_nbytes(pieces)
            return await self._inner.put(ref, pieces, expected=expected, headers=headers)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove, and tell."""
        with _Calling(self._on_call, "delete", ref):
            return await self._inner.delete(ref, expected=expected)

    async def aclose(self) -> None:
        """Close the inner store."""
        await self._inner.aclose()
