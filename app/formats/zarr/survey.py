"""Contents of an array for ``inspect``, ``verify`` and listings: descriptions, shards, keys."""

import json
import re
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter, floordiv, lt, mul
from typing import Any, Final

import numpy as np

from app.errors import DamagedError
from app.formats.listing import (
    Axis,
    Candidate,
    Cell,
    GridKeys,
    KeySelection,
    ListingIO,
    ListNames,
    Rows,
)
from app.formats.reading import DecodeError, Fetch, Opaque, Read, Versioned
from app.formats.surveying import Description, Entry, EntryTable, Fault, Shard
from app.formats.zarr.codecs import ShardingLevel, codec_name, configuration, shape_of
from app.formats.zarr.index import CHECKSUM_NBYTES
from app.formats.zarr.metadata import ArraySpec, Node
from app.model import ByteRange, ObjectRef, Part, Stored, VirtualKey

type Json = Any

_FOLDER: Final = re.compile("(0|[1-9][0-9]{0,18})/", re.ASCII)


def describe(node: Node) -> Description:
    """Describe an array. Raises: `DecodeError` for invalid metadata."""
    served: dict[str, Json] = json.loads(node.served)
    spec = node.array
    codecs = served.get("codecs")
    if not isinstance(codecs, list):
        raise DecodeError("the array has no list of codecs")
    inner = spec.inner_chunk_shape if spec else _chunk_shape(served.get("chunk_grid"))
    names = served.get("dimension_names")
    is_list = isinstance(names, list) and all(isinstance(name, str | None) for name in names)
    if names is not None and not is_list:
        raise DecodeError(f"dimension_names is no list of names: {str(names)[:80]}")
    indexes = spec.unsharded.indexes if spec else ()
    return Description(
        path="",
        format="zarr",
        kind="array",
        shape=shape_of(served.get("shape"), "shape", least=0),
        data_type=codec_name(served.get("data_type")),
        dimension_names=None if names is None else tuple(names),
        inner_chunk_shape=inner,
        codecs=tuple(map(codec_name, codecs)),
        shard_shape=spec.shard_shape if spec else None,
        chunks_per_shard=tuple(map(floordiv, spec.shard_shape, inner)) if spec else None,
        index_location=tuple(index.location.value for index in indexes),
        why_sharded=node.why_sharded,
    )


def _chunk_shape(grid: Json) -> tuple[int, ...]:
    """Read the shape of all chunks; empty where they differ."""
    if codec_name(grid) != "regular":
        return ()
    return shape_of(configuration(grid).get("chunk_shape"), "chunk_shape", least=0)


def array_names(node: Node) -> Sequence[str] | None:
    """Return the paths of the arrays in a group's consolidated metadata, if it has these."""
    consolidated = json.loads(node.served).get("consolidated_metadata")
    nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if not isinstance(nodes, dict):
        return None
    return [
        name
        for name, below in sorted(nodes.items())
        if isinstance(below, dict) and below.get("node_type") == "array"
    ]


@dataclass(frozen=True, slots=True)
class ChunkWalk:
    """Walks the keys of the inner chunks of an array: those of the stored shards."""

    array: ArraySpec

    def __call__(self, selection: KeySelection, io: ListingIO) -> AsyncIterator[Candidate]:
        spec = self.array
        inner, shards = spec.inner_chunk_shape, spec.shard_shape
        axes = tuple(
            Axis(-(-size // chunk), shard // chunk)
            for size, chunk, shard in zip(spec.shape, inner, shards, strict=True)
        )
        levels = spec.unsharded.levels
        innermost = levels[-2].inner_chunk_shape if len(levels) > 1 else shards
        chunks_per_index = tuple(map(floordiv, innermost, inner))

        async def stored(shard: Cell) -> Rows:
            return await self._stored(shard, io.list_names)

        def index(cell: Cell) -> Cell:
            return tuple(map(floordiv, cell, chunks_per_index))

        return GridKeys(axes, spec.keys.beginning, stored, index).walk(selection)

    async def _stored(self, shard: Cell, list_names: ListNames) -> Rows:
        keys, ndim = self.array.keys, len(self.array.shape)
        start = keys.beginning(shard)
        is_last = len(shard) + 1 == ndim or not keys.beginning((*shard, 0)).endswith("/")
        numbers = array("Q")
        async for name in list_names(start):
            if is_last:
                numbers.extend((keys.parse(name) or ())[len(shard) :])
            elif found := _FOLDER.fullmatch(name, len(start)):
                numbers.append(int(found[1]))
        rows = np.frombuffer(numbers, np.uint64)
        return np.unique(rows.reshape(-1, ndim - len(shard) if is_last else 1), axis=0)


@dataclass(frozen=True, slots=True)
class ZarrShards:
    """The shards of *array*, whose keys are relative to *directory*."""

    directory: ObjectRef
    array: ArraySpec
    prefix: str = ""

    def named(self, key: str) -> "ZarrShard | None":
        coords = self.array.keys.parse(key)
        if coords is None or not all(map(lt, coords, self._counts)):
            return None
        return self._shard(coords)

    def holding(self, key: VirtualKey) -> "ZarrShard | None":
        coords = self.array.keys.parse(key)
        if coords is None or (origin := self.array.origin(coords)) is None:
            return None
        return self._shard(tuple(map(floordiv, origin, self.array.shard_shape)))

    def every(self) -> Iterator["ZarrShard"]:
        return map(self._shard, product(*map(range, self._counts)))

    @property
    def _counts(self) -> tuple[int, ...]:
        shape, shard_shape = self.array.shape, self.array.shard_shape
        return tuple(-(-n // size) for n, size in zip(shape, shard_shape, strict=True))

    def _shard(self, coords: tuple[int, ...]) -> "ZarrShard":
        ref = self.directory.join(self.array.keys.format(coords))
        return ZarrShard(ref, self.array, tuple(map(mul, coords, self.array.shard_shape)))


@dataclass(frozen=True, slots=True)
class ZarrShard:
    """The shard that begins at the array element *origin*, *depth* shards deep in others."""

    ref: ObjectRef
    array: ArraySpec
    origin: tuple[int, ...]
    depth: int = 0
    inside: Stored | Part | None = None
    """The range of a shard that is no object of its own."""

    @property
    def key(self) -> VirtualKey:
        coords = tuple(map(floordiv, self.origin, self.array.inner_chunk_shape))
        return VirtualKey(self.array.keys.format(coords))

    @property
    def level(self) -> ShardingLevel:
        """The sharding codec that wrote it."""
        return self.array.unsharded.levels[self.depth]

    async def survey(self, fetch: Fetch) -> "ZarrSurvey | None":
        """Read the index; the indexes of shards inside are left to their own surveys."""
        if self.inside is None:
            read = Read("shard-index", self.ref, self.level.index.request, Opaque)
        else:
            place = self.inside.byte_range.narrow(self._index_place(self.inside))
            read = Read("shard-index", self.ref, place, Opaque, self.inside.version)
        index = await fetch(read)
        if index is None and self.inside is not None:
            raise DamagedError(self.ref, "does not exist, though it is referred to")
        if index is None:
            return None
        whole = self._whole(index)
        return ZarrSurvey(self, whole, self._index_place(whole), index.value.data)

    def _whole(self, index: Versioned[Opaque]) -> Stored:
        if self.inside is None:
            return Stored(self.ref, ByteRange(0, index.size), index.etag)
        if index.size < self.inside.byte_range.stop:
            reason = f"{self.inside.byte_range} is referred to, and it has {index.size} bytes"
            raise DamagedError(self.ref, reason)
        if isinstance(self.inside, Stored):
            return self.inside
        return Stored(self.ref, self.inside.byte_range, index.etag)

    def _index_place(self, whole: Stored | Part) -> ByteRange:
        try:
            return self.level.index.place(whole.byte_range.length)
        except DecodeError as error:
            raise DamagedError(self.ref, str(error)) from error


@dataclass(frozen=True, slots=True)
class ZarrSurvey:
    """One index of a shard, encoded."""

    shard: ZarrShard
    whole: Stored
    index_place: ByteRange
    encoded: bytes

    @property
    def indexes(self) -> tuple[ByteRange]:
        return (self.index_place,)

    @property
    def index_location(self) -> str:
        return self.shard.level.index.location.value

    @property
    def checksummed(self) -> tuple[ByteRange, ...]:
        """The bytes up to the end of each checksum that a codec appended, the last one first."""
        length, trailer_nbytes = self.whole.byte_range.length, self.shard.level.index.trailer_nbytes
        behind = range(0, trailer_nbytes, CHECKSUM_NBYTES)
        return tuple(ByteRange(0, length - nbytes) for nbytes in behind)

    @property
    def count(self) -> int:
        return self.shard.level.index.entry_count

    def table(self) -> EntryTable:
        codec, length = self.shard.level.index, self.whole.byte_range.length
        try:
            index = codec(self.encoded)
        except DecodeError as error:
            return EntryTable((), 0, (Fault(self.shard.key, str(error)),))
        entries: list[Entry] = []
        faults: list[Fault] = []
        for number in range(len(index)):
            try:
                place = codec.find(index, number, length)
            except DecodeError as error:
                faults.append(Fault(self._key(number), str(error)))
            else:
                if place is not None:
                    entries.append(Entry(number, place))
        entries.sort(key=attrgetter("place"))
        return EntryTable(entries, len(index) - len(entries) - len(faults), faults)

    def key(self, entry: Entry) -> VirtualKey:
        return self._key(entry.number)

    @property
    def inner(self) -> Callable[[Entry], Shard] | None:
        is_innermost = self.shard.depth + 1 == len(self.shard.array.unsharded.levels)
        return None if is_innermost else self._inner

    def check(self, _: Entry, data: bytes) -> str | None:
        return self.shard.array.chunk.fault(data)

    def _inner(self, entry: Entry) -> ZarrShard:
        whole = self.whole
        inside = Stored(whole.ref, whole.byte_range.narrow(entry.place), whole.version)
        origin = self._origin(entry.number)
        return replace(self.shard, origin=origin, depth=self.shard.depth + 1, inside=inside)

    def _key(self, number: int) -> VirtualKey:
        return replace(self.shard, origin=self._origin(number)).key

    def _origin(self, number: int) -> tuple[int, ...]:
        level, start = self.shard.level, self.shard.origin
        steps = zip(level.strides, level.chunks_per_shard, level.inner_chunk_shape, strict=True)
        places = (number // stride % count * size for stride, count, size in steps)
        return tuple(at + place for at, place in zip(start, places, strict=True))
