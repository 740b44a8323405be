"""Shards of volumes, skeletons and annotations, written anew.

As other writers do it, the shard index comes first, then all chunks, then all minishard indexes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import numpy as np

from app.errors import BadBodyError, ConflictError, DamagedError
from app.formats.compression import deflate, inflate
from app.formats.contract import LARGE_NBYTES, Entry, NewShard
from app.formats.neuroglancer_precomputed.index import (
    ENTRY_NBYTES,
    Columns,
    EncodedMinishards,
    MinishardIndex,
    MinishardIndexDecoder,
    MinishardPlaces,
    Numbers,
    Sharding,
    encode_minishards,
)
from app.formats.neuroglancer_precomputed.keys import Ids, VoxelBounds
from app.formats.neuroglancer_precomputed.lookup import (
    MAX_WHOLE_INDEX_NBYTES,
    Minishard,
    read_entry,
    read_index,
    read_minishard,
)
from app.formats.neuroglancer_precomputed.survey import (
    PrecomputedShard,
    ShardTables,
    StoredMinishard,
)
from app.formats.reading import DecodeError, Fetch, Opaque, Read
from app.model import ByteRange, ETag, ObjectRef, Piece, etag_of

_KNOWN_NBYTES: Final = 1024**2
"""Larger minishard indexes are not handed on to the next rewrite."""
_KNOWN_MINISHARDS: Final = 256
"""Indexes of further minishards are not handed on to readers."""

type Known = tuple[Read[Any], Any]


class Kept(NamedTuple):
    """Chunks of the old object that stay; columns have shape ``(count,)``."""

    ids: Ids
    starts: Numbers
    stops: Numbers


_ZERO: Final = np.empty(0, np.int64)
NOTHING: Final = Kept(np.empty(0, np.uint64), _ZERO, _ZERO)


@dataclass(frozen=True, slots=True)
class ChunkRewriter:
    """Rewrites *shard*; entries are chunk ids."""

    shard: PrecomputedShard
    voxel_nbytes: int | None = None
    """Bytes of a voxel, all channels, in a volume of raw chunks."""
    large_nbytes: int = LARGE_NBYTES
    """Size of the chunks of a shard from which on they keep their order."""

    @property
    def ref(self) -> ObjectRef:
        return self.shard.ref

    def encode(self, entry: Entry, body: bytes, *, is_gzip: bool) -> bytes:
        """Check a chunk, and compress it where the shard has gzip, unless it came so."""
        plain = body
        if is_gzip:
            try:
                plain = inflate(body, self.shard.most_nbytes)
            except DecodeError as error:
                raise BadBodyError(f"the body: {error}") from error
        if not plain:
            raise BadBodyError("the body is empty, and no chunk is")
        names = self.shard.part.names
        if self.voxel_nbytes is not None and isinstance(names, VoxelBounds):
            nbytes = self.voxel_nbytes * names.count_voxels(entry[0])
            if len(plain) != nbytes:
                raise BadBodyError(f"{len(plain)} bytes of a chunk that has {nbytes}")
        if not self.shard.part.sharding.is_data_gzip:
            return plain
        return body if is_gzip else deflate(plain)

    async def open(self, _: Collection[Entry], fetch: Fetch) -> "OldShard | None":
        """Read all indexes; their entries are checked by `plan`. Raises: `DamagedError`,
        `ConflictError` for a shard in two objects.
        """
        if (opened := await self.shard.open(fetch)) is None:
            return None
        if opened.index_ref != opened.region.ref:
            raise ConflictError(
                f"{self.ref}: the shard is stored in two objects, .index and .data, an old form"
                " that is not written"
            )
        tables = await self.shard.read(fetch, opened)
        if tables.faults:
            raise DamagedError(self.ref, tables.faults[0])
        return OldShard(tables)

    def plan(
        self, old: "OldShard | None", changes: Mapping[Entry, bytes | None]
    ) -> NewShard | None:
        changed = {entry[0]: data for entry, data in changes.items()}
        kept = NOTHING if old is None else old.keep(without=changed)
        added = {each: data for each, data in changed.items() if data is not None}
        if not added and not len(kept.ids):
            return None
        planned = arrange(self.shard.part.sharding, kept, added, self.large_nbytes)
        written = _WrittenShard.of(self.shard, planned)
        return NewShard(
            pieces=written.pieces,
            places={(each,): place for each, place in written.places(added).items()},
            indexes=list(written.known(changed)),
            indexes_of_version=list(written.known_of_version(changed)),
        )

    def plan_empty(self) -> NewShard:
        index = bytes(self.shard.part.sharding.index_nbytes)
        known = (read_index(self.ref, len(index)), MinishardPlaces(index))
        return NewShard(pieces=[index], places={}, indexes=[known])


@dataclass(frozen=True, eq=False)
class OldShard:
    """The indexes of one version of a shard."""

    tables: ShardTables
    _decoded: dict[int, Minishard | None] = field(default_factory=dict)

    @property
    def etag(self) -> ETag:
        return etag_of(self.tables.region.version)

    @property
    def size(self) -> int:
        return self.tables.region.byte_range.stop

    def lookup(self, entry: Entry) -> ByteRange | None:
        """Return the range in the object of the chunk whose id is the only number of *entry*."""
        chunk_id = entry[0]
        _, number = self.tables.shard.part.sharding.address(chunk_id)
        if number not in self._decoded:
            stored = self.tables.minishards.find(number)
            self._decoded[number] = None if stored is None else self._decode(stored)
        minishard = self._decoded[number]
        found = None if minishard is None else minishard.locate(chunk_id)
        return None if found is None else found.byte_range

    def _decode(self, minishard: StoredMinishard) -> Minishard:
        number, place, encoded = minishard
        shard, region = self.tables.shard, self.tables.region
        is_gzip = shard.part.sharding.is_minishard_index_gzip
        try:
            index = MinishardIndexDecoder(is_gzip, shard.most_nbytes)(encoded)
        except DecodeError as error:
            raise DamagedError(region.ref, f"minishard index {number}: {error}") from error
        return Minishard(place, index, region)

    def keep(self, without: Collection[int]) -> Kept:
        """Return all chunks except those whose ids are in *without*. Raises: `DamagedError`."""
        kept = self.chunks
        stays = ~np.isin(kept.ids, np.array(list(without), np.uint64))
        return Kept(kept.ids[stays], kept.starts[stays], kept.stops[stays])

    @cached_property
    def chunks(self) -> Kept:
        """All chunks. Raises: `DamagedError` for an entry that would be lost."""
        ref, first = self.tables.region.ref, self.tables.region.byte_range.start
        ids, places = self.tables.decode().sound(ref)
        starts, stops = (column.astype(np.int64) for column in places)
        minishards = self.tables.minishards
        begins = np.append(minishards.starts + first, 2**63 - 1)
        next_begins = begins[np.searchsorted(minishards.stops + first, starts, side="right")]
        wrong = np.flatnonzero((next_begins < stops) & (starts < stops))
        if wrong.size:
            raise DamagedError(ref, f"chunk {ids[wrong[0]]} overlaps a minishard index")
        return Kept(ids, starts, stops)


class Arrangement(NamedTuple):
    """The chunks of a new shard, one behind the other."""

    pieces: Sequence[Piece]
    nbytes: int
    chunks: Columns
    """By minishard and id; places count from the first piece."""


def arrange(
    sharding: Sharding, kept: Kept, new: Mapping[int, bytes], large_nbytes: int
) -> Arrangement:
    """Lay out the chunks of a shard: in a small one by minishard and id; in one of *large_nbytes*,
    or where chunks share bytes, kept chunks in their order, and new ones behind.
    """
    units = _Units.of(kept, new)
    owners = sharding.addresses(units.ids)[1]
    order = np.lexsort((units.ids, owners))
    if units.lengths.sum() < large_nbytes and not _overlap(kept):
        lengths = units.lengths[order]
        starts = np.empty_like(lengths)
        starts[order] = np.cumsum(lengths) - lengths
        pieces = list(_pieces(units, order))
    else:
        starts, pieces = _in_place(units, order)
    ends = starts + units.lengths
    columns = units.ids, starts.astype(np.uint64), ends.astype(np.uint64), owners
    chunks = Columns(*(column[order] for column in columns))
    return Arrangement(pieces, int(ends.max(initial=0)), chunks)


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """The chunks of the new shard: first those that are kept, then the new ones."""

    kept: Kept
    new: Sequence[bytes]
    ids: Ids
    lengths: Numbers

    @classmethod
    def of(cls, kept: Kept, new: Mapping[int, bytes]) -> Self:
        added = list(new.values())
        new_lengths = np.array(list(map(len, added)), np.int64)
        return cls(
            kept=kept,
            new=added,
            ids=np.concatenate([kept.ids, np.array(list(new), np.uint64)]),
            lengths=np.concatenate([kept.stops - kept.starts, new_lengths]),
        )


def _overlap(kept: Kept) -> bool:
    filled = kept.starts < kept.stops
    order = np.argsort(kept.starts[filled], kind="stable")
    starts, stops = kept.starts[filled][order], kept.stops[filled][order]
    return bool((starts[1:] < stops[:-1]).any())


def _pieces(units: _Units, order: Numbers) -> Iterator[Piece]:
    """Yield the bytes of chunks in *order*; kept neighbours are one range."""
    count = len(units.kept.ids)
    is_kept = order < count
    begins, ends = (
        np.append(column, 0)[np.where(is_kept, order, count)]
        for column in (units.kept.starts, units.kept.stops)
    )
    is_next = is_kept[1:] & is_kept[:-1] & (begins[1:] == ends[:-1])
    firsts = np.flatnonzero(np.append(True, ~is_next)[: len(order)])
    lasts = np.append(firsts[1:], len(order))[: len(firsts)] - 1
    runs = (order[firsts], begins[firsts], ends[lasts])
    for unit, start, stop in zip(*(column.tolist() for column in runs), strict=True):
        if unit >= count:
            yield units.new[unit - count]
        elif start < stop:
            yield ByteRange(start, stop)


def _in_place(units: _Units, order: Numbers) -> tuple[Numbers, list[Piece]]:
    kept, count = units.kept, len(units.kept.ids)
    by_place = np.lexsort((kept.stops, kept.starts))
    begins, ends = kept.starts[by_place], np.maximum.accumulate(kept.stops[by_place])
    holes = np.maximum(begins - np.append(0, ends)[:count], 0)
    starts = np.empty(len(units.ids), np.int64)
    starts[by_place] = begins - np.cumsum(holes)
    firsts = np.flatnonzero(np.append(True, holes[1:] > 0)[:count])
    lasts = np.append(firsts[1:], count)[: len(firsts)] - 1
    runs = zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True)
    pieces: list[Piece] = [ByteRange(start, stop) for start, stop in runs if start < stop]
    added = order[order >= count]
    lengths = units.lengths[added]
    reached = int(ends[-1] - holes.sum()) if count else 0
    starts[added] = reached + np.cumsum(lengths) - lengths
    pieces += (units.new[at - count] for at in added.tolist())
    return starts, pieces


@dataclass(frozen=True, slots=True, eq=False)
class _WrittenShard:
    """The indexes of *shard* over the *planned* chunks."""

    shard: PrecomputedShard
    planned: Arrangement
    minishards: EncodedMinishards
    index: bytes

    @classmethod
    def of(cls, shard: PrecomputedShard, planned: Arrangement) -> Self:
        sharding = shard.part.sharding
        minishards = encode_minishards(planned.chunks, is_gzip=sharding.is_minishard_index_gzip)
        entries = np.zeros((sharding.index_nbytes // ENTRY_NBYTES, 2), "<u8")
        ends = minishards.ends + planned.nbytes
        starts = np.append(planned.nbytes, ends)[: len(ends)]
        entries[minishards.numbers] = np.column_stack([starts, ends])
        return cls(shard, planned, minishards, entries.tobytes())

    @property
    def pieces(self) -> Sequence[Piece]:
        pieces = self.index, *self.planned.pieces, self.minishards.data
        return [each for each in pieces if isinstance(each, ByteRange) or each]

    def places(self, ids: Collection[int]) -> Mapping[int, ByteRange]:
        chunks = self.planned.chunks
        at = np.flatnonzero(np.isin(chunks.ids, np.array(list(ids), np.uint64)))
        columns = (each[at].tolist() for each in (chunks.ids, chunks.starts, chunks.stops))
        return {
            chunk_id: self._in_object(start, stop)
            for chunk_id, start, stop in zip(*columns, strict=True)
        }

    def known(self, ids: Collection[int]) -> Iterator[Known]:
        """Yield the shard index, and the entries of it that readers of the chunks *ids* need."""
        ref, nbytes = self.shard.ref, len(self.index)
        yield read_index(ref, nbytes), MinishardPlaces(self.index)
        if nbytes > MAX_WHOLE_INDEX_NBYTES:
            for number in self._owners(ids):
                start = number * ENTRY_NBYTES
                entry = self.index[start : start + ENTRY_NBYTES]
                yield read_entry(ref, number), MinishardPlaces(entry, number)

    def known_of_version(self, ids: Collection[int]) -> Iterator[Known]:
        """Yield all minishard indexes encoded, and those of the chunks *ids* decoded."""
        shard, sharding = self.shard, self.shard.part.sharding
        if 0 < len(self.minishards.data) <= _KNOWN_NBYTES:
            place = self._in_object(self.planned.nbytes, self._end(-1))
            read = Read("minishard-index", shard.ref, place, Opaque)
            yield read, Opaque(self.minishards.data)
        numbers, owners = self.minishards.numbers, self.planned.chunks.owners
        for number in self._owners(ids):
            at = int(np.searchsorted(numbers, number))
            if at == len(numbers) or numbers[at] != number:
                continue
            start = self._end(at - 1) if at else self.planned.nbytes
            place = self._in_object(start, self._end(at))
            first, last = np.searchsorted(owners, np.array([number, number + 1], np.uint64))
            columns = (column[first:last].copy() for column in self.planned.chunks[:3])
            index = MinishardIndex(*(column.data for column in columns))
            yield read_minishard(shard.ref, place, sharding, shard.most_nbytes), index

    def _owners(self, ids: Collection[int]) -> list[int]:
        addresses = self.shard.part.sharding.addresses(np.array(list(ids), np.uint64))
        return [int(number) for number in np.unique(addresses[1])[:_KNOWN_MINISHARDS]]

    def _end(self, at: int) -> int:
        return self.planned.nbytes + int(self.minishards.ends[at])

    def _in_object(self, start: int, stop: int) -> ByteRange:
        return ByteRange(len(self.index) + start, len(self.index) + stop)
