"""The shards of a part, and all chunks that their two levels of index name."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Final, NamedTuple, overload

import numpy as np

from app.errors import DamagedError, VersionChangedError
from app.formats.compression import inflate, inflate_to_array
from app.formats.listing import ListNames
from app.formats.neuroglancer_precomputed.index import (
    ENTRY_NBYTES,
    Columns,
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
from app.formats.surveying import Entry, EntryTable, Fault, Shard
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
    """The shards that *parts* share; their indexes name chunks of the first."""

    directory: ObjectRef
    parts: tuple[ShardedPart, ...]
    most_nbytes: int
    """A larger index is refused, or gzip chunk, before and after it is inflated."""

    @property
    def prefix(self) -> str:
        path = self.parts[0].path
        return f"{path}/" if path else ""

    def named(self, key: str) -> "PrecomputedShard | None":
        found = _NAME.fullmatch(key.removeprefix(self.prefix))
        if found is None or not key.startswith(self.prefix):
            return None
        sharding, number = self.parts[0].sharding, int(found[1], 16)
        if number >> sharding.shard_bits or sharding.shard_name(number) != found[1]:
            return None
        return self.numbered(number)

    def holding(self, key: VirtualKey) -> "PrecomputedShard | None":
        path, _, name = key.rpartition("/")
        if path != self.parts[0].path:
            return None
        for part in self.parts:
            if (chunk_id := part.names.parse(name)) is not None:
                return self.numbered(part.sharding.address(chunk_id)[0])
        return None

    def every(self) -> Iterator["PrecomputedShard"] | None:
        bits = self.parts[0].sharding.shard_bits
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
        return PrecomputedShard(self.directory, self.parts[0], number, self.most_nbytes)


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

    async def survey(self, fetch: Fetch) -> "PrecomputedSurvey | None":
        """Read the shard index, and all minishard indexes, of one version of both objects."""
        if (shard := await self.open(fetch)) is None:
            return None
        survey = await self.read(fetch, shard)
        await shard.confirm(fetch)
        return survey

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

    async def read(self, fetch: Fetch, shard: ShardObject) -> "PrecomputedSurvey":
        """Read the minishard indexes. Raises: `DamagedError`, `VersionChangedError`."""
        ref, region, etag = shard.region
        whole = Stored(ref, ByteRange(0, region.stop), etag)
        ranges, faults = _find_indexes(shard.index, region.length, self.most_nbytes)
        if ranges.nbytes > self.total_nbytes:
            raise DamagedError(
                ref, f"minishard indexes of {ranges.nbytes} bytes, over {self.total_nbytes}"
            )
        runs: list[bytes] = []
        for at in coalesce(ranges.starts, ranges.stops):
            run = ranges.sliced(at)
            read = Read("minishard-index", ref, region.narrow(run.span), Opaque, etag)
            if (found := await fetch(read)) is None:
                raise VersionChangedError(ref)
            runs.append(run.pick(found.value.data))
        return PrecomputedSurvey(self, whole, region, StoredMinishards(ranges, runs), faults)


class IndexRanges(NamedTuple):
    """Ranges of minishard indexes, rising and disjoint; columns have shape ``(count,)``."""

    numbers: Numbers
    starts: Numbers
    """Counted from the end of the shard index, as `stops`."""
    stops: Numbers

    @property
    def nbytes(self) -> int:
        return int((self.stops - self.starts).sum())

    @property
    def span(self) -> ByteRange:
        """The range from the first start to the last stop."""
        return ByteRange(int(self.starts[0]), int(self.stops[-1]))

    def sliced(self, run: slice) -> "IndexRanges":
        return IndexRanges(*(column[run] for column in self))

    def each(self) -> Iterator[ByteRange]:
        return map(ByteRange, self.starts.tolist(), self.stops.tolist())

    def pick(self, data: bytes) -> bytes:
        """Remove the gaps from *data*, the bytes of the `span`."""
        if len(data) == self.nbytes:
            return data
        starts, stops = (column - self.starts[0] for column in self[1:])
        return b"".join(map(data.__getitem__, map(slice, starts.tolist(), stops.tolist())))


class StoredMinishard(NamedTuple):
    """An encoded minishard index; *place* counts from the end of the shard index."""

    number: int
    place: ByteRange
    encoded: bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredMinishards:
    """Encoded minishard indexes; as there can be very many, objects are made on demand."""

    ranges: IndexRanges
    runs: Sequence[bytes]
    """The bytes of all ranges; each range is in one run."""

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[StoredMinishard]:
        numbers = self.ranges.numbers.tolist()
        return map(StoredMinishard, numbers, self.ranges.each(), self._encoded())

    def find(self, number: int) -> StoredMinishard | None:
        """Return the index of the minishard *number*, unless it is empty."""
        found = np.flatnonzero(self.ranges.numbers == number)
        if not found.size:
            return None
        at = int(found[0])
        nbytes = self.ranges.stops - self.ranges.starts
        start, run = int(nbytes[:at].sum()), 0
        while start >= len(self.runs[run]):
            start, run = start - len(self.runs[run]), run + 1
        (place,) = self.ranges.sliced(slice(at, at + 1)).each()
        return StoredMinishard(number, place, self.runs[run][start : start + place.length])

    def _encoded(self) -> Iterator[bytes]:
        ends = np.cumsum(self.ranges.stops - self.ranges.starts)
        reached = first = 0
        for run in self.runs:
            last = int(np.searchsorted(ends, reached + len(run), side="right"))
            edges = chain([0], (ends[first:last] - reached).tolist())
            yield from (run[start:stop] for start, stop in pairwise(edges))
            reached, first = reached + len(run), last


@dataclass(frozen=True, slots=True)
class PrecomputedSurvey:
    """The encoded minishard indexes of a shard; fragments before manifests count as gaps."""

    shard: PrecomputedShard
    whole: Stored
    region: ByteRange
    """The shard behind its shard index, which offsets count in."""
    minishards: StoredMinishards
    faults: tuple[str, ...]

    @property
    def indexes(self) -> Sequence[ByteRange]:
        """The shard index, unless it is a separate object, and the minishard indexes."""
        first = (ByteRange(0, self.region.start),) if self.region.start else ()
        return (*first, *map(self.region.narrow, self.minishards.ranges.each()))

    @property
    def index_location(self) -> str:
        return "start"

    @property
    def checksummed(self) -> tuple[()]:
        return ()

    @property
    def count(self) -> int:
        """Size of the encoded indexes: about one byte per entry in gzip."""
        return self.minishards.nbytes

    def table(self) -> EntryTable:
        entries, faults = self._entries()
        return EntryTable(entries, 0, faults)

    def columns(self) -> tuple[Ids, Ids]:
        """Return the ids of all chunks, and their places in the object, shape ``(count, 2)``."""
        entries, faults = self._entries()
        if faults:
            raise DamagedError(self.whole.ref, f"{faults[0].key}: {faults[0].reason}")
        places = np.stack([entries.starts, entries.stops], axis=1)
        return np.asarray(entries.ids), places

    def _entries(self) -> tuple["Entries", list[Fault]]:
        reader = _TableReader(self.shard, self.region)
        entries = reader.read(self.minishards)
        faults = [Fault(self.shard.key, reason) for reason in self.faults]
        return entries, [*faults, *reader.faults]

    def key(self, entry: Entry) -> VirtualKey:
        return self.shard.chunk_key(entry.number)

    @property
    def inner(self) -> Callable[[Entry], Shard] | None:
        return None

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
        room = manifest.place.start - self.region.start
        if nbytes > room:
            return f"its fragments have {nbytes} bytes, and there are {room} before it"
        ranges = self.minishards.ranges
        before = int(np.searchsorted(ranges.starts, room))
        if nbytes and before and ranges.stops[before - 1] > room - nbytes:
            return "its fragments overlap a minishard index"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Entries(Sequence[Entry]):
    """Entries in three columns of uint64; objects are made on demand."""

    ids: memoryview
    starts: memoryview
    stops: memoryview

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> "Entries": ...
    def __getitem__(self, at: int | slice) -> "Entry | Entries":
        if isinstance(at, slice):
            return Entries(self.ids[at], self.starts[at], self.stops[at])
        return Entry(self.ids[at], ByteRange(self.starts[at], self.stops[at]))

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry, self.ids, map(ByteRange, self.starts, self.stops))


@dataclass(slots=True)
class _TableReader:
    """Reads all entries of *shard* as rows of `Columns`, shape ``(count, 4)``, and their faults."""

    shard: PrecomputedShard
    region: ByteRange
    faults: list[Fault] = field(default_factory=list)

    def read(self, minishards: Iterable[StoredMinishard]) -> Entries:
        """Decode *minishards* without faulty chunks; entries are in the order of their places."""
        rows = self._decode(minishards)
        ids, _, stops, owners = rows.T
        sound = np.ones(len(rows), np.bool_)
        for wrong, reason in (
            (~self.shard.part.names.covers(ids), self._not_on_grid),
            (self._misplaced(ids, owners), self._is_misplaced),
            (_repeated(ids, owners), _is_repeated),
            (stops > np.uint64(self.region.length), self._is_outside),
        ):
            self._report(rows[sound & wrong], reason)
            sound &= ~wrong
        rows = rows[sound]
        rows = rows[np.lexsort((rows[:, 2], rows[:, 1]))]
        places = rows[:, 1:3] + np.uint64(self.region.start)
        return Entries(*(column.copy().data for column in (rows[:, 0], *places.T)))

    def _decode(self, minishards: Iterable[StoredMinishard]) -> Ids:
        decoded = list(self._inflate(minishards))
        numbers = [number for number, _ in decoded]
        chunks: Columns = decode_minishards(numbers, [data for _, data in decoded])
        wrong = chunks.starts > chunks.stops
        if wrong.any():
            owners, first = np.unique(chunks.owners[wrong], return_index=True)
            for owner, chunk_id in zip(owners, chunks.ids[wrong][first], strict=True):
                self._fault(f"minishard index {owner}: chunk {chunk_id} ends past 2^64")
            wrong = np.isin(chunks.owners, owners)
        return np.column_stack(chunks)[~wrong]

    def _inflate(
        self, minishards: Iterable[StoredMinishard]
    ) -> Iterator[tuple[int, bytes | bytearray]]:
        shard, room = self.shard, self.shard.total_nbytes
        is_gzip = shard.part.sharding.is_minishard_index_gzip
        for number, _, encoded in minishards:
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
        shards, minishards = self.shard.part.sharding.addresses(ids)
        wrong: Mask = (shards != np.uint64(self.shard.number)) | (minishards != owners)
        return wrong

    def _fault(self, reason: str) -> None:
        self.faults.append(Fault(self.shard.key, reason))

    def _report(self, rows: Ids, reason: Callable[[int, int, int, int], Fault | str]) -> None:
        """Report the fault *reason* of each chunk in *rows*, once per id."""
        _, first = np.unique(rows[:, 0], return_index=True)
        named = rows[first[:_NAMED_FAULTS]].tolist()
        for row in named:
            said = reason(*row)
            fault = said if isinstance(said, Fault) else Fault(self.shard.chunk_key(row[0]), said)
            self.faults.append(fault)
        if (more := len(first) - _NAMED_FAULTS) > 0:
            self._fault(f"{more:,} more chunks have the fault of chunk {named[-1][0]}")

    def _not_on_grid(self, chunk_id: int, *_: int) -> Fault:
        return Fault(self.shard.key, f"id {chunk_id} is of no chunk on the grid")

    def _is_misplaced(self, chunk_id: int, _: int, __: int, owner: int) -> str:
        sharding = self.shard.part.sharding
        number, minishard = sharding.address(chunk_id)
        return (
            f"chunk {chunk_id} is in minishard {owner} and not in minishard {minishard} of shard"
            f" {sharding.shard_name(number)}, where readers look for it"
        )

    def _is_outside(self, chunk_id: int, start: int, stop: int, _: int) -> str:
        place = ByteRange(start, stop)
        return f"chunk {chunk_id} at {place} ends past {self.region.length} bytes"


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
) -> tuple[IndexRanges, tuple[str, ...]]:
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
    return IndexRanges(*columns), tuple(faults)


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
