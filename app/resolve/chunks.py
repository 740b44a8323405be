"""Read the bytes of located chunks: cached, shared, and merged with their neighbours."""

import asyncio
from collections import Counter
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

    One range alone waits for some turns of the event loop (20 µs), so that reading one chunk
    after the other costs nothing. If that brought others, or others are being read, more are
    likely to come: then it lasts `_MOMENT_S`.
    """

    def __init__(self, end: Callable[[list[ByteRange]], list[ByteRange]], *, busy: bool) -> None:
        self._end_with = end
        self._is_busy = busy
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
        elif self._is_busy or len(self.ranges) > 1:
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
        self._reading: Counter[_Version] = Counter()

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
        self._reading[version] += 1
        try:
            data = await self._flights.run(merged, lambda: self._get(merged))
        finally:
            self._reading[version] -= 1
            if not self._reading[version]:
                del self._reading[version]
        if merged is not chunk:
            data = data[wanted.start - span.start : wanted.stop - span.start]
        return data

    async def _span(self, version: _Version, wanted: ByteRange) -> ByteRange:
        """Wait out the moment, and find what is then read for *wanted* and its neighbours."""
        moment = self._moments.get(version)
        if moment is None:
            moment = _Moment(partial(self._plan, version), busy=version in self._reading)
            self._moments[version] = moment
        moment.ranges.append(wanted)
        try:
            await moment.is_over.wait()
        except asyncio.CancelledError:
            moment.ranges.remove(wanted)
            raise
        return span_of(wanted, moment.spans)

    def _plan(self, version: _Version, ranges: list[ByteRange]) -> list[ByteRange]:
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
