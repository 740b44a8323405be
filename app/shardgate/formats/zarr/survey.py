"""Contents of an array for ``inspect``, ``verify`` and listings: descriptions, shards, keys."""

import re
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import floordiv, lt
from typing import Final

import numpy as np

from shardgate.formats.documents import Json, parse_json
from shardgate.formats.listing import Cell, Grid, GridWalk, ListingIO, ListNames, Rows, Wanted
from shardgate.formats.reading import BoundDecoder, DecodeError, Fetch, Opaque, Read
from shardgate.formats.surveying import Description, EntryTable, Fault, IndexEntry, Ranges, Survey
from shardgate.formats.zarr.array_spec import ArraySpec, RectilinearArraySpec
from shardgate.formats.zarr.codecs import codec_name, shape_of
from shardgate.formats.zarr.grid import read_chunk_shape
from shardgate.formats.zarr.index import CHECKSUM_NBYTES, EMPTY, ShardingLevel, shard_of
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.formats.zarr.metadata import Node, consolidated_nodes
from shardgate.model import ByteRange, ObjectRef, Part, Stored, VirtualKey, Whole, is_key

_FOLDER: Final = re.compile("(0|[1-9][0-9]{0,18})/", re.ASCII)


def describe(node: Node) -> Description:
    """Describe an array; of one that is not understood give the reason alone. Raises:
    `DecodeError` for an array without shards whose metadata are invalid.
    """
    try:
        return describe_served(parse_json(node.served), node.array, node.why_sharded)
    except DecodeError:
        if not node.why_sharded:
            raise
        return Description("", "zarr", "array", why_sharded=node.why_sharded)


def describe_served(
    served: dict[str, Json], spec: ArraySpec | None = None, why_sharded: str = ""
) -> Description:
    """Describe an array by its document as it is *served*. Raises: `DecodeError`."""
    codecs = served.get("codecs")
    if not isinstance(codecs, list):
        raise DecodeError("the array has no list of codecs")
    inner = spec.inner_chunk_shape if spec else read_chunk_shape(served.get("chunk_grid"))
    names = served.get("dimension_names")
    is_list = isinstance(names, list) and all(isinstance(name, str | None) for name in names)
    if names is not None and not is_list:
        raise DecodeError(f"dimension_names is no list of names: {str(names)[:80]}")
    indexes = spec.indexes if spec else ()
    shard_shape = spec.shard_shape if spec else None
    sharding = None
    if isinstance(spec, RectilinearArraySpec):
        sharding = f"rectilinear, at most {'×'.join(map(str, spec.shard_shape))}"
        shard_shape = None  # they have none in common
    chunks_per_shard = None
    if shard_shape is not None and inner is not None:
        chunks_per_shard = tuple(map(floordiv, shard_shape, inner))
    return Description(
        path="",
        format="zarr2" if served.get("zarr_format") == 2 else "zarr",  # noqa: PLR2004
        kind="array",
        shape=shape_of(served.get("shape"), "shape", least=0),
        data_type=codec_name(served.get("data_type")),
        dimension_names=None if names is None else tuple(names),
        inner_chunk_shape=inner,
        codecs=tuple(map(codec_name, codecs)),
        shard_shape=shard_shape,
        chunks_per_shard=chunks_per_shard,
        index_location=tuple(index.location for index in indexes),
        sharding=sharding,
        why_sharded=why_sharded,
    )


def array_names(node: Node) -> Sequence[str] | None:
    """Return the paths, as keys spell them, of the arrays in a group's consolidated metadata."""
    if (nodes := consolidated_nodes(parse_json(node.served))) is None:
        return None
    return [
        name
        for name, below in sorted(nodes.items())
        if isinstance(below, dict) and below.get("node_type") == "array" and is_key(name)
    ]


def walk_chunks(shards: "ZarrShards") -> GridWalk:
    """Return the walk of the inner chunks in *shards*."""
    array = shards.array
    grid = Grid(array.axes, array.keys.beginning)

    async def walk(wanted: Wanted, io: ListingIO) -> AsyncIterator[str]:
        async for cell in grid.walk(wanted, partial(_list_shards, array.keys, io.list_names)):
            yield grid.spell(cell)

    return GridWalk(walk, grid, shards.stored, max(index.nbytes for index in array.indexes))


async def _list_shards(keys: ChunkKeys, list_names: ListNames, first: Cell) -> Rows:
    """List the next coordinates of the stored shards with these *first* ones."""
    start = keys.beginning(first)
    # The last coordinate ends a name, and separators other than a slash make no folders.
    is_last = len(first) + 1 == keys.ndim or not keys.beginning((*first, 0)).endswith("/")
    numbers = array("Q")
    async for name in list_names(start):
        if is_last:
            numbers.extend((keys.parse(name) or ())[len(first) :])
        elif found := _FOLDER.fullmatch(name, len(start)):
            numbers.append(int(found[1]))
    rows = np.frombuffer(numbers, np.uint64)
    return np.unique(rows.reshape(-1, keys.ndim - len(first) if is_last else 1), axis=0)


@dataclass(frozen=True, slots=True)
class ZarrShards:
    """The shards of *array*, whose keys are relative to *directory*."""

    directory: ObjectRef
    array: ArraySpec
    prefix: str = ""

    @property
    def is_checkable(self) -> bool:
        return self.array.chunk.is_checked

    def named(self, key: str) -> "ZarrShard | None":
        coords = self.array.keys.parse(key)
        if coords is None or not all(map(lt, coords, self.array.shard_counts)):
            return None
        return self._shard(coords)

    def holding(self, key: VirtualKey) -> "ZarrShard | None":
        coords = self.array.keys.parse(key)
        if coords is None or (origin := self.array.origin(coords)) is None:
            return None
        return self._shard(self.array.shard(origin).coords)

    async def stored(self, io: ListingIO) -> AsyncIterator[AsyncIterator[Rows]]:
        """Find the stored shards; see `GridWalk`."""
        async for name in io.list_objects(self.prefix):
            if (shard := self.named(name)) is not None:
                yield shard.cells(io)

    def every(self) -> Iterator["ZarrShard"]:
        counts = self.array.shard_counts
        strides = [prod(counts[axis + 1 :]) for axis in range(len(counts))]
        for number in range(prod(counts)):  # itertools.product would list each dimension
            at = zip(strides, counts, strict=True)
            yield self._shard(tuple(number // stride % count for stride, count in at))

    def _shard(self, coords: tuple[int, ...]) -> "ZarrShard":
        ref = self.directory.join(self.array.keys.format(coords))
        return ZarrShard(ref, self.array, self.array.shard_origin(coords))


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
        return self.array.shard(self.origin).levels[self.depth]

    async def cells(self, io: ListingIO) -> AsyncIterator[Rows]:
        """Yield the cells whose chunks it holds; their places are not checked. See `GridWalk`."""
        if self.depth + 1 < len(self.array.levels):
            if (survey := await self.survey(io.fetch)) is not None:
                table = await io.run_in_thread(survey.table)
                table.sound(survey.whole.ref)
                for entry in table:
                    async for cells in self._inner(survey.whole, entry).cells(io):
                        yield cells
            return
        read = self.level.index.read(self.inside or Whole(self.ref))
        decode = BoundDecoder(_decode_cells, (self.level,))
        found = await io.fetch(Read(read.kind, read.ref, read.request, decode, read.version))
        if found is not None:
            first = map(floordiv, self.origin, self.array.inner_chunk_shape)
            yield found.value + np.array(tuple(first), np.uint64)

    async def survey(self, fetch: Fetch) -> Survey | None:
        """Read the index; those of shards inside are left to their own surveys."""
        codec = self.level.index
        shard = self.inside or Whole(self.ref)
        read = codec.read(shard)
        found = await fetch(Read(read.kind, read.ref, read.request, Opaque, read.version))
        if (whole := shard_of(shard, found)) is None or found is None:
            return None
        is_innermost = self.depth + 1 == len(self.array.levels)
        length = whole.byte_range.length
        return Survey(
            whole=whole,
            table=partial(self._table, found.value.data, length),
            key=self._key,
            check=lambda _, data: self.array.chunk.check(data),
            indexes=Ranges.of(codec.place_in(whole)),
            index_location=codec.location,
            checksummed=[
                ByteRange(0, length - nbytes)  # the last checksum first
                for nbytes in range(0, codec.trailer_nbytes, CHECKSUM_NBYTES)
            ],
            inner=None if is_innermost else partial(self._inner, whole),
        )

    def _table(self, encoded: bytes, shard_nbytes: int) -> EntryTable:
        codec = self.level.index
        faults: list[Fault] = []
        try:
            index = codec(encoded)
        except DecodeError as error:
            nothing = Ranges.of()
            return EntryTable(nothing.starts, nothing, faults=[Fault(self.key, str(error))])
        columns = codec.columns(index, shard_nbytes)
        for number in np.flatnonzero(columns.is_damaged).tolist():
            try:
                codec.find(index, number, shard_nbytes)
            except DecodeError as error:
                faults.append(Fault(self._key(number), str(error)))
        is_empty = columns.is_empty
        numbers = np.flatnonzero(~is_empty & ~columns.is_damaged)
        starts, nbytes = columns.offsets[numbers], columns.nbytes[numbers]
        places = Ranges(starts, starts + nbytes)
        return EntryTable.by_place(numbers.astype(np.uint64), places, int(is_empty.sum()), faults)

    def _inner(self, whole: Stored, entry: IndexEntry) -> "ZarrShard":
        inside = whole._replace(byte_range=whole.byte_range.narrow(entry.place))
        return replace(self, origin=self._origin(entry.number), depth=self.depth + 1, inside=inside)

    def _key(self, number: int) -> VirtualKey:
        return replace(self, origin=self._origin(number)).key

    def _origin(self, number: int) -> tuple[int, ...]:
        level = self.level
        steps = zip(level.strides, level.chunks_per_shard, level.inner_chunk_shape, strict=True)
        places = (number // stride % count * size for stride, count, size in steps)
        return tuple(at + place for at, place in zip(self.origin, places, strict=True))


def _decode_cells(data: bytes, level: ShardingLevel) -> Rows:
    """Decode an index to the cells whose chunks it holds, counted from the first of the shard."""
    # The marker of empty entries is the same in either byte order.
    entries = np.frombuffer(level.index(data).entries, np.uint64).reshape(-1, 2)
    numbers = np.flatnonzero((entries != EMPTY).any(axis=1))
    cells = np.empty((len(numbers), len(level.strides)), np.uint32)
    axes = zip(level.strides, level.chunks_per_shard, strict=True)
    for axis, (stride, count) in enumerate(axes):
        cells[:, axis] = numbers // stride % count
    return cells
