"""Patience with a store."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from app.errors import (
    RangeNotSatisfiedError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
    VersionChangedError,
)
from app.model import ByteRange, ETag, ObjectRef
from app.storage.contract import Listed
from app.storage.memory import MemoryStore
from app.storage.retrying import RetryingStore

REF = ObjectRef("memory://bucket", "key")
PASSING = [
    StorageThrottledError(REF, "slow down"),
    StorageUnavailableError(REF, "refused"),
    TruncatedReadError(REF, "cut"),
]
FINAL = [
    StorageDeniedError(REF, "denied"),
    StorageUnavailableError(REF, "no bucket", lasting=True),
    StorageTimeoutError(REF, "silent"),
    RangeNotSatisfiedError(REF, 5),
    VersionChangedError(REF),
]


class FailingStore(MemoryStore):
    """Raises the errors of a list, one a call, before it works; its streams begin with a get."""

    def __init__(self, errors: list[StorageError]) -> None:
        super().__init__()
        self.errors = errors
        self.etag = self.place(REF, b"data")
        self.calls = 0

    def fail(self) -> None:
        """Count a call, and raise the next error."""
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    async def get(self, *args: Any, **options: Any) -> Any:
        """Fail first."""
        self.fail()
        return await super().get(*args, **options)

    async def stat(self, ref: ObjectRef) -> Any:
        """Fail first."""
        self.fail()
        return await super().stat(ref)

    async def reach(self, root: ObjectRef) -> None:
        """Fail first."""
        self.fail()

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Fail first."""
        self.fail()
        async for each in super().list(prefix, delimiter=delimiter, after=after):
            yield each


class Pauses:
    """Takes the pauses that would have been slept, at their longest."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """Note, and go on."""
        self.slept.append(seconds)

    def longest(self, low: float, high: float) -> float:
        """Stand in for chance."""
        assert low == 0
        return high


def patient(inner: FailingStore, pauses: Pauses | None = None) -> RetryingStore:
    """Wrap *inner* so that no test waits."""
    pauses = pauses or Pauses()
    return RetryingStore(inner, 5, sleep=pauses.sleep, uniform=pauses.longest)


async def do_get(store: RetryingStore, etag: ETag) -> object:
    """Read a range."""
    return await store.get(REF, ByteRange(0, 2), if_match=etag)


async def do_stat(store: RetryingStore, etag: ETag) -> object:
    """Ask for size and version."""
    return await store.stat(REF)


async def do_reach(store: RetryingStore, etag: ETag) -> object:
    """Ask for the bucket."""
    await store.reach(REF)
    return "reached"


async def do_stream(store: RetryingStore, etag: ETag) -> object:
    """Read a stream to its end."""
    async with store.stream(REF, ByteRange(0, 4), if_match=etag) as pieces:
        return [piece async for piece in pieces]


async def do_list(store: RetryingStore, etag: ETag) -> object:
    """List the bucket."""
    return [each async for each in store.list(ObjectRef(REF.bucket, ""))]


type Call = Callable[[RetryingStore, ETag], Awaitable[object]]
CALLS: list[Call] = [do_get, do_stat, do_reach, do_stream, do_list]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", CALLS)
async def test_what_may_pass_is_tried_again(call: Call, error: StorageError) -> None:
    """Three failures and a success are a success."""
    inner = FailingStore([error] * 3)

    assert await call(patient(inner), inner.etag)
    assert inner.calls == 4


@pytest.mark.parametrize("call", CALLS)
async def test_the_fourth_failure_is_told(call: Call) -> None:
    """Patience ends, with the last error."""
    inner = FailingStore([*PASSING, StorageThrottledError(REF, "the last")])

    with pytest.raises(StorageThrottledError, match="the last"):
        await call(patient(inner), inner.etag)


@pytest.mark.parametrize("error", FINAL, ids=str)
@pytest.mark.parametrize("call", CALLS)
async def test_what_will_not_pass_is_told_at_once(call: Call, error: StorageError) -> None:
    """Denied is denied."""
    inner = FailingStore([error])

    with pytest.raises(type(error)):
        await call(patient(inner), inner.etag)

    assert inner.calls == 1


async def test_pauses_double() -> None:
    """The longest pause doubles from one attempt to the next; chance takes a part of it."""
    pauses = Pauses()

    await patient(FailingStore(list(PASSING)), pauses).stat(REF)

    assert pauses.slept == [0.1, 0.2, 0.4]


async def test_the_deadline_bounds_everything() -> None:
    """Attempts and pauses together end at the deadline."""
    inner = FailingStore(list(PASSING))
    store = RetryingStore(inner, 0.05, sleep=lambda _: asyncio.sleep(60))

    with pytest.raises(StorageTimeoutError, match=r"0\.05 s"):
        await store.stat(REF)


async def test_a_timeout_of_the_caller_is_not_ours() -> None:
    """Who waits less than the deadline hears `TimeoutError`."""
    store = RetryingStore(FailingStore(list(PASSING)), 5, sleep=lambda _: asyncio.sleep(60))

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await store.stat(REF)


@pytest.mark.parametrize("delimiter", ["", "/"])
async def test_a_listing_goes_on_where_it_broke_off(delimiter: str) -> None:
    """Each name is told once, in order, though the listing breaks off behind every other one."""

    class Breaking(FailingStore):
        async def list(self, *args: Any, **options: Any) -> AsyncIterator[Listed]:
            count = 0
            async for each in super().list(*args, **options):
                if count == 2:
                    raise StorageThrottledError(REF, "slow down")
                count += 1
                yield each

    inner = Breaking([])
    for name in ("a", "b/c", "b/d", "b0", "e/f", "g", "h/i"):
        inner.place(REF._replace(key=name), b"data")
    bucket = ObjectRef(REF.bucket, "")

    found = [each.ref.key async for each in patient(inner).list(bucket, delimiter=delimiter)]
    whole = [each.ref.key async for each in MemoryStore.list(inner, bucket, delimiter=delimiter)]
    assert found == whole
    assert len(found) > 5


async def test_writes_are_not_repeated() -> None:
    """Only the store can find out what became of a write that failed."""

    class Lost(FailingStore):
        async def put(self, *args: Any, **options: Any) -> Any:
            self.fail()

        async def delete(self, *args: Any, **options: Any) -> Any:
            self.fail()

    inner = Lost(list(PASSING))
    for call in (
        patient(inner).put(REF, [b"1"], expected=None),
        patient(inner).delete(REF, expected=None),
    ):
        with pytest.raises(StorageError):
            await call
    assert inner.calls == 2
