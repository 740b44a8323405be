"""Retries of reads, and traces of calls."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from shardgate.errors import (
    RangeNotSatisfiedError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    StorageUnusableError,
    TruncatedReadError,
    VersionChangedError,
)
from shardgate.model import ByteRange, ETag, ObjectRef
from shardgate.storage.contract import ABSENT, CONFLICT, Listed, ObjectStore
from shardgate.storage.memory import MemoryStore
from shardgate.storage.wrappers import Call as TracedCall
from shardgate.storage.wrappers import RetryingStore, RetryPolicy, StoreWrapper, TracedStore
from tests.support.records import replaced

REF = ObjectRef("memory://bucket", "key")
PASSING = [
    StorageThrottledError(REF, "slow down"),
    StorageUnavailableError(REF, "refused"),
    TruncatedReadError(REF, "cut"),
]
LAST = StorageThrottledError(REF, "the last")
BACKOFF = RetryPolicy(5).backoff
SLOW = replaced(BACKOFF, sleep=lambda _: asyncio.sleep(60))
FINAL = [
    StorageDeniedError(REF, "denied"),
    StorageUnusableError(REF, "no bucket"),
    StorageTimeoutError(REF, "silent"),
    RangeNotSatisfiedError(REF, 5),
    VersionChangedError(REF),
]


class FailingStore(StoreWrapper):
    """A store that raises the errors of a list, one a call, before it works."""

    def __init__(self, errors: list[StorageError], memory: MemoryStore | None = None) -> None:
        self.memory = memory or MemoryStore()
        super().__init__(self.memory)
        self.errors = errors
        self.etag = self.memory.place(REF, b"data")
        self.calls = 0

    def store_of(self, ref: ObjectRef) -> ObjectStore:
        """Count a call, and raise the next error."""
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().store_of(ref)


def retrying(inner: FailingStore, slept: list[float] | None = None) -> RetryingStore:
    """Wrap *inner* without waiting, and record the longest pauses in *slept*."""

    async def sleep(seconds: float) -> None:
        if slept is not None:
            slept.append(seconds)

    backoff = replaced(BACKOFF, sleep=sleep, uniform=lambda low, high: low + high)
    return RetryingStore(inner, RetryPolicy(5, backoff=backoff))


async def streamed(store: RetryingStore, etag: ETag) -> object:
    """Read a stream to its end."""
    async with store.stream(REF, ByteRange(0, 4), if_match=etag) as pieces:
        return [piece async for piece in pieces]


async def listed(store: RetryingStore, _: ETag) -> object:
    """List the bucket."""
    return [each async for each in store.list(ObjectRef(REF.bucket, ""))]


type Call = Callable[[RetryingStore, ETag], Awaitable[object]]
CALLS: list[Call] = [
    lambda store, etag: store.get(REF, ByteRange(0, 2), if_match=etag),
    lambda store, _: store.stat(REF),
    lambda store, _: store.check_reachable(REF),
    streamed,
    listed,
]


@pytest.mark.parametrize("call", CALLS)
async def test_transient_errors_are_retried(call: Call) -> None:
    """A call with three transient errors succeeds; its pauses double, with jitter."""
    inner, slept = FailingStore(list(PASSING)), list[float]()

    found = await call(retrying(inner, slept), inner.etag)

    assert found == await call(retrying(FailingStore([])), inner.etag)
    assert inner.calls == 4
    assert slept == [0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    "errors", [[*PASSING, LAST], *([error] for error in FINAL)], ids=lambda errors: str(errors[-1])
)
@pytest.mark.parametrize("call", CALLS)
async def test_lasting_errors_are_raised(call: Call, errors: list[StorageError]) -> None:
    """A call with a lasting error raises it at once; one with four transient errors, the last."""
    inner = FailingStore([*errors])

    with pytest.raises(StorageError) as raised:
        await call(retrying(inner), inner.etag)

    assert raised.value is errors[-1]
    assert inner.calls == len(errors)


async def test_writes_are_not_retried() -> None:
    """A failed write is not retried."""
    inner = FailingStore(list(PASSING))
    with pytest.raises(StorageError):
        await retrying(inner).put(REF, [b"1"], expected=None)
    assert inner.calls == 1


async def test_deadline_bounds_attempts_and_pauses() -> None:
    """Attempts and pauses beyond the deadline raise StorageTimeoutError.

    A caller's own shorter timeout raises TimeoutError.
    """
    store = RetryingStore(FailingStore(list(PASSING)), RetryPolicy(0.05, backoff=SLOW))

    with pytest.raises(StorageTimeoutError, match=r"0\.05 s"):
        await store.stat(REF)
    store = RetryingStore(FailingStore(list(PASSING)), RetryPolicy(5, backoff=SLOW))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await store.stat(REF)


@pytest.mark.parametrize("delimiter", ["", "/"])
async def test_failed_listing_is_resumed(delimiter: str) -> None:
    """A listing that fails after every second name lists each once, in order."""

    class Breaking(MemoryStore):
        async def list(self, *args: Any, **options: Any) -> AsyncGenerator[Listed]:
            count = 0
            async for each in super().list(*args, **options):
                if count == 2:
                    raise StorageThrottledError(REF, "slow down")
                count += 1
                yield each

    inner = Breaking()
    for name in ("a", "b/c", "b/d", "b0", "e/f", "g", "h/i"):
        inner.place(replaced(REF, key=name), b"data")
    bucket, store = ObjectRef(REF.bucket, ""), retrying(FailingStore([], inner))

    found = [each.ref.key async for each in store.list(bucket, delimiter=delimiter)]
    whole = [each.ref.key async for each in MemoryStore.list(inner, bucket, delimiter=delimiter)]
    assert found == whole
    assert len(found) > 5


async def test_each_call_is_traced() -> None:
    """Each call is traced with method, object, bytes and error."""
    calls: list[TracedCall] = []
    inner, bucket, before = MemoryStore(), ObjectRef(REF.bucket, ""), time.perf_counter()
    store = TracedStore(inner, calls.append)

    await store.verify_conditional_writes(REF)
    etag = await store.put(REF, [b"data", b"more"], expected=ABSENT)
    assert isinstance(etag, str)
    assert await store.put(REF, [b"late"], expected=ABSENT) is CONFLICT
    await store.get(REF, ByteRange(1, 3))
    await store.stat(REF)
    await store.check_reachable(REF)
    async with store.stream(REF, ByteRange(0, 8), if_match=etag) as pieces:
        assert [piece async for piece in pieces] == [b"datamore"]
    assert [each async for each in store.list(bucket)]
    await store.put(REF, [b"new", ByteRange(0, 4)], expected=etag)
    with pytest.raises(VersionChangedError):
        await store.get(REF, if_match=etag)
    await store.delete(REF, expected=None)

    assert store.keeps_headers(REF)
    assert [(each.method, each.ref, each.nbytes) for each in calls] == [
        ("safety", REF, 0),
        ("put", REF, 8),
        ("put", REF, 4),
        ("get", REF, 2),
        ("stat", REF, 0),
        ("reach", REF, 0),
        ("stream", REF, 8),
        ("list", bucket, 0),
        ("put", REF, 3),
        ("get", REF, 0),
        ("delete", REF, 0),
    ]
    errors = [type(each.error) for each in calls if each.error is not None]
    assert errors == [VersionChangedError]
    assert all(0 <= each.seconds < time.perf_counter() - before for each in calls)
