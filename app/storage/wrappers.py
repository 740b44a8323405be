"""Stores around other stores: routing, refusal of writes, guarded keys, and retries."""

import asyncio
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Unpack

from app.errors import (
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
    UnwritableError,
)
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

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_SEPARATORS: Final = re.compile(r"[/\\]")


class StoreWrapper:
    """Passes each call to the store that `store_of` returns, by default *inner*."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    def store_of(self, ref: ObjectRef) -> ObjectStore:  # noqa: ARG002  for subclasses
        return self._inner

    def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        **conditions: Unpack[ReadConditions],
    ) -> Coroutine[Any, Any, Found | NotModified | None]:
        return self.store_of(ref).get(ref, request, **conditions)

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self.store_of(ref).stream(ref, byte_range, if_match=if_match)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        return await self.store_of(ref).stat(ref)

    def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
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

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
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
        if not all(map(is_plain, ref.key.split("/"))):
            raise StorageDeniedError(ref, "the key contains '.' or '..' segments")
        return self._inner

    def list(self, prefix: ObjectRef, **_: str) -> AsyncIterator[Listed]:
        """Refuse: references name single objects."""
        raise StorageDeniedError(prefix, "virtual references cannot be listed")

    async def aclose(self) -> None:
        """Leave the inner store open for its other users."""


def is_plain(segment: str) -> bool:
    """Return whether no server or file system takes a path segment for more than a name."""
    return {".", ".."}.isdisjoint(_SEPARATORS.split(segment)) and "/" not in segment


def is_transient(error: StorageError) -> bool:
    """Return whether the same read can succeed a moment later; a time-out waited long enough."""
    if isinstance(error, StorageUnavailableError):
        return not error.lasting
    return isinstance(error, StorageThrottledError | TruncatedReadError)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries with exponential backoff (0.1 s to 5 s) and full jitter, within *deadline_s*."""

    deadline_s: float
    """Longest time for all attempts and the pauses between them."""
    attempts: int = 4
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[float, float], float] = random.uniform

    async def run[T](
        self,
        ref: ObjectRef,
        call: Callable[[], Awaitable[T]],
        *,
        is_transient: Callable[[StorageError], bool] = is_transient,
    ) -> T:
        """Repeat *call* after transient errors; raise `StorageTimeoutError` at the deadline."""
        try:
            async with asyncio.timeout(self.deadline_s):
                for attempt in range(self.attempts - 1):
                    try:
                        return await call()
                    except StorageError as error:
                        if not is_transient(error):
                            raise
                    longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
                    await self.sleep(self.uniform(0, longest))
                return await call()
        except TimeoutError as error:
            raise StorageTimeoutError(ref, f"no response within {self.deadline_s:g} s") from error


class RetryingStore(StoreWrapper):
    """Retries reads until they begin; stores retry their writes themselves."""

    def __init__(self, inner: ObjectStore, policy: RetryPolicy) -> None:
        super().__init__(inner)
        self._policy = policy

    def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        **conditions: Unpack[ReadConditions],
    ) -> Coroutine[Any, Any, Found | NotModified | None]:
        return self._policy.run(ref, lambda: self._inner.get(ref, request, **conditions))

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        async with AsyncExitStack() as stack:

            async def enter() -> AsyncIterator[bytes]:
                opened = self._inner.stream(ref, byte_range, if_match=if_match)
                return await stack.enter_async_context(opened)

            yield await self._policy.run(ref, enter)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        return await self._policy.run(ref, lambda: self._inner.stat(ref))

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List with retries, each of which begins after the last key that was listed."""
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

        while (found := await self._policy.run(prefix, step)) is not None:
            last = found.ref.key
            yield found

    async def check_reachable(self, root: ObjectRef) -> None:
        await self._policy.run(root, lambda: self._inner.check_reachable(root))
