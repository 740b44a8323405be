"""Check one shard: its indexes, and its inner chunks if asked."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from operator import floordiv
from typing import Final

import crc32c

from app.errors import VersionChangedError
from app.formats.contract import DecodeError
from app.formats.zarr_sharding_indexed.index import CHECKSUM_NBYTES, IndexCodec, ShardIndex
from app.formats.zarr_sharding_indexed.metadata import ArraySpec
from app.formats.zarr_sharding_indexed.unshard import ShardingLevel, codec_name
from app.model import ByteRange, ObjectRef, Stored
from app.resolve.coalesce import plan_reads
from app.storage.contract import Found, ObjectReader

_GAP_BYTES: Final = 64 * 1024
_SPAN_BYTES: Final = 8 * 1024**2
_LARGE_INDEX_ENTRIES: Final = 4096


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with *object*, seen by the virtual key of the first chunk it hurts."""

    object: str
    key: str
    reason: str


@dataclass(slots=True)
class Report:
    """What was read so far, and what came out."""

    arrays: int = 0
    shards: int = 0
    chunks: int = 0
    nbytes: int = 0
    """Bytes of inner chunks that the indexes name."""
    not_checked: dict[str, str] = field(default_factory=dict)
    """Arrays that are served as they are, and why."""
    damages: list[Damage] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Count what *other* counted."""
        self.shards += other.shards
        self.chunks += other.chunks
        self.nbytes += other.nbytes
        self.damages += other.damages


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard object of an array, with the array element it begins at."""

    path: str
    array: ArraySpec
    ref: ObjectRef
    origin: tuple[int, ...]

    def key(self, origin: tuple[int, ...]) -> str:
        """Spell the virtual key of the inner chunk at *origin*."""
        coords = tuple(map(floordiv, origin, self.array.inner_chunk_shape))
        return f"{self.path}/{self.array.keys.format(coords)}".lstrip("/")


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard or an inner chunk, with the array element it begins at."""

    origin: tuple[int, ...]
    place: Stored


class ShardCheck:
    """Checks one version of one shard."""

    def __init__(self, store: ObjectReader, shard: Shard, *, chunks: bool) -> None:
        self.report = Report()
        self._store = store
        self._shard = shard
        self._levels = shard.array.unsharded.levels
        self._chunks = chunks

    async def run(self) -> None:
        """Check the shard if there is one.

        Raises: `VersionChangedError` where it is replaced meanwhile.
        """
        ref = self._shard.ref
        found = await self._store.get(ref, self._levels[0].index.request)
        if isinstance(found, Found):
            self.report.shards += 1
            whole = Stored(ref, ByteRange(0, found.size), found.etag)
            await self._level(0, _Part(self._shard.origin, whole), found.data)

    def damage(self, origin: tuple[int, ...], reason: str) -> None:
        """Note what is wrong with the inner chunk, or the shard, that begins at *origin*."""
        damage = Damage(str(self._shard.ref), self._shard.key(origin), reason)
        self.report.damages.append(damage)

    async def _level(self, depth: int, part: _Part, encoded_index: bytes) -> None:
        """Check the index of *part*, a shard, and what it names."""
        level, length = self._levels[depth], part.place.byte_range.length
        try:
            level.index.place(length)
            index = level.index(encoded_index)
        except DecodeError as error:
            self.damage(part.origin, str(error))
            return
        named, faults = await _in_thread_if_large(level.index, index, length)
        for entry, reason in faults.items():
            self.damage(_origin(level, part.origin, entry), reason)
        if self._chunks:
            await self._trailer(level.index, part)
        inner = [
            _Part(_origin(level, part.origin, entry), _narrow(part.place, place))
            for entry, place in named.items()
        ]
        if depth + 1 == len(self._levels):
            await self._inner_chunks(inner)
        else:
            for inner_shard in inner:
                await self._inner_shard(depth + 1, inner_shard)

    async def _inner_shard(self, depth: int, part: _Part) -> None:
        try:
            place = self._levels[depth].index.place(part.place.byte_range.length)
        except DecodeError as error:
            self.damage(part.origin, str(error))
        else:
            await self._level(depth, part, await self._read(_narrow(part.place, place)))

    async def _inner_chunks(self, chunks: list[_Part]) -> None:
        self.report.chunks += len(chunks)
        self.report.nbytes += sum(chunk.place.byte_range.length for chunk in chunks)
        if not self._chunks:
            return
        has_checksum = codec_name(self._shard.array.unsharded.codecs[-1]) == "crc32c"
        async for chunk, data in self._read_all(chunks):
            if has_checksum and not _is_intact(data):
                self.damage(chunk.origin, "the checksum of the inner chunk does not match")

    async def _read_all(self, chunks: list[_Part]) -> AsyncGenerator[tuple[_Part, bytes]]:
        """Read *chunks*, neighbours together."""
        waiting = deque(sorted(chunks, key=lambda chunk: chunk.place.byte_range))
        ranges = [chunk.place.byte_range for chunk in waiting]
        for span in plan_reads(ranges, max_gap_bytes=_GAP_BYTES, max_span_bytes=_SPAN_BYTES):
            data = await self._read(Stored(self._shard.ref, span, waiting[0].place.etag))
            while waiting and waiting[0].place.byte_range.stop <= span.stop:
                chunk = waiting.popleft()
                start = chunk.place.byte_range.start - span.start
                yield chunk, data[start : start + chunk.place.byte_range.length]

    async def _trailer(self, codec: IndexCodec, part: _Part) -> None:
        """Check the checksums behind a shard, each over all that is before it."""
        length = part.place.byte_range.length
        for behind in range(0, codec.trailer_nbytes, CHECKSUM_NBYTES):
            if not await self._is_intact(_narrow(part.place, ByteRange(0, length - behind))):
                self.damage(part.origin, "the checksum behind the shard does not match")

    async def _is_intact(self, place: Stored) -> bool:
        checksum, kept = 0, b""
        async with self._store.stream(place.ref, place.byte_range, if_match=place.etag) as pieces:
            async for piece in pieces:
                kept += piece
                checksum = crc32c.crc32c(kept[:-CHECKSUM_NBYTES], checksum)
                kept = kept[-CHECKSUM_NBYTES:]
        return checksum == int.from_bytes(kept, "little")

    async def _read(self, place: Stored) -> bytes:
        found = await self._store.get(place.ref, place.byte_range, if_match=place.etag)
        if not isinstance(found, Found):
            raise VersionChangedError(place.ref)
        return found.data


def check_index(
    codec: IndexCodec, index: ShardIndex, shard_nbytes: int
) -> tuple[dict[int, ByteRange], dict[int, str]]:
    """Split the entries into the places they name and what is wrong with the others."""
    named: dict[int, ByteRange] = {}
    faults: dict[int, str] = {}
    for entry in range(len(index)):
        try:
            found = codec.find(index, entry, shard_nbytes)
        except DecodeError as error:
            faults[entry] = str(error)
        else:
            if found is not None:
                named[entry] = found
    last = None
    for entry, place in sorted(named.items(), key=lambda item: item[1]):
        if last is not None and place.overlaps(named[last]):
            faults[entry] = (
                f"inner chunk {entry} at {place} overlaps inner chunk {last} at {named[last]}"
            )
        if last is None or place.stop > named[last].stop:
            last = entry
    return named, faults


async def _in_thread_if_large(
    codec: IndexCodec, index: ShardIndex, shard_nbytes: int
) -> tuple[dict[int, ByteRange], dict[int, str]]:
    if len(index) < _LARGE_INDEX_ENTRIES:
        return check_index(codec, index, shard_nbytes)
    return await asyncio.to_thread(check_index, codec, index, shard_nbytes)


def _origin(level: ShardingLevel, origin: tuple[int, ...], entry: int) -> tuple[int, ...]:
    """Find the first array element of inner chunk *entry* of the shard at *origin*."""
    return tuple(
        start + entry // stride % count * size
        for start, stride, count, size in zip(
            origin, level.strides, level.chunks_per_shard, level.inner_chunk_shape, strict=True
        )
    )


def _narrow(place: Stored, inner: ByteRange) -> Stored:
    return Stored(place.ref, place.byte_range.narrow(inner), place.etag)


def _is_intact(chunk: bytes) -> bool:
    """Tell whether the last four bytes are the checksum of those before."""
    data, checksum = chunk[:-CHECKSUM_NBYTES], chunk[-CHECKSUM_NBYTES:]
    return len(checksum) == CHECKSUM_NBYTES and crc32c.crc32c(data) == int.from_bytes(
        checksum, "little"
    )
