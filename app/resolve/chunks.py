"""Read the bytes of located chunks: cached, shared, and merged with their neighbours."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from app.errors import RangeNotSatisfiedError, TruncatedReadError, VersionChangedError
from app.model import ByteRange, ETag, ObjectRef, Stored
from app.resolve.coalesce import plan_reads, span_of
from app.resolve.flight import SingleFlight
from app.resolve.weighed import WeighedCache
from app.storage.contract import Found, ObjectReader

_OVERHEAD_NBYTES: Final = 1024
_MAX_TURNS: Final = 16


@dataclass(slots=True)
class _Batch:
    """Ranges of one version that are asked for in the same moment."""

    ranges: list[ByteRange] = field(default_factory=list)
    spans: list[ByteRange] | None = None

    async def complete(self) -> None:
        """Wait until it is planned, or a whole turn has brought nothing more."""
        for _ in range(_MAX_TURNS):
            seen = len(self.ranges)
            await asyncio.sleep(0)
            if self.spans is not None or len(self.ranges) == seen:
                return


class ChunkReader:
    """Reads ranges of named versions, which can never go stale.

    A moment lasts until a whole turn of the event loop has brought no further range of the
    same object, so that it costs nothing where nothing else is going on.
    """

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
        self._batches: dict[tuple[ObjectRef, ETag], _Batch] = {}

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
        span = await self._span(chunk)
        merged = chunk if span == wanted else Stored(chunk.ref, span, chunk.etag)
        data = await self._flights.run(merged, lambda: self._get(merged))
        if merged is not chunk:
            data = data[wanted.start - span.start : wanted.stop - span.start]
        return data

    async def _span(self, chunk: Stored) -> ByteRange:
        """Wait out the moment, and find what is then read for *chunk* and its neighbours."""
        version = (chunk.ref, chunk.etag)
        batch = self._batches.setdefault(version, _Batch())
        batch.ranges.append(chunk.byte_range)
        try:
            await batch.complete()
        except asyncio.CancelledError:
            batch.ranges.remove(chunk.byte_range)
            if not batch.ranges and self._batches.get(version) is batch:
                del self._batches[version]
            raise
        if batch.spans is None:
            del self._batches[version]
            batch.spans = plan_reads(
                batch.ranges,
                max_gap_bytes=self._max_gap_bytes,
                max_span_bytes=self._max_span_bytes,
            )
        return span_of(chunk.byte_range, batch.spans)

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
