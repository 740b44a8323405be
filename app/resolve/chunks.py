"""Read the bytes of located chunks: cached, shared, and merged with their neighbours."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Final

from app.errors import RangeNotSatisfiedError, TruncatedReadError, VersionChangedError
from app.model import ByteRange, ETag, ObjectRef, Stored
from app.resolve.coalesce import plan_reads, span_of
from app.resolve.flight import SingleFlight
from app.resolve.weighed import WeighedCache
from app.storage.contract import Found, ObjectReader

_OVERHEAD_NBYTES: Final = 1024
_TURNS: Final = 4
_MOMENT_S: Final = 0.001
"""As short as the event loop's timers allow; a page of a viewer sends its requests in less."""

type _Version = tuple[ObjectRef, ETag]


class _Moment:
    """Gathers the ranges of one version that are asked for at once.

    Some turns of the event loop (20 µs) bring those that have arrived already. Only if there are
    neighbours among them, so that more are likely to come, it lasts `_MOMENT_S`.
    """

    def __init__(
        self,
        has_neighbours: Callable[[list[ByteRange]], bool],
        end: Callable[[list[ByteRange]], list[ByteRange]],
    ) -> None:
        self._has_neighbours = has_neighbours
        self._end_with = end
        self._turns = 0
        self._loop = asyncio.get_running_loop()
        self.ranges: list[ByteRange] = []
        self.spans: list[ByteRange] = []
        self.is_over = asyncio.Event()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turns += 1
        if self._turns < _TURNS:
            self._loop.call_soon(self._turn)
        elif self._has_neighbours(self.ranges):
            self._loop.call_later(_MOMENT_S, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self.spans = self._end_with(self.ranges)
        self.is_over.set()


class ChunkReader:
    """Reads ranges of named versions, which can never go stale."""

    def __init__(
        self, store: ObjectReader, *, max_bytes: int, max_gap_bytes: int, max_span_bytes: int
    ) -> None:
        self._store = store
        self._max_gap_bytes = max_gap_bytes
        self._max_span_bytes = max_span_bytes
        self._cache = WeighedCache[Stored, bytes](
            max_bytes, lambda _, data: len(data) + _OVERHEAD_NBYTES
        )
        self._flights = SingleFlight[Stored]()
        self._moments: dict[_Version, _Moment] = {}
        self._reading: defaultdict[_Version, list[ByteRange]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """What all cached bodies weigh."""
        return self._cache.nbytes

    def cached(self, chunk: Stored) -> bytes | None:
        """Give the bytes of *chunk* if they are at hand."""
        return self._cache.get(chunk)

    def keep(self, chunk: Stored, data: bytes) -> None:
        """Put *data*, which was read otherwise, at hand."""
        self._cache.put(chunk, data)

    async def read(self, chunk: Stored) -> bytes:
        """Read exactly the bytes of *chunk*.

        Raises: `VersionChangedError` where the object is another one by now, `StorageError`.
        """
        wanted = chunk.byte_range
        if wanted.length == 0:
            return b""
        version = (chunk.ref, chunk.etag)
        span = await self._span(version, wanted)
        merged = chunk if span == wanted else Stored(chunk.ref, span, chunk.etag)
        self._reading[version].append(span)
        try:
            data = await self._flights.run(merged, lambda: self._get(merged))
        finally:
            self._reading[version].remove(span)
            if not self._reading[version]:
                del self._reading[version]
        if merged is not chunk:
            data = data[wanted.start - span.start : wanted.stop - span.start]
        return data

    async def _span(self, version: _Version, wanted: ByteRange) -> ByteRange:
        """Wait out the moment, and find what is then read for *wanted* and its neighbours."""
        moment = self._moments.get(version)
        if moment is None:
            moment = _Moment(partial(self._have_neighbours, version), partial(self._end, version))
            self._moments[version] = moment
        moment.ranges.append(wanted)
        try:
            await moment.is_over.wait()
        except asyncio.CancelledError:
            moment.ranges.remove(wanted)
            raise
        return span_of(wanted, moment.spans)

    def _have_neighbours(self, version: _Version, ranges: list[ByteRange]) -> bool:
        """Tell whether *ranges* touch one another, or what is being read."""
        known = [*ranges, *self._reading.get(version, ())]
        starts = {each.start for each in known}
        return any(each.stop in starts for each in known)

    def _end(self, version: _Version, ranges: list[ByteRange]) -> list[ByteRange]:
        """End the moment of *version*: the next range begins a new one."""
        del self._moments[version]
        return plan_reads(
            ranges, max_gap_bytes=self._max_gap_bytes, max_span_bytes=self._max_span_bytes
        )

    async def _get(self, chunk: Stored) -> bytes:
        try:
            found = await self._store.get(chunk.ref, chunk.byte_range, if_match=chunk.etag)
        except RangeNotSatisfiedError as error:
            raise VersionChangedError(chunk.ref) from error
        if not isinstance(found, Found):
            raise VersionChangedError(chunk.ref)
        if len(found.data) != chunk.byte_range.length:
            raise TruncatedReadError(
                chunk.ref, f"{len(found.data)} bytes came instead of {chunk.byte_range.length}"
            )
        return found.data
