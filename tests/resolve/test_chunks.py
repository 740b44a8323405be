"""Reads of located chunks, and of neighbours together."""

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import DamagedError, StorageThrottledError, TruncatedReadError, VersionChangedError
from app.model import ByteRange, ByteRequest, ETag, Fixed, ObjectRef, Stored
from app.resolve.budget import ByteBudget
from app.resolve.chunks import ChunkReader, StoreCost
from app.storage.contract import Found, NotModified
from tests.resolve.stores import REF, WatchedStore, settle

_DATA = bytes(i * 7 % 251 for i in range(1000))
_GAP, _SPAN = 16, 200


class _Case:
    """A reader of one object of a thousand bytes."""

    def __init__(self, store: WatchedStore | None = None, max_bytes: int = 2**20) -> None:
        self.store = store or WatchedStore()
        self.etag = self.store.place(REF, _DATA)
        self.budget = ByteBudget(2**26, wait_s=0.2)
        self.reader = ChunkReader(
            self.store, self.budget, max_bytes=max_bytes, max_gap_bytes=_GAP, max_span_bytes=_SPAN
        )

    def chunk(self, start: int, stop: int) -> Stored:
        """Name a range of the object."""
        return Stored(REF, ByteRange(start, stop), self.etag)

    async def read(self, *ranges: tuple[int, int]) -> list[bytes]:
        """Read ranges at the same moment."""
        return await asyncio.gather(*(self.reader.read(self.chunk(*r)) for r in ranges))

    @property
    def requests(self) -> list[ByteRequest | None]:
        """What was asked of the store."""
        return [call.request for call in self.store.calls]


async def test_callers_join_a_read_that_is_under_way() -> None:
    """A caller that arrives during the read waits for it; exactly its bytes are requested."""
    case = _Case()
    case.store.gate.clear()
    first = asyncio.create_task(case.read((10, 20)))
    await settle()
    second = asyncio.create_task(case.read((10, 20)))
    await settle()
    case.store.gate.set()

    assert await first == await second == [_DATA[10:20]]
    (call,) = case.store.calls
    assert (call.request, call.if_match) == (ByteRange(10, 20), case.etag)


async def test_there_is_no_moment_between_the_read_and_the_cache() -> None:
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
    """Touching ranges and gaps up to the limit are one read, wider gaps and longer spans not."""
    case = _Case()
    await case.read(*ranges)

    assert sorted(r for r in case.requests if isinstance(r, ByteRange)) == [
        ByteRange(*request) for request in requests
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.integers(0, 220)).map(
            lambda r: (r[0], min(1000, r[0] + r[1]))
        ),
        max_size=20,
    )
)
def test_whatever_is_merged_is_cut_exactly(ranges: list[tuple[int, int]]) -> None:
    """Each caller gets the bytes of its own range, and gaps are held no longer than read.

    A read begins and ends with ranges, bridges no wider gap, and is longer only by one range.
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


@pytest.mark.parametrize("is_fixed", [False, True])
async def test_a_short_read_is_no_short_chunk(*, is_fixed: bool) -> None:
    """Fewer bytes than the object has are a failure of the store for each caller, no damage."""
    case = _Case()
    case.store.spoil = lambda found: replace(found, data=found.data[:-1])
    chunks = [(_fixed if is_fixed else _Case.chunk)(case, at, at + 10) for at in (0, 10)]
    heard = await asyncio.gather(*map(case.reader.read, chunks), return_exceptions=True)

    assert [type(each) for each in heard] == [TruncatedReadError] * 2


@pytest.mark.parametrize("is_removed", [False, True])
async def test_another_version_is_never_read(*, is_removed: bool) -> None:
    """A missing object has changed: only a look-up can prove absence."""
    case = _Case()
    case.store.place(REF, b"another")
    if is_removed:
        case.store.remove(REF)
    with pytest.raises(VersionChangedError):
        await case.read((10, 20))


async def test_a_body_is_let_go_at_once() -> None:
    """A delivered body does not wait for the garbage collector."""
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


async def test_after_a_failure_the_next_read_tries_again() -> None:
    """A failure is not cached; with a size of 0 nothing is, not even an empty body."""
    case = _Case(max_bytes=0)
    case.store.failure = StorageThrottledError(REF, "for the test")
    with pytest.raises(StorageThrottledError):
        await case.read((10, 20))

    assert await case.read((10, 20)) == [_DATA[10:20]]
    case.reader.cache.put(case.chunk(0, 0), b"")
    assert case.reader.cached(case.chunk(0, 0)) is None


@pytest.mark.parametrize("leaving", [1, 2])
async def test_a_read_without_callers_is_cancelled(leaving: int) -> None:
    """While one is left, the callers of the other half of a merged read get it."""
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
    return case.chunk(start, stop)._replace(version=Fixed(ETag('"name"')))


@pytest.mark.parametrize("size", range(0, 60, 5))
async def test_of_merged_chunks_only_those_past_the_end_are_damaged(size: int) -> None:
    """The size of an object that never changes is unknown before it is read."""
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
    """Ranges of one object under other conditions are separate reads, as those of two objects."""
    case = _Case()
    other = ObjectRef("memory://bucket", "data/other")
    etag = case.store.place(other, b"0123456789")
    pinned = Fixed(ETag('"name"'), case.etag)
    chunks = [
        _fixed(case, 0, 10),
        case.chunk(10, 20)._replace(version=pinned),
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
    """Answers after a while."""

    async def get(self, *args: Any, **kwargs: Any) -> Found | NotModified | None:
        """Wait, read."""
        await asyncio.sleep(0.05)
        return await super().get(*args, **kwargs)


@pytest.mark.parametrize(("store", "requests"), [(WatchedStore, 2), (_LateStore, 1)])
async def test_gaps_are_bridged_where_a_request_takes_longer(
    store: type[WatchedStore], requests: int
) -> None:
    """A chunk further on is read along from a store that answers late, not from a quick one."""
    case = _Case(store())
    case.etag = case.store.place(REF, bytes(2**18))
    case.reader = ChunkReader(
        case.store, case.budget, max_bytes=0, max_gap_bytes=2**20, max_span_bytes=2**22
    )
    await case.read((5000, 5010))
    case.store.calls.clear()

    await case.read((0, 10), (200_000, 200_010))

    assert len(case.requests) == requests
    assert case.reader.counters.unread_nbytes == (199_990 if requests == 1 else 0)
    assert case.budget.held_bytes == 0


async def test_gaps_are_not_bridged_without_room_for_them() -> None:
    """Bytes that no request asked for are read only where they fit among those in flight."""
    case = _Case()
    await case.budget.acquire(2**26 - 4)
    await case.read((0, 10), (20, 30))

    assert case.requests == [ByteRange(0, 10), ByteRange(20, 30)]


def test_reads_that_wait_for_one_another_make_no_store_far() -> None:
    """Where one read in ten is quick, the others waited here: hardly a gap is worth a request."""
    cost = StoreCost()
    for number in range(200):
        cost.note(2**16, 0.003 if number % 10 else 0.0003)

        assert cost.gap_nbytes < 2**14
