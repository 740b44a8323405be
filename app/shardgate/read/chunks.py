"""Read the bytes of located chunks: cached, shared, and merged with their neighbours."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from sys import maxsize
from typing import Final, cast

from shardgate.errors import RangeNotSatisfiedError, TruncatedReadError, VersionChangedError, lost
from shardgate.model import (
    ByteRange,
    Fixed,
    ObjectRef,
    Stored,
    Version,
    VolatileBucket,
    coalesce,
    condition_of,
)
from shardgate.read.budget import ByteBudget
from shardgate.read.metadata_cache import OVERHEAD_NBYTES, CacheCounters, SizedLRUCache
from shardgate.read.nearby import RecentRead, StoreCost
from shardgate.storage.contract import Found, ObjectReader

_WINDOW_S: Final = 0.001
"""As short as the event loop's timers allow; a page of a viewer sends its requests in less."""
_BLOCK_NBYTES: Final = 1024**2
"""Chunks in the same block of an object are near one another."""
_LEAST_AROUND_NBYTES: Final = 16 * 1024
"""Stores less than about a millisecond away are not read around."""

type _ObjectVersion = tuple[ObjectRef, Version]


class _PendingChunk:
    """A chunk that callers wait for; it is in a window first, and then in a `_SpanRead`."""

    __slots__ = ("chunk", "is_kept", "near", "read", "waiters")

    def __init__(self, chunk: Stored, near: RecentRead | None) -> None:
        self.chunk = chunk
        self.near = near
        """Earlier read of the same block, if there was one."""
        self.waiters: list[asyncio.Future[bytes | None]] = []
        """Each gets the bytes, or `None`: its caller has to perform *read*."""
        self.read: _SpanRead | None = None
        """The read of this chunk alone, while it is left to the callers."""
        self.is_kept = False
        """Whether the chunk is cached on arrival, so that no request finds it in neither place."""

    def wake(self, outcome: "bytes | BaseException") -> None:
        for waiter in self.waiters:
            if waiter.done():
                continue
            if isinstance(outcome, bytes):
                waiter.set_result(outcome)
            elif isinstance(outcome, asyncio.CancelledError):
                waiter.cancel()
            else:
                waiter.set_exception(outcome)


class _SpanRead:
    """A read under way: in a task of its own, or in that of a caller if no other is near."""

    __slots__ = ("chunks", "overfetched_nbytes", "source", "task")

    def __init__(self, source: Stored, chunks: list[_PendingChunk]) -> None:
        self.source = source
        self.chunks = chunks
        """By range."""
        self.overfetched_nbytes = 0
        """Bytes around the chunks, and in gaps between them."""
        self.task: asyncio.Task[Found] | None = None

    def covers(self, wanted: ByteRange) -> bool:
        """Return whether this read will bring the bytes *wanted* too, unless it fails."""
        first, last = self.source.byte_range
        if self.task is None or self.task.cancelling():
            return False
        return first <= wanted.start and wanted.stop <= last


class ChunkReader:
    """Reads ranges of object versions, which never go stale.

    Concurrent requests for a chunk share one read. When a caller is cancelled, the others keep
    waiting; when all callers of a span are cancelled, its read is cancelled; when the read fails,
    all callers get the error and the next caller starts anew. A chunk that is alone is read in the
    task of its caller; if that is cancelled, the next caller reads it.

    The chunks of one object version that are requested at the same time form a window. A few turns
    of the event loop (20 µs) collect the requests that have arrived already. Only if some of these
    are neighbours, so that more are likely to come, the window lasts `_WINDOW_S`.

    Neighbours are read together across a gap of up to *max_gap_bytes* where reading it takes less
    time than another request, as measured for the store, and where *budgets* has room for it.

    Where the same block of the object was read before, a third of such a gap is read on each side
    of a chunk, and kept for a while: a browser that sends six requests at a time asks for these
    bytes next. All that is read at a time for no request is no longer than a gap either, so that it
    does not hold up what was asked for.
    """

    def __init__(
        self,
        store: ObjectReader,
        budgets: Mapping[str, ByteBudget],
        *,
        max_bytes: int,
        max_gap_bytes: int,
        max_span_bytes: int,
    ) -> None:
        self._store = store
        self._budgets = budgets
        self._costs = defaultdict[str, StoreCost](StoreCost)
        """By bucket."""
        self._max_gap_bytes = max_gap_bytes
        self._max_span_bytes = max_span_bytes
        self.cache = SizedLRUCache[Stored, bytes](max_bytes, _chunk_nbytes)
        self.counters = CacheCounters()
        self._pending: dict[Stored, _PendingChunk] = {}
        self._windows: dict[_ObjectVersion, list[_PendingChunk]] = {}
        self._reads: defaultdict[_ObjectVersion, list[_SpanRead]] = defaultdict(list)
        self._recent = SizedLRUCache[tuple[_ObjectVersion, int], RecentRead](
            max_bytes // 16,  # in addition to the cache of chunks
            lambda _, read: len(read.data) + OVERHEAD_NBYTES,
        )
        """Bytes read around chunks, by number of the block; none if only a chunk was read."""
        self._max_around_bytes = min(max_gap_bytes, self._recent.maxsize // 4)

    def cached(self, chunk: Stored) -> bytes | None:
        data = self.cache.get(chunk)
        if data is not None:
            self.counters.hits += 1
        return data

    async def read(self, chunk: Stored, *, keep: bool = False) -> bytes:
        """Read exactly the bytes of *chunk*, and cache them if *keep*.

        Callers have looked into the cache before. Raises: `VersionChangedError` if the object was
        replaced, and any other `StorageError`.
        """
        start, stop = chunk.byte_range
        if start == stop:
            return b""
        pending = self._pending.get(chunk)
        if pending is None:
            near = self._recent.get(((chunk.ref, chunk.version), start // _BLOCK_NBYTES))
            if near is not None and near.data and (data := near.cut(chunk.byte_range)) is not None:
                self.counters.hits += 1
                self.counters.merged += 1
                if keep:
                    self.cache.put(chunk, data)
                return data
            pending = self._pending[chunk] = _PendingChunk(chunk, near)
            self._find_read(pending)
        else:
            self.counters.joins += 1
        pending.is_kept |= keep
        waiter: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        pending.waiters.append(waiter)
        try:
            outcome = await waiter
            read = cast("_SpanRead", pending.read)  # which it is where there are no bytes
            return await self._perform(read) if outcome is None else outcome
        except asyncio.CancelledError:
            pending.waiters.remove(waiter)
            self._leave(pending, waiter)
            raise

    def _leave(self, pending: _PendingChunk, waiter: asyncio.Future[bytes | None]) -> None:
        """Leave what the caller of *waiter* was to do to another one, or give it up."""
        # Its caller may be reading, or have been cancelled in the turn that asked it to read.
        is_reading = not (waiter.cancelled() or waiter.exception()) and waiter.result() is None
        if is_reading and pending.read is not None:
            self._hand_over(pending.read)
        elif not pending.waiters and self._pending.get(pending.chunk) is pending:
            self._abandon(pending)

    def _find_read(self, pending: _PendingChunk) -> None:
        """Join a read under way that brings the bytes of *pending* too, or enter a window."""
        version = (pending.chunk.ref, pending.chunk.version)
        for read in self._reads.get(version, ()):
            if read.covers(pending.chunk.byte_range):
                self.counters.joins += 1
                self.counters.merged += 1
                read.chunks.append(pending)
                return
        self.counters.misses += 1
        window = self._windows.get(version)
        if window is None:
            window = self._windows[version] = []
            # Four turns of the event loop: with fewer, chunks from a near store are read at seven
            # eighths of the rate.
            soon: Callable[..., object] = asyncio.get_running_loop().call_soon
            soon(soon, soon, soon, self._close, version)
        window.append(pending)

    def _close(self, version: _ObjectVersion) -> None:
        """Start the reads of a window, or leave it open for more neighbours."""
        is_alone = len(self._windows[version]) == 1 and version not in self._reads
        if not is_alone and self._has_neighbours(version):
            asyncio.get_running_loop().call_later(_WINDOW_S, self._start_reads, version)
            return
        for pending in self._windows.pop(version):
            read = self._begin(_SpanRead(pending.chunk, [pending]))
            if is_alone and not read.overfetched_nbytes:
                self._hand_over(read)
            else:
                self._start(read)

    def _has_neighbours(self, version: _ObjectVersion) -> bool:
        wanted = {each.chunk.byte_range for each in self._windows[version]}
        reads = (each.source.byte_range for each in self._reads.get(version, ()))
        around = sorted([*wanted, *reads])
        max_gap_bytes = self._gap_bytes(version)
        return any(
            after.start - before.stop <= max_gap_bytes and not wanted.isdisjoint((before, after))
            for before, after in pairwise(around)
        )

    def _gap_bytes(self, version: _ObjectVersion) -> int:
        return min(self._max_gap_bytes, self._costs[version[0].bucket].gap_nbytes)

    def _start_reads(self, version: _ObjectVersion) -> None:
        chunks = self._windows.pop(version)
        reads = self._split(version, chunks, self._gap_bytes(version))
        overfetched_nbytes = sum(each.overfetched_nbytes for each in reads)
        if overfetched_nbytes and not self._budgets[version[0].bucket].take(overfetched_nbytes):
            reads = self._split(version, chunks, 0)
        self.counters.merged += len(chunks) - len(reads)
        for each in reads:
            self._start(self._begin(each))

    def _split(
        self, version: _ObjectVersion, chunks: Sequence[_PendingChunk], max_gap_bytes: int
    ) -> list[_SpanRead]:
        """Divide *chunks* into reads, each chunk in one of them."""
        ref, etag = version
        ranges = sorted({each.chunk.byte_range for each in chunks})
        spans = coalesce(ranges, max_gap_nbytes=max_gap_bytes, max_span_nbytes=self._max_span_bytes)
        reads = [_SpanRead(Stored(ref, span, etag), []) for span in spans]
        at = 0
        for pending in sorted(chunks, key=lambda each: each.chunk.byte_range):
            while spans[at].stop < pending.chunk.byte_range.stop:
                at += 1
            reads[at].chunks.append(pending)
        for read in reads:
            reached = read.source.byte_range.start
            for start, stop in (each.chunk.byte_range for each in read.chunks):
                read.overfetched_nbytes += max(0, start - reached)
                reached = max(reached, stop)
        return reads

    def _begin(self, read: _SpanRead) -> _SpanRead:
        """Enter *read*, of more around its chunks if that is cheap, among those under way."""
        ref, span, etag = read.source
        if (near := read.chunks[0].near) is not None:
            wide = self._widen(ref, span, near.size)
            if wide is not span and self._budgets[ref.bucket].take(wide.length - span.length):
                read.overfetched_nbytes += wide.length - span.length
                read.source = Stored(ref, wide, etag)
        self._costs[ref.bucket].overfetched_nbytes += read.overfetched_nbytes
        self.counters.overfetched_nbytes += read.overfetched_nbytes
        self._reads[ref, etag].append(read)
        return read

    def _start(self, read: _SpanRead) -> None:
        """Perform *read* in a task, which goes on for the other callers when one leaves."""
        read.task = asyncio.create_task(self._get(read.source))
        read.task.add_done_callback(partial(self._finish, read))

    def _widen(self, ref: ObjectRef, span: ByteRange, size: int) -> ByteRange:
        """Extend *span* within *size* bytes, if two chunks as long fit in on each side."""
        cost = self._costs[ref.bucket]
        max_nbytes = min(cost.gap_nbytes, self._max_around_bytes)
        nbytes = max_nbytes // 3
        is_free = cost.overfetched_nbytes + 2 * nbytes <= max_nbytes
        start, stop = span
        if not is_free or nbytes < max(_LEAST_AROUND_NBYTES, 2 * (stop - start)):
            return span
        return ByteRange(max(0, start - nbytes), max(stop, min(size, stop + nbytes)))

    def _hand_over(self, read: _SpanRead) -> None:
        """Have one caller perform the *read* of a single chunk; without callers it ends."""
        read.chunks[0].read = read
        for waiter in read.chunks[0].waiters:
            if not waiter.done():
                waiter.set_result(None)
                return
        self._end(read)

    async def _perform(self, read: _SpanRead) -> bytes:
        """Perform the *read* of a single chunk for all its callers, in the task of one; if that
        leaves, `_leave` hands it over.
        """
        try:
            found = await self._get(read.source)
        except Exception as failure:
            self._end(read)
            read.chunks[0].wake(failure)
            raise
        self._end(read)
        self._deliver(read, found)
        ref, byte_range, version = read.source
        if len(found.data) < byte_range.stop - byte_range.start:
            raise lost(ref, version)
        return found.data

    def _finish(self, read: _SpanRead, task: asyncio.Task[Found]) -> None:
        self._end(read)
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is None:
            self._deliver(read, task.result())
            return
        for pending in read.chunks:
            pending.wake(failure)

    def _deliver(self, read: _SpanRead, found: Found) -> None:
        """Wake the callers with the bytes of their chunks, and cache those."""
        first = read.source.byte_range.start
        for pending in read.chunks:
            ref, (start, stop), version = pending.chunk
            data = found.data[start - first : stop - first]
            if len(data) != stop - start:
                pending.wake(lost(ref, version))
                continue
            pending.wake(data)
            if pending.is_kept:
                self.cache.put(pending.chunk, data)
        is_first_nearby = read.chunks[0].near is None
        if self._max_around_bytes and (read.overfetched_nbytes or is_first_nearby):
            self._remember(read, found)

    def _end(self, read: _SpanRead) -> None:
        ref, _, etag = read.source
        if read.overfetched_nbytes:
            self._budgets[ref.bucket].release(read.overfetched_nbytes)
            self._costs[ref.bucket].overfetched_nbytes -= read.overfetched_nbytes
        reads = self._reads[ref, etag]
        reads.remove(read)
        if not reads:
            del self._reads[ref, etag]
        for pending in read.chunks:
            pending.read = None  # they would be a cycle
            if self._pending.get(pending.chunk) is pending:
                del self._pending[pending.chunk]

    def _remember(self, read: _SpanRead, found: Found) -> None:
        """Keep what *read* brought around chunks, or note that it was in this block."""
        version = (read.source.ref, read.source.version)
        start, stop = read.source.byte_range
        first = start // _BLOCK_NBYTES
        if read.overfetched_nbytes:
            for block in range(first, -(-stop // _BLOCK_NBYTES)):
                self._recent.put((version, block), RecentRead(found.size, start, found.data))
        elif stop - start < found.size:
            self._recent.put((version, first), RecentRead(found.size))

    def _abandon(self, pending: _PendingChunk) -> None:
        """Cancel the read of a chunk without waiters, unless other chunks of its span have some."""
        del self._pending[pending.chunk]
        version = (pending.chunk.ref, pending.chunk.version)
        window = self._windows.get(version, [])
        if pending in window:
            window.remove(pending)
        for read in self._reads.get(version, ()):
            if pending not in read.chunks or any(each.waiters for each in read.chunks):
                continue
            if read.task is not None:
                read.task.cancel()

    async def _get(self, span: Stored) -> Found:
        """Read *span*; only a `Fixed` version, whose size is unknown, may be shorter."""
        ref, byte_range, version = span
        nbytes = byte_range.stop - byte_range.start
        began_at = time.monotonic()
        try:
            found = await self._store.get(
                ref, byte_range, if_match=condition_of(version), kind="chunk"
            )
        except (RangeNotSatisfiedError, VersionChangedError) as error:
            raise lost(ref, version, error) from error
        if not isinstance(found, Found):
            raise lost(ref, version)
        self._costs[ref.bucket].note(len(found.data), time.monotonic() - began_at)
        if isinstance(version, Fixed) and found.byte_range.stop == found.size:
            nbytes = found.byte_range.length
        if len(found.data) != nbytes:
            raise TruncatedReadError(ref, f"{len(found.data)} bytes came instead of {nbytes}")
        return found


def _chunk_nbytes(chunk: Stored, data: bytes) -> int:
    """Weigh a chunk; one of a volatile bucket fits into no cache."""
    return maxsize if isinstance(chunk.ref.bucket, VolatileBucket) else len(data) + OVERHEAD_NBYTES
