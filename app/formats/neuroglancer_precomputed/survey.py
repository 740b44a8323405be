"""The shards of a part, and all chunks that their two levels of index name."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from app.errors import DamagedError, VersionChangedError
from app.formats.compression import inflate, inflate_to_array
from app.formats.listing import ListNames
from app.formats.neuroglancer_precomputed.index import (
    ENTRY_NBYTES,
    MinishardPlaces,
    Numbers,
    check_rows,
    decode_minishards,
)
from app.formats.neuroglancer_precomputed.keys import Ids, Mask
from app.formats.neuroglancer_precomputed.lookup import (
    MeshManifestDecoder,
    ShardObject,
    open_shard,
    read_index,
)
from app.formats.neuroglancer_precomputed.metadata import Kind, ShardedPart
from app.formats.reading import DecodeError, Fetch, Opaque, Read, Versioned
from app.formats.surveying import Entry, EntryTable, Fault, Ranges, Survey
from app.model import ByteRange, ETag, ObjectRef, Stored, VirtualKey

_GAP_NBYTES: Final = 64 * 1024
_SPAN_NBYTES: Final = 8 * 1024**2
"""Ranges are read together across gaps of the first size, up to spans of the second."""
_NAME: Final = re.compile(r"([0-9a-f]{1,16})\.(?:shard|data)", re.ASCII)
_EVERY_BITS: Final = 12
"""With more bits the shards are too many to try each."""
_INDEXES: Final = 4
"""All minishard indexes of a shard may hold so many times the limit of one."""
_NAMED_FAULTS: Final = 100
"""So many chunks of a shard with the same fault are named; the rest is counted."""


@dataclass(frozen=True, slots=True)
class PrecomputedShards:
    """The shards of *part*."""

    directory: ObjectRef
    part: ShardedPart
    most_nbytes: int
    """A larger index is refused, or gzip chunk, before and after it is inflated."""

    @property
    def prefix(self) -> str:
        path = self.part.path
        return f"{path}/" if path else ""

    def named(self, key: str) -> "PrecomputedShard | None":
        found = _NAME.fullmatch(key.removeprefix(self.prefix))
        if found is None or not key.startswith(self.prefix):
            return None
        sharding, number = self.part.sharding, int(found[1], 16)
        if number >> sharding.shard_bits or sharding.shard_name(number) != found[1]:
            return None
        return self.numbered(number)

    def holding(self, key: VirtualKey) -> "PrecomputedShard | None":
        path, _, name = key.rpartition("/")
        chunk_id = self.part.names.parse(name) if path == self.part.path else None
        return None if chunk_id is None else self.numbered(self.part.sharding.address(chunk_id)[0])

    def every(self) -> Iterator["PrecomputedShard"] | None:
        bits = self.part.sharding.shard_bits
        return None if bits > _EVERY_BITS else map(self.numbered, range(1 << bits))

    async def stored(self, list_names: ListNames) -> frozenset[int]:
        """List the numbers of the stored shards."""
        named = [self.named(key) async for key in list_names(self.prefix)]
        return frozenset(shard.number for shard in named if shard is not None)

    def hides(self, name: str) -> bool:
        """Return whether *name*, right below, is an object of a shard."""
        stem, dot, ending = name.rpartition(".")
        key = f"{self.prefix}{stem}.data" if ending == "index" else self.prefix + name
        return bool(dot) and self.named(key) is not None

    def numbered(self, number: int) -> "PrecomputedShard":
        return PrecomputedShard(self.directory, self.part, number, self.most_nbytes)


@dataclass(frozen=True, slots=True)
class PrecomputedShard:
    """The shard *number* of *part*."""

    directory: ObjectRef
    part: ShardedPart
    number: int
    most_nbytes: int

    @property
    def ref(self) -> ObjectRef:
        return self._name._replace(key=f"{self._name.key}.shard")

    @property
    def key(self) -> VirtualKey:
        """The key of the object: no chunk is the first."""
        return VirtualKey(self.ref.key.removeprefix(self.directory.prefix.key))

    @property
    def total_nbytes(self) -> int:
        """Limit of all minishard indexes together."""
        return _INDEXES * self.most_nbytes

    def chunk_key(self, chunk_id: int) -> VirtualKey:
        name = self.part.names.format(chunk_id)
        return VirtualKey(f"{self.part.path}/{name}" if self.part.path else name)

    async def survey(self, fetch: Fetch) -> Survey | None:
        """Read the shard index, and all minishard indexes, of one version of both objects."""
        if (opened := await self.open(fetch)) is None:
            return None
        tables = await self.read(fetch, opened)
        await opened.confirm(fetch)
        return Survey(
            whole=tables.whole,
            table=tables.decode,
            key=self.chunk_key,
            check=tables.check,
            indexes=tables.indexes,
            index_location="start",
        )

    async def open(self, fetch: Fetch) -> ShardObject | None:
        """Read the shard index; `None` if there is no such shard. Raises: `DamagedError`."""
        read_index = partial(self._index, fetch)
        return await open_shard(self._name, self.part.sharding.index_nbytes, read_index, fetch)

    @property
    def _name(self) -> ObjectRef:
        directory = self.directory.join(self.part.path)
        return directory.join(self.part.sharding.shard_name(self.number))

    async def _index(
        self, fetch: Fetch, ref: ObjectRef, data_etag: ETag | None
    ) -> Versioned[MinishardPlaces] | None:
        nbytes = self.part.sharding.index_nbytes
        if nbytes <= self.most_nbytes:
            return await fetch(read_index(ref, nbytes, data_etag))
        if await fetch(Read("shard-index", ref, ByteRange(0, ENTRY_NBYTES), Opaque)) is not None:
            raise DamagedError(ref, f"a shard index of {nbytes} bytes, over {self.most_nbytes}")
        return None

    async def read(self, fetch: Fetch, shard: ShardObject) -> "ShardTables":
        """Read the minishard indexes. Raises: `DamagedError`, `VersionChangedError`."""
        ref, region, etag = shard.region
        found, faults = _find_indexes(shard.index, region.length, self.most_nbytes)
        nbytes = int((found.stops - found.starts).sum())
        if nbytes > self.total_nbytes:
            raise DamagedError(
                ref, f"minishard indexes of {nbytes} bytes, over {self.total_nbytes}"
            )
        runs: list[bytes] = []
        for at in coalesce(found.starts, found.stops):
            starts, stops = found.starts[at], found.stops[at]
            span = region.narrow(ByteRange(int(starts[0]), int(stops[-1])))
            run = await fetch(Read("minishard-index", ref, span, Opaque, etag))
            if run is None:
                raise VersionChangedError(ref)
            runs.append(_without_gaps(run.value.data, starts - starts[0], stops - starts[0]))
        return ShardTables(self, shard.region, replace(found, data=b"".join(runs)), faults)


def _without_gaps(data: bytes, starts: Numbers, stops: Numbers) -> bytes:
    if len(data) == (stops - starts).sum():
        return data
    return b"".join(map(data.__getitem__, map(slice, starts.tolist(), stops.tolist())))


class StoredMinishard(NamedTuple):
    """An encoded minishard index; *place* counts from the end of the shard index."""

    number: int
    place: ByteRange
    encoded: bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredMinishards:
    """Encoded minishard indexes by their places, which are disjoint; columns have shape
    ``(count,)``. As there can be very many, objects are made on demand.
    """

    numbers: Numbers
    starts: Numbers
    """Counted from the end of the shard index, as `stops`."""
    stops: Numbers
    data: bytes = b""
    """The indexes, one behind the other."""

    def __iter__(self) -> Iterator[StoredMinishard]:
        edges = pairwise([0, *self._ends.tolist()])
        places = map(ByteRange, self.starts.tolist(), self.stops.tolist())
        encoded = (self.data[start:stop] for start, stop in edges)
        return map(StoredMinishard, self.numbers.tolist(), places, encoded)

    def find(self, number: int) -> StoredMinishard | None:
        """Return the index of the minishard *number*, unless it is empty."""
        for at in np.flatnonzero(self.numbers == number).tolist():
            place, end = ByteRange(int(self.starts[at]), int(self.stops[at])), int(self._ends[at])
            return StoredMinishard(number, place, self.data[end - place.length : end])
        return None

    @property
    def _ends(self) -> Numbers:
        return np.cumsum(self.stops - self.starts)


@dataclass(frozen=True, slots=True, eq=False)
class ShardTables:
    """The indexes of one version of a shard; fragments before manifests count as gaps."""

    shard: PrecomputedShard
    region: Stored
    """The shard behind its shard index, which offsets count in."""
    minishards: StoredMinishards
    faults: tuple[str, ...]

    @property
    def whole(self) -> Stored:
        return self.region._replace(byte_range=ByteRange(0, self.region.byte_range.stop))

    @property
    def indexes(self) -> Ranges:
        """The shard index, unless it is a separate object, and the minishard indexes."""
        start, found = self.region.byte_range.start, self.minishards
        starts, stops = (column.astype(np.uint64) + start for column in (found.starts, found.stops))
        return Ranges(np.append(np.uint64(0), starts), np.append(np.uint64(start), stops))

    def decode(self) -> EntryTable:
        """Decode and check the indexes."""
        return _TableReader(self).read()

    def check(self, entry: Entry, data: bytes) -> str | None:
        """Inflate gzip; decode a manifest, and check that its fragments fit before it."""
        part, most_nbytes = self.shard.part, self.shard.most_nbytes
        try:
            if part.kind is Kind.MANIFESTS:
                manifest = MeshManifestDecoder(part.sharding.is_data_gzip, most_nbytes)(data)
                return self._check_fragments(entry, manifest.fragments_nbytes)
            if part.sharding.is_data_gzip:
                inflate(data, most_nbytes)
        except DecodeError as error:
            return str(error)
        return None

    def _check_fragments(self, manifest: Entry, nbytes: int) -> str | None:
        room = manifest.place.start - self.region.byte_range.start
        if nbytes > room:
            return f"its fragments have {nbytes} bytes, and there are {room} before it"
        before = int(np.searchsorted(self.minishards.starts, room))
        if nbytes and before and self.minishards.stops[before - 1] > room - nbytes:
            return "its fragments overlap a minishard index"
        return None


@dataclass(slots=True)
class _TableReader:
    """Decodes the rows ``(id, start, stop, minishard)`` of *tables*, and collects their faults."""

    tables: ShardTables
    faults: list[Fault] = field(default_factory=list)

    def read(self) -> EntryTable:
        """Return the entries without faults; places count from the start of the object."""
        shard, region = self.tables.shard, self.tables.region.byte_range
        for fault in self.tables.faults:
            self._fault(fault)
        rows = self._decode()
        ids, _, stops, owners = rows.T
        sound = np.ones(len(rows), np.bool_)
        for wrong, reason in (
            (~shard.part.names.covers(ids), self._not_on_grid),
            (self._misplaced(ids, owners), self._is_misplaced),
            (_repeated(ids, owners), _is_repeated),
            (stops > np.uint64(region.length), self._is_outside),
        ):
            self._report(rows[sound & wrong], reason)
            sound &= ~wrong
        ids, starts, stops, _ = rows[sound].T
        first = np.uint64(region.start)
        return EntryTable.by_place(ids, Ranges(starts + first, stops + first), faults=self.faults)

    def _decode(self) -> Ids:
        decoded = list(self._inflate())
        numbers = [number for number, _ in decoded]
        chunks = decode_minishards(numbers, [data for _, data in decoded])
        wrong = chunks.starts > chunks.stops
        if wrong.any():
            owners, first = np.unique(chunks.owners[wrong], return_index=True)
            for owner, chunk_id in zip(owners, chunks.ids[wrong][first], strict=True):
                self._fault(f"minishard index {owner}: chunk {chunk_id} ends past 2^64")
            wrong = np.isin(chunks.owners, owners)
        return np.column_stack(chunks)[~wrong]

    def _inflate(self) -> Iterator[tuple[int, bytes | bytearray]]:
        shard = self.tables.shard
        room, is_gzip = shard.total_nbytes, shard.part.sharding.is_minishard_index_gzip
        for number, _, encoded in self.tables.minishards:
            try:
                data = inflate_to_array(encoded, shard.most_nbytes) if is_gzip else encoded
                check_rows(data)
            except DecodeError as error:
                self._fault(f"minishard index {number}: {error}")
                continue
            if (room := room - len(data)) < 0:
                self._fault(f"its minishard indexes hold over {shard.total_nbytes} bytes in all")
                return
            yield number, data

    def _misplaced(self, ids: Ids, owners: Ids) -> Mask:
        shard = self.tables.shard
        shards, minishards = shard.part.sharding.addresses(ids)
        wrong: Mask = (shards != np.uint64(shard.number)) | (minishards != owners)
        return wrong

    def _fault(self, reason: str) -> None:
        self.faults.append(Fault(self.tables.shard.key, reason))

    def _report(self, rows: Ids, reason: Callable[[int, int, int, int], Fault | str]) -> None:
        """Report the fault *reason* of each chunk in *rows*, once per id."""
        _, first = np.unique(rows[:, 0], return_index=True)
        named = rows[first[:_NAMED_FAULTS]].tolist()
        for row in named:
            said, key = reason(*row), self.tables.shard.chunk_key
            self.faults.append(said if isinstance(said, Fault) else Fault(key(row[0]), said))
        if (more := len(first) - _NAMED_FAULTS) > 0:
            self._fault(f"{more:,} more chunks have the fault of chunk {named[-1][0]}")

    def _not_on_grid(self, chunk_id: int, *_: int) -> Fault:
        return Fault(self.tables.shard.key, f"id {chunk_id} is of no chunk on the grid")

    def _is_misplaced(self, chunk_id: int, _: int, __: int, owner: int) -> str:
        sharding = self.tables.shard.part.sharding
        number, minishard = sharding.address(chunk_id)
        return (
            f"chunk {chunk_id} is in minishard {owner} and not in minishard {minishard} of shard"
            f" {sharding.shard_name(number)}, where readers look for it"
        )

    def _is_outside(self, chunk_id: int, start: int, stop: int, _: int) -> str:
        place, length = ByteRange(start, stop), self.tables.region.byte_range.length
        return f"chunk {chunk_id} at {place} ends past {length} bytes"


def _is_repeated(chunk_id: int, *_: int) -> str:
    return f"chunk {chunk_id} is twice in its minishard index"


def _repeated(ids: Ids, owners: Ids) -> Mask:
    same = (ids[1:] == ids[:-1]) & (owners[1:] == owners[:-1])
    found = np.zeros(len(ids), np.bool_)
    found[1:] |= same
    found[:-1] |= same
    return found


def _find_indexes(
    index: MinishardPlaces, length: int, most_nbytes: int
) -> tuple[StoredMinishards, tuple[str, ...]]:
    entries = np.frombuffer(index.entries, "<u8").reshape(-1, 2)
    filled = np.flatnonzero(entries[:, 0] != entries[:, 1])
    numbers = filled[np.argsort(entries[filled, 0], kind="stable")]
    starts, stops = entries[numbers].T
    is_sound = (starts <= stops) & (stops <= length) & (stops - starts <= most_nbytes)
    is_sound[1:] &= stops[:-1] <= starts[1:]
    faults: list[str] = []
    if not is_sound.all():  # one may overlap another that is not sound itself
        end = 0
        for at, (start, stop) in enumerate(entries[numbers].tolist()):
            is_sound[at] = end <= start <= stop <= length and stop - start <= most_nbytes
            if is_sound[at]:
                end = stop
            else:
                fault = _index_fault(start, stop, length, most_nbytes)
                faults.append(f"minishard index {numbers[at]} {fault}")
    columns = (each[is_sound].astype(np.int64) for each in (numbers, starts, stops))
    return StoredMinishards(*columns), tuple(faults)


def _index_fault(start: int, stop: int, length: int, most_nbytes: int) -> str:
    if start > stop:
        return f"ends at {stop}, before {start}"
    named = f"at [{start}, {stop})"
    if stop > length:
        return f"{named} ends past {length} bytes"
    if stop - start > most_nbytes:
        return f"{named} has over {most_nbytes} bytes"
    return f"{named} overlaps another"


def coalesce(starts: Numbers, stops: Numbers) -> Iterator[slice]:
    """Group neighbouring ranges, ordered by *starts*, that are read with one request."""
    reached = np.maximum.accumulate(stops)
    gaps = np.flatnonzero(starts[1:] - reached[:-1] > _GAP_NBYTES) + 1
    first = 0
    for end in [*gaps.tolist(), len(starts)]:
        while first < end:
            most = int(np.searchsorted(reached, starts[first] + _SPAN_NBYTES, side="right"))
            run = slice(first, max(first + 1, min(most, end)))
            yield run
            first = run.stop
