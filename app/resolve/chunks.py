"""Read the bytes of located chunks: cached, shared, and merged with their neighbours."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from app.errors import RangeNotSatisfiedError, TruncatedReadError, VersionChangedError, lost
from app.model import ByteRange, Fixed, ObjectRef, Stored, Version, condition_of
from app.resolve.coalesce import plan_reads, span_of
from app.resolve.tally import CHUNK, Tally, kind_of_read
from app.resolve.weighed import WeighedCache
from app.storage.contract import Found, ObjectReader

_OVERHEAD_NBYTES: Final = 1024
_TURNS: Final = 4
_MOMENT_S: Final = 0.001
"""As short as the event loop's timers allow; a page of a viewer sends its requests in less."""

type _Version = tuple[ObjectRef, Version]


class _Wanted:
    """A chunk that has been asked for, and who waits for it."""

    __slots__ = ("chunk", "is_kept", "reading", "waiters")

    def __init__(self, chunk: Stored) -> None:
        self.chunk = chunk
        self.waiters: list[asyncio.Future[bytes]] = []
        self.reading: _Reading | None = None
        """The read that brings it; `None` while its moment lasts."""
        self.is_kept = False
        """Whether it goes into the cache, so that there is no moment when it is nowhere."""

    def settle(self, reading: "_Reading") -> bytes | None:
        """Tell all who wait how *reading* ended; give what it brought."""
        task, start = reading.task, reading.source.byte_range.start
        failure = None if task.cancelled() else task.exception()
        data = None
        if not task.cancelled() and failure is None:
            wanted = self.chunk.byte_range
            data = task.result()[wanted.start - start : wanted.stop - start]
            if len(data) != wanted.length:
                failure = lost(self.chunk.ref, self.chunk.version)
                data = None
        for waiter in self.waiters:
            if waiter.done():
                continue
            if task.cancelled():
                waiter.cancel()
            elif failure is not None:
                waiter.set_exception(failure)
            elif data is not None:
                waiter.set_result(data)
        return data


class _Reading:
    """One upstream read, and the chunks in its span."""

    __slots__ = ("chunks", "source", "task")

    def __init__(self, source: Stored, call: Coroutine[Any, Any, bytes]) -> None:
        self.source = source
        self.chunks: list[_Wanted] = []
        self.task = asyncio.create_task(call)


class _Moment:
    """Gathers the chunks of one version that are asked for at once.

    Some turns of the event loop (20 µs) bring those that have arrived already. Only if there are
    neighbours among them, so that more are likely to come, it lasts `_MOMENT_S`.
    """

    def __init__(
        self,
        has_neighbours: Callable[[list[_Wanted]], bool],
        end: Callable[[list[_Wanted]], None],
    ) -> None:
        self._has_neighbours = has_neighbours
        self._end = end
        self._turns = 0
        self._loop = asyncio.get_running_loop()
        self.chunks: list[_Wanted] = []
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turns += 1
        if self._turns < _TURNS:
            self._loop.call_soon(self._turn)
        elif self._has_neighbours(self.chunks):
            self._loop.call_later(_MOMENT_S, self._end, self.chunks)
        else:
            self._end(self.chunks)


class ChunkReader:
    """Reads ranges of named versions, which can never go stale.

    A chunk is on its way once, for all who ask. When one of them leaves, the others go on; when
    all have left who wait for anything in a span, its read is cancelled; when it fails, all hear
    it and the next one tries again.
    """

    def __init__(
        self, store: ObjectReader, *, max_bytes: int, max_gap_bytes: int, max_span_bytes: int
    ) -> None:
        self._store = store
        self._max_gap_bytes = max_gap_bytes
        self._max_span_bytes = max_span_bytes
        self.cache = WeighedCache[Stored, bytes](
            max_bytes, lambda _, data: len(data) + _OVERHEAD_NBYTES
        )
        self.tally = Tally()
        self._wanted: dict[Stored, _Wanted] = {}
        self._moments: dict[_Version, _Moment] = {}
        self._spans: defaultdict[_Version, list[ByteRange]] = defaultdict(list)

    def cached(self, chunk: Stored) -> bytes | None:
        """Give the bytes of *chunk* if they are at hand."""
        data = self.cache.get(chunk)
        if data is not None:
            self.tally.hits += 1
        return data

    def keep(self, chunk: Stored, data: bytes) -> None:
        """Put *data*, which was read otherwise, at hand."""
        self.cache.put(chunk, data)

    async def read(self, chunk: Stored, *, keep: bool = False) -> bytes:
        """Read exactly the bytes of *chunk*, and *keep* them at hand.

        Raises: `VersionChangedError` where the object is another one by now, `StorageError`.
        """
        if not chunk.byte_range.length:
            return b""
        wanted = self._wanted.get(chunk)
        if wanted is None:
            self.tally.misses += 1
            wanted = self._wanted[chunk] = _Wanted(chunk)
            self._gather(wanted)
        else:
            self.tally.joins += 1
        wanted.is_kept |= keep
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        wanted.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                waiter.exception()  # or asyncio logs that nobody heard of it
            wanted.waiters.remove(waiter)
            if not wanted.waiters and self._wanted.get(chunk) is wanted:
                self._give_up(wanted)
            raise

    def _gather(self, wanted: _Wanted) -> None:
        """Let *wanted* take part in the moment of its version."""
        version = (wanted.chunk.ref, wanted.chunk.version)
        moment = self._moments.get(version)
        if moment is None:
            moment = self._moments[version] = _Moment(
                partial(self._have_neighbours, version), partial(self._begin, version)
            )
        moment.chunks.append(wanted)

    def _have_neighbours(self, version: _Version, chunks: list[_Wanted]) -> bool:
        """Tell whether *chunks* touch one another, or what is being read."""
        ranges = [each.chunk.byte_range for each in chunks]
        around = [*ranges, *self._spans.get(version, ())]
        starts, stops = {each.start for each in around}, {each.stop for each in around}
        return any(each.stop in starts or each.start in stops for each in ranges)

    def _begin(self, version: _Version, chunks: list[_Wanted]) -> None:
        """End the moment of *version*, for the next chunk begins a new one, and read *chunks*."""
        del self._moments[version]
        spans = plan_reads(
            (each.chunk.byte_range for each in chunks),
            max_gap_bytes=self._max_gap_bytes,
            max_span_bytes=self._max_span_bytes,
        )
        self.tally.merged += len(chunks) - len(spans)
        readings = {span: self._start(version, span) for span in spans}
        for wanted in chunks:
            wanted.reading = readings[span_of(wanted.chunk.byte_range, spans)]
            wanted.reading.chunks.append(wanted)

    def _start(self, version: _Version, span: ByteRange) -> _Reading:
        ref, etag = version
        source = Stored(ref, span, etag)
        reading = _Reading(source, self._get(source))
        reading.task.add_done_callback(lambda _: self._end(version, reading))
        self._spans[version].append(span)
        return reading

    def _end(self, version: _Version, reading: _Reading) -> None:
        """Tell all who wait how the read ended."""
        self._spans[version].remove(reading.source.byte_range)
        if not self._spans[version]:
            del self._spans[version]
        while reading.chunks:  # which would hold the bytes in a cycle
            wanted = reading.chunks.pop()
            if self._wanted.get(wanted.chunk) is wanted:
                del self._wanted[wanted.chunk]
            data = wanted.settle(reading)
            if wanted.is_kept and data is not None:
                self.keep(wanted.chunk, data)

    def _give_up(self, wanted: _Wanted) -> None:
        """Do no more for a chunk that nobody waits for."""
        del self._wanted[wanted.chunk]
        if wanted.reading is None:
            self._moments[wanted.chunk.ref, wanted.chunk.version].chunks.remove(wanted)
        elif not any(each.waiters for each in wanted.reading.chunks):
            wanted.reading.task.cancel()

    async def _get(self, span: Stored) -> bytes:
        """Read *span*, or less of an object that nobody has seen the size of."""
        ref, byte_range, version = span
        kind_of_read.set(CHUNK)
        try:
            found = await self._store.get(ref, byte_range, if_match=condition_of(version))
        except (RangeNotSatisfiedError, VersionChangedError) as error:
            raise lost(ref, version) from error
        if not isinstance(found, Found):
            raise lost(ref, version)
        is_whole = isinstance(version, Fixed) and found.byte_range.stop == found.size
        if len(found.data) != (found.byte_range if is_whole else byte_range).length:
            raise TruncatedReadError(
                ref, f"{len(found.data)} bytes came instead of {byte_range.length}"
            )
        return found.data
