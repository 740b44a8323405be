"""Stores around other stores: routing, refusal of writes, guarded keys, retries, tracing."""

import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple, NoReturn, Self, Unpack

from shardgate.concurrency import Backoff, Deadline, Deadlines
from shardgate.errors import (
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
    UnwritableError,
)
from shardgate.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from shardgate.storage.contract import (
    OBJECT,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectStore,
    ReadOptions,
    Stat,
    WriteOptions,
)

_SEPARATORS: Final = re.compile(r"[/\\]")  # servers on Windows take both


class StoreWrapper:
    """Passes each call to the store that `store_of` returns, by default *inner*."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    def store_of(self, ref: ObjectRef) -> ObjectStore:  # noqa: ARG002  for subclasses
        return self._inner

    def get(
        self, ref: ObjectRef, request: ByteRequest | None = None, **options: Unpack[ReadOptions]
    ) -> Coroutine[Any, Any, Found | NotModified | None]:
        return self.store_of(ref).get(ref, request, **options)

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self.store_of(ref).stream(ref, byte_range, if_match=if_match)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        return await self.store_of(ref).stat(ref)

    def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        return self.store_of(prefix).list(prefix, delimiter=delimiter, after=after)

    async def check_reachable(self, root: ObjectRef) -> None:
        await self.store_of(root).check_reachable(root)

    async def verify_conditional_writes(self, root: ObjectRef) -> None:
        await self.store_of(root).verify_conditional_writes(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:
        return self.store_of(ref).keeps_headers(ref)

    async def put(
        self, ref: ObjectRef, pieces: Sequence[Piece], **options: Unpack[WriteOptions]
    ) -> ETag | Conflict:
        return await self.store_of(ref).put(ref, pieces, **options)

    async def delete(self, ref: ObjectRef, *, expected: Expected) -> bool | Conflict:
        return await self.store_of(ref).delete(ref, expected=expected)

    async def aclose(self) -> None:
        await self._inner.aclose()


class ReadOnlyStore:
    """Refuses every write with `UnwritableError`."""

    async def verify_conditional_writes(self, root: ObjectRef) -> NoReturn:
        raise _unwritable(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        return False

    async def put(self, ref: ObjectRef, *_: object, **__: object) -> NoReturn:
        raise _unwritable(ref)

    async def delete(self, ref: ObjectRef, **_: object) -> NoReturn:
        raise _unwritable(ref)


def _unwritable(ref: ObjectRef) -> UnwritableError:
    return UnwritableError(f"{ref}: stores of this kind are read-only")


class GuardedStore(ReadOnlyStore, StoreWrapper):
    """Reads virtual references by plain keys only, which cannot lead out of the root."""

    def store_of(self, ref: ObjectRef) -> ObjectStore:
        """Return the inner store; raise `StorageDeniedError` for segments such as ``..``."""
        if not is_plain(ref.key):
            raise StorageDeniedError(ref, "the key contains '.' or '..' segments")
        return self._inner

    def list(self, prefix: ObjectRef, **_: str) -> AsyncGenerator[Listed]:
        """Refuse: references name single objects."""
        raise StorageDeniedError(prefix, "virtual references cannot be listed")

    async def aclose(self) -> None:
        """Leave the inner store open for its other users."""


def is_plain(key: str) -> bool:
    """Return whether no server or file system takes a segment of *key* for more than a name."""
    return {".", ".."}.isdisjoint(_SEPARATORS.split(key))


def is_transient(error: StorageError) -> bool:
    """Return whether the same read can succeed a moment later; a time-out waited long enough."""
    return isinstance(error, StorageThrottledError | StorageUnavailableError | TruncatedReadError)


_BACKOFF: Final = Backoff(first_s=0.1, longest_s=5.0, at_once=1)


class RetryPolicy:
    """Retries with exponential backoff (0.1 s to 5 s) and full jitter.

    All attempts, and the pauses between them, take up to *deadline_s*.
    """

    def __init__(self, deadline_s: float, *, backoff: Backoff = _BACKOFF) -> None:
        self._deadline_s = deadline_s
        self._deadlines = Deadlines(deadline_s)
        self.backoff = backoff

    async def run[T](
        self,
        ref: ObjectRef,
        call: Callable[[], Awaitable[T]],
        *,
        is_transient: Callable[[StorageError], bool] = is_transient,
    ) -> T:
        """Repeat *call* after transient errors; raise `StorageTimeoutError` at the deadline."""
        try:
            with Deadline(self._deadlines):
                for number in range(1, 4):
                    try:
                        return await call()
                    except StorageError as error:
                        if not is_transient(error):
                            raise
                    await self.backoff.pause(number)
                return await call()  # the last attempt, whose error the caller gets
        except TimeoutError as error:
            raise StorageTimeoutError(ref, f"no response within {self._deadline_s:g} s") from error


class RetryingStore(StoreWrapper):
    """Retries reads until they begin; stores retry their writes themselves."""

    def __init__(self, inner: ObjectStore, policy: RetryPolicy) -> None:
        super().__init__(inner)
        self._policy = policy

    def get(
        self, ref: ObjectRef, request: ByteRequest | None = None, **options: Unpack[ReadOptions]
    ) -> Coroutine[Any, Any, Found | NotModified | None]:
        return self._policy.run(ref, partial(self._inner.get, ref, request, **options))

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        async with AsyncExitStack() as stack:
            # Only entering is repeated: bytes that were yielded cannot be taken back.
            async def enter() -> AsyncIterator[bytes]:
                opened = self._inner.stream(ref, byte_range, if_match=if_match)
                return await stack.enter_async_context(opened)

            yield await self._policy.run(ref, enter)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        return await self._policy.run(ref, lambda: self._inner.stat(ref))

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        """List with retries, each of which begins after the last key that was listed."""
        listing: AsyncGenerator[Listed] | None = None
        last = after

        async def step() -> Listed | None:
            nonlocal listing
            listing = listing or self._inner.list(prefix, delimiter=delimiter, after=last)
            try:
                return await anext(listing, None)
            except BaseException:
                listing = None  # a generator that has raised yields nothing more
                raise

        while (found := await self._policy.run(prefix, step)) is not None:
            last = found.ref.key
            yield found

    async def check_reachable(self, root: ObjectRef) -> None:
        await self._policy.run(root, lambda: self._inner.check_reachable(root))


type Method = Literal["get", "stream", "stat", "list", "reach", "safety", "put", "delete"]


class Call(NamedTuple):
    """A finished call of a store, also one that failed."""

    method: Method
    ref: ObjectRef
    seconds: float
    nbytes: int
    """Bytes that were read, or new bytes that were to be written."""
    error: BaseException | None
    kind: str = OBJECT
    """`Read.kind` of the read, or another label."""


type OnCall = Callable[[Call], None]
"""Called after each call, on the event loop and in the context of the caller."""


@dataclass(slots=True)
class _Timer:
    on_call: OnCall
    method: Method
    ref: ObjectRef
    nbytes: int = 0
    began_at: float = field(default_factory=time.perf_counter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        seconds = time.perf_counter() - self.began_at
        self.on_call(Call(self.method, self.ref, seconds, self.nbytes, error))


class TracedStore(StoreWrapper):
    """Calls *on_call* after each call of *inner*."""

    def __init__(self, inner: ObjectStore, on_call: OnCall) -> None:
        super().__init__(inner)
        self._on_call = on_call

    async def get(
        self, ref: ObjectRef, request: ByteRequest | None = None, **options: Unpack[ReadOptions]
    ) -> Found | NotModified | None:
        # Without a `_Timer`, which would cost the reads of chunks two calls more.
        kind = options.pop("kind", OBJECT)
        nbytes = 0
        error = None
        began = time.perf_counter()
        try:
            found = await self._inner.get(ref, request, **options)
            nbytes = len(found.data) if isinstance(found, Found) else 0
        except BaseException as raised:
            error = raised
            raise
        else:
            return found
        finally:
            seconds = time.perf_counter() - began
            self._on_call(Call("get", ref, seconds, nbytes, error, kind))

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        async def counted(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in pieces:
                timer.nbytes += len(piece)
                yield piece

        with _Timer(self._on_call, "stream", ref) as timer:
            async with self._inner.stream(ref, byte_range, if_match=if_match) as pieces:
                yield counted(pieces)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        with _Timer(self._on_call, "stat", ref):
            return await self._inner.stat(ref)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
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
            timer.nbytes = sum([len(piece) for piece in pieces if isinstance(piece, bytes)])
            return await self._inner.put(ref, pieces, **options)

    async def delete(self, ref: ObjectRef, *, expected: Expected) -> bool | Conflict:
        with _Timer(self._on_call, "delete", ref):
            return await self._inner.delete(ref, expected=expected)
