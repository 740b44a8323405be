"""The shards of a part, and all that their two levels of index name."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, cast

import numpy as np

from app.errors import DamagedError, VersionChangedError
from app.formats.compression import inflate
from app.formats.naming import Look
from app.formats.neuroglancer_precomputed.encoded import Minishards, Places
from app.formats.neuroglancer_precomputed.index import (
    ENTRY_NBYTES,
    ShardIndex,
)
from app.formats.neuroglancer_precomputed.keys import Ids, Mask
from app.formats.neuroglancer_precomputed.mesh import ManifestDecoder
from app.formats.neuroglancer_precomputed.metadata import Kind, Part
from app.formats.neuroglancer_precomputed.minishards import Numbers
from app.formats.neuroglancer_precomputed.shards import OpenShard, open_shard, read_index
from app.formats.neuroglancer_precomputed.table import Entries, Rows, TableReader
from app.formats.reading import DecodeError, Fetch, Opaque, Read, Versioned
from app.formats.surveying import Entry, Fault, Shard, Table
from app.model import ByteRange, ETag, ObjectRef, Stored, VirtualKey

_GAP_NBYTES: Final = 64 * 1024
_SPAN_NBYTES: Final = 8 * 1024**2
"""Ranges are read together across gaps of the first size, up to spans of the second."""
_NAME: Final = re.compile(r"([0-9a-f]{1,16})\.(?:shard|data)", re.ASCII)
_EVERY_BITS: Final = 12
"""Shards of more bits are too many to ask for each."""
_INDEXES: Final = 4
"""All minishard indexes of a shard may hold so many times what one may."""


@dataclass(frozen=True, slots=True)
class PrecomputedShards:
    """The shards of *parts* that lie in the same ones; their indexes name chunks of the first."""

    directory: ObjectRef
    """Of the container."""
    parts: tuple[Part, ...]
    most_nbytes: int
    """A larger index is refused, or chunk in gzip, before and after it is inflated."""

    @property
    def prefix(self) -> str:
        """Where the shards lie."""
        path = self.parts[0].path
        return f"{path}/" if path else ""

    def named(self, key: str) -> "PrecomputedShard | None":
        """Take *key* for a shard, or for the larger object of two, as shards were once."""
        found = _NAME.fullmatch(key.removeprefix(self.prefix))
        if found is None or not key.startswith(self.prefix):
            return None
        sharding, number = self.parts[0].sharding, int(found[1], 16)
        if number >> sharding.shard_bits or sharding.shard_name(number) != found[1]:
            return None
        return self.numbered(number)

    def holding(self, key: VirtualKey) -> "PrecomputedShard | None":
        """Find the shard of the chunk *key*."""
        path, _, name = key.rpartition("/")
        if path != self.parts[0].path:
            return None
        for part in self.parts:
            if (chunk_id := part.names.parse(name)) is not None:
                return self.numbered(part.sharding.address(chunk_id)[0])
        return None

    def every(self) -> Iterator["PrecomputedShard"] | None:
        """Give all, unless they are many."""
        bits = self.parts[0].sharding.shard_bits
        return None if bits > _EVERY_BITS else map(self.numbered, range(1 << bits))

    async def stored(self, look: Look) -> frozenset[int]:
        """Find the numbers of the shards that are stored."""
        named = [self.named(key) async for key in look(self.prefix)]
        return frozenset(shard.number for shard in named if shard is not None)

    def hides(self, name: str) -> bool:
        """Tell whether *name*, right below, is of an object that shards are in."""
        stem, dot, ending = name.rpartition(".")
        key = f"{self.prefix}{stem}.data" if ending == "index" else self.prefix + name
        return bool(dot) and self.named(key) is not None

    def numbered(self, number: int) -> "PrecomputedShard":
        """Give the shard *number*."""
        return PrecomputedShard(self.directory, self.parts[0], number, self.most_nbytes)


@dataclass(frozen=True, slots=True)
class PrecomputedShard:
    """The shard *number* of *part*."""

    directory: ObjectRef
    part: Part
    number: int
    most_nbytes: int

    @property
    def ref(self) -> ObjectRef:
        """The object, as it is called today."""
        return self._name._replace(key=f"{self._name.key}.shard")

    @property
    def key(self) -> VirtualKey:
        """Its own name: no chunk is the first."""
        return VirtualKey(self.ref.key.removeprefix(self.directory.prefix.key))

    async def survey(self, fetch: Fetch) -> "PrecomputedSurvey | None":
        """Read the shard index, and all minishard indexes of the same version.

        Of a shard in two objects the version is that which the data had before their index was
        read, and still have at the end.
        """
        if (shard := await self.open(fetch)) is None:
            return None
        survey = await self.read(fetch, shard)
        await shard.confirm(fetch)
        return survey

    async def open(self, fetch: Fetch) -> OpenShard | None:
        """Read the shard index; `None` means that there is no such shard.

        Raises: `DamagedError`.
        """
        read_index = partial(self._index, fetch)
        return await open_shard(self._name, self.part.sharding.index_nbytes, read_index, fetch)

    @property
    def _name(self) -> ObjectRef:
        directory = self.directory.join(self.part.path)
        return directory.join(self.part.sharding.shard_name(self.number))

    async def _index(
        self, fetch: Fetch, ref: ObjectRef, beside: ETag | None
    ) -> Versioned[ShardIndex] | None:
        """Read the shard index in *ref*; of one that is too large, just whether it is there."""
        nbytes = self.part.sharding.index_nbytes
        if nbytes <= self.most_nbytes:
            return await fetch(read_index(ref, nbytes, beside))
        if await fetch(Read("shard-index", ref, ByteRange(0, ENTRY_NBYTES), Opaque)) is not None:
            raise DamagedError(ref, f"a shard index of {nbytes} bytes, over {self.most_nbytes}")
        return None

    async def read(self, fetch: Fetch, shard: OpenShard) -> "PrecomputedSurvey":
        """Read the minishard indexes.

        Raises: `DamagedError`, `VersionChangedError`.
        """
        ref, region, etag = shard.region
        whole = Stored(ref, ByteRange(0, region.stop), etag)
        placed = _plan(shard.index, region.length, self.most_nbytes)
        if (nbytes := placed.places.nbytes) > self._total_nbytes:
            raise DamagedError(
                ref, f"minishard indexes of {nbytes} bytes, over {self._total_nbytes}"
            )
        runs: list[bytes] = []
        for at in coalesce(placed.places.starts, placed.places.stops):
            run = placed.places.among(at)
            read = Read("minishard-index", ref, region.narrow(run.span), Opaque, etag)
            if (found := await fetch(read)) is None:
                raise VersionChangedError(ref)
            runs.append(run.pick(found.value.data))
        minishards = Minishards(placed.places, runs)
        return PrecomputedSurvey(self, whole, region, minishards, tuple(placed.faults))

    @property
    def _total_nbytes(self) -> int:
        return _INDEXES * self.most_nbytes


class Listed(NamedTuple):
    """What a `Table` is made of."""

    entries: Entries
    empty: int
    faults: list[Fault]


@dataclass(frozen=True, slots=True)
class PrecomputedSurvey:
    """The minishard indexes of a shard, encoded.

    Nothing but a manifest tells how long the fragments before it are: a survey does not know
    them, and takes them for gaps.
    """

    shard: PrecomputedShard
    whole: Stored
    region: ByteRange
    """What offsets count in: the shard behind its shard index."""
    minishards: Minishards
    faults: tuple[str, ...]
    """What is wrong with other minishards."""

    @property
    def indexes(self) -> Sequence[ByteRange]:
        """The shard index, unless it is an object of its own, and the minishard indexes."""
        first = (ByteRange(0, self.region.start),) if self.region.start else ()
        return (*first, *map(self.region.narrow, self.minishards.places.each()))

    @property
    def index_location(self) -> str:
        """Where the shard index always is."""
        return "start"

    @property
    def checksummed(self) -> tuple[()]:
        """The format has no checksums."""
        return ()

    @property
    def count(self) -> int:
        """One for each byte of the indexes where they are gzip, about."""
        return self.minishards.nbytes

    def table(self) -> Table:
        """Decode the minishard indexes, and check all that they name."""
        return Table(*self.entries())

    def entries(self) -> Listed:
        """Decode and check in the same way, and give columns."""
        reader = self._reader
        entries = reader.read(self.minishards)
        faults = [Fault(self.shard.key, reason) for reason in self.faults]
        return Listed(entries, 0, [*faults, *reader.faults])

    def columns(self) -> tuple[Ids, Rows]:
        """Give the ids of all chunks, and where each begins and ends in the object.

        Raises: `DamagedError` where not all can be told.
        """
        table = self.table()
        if table.faults:
            fault = table.faults[0]
            raise DamagedError(self.whole.ref, f"{fault.key}: {fault.reason}")
        entries = cast("Entries", table.entries)
        places = np.stack([entries.starts, entries.stops], axis=1)
        return np.asarray(entries.ids), places

    def key(self, entry: Entry) -> VirtualKey:
        """Spell the name that the chunk has unsharded."""
        return self._reader.chunk_key(entry.number)

    @property
    def inner(self) -> Callable[[Entry], Shard] | None:
        """No shard is in another."""
        return None

    def check(self, entry: Entry, data: bytes) -> str | None:
        """Read a manifest, and see that its fragments fit before it; inflate what is gzip."""
        part, most_nbytes = self.shard.part, self.shard.most_nbytes
        try:
            if part.kind is Kind.MANIFESTS:
                manifest = ManifestDecoder(part.sharding.is_data_gzip, most_nbytes)(data)
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
        places = self.minishards.places
        before = int(np.searchsorted(places.starts, room))
        if nbytes and before and places.stops[before - 1] > room - nbytes:
            return "its fragments overlap a minishard index"
        return None

    @property
    def _reader(self) -> TableReader:
        shard = self.shard
        return TableReader(
            shard.part,
            shard.number,
            shard.key,
            self.region,
            shard.most_nbytes,
            _INDEXES * shard.most_nbytes,
        )


class _Plan(NamedTuple):
    places: Places
    faults: list[str]


def _plan(index: ShardIndex, length: int, most_nbytes: int) -> _Plan:
    """Find the minishard indexes in *length* bytes, by their places, none over another."""
    entries = np.frombuffer(index.entries, "<u8").reshape(-1, 2)
    filled = np.flatnonzero(entries[:, 0] != entries[:, 1])
    numbers = filled[np.argsort(entries[filled, 0], kind="stable")]
    starts, stops = entries[numbers].T
    is_sound = (starts <= stops) & (stops <= length) & (stops - starts <= most_nbytes)
    is_sound[1:] &= stops[:-1] <= starts[1:]
    faults: list[str] = []
    if not is_sound.all():
        faults = list(_check(numbers, entries, is_sound, length, most_nbytes))
    columns = (each[is_sound].astype(np.int64) for each in (numbers, starts, stops))
    return _Plan(Places(*columns), faults)


def _check(
    numbers: Numbers, entries: Ids, is_sound: Mask, length: int, most_nbytes: int
) -> Iterator[str]:
    """Tell what is wrong, and note in *is_sound* of what: one may lie over another that is not."""
    end = 0
    for at, (start, stop) in enumerate(entries[numbers].tolist()):
        is_sound[at] = end <= start <= stop <= length and stop - start <= most_nbytes
        if is_sound[at]:
            end = stop
        else:
            yield f"minishard index {numbers[at]} {_fault(start, stop, length, most_nbytes)}"


def _fault(start: int, stop: int, length: int, most_nbytes: int) -> str:
    """Tell why no minishard index can be there."""
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
