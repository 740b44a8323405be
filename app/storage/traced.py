"""Notices of store calls, for metrics, traces and tests."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, NamedTuple, Self, Unpack, get_args

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from app.storage.contract import (
    Conflict,
    Found,
    Listed,
    NotModified,
    ObjectStore,
    ReadConditions,
    Stat,
    WriteOptions,
)
from app.storage.spans import new_nbytes
from app.storage.wrappers import StoreWrapper

type Method = Literal["get", "stream", "stat", "list", "reach", "safety", "put", "delete"]

METHODS: Final[tuple[str, ...]] = get_args(Method.__value__)


class Call(NamedTuple):
    """A finished call of a store, also one that failed."""

    method: Method
    ref: ObjectRef
    request: ByteRequest | None
    seconds: float
    nbytes: int
    """Bytes that were read, or new bytes that were to be written."""
    error: BaseException | None


type OnCall = Callable[[Call], None]
"""Called after each call, on the event loop and in the context of the caller."""


class _Timer:
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

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        seconds = time.perf_counter() - self._began
        self._on_call(Call(self._method, self._ref, self._request, seconds, self.nbytes, error))


class TracedStore(StoreWrapper):
    """Calls *on_call* after each call of *inner*."""

    def __init__(self, inner: ObjectStore, on_call: OnCall) -> None:
        super().__init__(inner)
        self._on_call = on_call

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        **conditions: Unpack[ReadConditions],
    ) -> Found | NotModified | None:
        with _Timer(self._on_call, "get", ref, request) as timer:
            found = await self._inner.get(ref, request, **conditions)
            timer.nbytes = len(found.data) if isinstance(found, Found) else 0
            return found

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        async def counted(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in pieces:
                timer.nbytes += len(piece)
                yield piece

        with _Timer(self._on_call, "stream", ref, byte_range) as timer:
            async with self._inner.stream(ref, byte_range, if_match=if_match) as pieces:
                yield counted(pieces)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        with _Timer(self._on_call, "stat", ref):
            return await self._inner.stat(ref)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        with _Timer(self._on_call, "list", prefix):
            async for each in self._inner.list(prefix, delimiter=delimiter, after=after):
                yield each

    async def check_reachable(self, root: ObjectRef) -> None:
        with _Timer(self._on_call, "reach", root):
            await self._inner.check_reachable(root)

    async def verify_conditional_writes(self, root: ObjectRef) -> None:
        with _Timer(self._on_call, "safety", root):
            await self._inner.verify_conditional_writes(root)

    async def put(
        self, ref: ObjectRef, pieces: Sequence[Piece], **options: Unpack[WriteOptions]
    ) -> ETag | Conflict:
        with _Timer(self._on_call, "put", ref) as timer:
            timer.nbytes = new_nbytes(pieces)
            return await self._inner.put(ref, pieces, **options)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        with _Timer(self._on_call, "delete", ref):
            return await self._inner.delete(ref, expected=expected)
