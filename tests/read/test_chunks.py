"""Reads of located chunks, merged reads of neighbours, and bytes read ahead."""

import asyncio
import gc
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import (
    DamagedError,
    StorageThrottledError,
    TruncatedReadError,
    VersionChangedError,
)
from shardgate.model import ByteRange, ByteRequest, ETag, Fixed, ObjectRef, Stored, VolatileBucket
from shardgate.read.budget import BucketBudgets, ByteBudget
from shardgate.read.chunks import ChunkReader
from shardgate.read.nearby import StoreCost
from shardgate.storage.contract import Found, NotModified
from tests.support.read.stores import REF, WatchedStore, settle
from tests.support.records import replaced

_DATA = bytes(i * 7 % 251 for i in range(1000))
_GAP, _SPAN = 16, 200


class _Case:
    """A reader of one object of a thousand bytes."""

    def __init__(self, store: WatchedStore | None = None, max_bytes: int = 2**20) -> None:
        self.store = store or WatchedStore()
        self.etag = self.store.place(REF, _DATA)
        self.budget = ByteBudget(2**26, wait_s=0.2)
        budgets = BucketBudgets(self.budget)
        self.reader = ChunkReader(
            self.store, budgets, max_bytes=max_bytes, max_gap_bytes=_GAP, max_span_bytes=_SPAN
        )

    def chunk(self, start: int, stop: int) -> Stored:
        """Return the location of a range of the object."""
        return Stored(REF, ByteRange(start, stop), self.etag)

    async def read(self, *ranges: tuple[int, int]) -> list[bytes]:
        """Read ranges at the same moment."""
        return await asyncio.gather(*(self.reader.read(self.chunk(*r)) for r in ranges))

    @property
    def requests(self) -> list[ByteRequest | None]:
        """The ranges requested from the store."""
        return [call.request for call in self.store.calls]


async def test_finished_read_is_cached_without_a_gap() -> None:
    """In any turn of the loop a caller finds the chunk in a read or in the cache."""
    case = _Case()
    chunk = case.chunk(10, 20)

    async def ask() -> bytes:
        return case.reader.cached(chunk) or await case.reader.read(chunk, keep=True)

    callers = [asyncio.create_task(ask())]
    while not callers[0].done():
        callers.append(asyncio.create_task(ask()))
        await asyncio.sleep(0)

    assert set(await asyncio.gather(*callers)) == {_DATA[10:20]}
    assert case.requests == [ByteRange(10, 20)]


async def test_chunk_of_a_volatile_bucket_is_not_cached() -> None:
    """A chunk of a volatile bucket is read for each request, and kept for none."""
    case = _Case()
    ref = ObjectRef(VolatileBucket("volatile+session", "session"), "a/c/0")
    chunk = Stored(ref, ByteRange(0, 10), case.store.place(ref, _DATA))
    await case.reader.read(chunk, keep=True)

    assert case.reader.cached(chunk) is None


@pytest.mark.parametrize(
    ("ranges", "requests"),
    [
        ([(0, 10), (10, 20)], [(0, 20)]),
        ([(0, 10), (10 + _GAP, 40)], [(0, 40)]),
        ([(0, 100), (100, _SPAN + 1)], [(0, 100), (100, _SPAN + 1)]),
        ([(5, 5)], []),
    ],
)
async def test_neighbours_are_merged(
    ranges: list[tuple[int, int]], requests: list[tuple[int, int]]
) -> None:
    """Ranges with gaps up to the limit are one read; wider gaps and longer spans are not."""
    case = _Case()
    await case.read(*ranges)

    assert sorted(r for r in case.requests if isinstance(r, ByteRange)) == [
        ByteRange(*request) for request in requests
    ]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.integers(0, 220)).map(
            lambda r: (r[0], min(1000, r[0] + r[1]))
        ),
        max_size=20,
    )
)
def test_merged_ranges_are_cut_exactly(ranges: list[tuple[int, int]]) -> None:
    """Each caller of merged reads gets the bytes of its own range.

    A read begins and ends with requested ranges, and bridges no gap wider than the limit.
    """

    async def run() -> None:
        case = _Case()
        assert await case.read(*ranges) == [_DATA[start:stop] for start, stop in ranges]
        assert case.budget.held_bytes == 0
        wanted = {at for start, stop in ranges for at in range(start, stop)}
        for span in case.requests:
            assert isinstance(span, ByteRange)
            assert span.start in {start for start, _ in ranges}
            assert span.stop in {stop for _, stop in ranges}
            assert span.length <= _SPAN or span in ranges
            unwanted = 0
            for at in range(*span):
                unwanted = 0 if at in wanted else unwanted + 1
                assert unwanted <= _GAP

    asyncio.run(run())


def _without_last(found: Found) -> Found:
    start, stop = found.byte_range
    return replace(found, data=found.data[:-1], byte_range=ByteRange(start, stop - 1))


def _without_end(found: Found) -> Found:
    short = _without_last(found)
    return replace(short, size=short.byte_range.stop)


@pytest.mark.parametrize(
    ("spoil", "is_fixed"),
    [
        *product(
            (lambda found: replace(found, data=found.data[:-1]), _without_last), (False, True)
        ),
        (_without_end, False),
    ],
)
async def test_short_read_is_truncated(spoil: Callable[[Found], Found], *, is_fixed: bool) -> None:
    """An answer with fewer bytes than requested raises TruncatedReadError for each caller, also if
    a version with an ETag ends before an indexed chunk.
    """
    case = _Case()
    case.store.spoil = spoil
    chunks = [(_fixed if is_fixed else _Case.chunk)(case, at, at + 10) for at in (0, 10)]
    heard = await asyncio.gather(*map(case.reader.read, chunks), return_exceptions=True)

    assert [type(each) for each in heard] == [TruncatedReadError] * 2


@pytest.mark.parametrize("is_removed", [False, True])
async def test_another_version_is_never_read(*, is_removed: bool) -> None:
    """A chunk whose object was replaced or removed raises VersionChangedError."""
    case = _Case()
    case.store.place(REF, b"another")
    if is_removed:
        case.store.remove(REF)
    with pytest.raises(VersionChangedError):
        await case.read((10, 20))


async def test_delivered_body_is_freed_at_once() -> None:
    """A delivered body is freed without the garbage collector."""
    let_go = []

    class Body(bytes):
        def __del__(self) -> None:
            let_go.append(len(self))

    case = _Case()
    case.store.spoil = lambda found: replace(found, data=Body(found.data))
    gc.disable()
    try:
        await case.read((0, 10), (10, 20))
        await settle()
        assert let_go == [20]
    finally:
        gc.enable()


async def test_failure_is_not_cached() -> None:
    """A failed read is repeated by the next request. A cache of size 0 keeps nothing."""
    case = _Case(max_bytes=0)
    case.store.failure = StorageThrottledError(REF, "for the test")
    with pytest.raises(StorageThrottledError):
        await case.read((10, 20))

    assert await case.read((10, 20)) == [_DATA[10:20]]
    case.reader.cache.put(case.chunk(0, 0), b"")
    assert case.reader.cached(case.chunk(0, 0)) is None


@pytest.mark.parametrize("turns", range(1, 12))
async def test_read_of_a_caller_that_leaves_is_handed_over(turns: int) -> None:
    """Whenever the first caller of a chunk leaves, the second gets its bytes."""
    case = _Case()
    chunk = case.chunk(10, 20)
    first, second = (asyncio.create_task(case.reader.read(chunk)) for _ in range(2))
    for _ in range(turns):
        await asyncio.sleep(0)
    first.cancel()

    assert await second == _DATA[10:20]
    assert await case.reader.read(chunk) == _DATA[10:20]


@pytest.mark.parametrize("turns", range(1, 12))
async def test_caller_after_all_have_left_reads_anew(turns: int) -> None:
    """Whenever the only caller of a chunk leaves, a caller of the same turn gets its bytes."""
    case = _Case()
    chunk = case.chunk(10, 20)
    first = asyncio.create_task(case.reader.read(chunk))
    for _ in range(turns):
        await asyncio.sleep(0)
    first.cancel()

    assert await case.reader.read(chunk) == _DATA[10:20]


@pytest.mark.parametrize("leaving", [1, 2])
async def test_a_read_without_callers_is_cancelled(leaving: int) -> None:
    """A merged read is cancelled when its last caller is, and not before."""
    case = _Case()
    case.store.gate.clear()
    tasks = [asyncio.create_task(case.read(r)) for r in [(0, 10), (10, 20)]]
    await settle()
    for task in tasks[:leaving]:
        task.cancel()
    await settle()
    case.store.gate.set()

    assert (len(case.store.calls), case.store.cancelled) == (1, leaving // 2)
    assert leaving == 2 or await tasks[1] == [_DATA[10:20]]


def _fixed(case: _Case, start: int, stop: int) -> Stored:
    return replaced(case.chunk(start, stop), version=Fixed(ETag('"name"')))


@pytest.mark.parametrize("size", range(0, 60, 5))
async def test_merged_chunk_past_the_end_is_damage(size: int) -> None:
    """Merged chunks that end within the object are read, and those past its end are damage."""
    case = _Case()
    case.store.place(REF, _DATA[:size])
    chunks = [_fixed(case, at, at + 10) for at in range(0, 50, 10)]
    found = await asyncio.gather(*map(case.reader.read, chunks), return_exceptions=True)

    assert case.requests == [ByteRange(0, 50)]
    for chunk, each in zip(chunks, found, strict=True):
        start, stop = chunk.byte_range
        if stop <= size:
            assert each == _DATA[start:stop]
        else:
            assert isinstance(each, DamagedError)


async def test_chunks_of_other_versions_or_objects_are_not_merged() -> None:
    """Chunks of another object, or with another condition, are separate reads."""
    case = _Case()
    other = ObjectRef("memory://bucket", "data/other")
    etag = case.store.place(other, b"0123456789")
    pinned = Fixed(ETag('"name"'), case.etag)
    chunks = [
        _fixed(case, 0, 10),
        replaced(case.chunk(10, 20), version=pinned),
        case.chunk(20, 30),
        Stored(other, ByteRange(4, 8), etag),
    ]

    assert await asyncio.gather(*map(case.reader.read, chunks)) == [
        *(_DATA[at : at + 10] for at in (0, 10, 20)),
        b"4567",
    ]
    assert [(call.ref, call.if_match) for call in case.store.calls] == [
        *((REF, each) for each in (None, case.etag, case.etag)),
        (other, etag),
    ]


class _LateStore(WatchedStore):
    """A store that answers after a while."""

    late_s = 0.05

    async def get(self, *args: Any, **kwargs: Any) -> Found | NotModified | None:
        """Wait, read."""
        await asyncio.sleep(self.late_s)
        return await super().get(*args, **kwargs)


class _LargeCase(_Case):
    """A reader of an object of 8 MiB, which reads up to 20,000 bytes on each side of a chunk."""

    data = random.Random(0).randbytes(2**23)

    def __init__(
        self, store: WatchedStore, max_bytes: int = 2**26, max_gap_bytes: int = 60_000
    ) -> None:
        super().__init__(store)
        self.etag = store.place(REF, self.data)
        self.reader = ChunkReader(
            store,
            BucketBudgets(self.budget),
            max_bytes=max_bytes,
            max_gap_bytes=max_gap_bytes,
            max_span_bytes=2**22,
        )

    async def read_each(self, *ranges: tuple[int, int]) -> None:
        """Read ranges one after the other, and assert their bytes."""
        for start, stop in ranges:
            assert await self.read((start, stop)) == [self.data[start:stop]]


@pytest.mark.parametrize(("store", "requests"), [(WatchedStore, 2), (_LateStore, 1)])
async def test_gaps_are_bridged_for_slow_stores(store: type[WatchedStore], requests: int) -> None:
    """A gap is read along with its neighbours from a slow store, and not from a quick one."""
    case = _LargeCase(store(), max_bytes=0, max_gap_bytes=2**20)
    await case.read((5000, 5010))
    case.store.calls.clear()

    await case.read((0, 10), (200_000, 200_010))

    assert len(case.requests) == requests
    assert case.reader.counters.overfetched_nbytes == (199_990 if requests == 1 else 0)
    assert case.budget.held_bytes == 0


_FIRST, _NEAR = (140_000, 140_010), (150_000, 151_000)
_WIDE = ByteRange(130_000, 171_000)


async def test_second_read_nearby_reads_ahead() -> None:
    """The second read in a region of a slow store also reads the bytes around its chunk.

    Later chunks there need no read, and are cached when used.
    """
    case = _LargeCase(_LateStore())
    await case.read_each(_FIRST, _NEAR, (140_000, 142_000), (155_000, 161_000))
    assert case.requests == [ByteRange(*_FIRST), _WIDE]
    assert case.reader.counters.overfetched_nbytes == 40_000
    assert case.budget.held_bytes == 0

    chunk = case.chunk(151_000, 152_000)
    await case.reader.read(chunk, keep=True)
    assert case.reader.cached(chunk) == case.data[151_000:152_000]
    await case.read_each((129_999, 130_001), (170_999, 171_001))
    assert len(case.requests) == 4


@pytest.mark.parametrize(
    ("store", "max_bytes", "chunk"),
    [
        pytest.param(WatchedStore, 2**26, _NEAR, id="a store that answers at once"),
        pytest.param(_LateStore, 0, _NEAR, id="no cache"),
        pytest.param(_LateStore, 2**17, _NEAR, id="a small cache"),
        pytest.param(_LateStore, 2**26, (150_000, 160_001), id="a longer chunk"),
        pytest.param(_LateStore, 2**26, (2_000_000, 2_000_010), id="a chunk further away"),
    ],
)
async def test_chunk_is_read_alone(
    store: type[WatchedStore], max_bytes: int, chunk: tuple[int, int]
) -> None:
    """A quick store, a small cache, a long or a distant chunk cause no read around the chunk."""
    case = _LargeCase(store(), max_bytes)
    await case.read_each(*((at, at + 10) for at in range(3 * 2**20, 2**23, 2**20)))
    case.store.calls.clear()
    await case.read_each(_FIRST, chunk)

    assert case.requests == [ByteRange(*_FIRST), ByteRange(*chunk)]


async def test_callers_join_a_read_ahead() -> None:
    """Callers of chunks around a chunk join its read, which is cancelled with the last of them."""
    case = _LargeCase(_LateStore())
    await case.read_each(_FIRST)
    ranges = _NEAR, (152_000, 153_000), (153_000, 154_000)
    callers = []
    for each in ranges:
        callers.append(asyncio.create_task(case.read(each)))
        await asyncio.sleep(0.01)
    callers[0].cancel()
    assert await asyncio.gather(*callers[1:]) == [[case.data[a:b]] for a, b in ranges[1:]]
    assert case.requests == [ByteRange(*_FIRST), _WIDE]

    caller = asyncio.create_task(case.read((190_000, 190_100)))
    await asyncio.sleep(0.01)
    caller.cancel()
    await case.read_each((190_100, 190_200))
    assert case.budget.held_bytes == 0


async def test_concurrent_reads_read_little_ahead() -> None:
    """Many concurrent reads overfetch no more than the bandwidth-delay product."""
    store = _LateStore()
    store.late_s = 0.002
    case = _LargeCase(store)
    await case.read_each(*((at, at + 10) for at in range(0, 2**23, 2**20)))
    before = case.reader.counters.overfetched_nbytes
    starts = range(100_000, 2**23, 70_000)
    await asyncio.gather(*(case.read((at, at + 10)) for at in starts))

    assert 0 < case.reader.counters.overfetched_nbytes - before <= 60_000
    await case.read_each((30_000, 30_010), (35_000, 35_010))
    assert len(case.requests) == 8 + len(starts) + 1


async def test_read_ahead_bytes_use_a_16th_of_the_cache() -> None:
    """Bytes read ahead are kept in a sixteenth of the cache, and the oldest are evicted first."""
    case = _LargeCase(_LateStore(), max_bytes=2**22)
    starts = range(500_000, 2**23, 2**20)
    await case.read_each(*((at, at + 10) for start in starts for at in (start, start + 20)))
    assert len(case.requests) == 16

    await case.read_each((starts[7] + 40, starts[7] + 50))
    assert len(case.requests) == 16
    await case.read_each((starts[0] + 40, starts[0] + 50))
    assert len(case.requests) == 17


async def test_read_ahead_across_a_mebibyte_is_found() -> None:
    """Bytes read ahead across a MiB boundary are found from both sides."""
    case = _LargeCase(_LateStore())
    first, middle, last = ((at, at + 100) for at in (2**20 - 3000, 2**20 - 1000, 2**20 + 1000))
    await case.read_each(first, middle, last)

    assert len(case.requests) == 2


async def test_failed_read_ahead_is_repeated() -> None:
    """A read ahead that fails raises for its caller, and the next request reads again."""
    case = _LargeCase(_LateStore())
    await case.read_each(_FIRST)
    case.store.failure = StorageThrottledError(REF, "for the test")
    with pytest.raises(StorageThrottledError):
        await case.read(_NEAR)

    await case.read_each(_NEAR)
    assert case.budget.held_bytes == 0


async def test_read_ahead_bytes_belong_to_one_version() -> None:
    """A chunk of a replaced object is not cut from bytes that were read ahead before."""
    case = _LargeCase(_LateStore())
    await case.read_each(_FIRST, _NEAR)
    case.data = bytes(len(case.data))
    case.etag = case.store.place(REF, case.data)

    await case.read_each((152_000, 153_000))


async def test_read_ahead_needs_room() -> None:
    """Bytes around a chunk are not read if the budget has no room for them."""
    case = _LargeCase(_LateStore())
    await case.budget.acquire(2**26 - 4)
    await case.read_each(_FIRST, _NEAR)

    assert case.requests == [ByteRange(*_FIRST), ByteRange(*_NEAR)]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 10_000)), min_size=4, max_size=8))
def test_read_ahead_chunks_are_cut_exactly(ranges: list[tuple[int, int]]) -> None:
    """Chunks near both ends of an object are cut exactly from bytes read ahead."""

    async def run() -> None:
        store = _LateStore()
        store.late_s = 0.002
        case = _LargeCase(store)
        for number, (distance, nbytes) in enumerate(ranges):
            start = distance if number % 2 else len(case.data) - nbytes - distance
            await case.read_each((start, start + nbytes))
        assert case.budget.held_bytes == 0

    asyncio.run(run())


async def test_bridging_a_gap_needs_room() -> None:
    """Gaps are not read if the budget has no room for them."""
    case = _Case()
    await case.budget.acquire(2**26 - 4)
    await case.read((0, 10), (20, 30))

    assert case.requests == [ByteRange(0, 10), ByteRange(20, 30)]


def test_store_cost_uses_the_quickest_reads() -> None:
    """If one read in ten is quick, a request is cheap and only small gaps are worth bridging."""
    cost = StoreCost()
    for number in range(200):
        cost.note(2**16, 0.003 if number % 10 else 0.0003)

        assert cost.gap_nbytes < 2**14
