"""Read the bytes of located chunks: cached, shared, and merged with their neighbours."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from sys import maxsize
from typing import Final, NamedTuple

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


@dataclass(eq=False, slots=True)
class _PendingChunk:
    """A chunk that callers wait for; it is in a window first, and then in a `_SpanRead`."""

    chunk: Stored
    near: RecentRead | None
    """Earlier read of the same block, if there was one."""
    waiters: list[asyncio.Future[bytes]] = field(default_factory=list)
    is_kept: bool = False
    """Whether the chunk is cached on arrival, so that no request finds it in neither place."""

    def fail(self, failure: BaseException) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(failure)

    def cancel(self) -> None:
        for waiter in self.waiters:
            waiter.cancel()


@dataclass(eq=False, slots=True)
class _SpanRead:
    source: Stored
    overfetched_nbytes: int
    """Bytes around the chunks, and in gaps between them."""
    chunks: list[_PendingChunk]
    task: asyncio.Task[Found]

    def covers(self, wanted: ByteRange) -> bool:
        """Return whether this read will bring the bytes *wanted*, unless it fails."""
        first, last = self.source.byte_range
        return first <= wanted.start and wanted.stop <= last and not self.task.cancelling()


class _PlannedRead(NamedTuple):
    span: ByteRange
    chunks: list[_PendingChunk]
    """By range."""

    @property
    def overfetched_nbytes(self) -> int:
        """Bytes of the span that are in none of the chunks."""
        nbytes = 0
        reached = self.span.start
        for start, stop in (each.chunk.byte_range for each in self.chunks):
            nbytes += max(0, start - reached)
            reached = max(reached, stop)
        return nbytes


class ChunkReader:
    """Reads ranges of object versions, which never go stale.

    Concurrent requests for a chunk share one read. When a caller is cancelled, the others keep
    waiting; when all callers of a span are cancelled, its read is cancelled; when the read fails,
    all callers get the error and the next caller starts anew.

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
            if near is not None and (data := near.cut(chunk.byte_range)) is not None:
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
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        pending.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # the read ended in the same turn of the loop
                waiter.exception()  # else asyncio logs that it was never retrieved
            pending.waiters.remove(waiter)
            if not pending.waiters and self._pending.get(chunk) is pending:
                self._abandon(pending)
            raise

    def _find_read(self, pending: _PendingChunk) -> None:
        """Join a read under way that brings the bytes of *pending* too, or enter a window."""
        version = (pending.chunk.ref, pending.chunk.version)
        for read in self._reads.get(version, ()):
            if read.overfetched_nbytes and read.covers(pending.chunk.byte_range):
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
            self._start(version, pending.chunk.byte_range, 0, [pending])

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
        reads = self._split(chunks, self._gap_bytes(version))
        overfetched_nbytes = sum(each.overfetched_nbytes for each in reads)
        if overfetched_nbytes and not self._budgets[version[0].bucket].take(overfetched_nbytes):
            reads = self._split(chunks, 0)
        self.counters.merged += len(chunks) - len(reads)
        for each in reads:
            self._start(version, each.span, each.overfetched_nbytes, each.chunks)

    def _split(self, chunks: Sequence[_PendingChunk], max_gap_bytes: int) -> list[_PlannedRead]:
        """Divide *chunks* into reads, each chunk in one of them."""
        ranges = sorted({each.chunk.byte_range for each in chunks})
        spans = coalesce(ranges, max_gap_nbytes=max_gap_bytes, max_span_nbytes=self._max_span_bytes)
        reads = [_PlannedRead(span, []) for span in spans]
        at = 0
        for pending in sorted(chunks, key=lambda each: each.chunk.byte_range):
            while reads[at].span.stop < pending.chunk.byte_range.stop:
                at += 1
            reads[at].chunks.append(pending)
        return reads

    def _start(
        self,
        version: _ObjectVersion,
        span: ByteRange,
        overfetched_nbytes: int,
        chunks: list[_PendingChunk],
    ) -> None:
        ref, etag = version
        if (near := chunks[0].near) is not None:
            wide = self._widen(ref, span, near.size)
            if wide is not span and self._budgets[ref.bucket].take(wide.length - span.length):
                overfetched_nbytes += wide.length - span.length
                span = wide
        self._costs[ref.bucket].overfetched_nbytes += overfetched_nbytes
        source = Stored(ref, span, etag)
        task = asyncio.create_task(self._get(source))
        read = _SpanRead(source, overfetched_nbytes, chunks, task)
        task.add_done_callback(partial(self._end, version, read))
        self.counters.overfetched_nbytes += overfetched_nbytes
        self._reads[version].append(read)

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

    def _end(self, version: _ObjectVersion, read: _SpanRead, task: asyncio.Task[Found]) -> None:
        if read.overfetched_nbytes:
            bucket = read.source.ref.bucket
            self._budgets[bucket].release(read.overfetched_nbytes)
            self._costs[bucket].overfetched_nbytes -= read.overfetched_nbytes
        self._reads[version].remove(read)
        if not self._reads[version]:
            del self._reads[version]
        failure = None if task.cancelled() else task.exception()
        for pending in read.chunks:
            if self._pending.get(pending.chunk) is pending:
                del self._pending[pending.chunk]
            if task.cancelled():
                pending.cancel()
            elif failure is not None:
                pending.fail(failure)
            else:
                self._deliver(pending, read, task.result().data)
        if not task.cancelled() and failure is None and self._max_around_bytes:
            self._remember(version, read, task.result())

    def _deliver(self, pending: _PendingChunk, read: _SpanRead, data: bytes) -> None:
        """Cut the bytes of a chunk out of those that *read* brought."""
        ref, (start, stop), version = pending.chunk
        first = read.source.byte_range.start
        cut = data[start - first : stop - first]
        if len(cut) != stop - start:
            pending.fail(lost(ref, version))
            return
        for waiter in pending.waiters:
            if not waiter.done():
                waiter.set_result(cut)
        if pending.is_kept:
            self.cache.put(pending.chunk, cut)

    def _remember(self, version: _ObjectVersion, read: _SpanRead, found: Found) -> None:
        """Keep what *read* brought around chunks, or note that it was in this block."""
        start, stop = read.source.byte_range
        first = start // _BLOCK_NBYTES
        if read.overfetched_nbytes:
            for block in range(first, -(-stop // _BLOCK_NBYTES)):
                self._recent.put((version, block), RecentRead(found.size, start, found.data))
        elif read.chunks[0].near is None and stop - start < found.size:
            self._recent.put((version, first), RecentRead(found.size))

    def _abandon(self, pending: _PendingChunk) -> None:
        """Cancel the read of a chunk without waiters, unless other chunks of its span have some."""
        del self._pending[pending.chunk]
        version = (pending.chunk.ref, pending.chunk.version)
        window = self._windows.get(version, [])
        if pending in window:
            window.remove(pending)
        for read in self._reads.get(version, ()):
            if pending in read.chunks and not any(each.waiters for each in read.chunks):
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
