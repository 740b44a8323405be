"""The shards of a part, and all that their two levels of index name."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from app.errors import DamagedError, VersionChangedError
from app.formats.gzipped import inflate
from app.formats.neuroglancer_precomputed.index import (
    ENTRY_NBYTES,
    ShardIndex,
    ShardIndexDecoder,
)
from app.formats.neuroglancer_precomputed.mesh import ManifestDecoder
from app.formats.neuroglancer_precomputed.metadata import Kind, Part
from app.formats.neuroglancer_precomputed.shards import OpenShard, open_shard
from app.formats.neuroglancer_precomputed.table import Minishard, TableReader
from app.formats.reading import DecodeError, Fetch, Opaque, Read, Versioned
from app.formats.surveying import Entry, Fault, Shard, Table
from app.model import ByteRange, ETag, ObjectRef, Stored, VirtualKey

_NAME: Final = re.compile(r"([0-9a-f]{1,16})\.(?:shard|data)", re.ASCII)
_EVERY_BITS: Final = 12
"""Shards of more bits are too many to ask for each."""
_INDEXES: Final = 4
"""All minishard indexes of a shard may hold so many times what one may."""
_GAP_NBYTES: Final = 64 * 1024
_SPAN_NBYTES: Final = 8 * 1024**2
"""Minishard indexes are read together across such gaps, up to such a length."""


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
        return self._shard(number)

    def holding(self, key: VirtualKey) -> "PrecomputedShard | None":
        """Find the shard of the chunk *key*."""
        path, _, name = key.rpartition("/")
        if path != self.parts[0].path:
            return None
        for part in self.parts:
            if (chunk_id := part.names.parse(name)) is not None:
                return self._shard(part.sharding.address(chunk_id)[0])
        return None

    def every(self) -> Iterator["PrecomputedShard"] | None:
        """Give all, unless they are many."""
        bits = self.parts[0].sharding.shard_bits
        return None if bits > _EVERY_BITS else map(self._shard, range(1 << bits))

    def _shard(self, number: int) -> "PrecomputedShard":
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
        read_index = partial(self._index, fetch)
        index_nbytes = self.part.sharding.index_nbytes
        shard = await open_shard(self._name, index_nbytes, read_index, fetch)
        if shard is None:
            return None
        survey = await self._read(fetch, shard)
        await shard.confirm(fetch)
        return survey

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
            decode = ShardIndexDecoder(nbytes, beside=beside)
            return await fetch(Read("shard-index", ref, ByteRange(0, nbytes), decode))
        if await fetch(Read("shard-index", ref, ByteRange(0, ENTRY_NBYTES), Opaque)) is not None:
            raise DamagedError(ref, f"a shard index of {nbytes} bytes, over {self.most_nbytes}")
        return None

    async def _read(self, fetch: Fetch, shard: OpenShard) -> "PrecomputedSurvey":
        """Read the minishard indexes."""
        ref, region, etag = shard.region
        whole = Stored(ref, ByteRange(0, region.stop), etag)
        placed = _plan(shard.index, region.length, self.most_nbytes)
        if (nbytes := sum(place.length for _, place in placed.places)) > self._total_nbytes:
            raise DamagedError(
                ref, f"minishard indexes of {nbytes} bytes, over {self._total_nbytes}"
            )
        minishards: list[Minishard] = []
        for run in _runs(placed.places):
            span = ByteRange(run[0][1].start, run[-1][1].stop)
            read = Read("minishard-index", ref, region.narrow(span), Opaque, etag)
            if (found := await fetch(read)) is None:
                raise VersionChangedError(ref)
            data = memoryview(found.value.data)
            for number, place in run:
                encoded = bytes(data[place.start - span.start : place.stop - span.start])
                minishards.append(Minishard(number, place, encoded))
        return PrecomputedSurvey(self, whole, region, tuple(minishards), tuple(placed.faults))

    @property
    def _total_nbytes(self) -> int:
        return _INDEXES * self.most_nbytes


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
    minishards: tuple[Minishard, ...]
    """By their places."""
    faults: tuple[str, ...]
    """What is wrong with other minishards."""

    @property
    def indexes(self) -> Sequence[ByteRange]:
        """The shard index, unless it is an object of its own, and the minishard indexes."""
        first = (ByteRange(0, self.region.start),) if self.region.start else ()
        return (*first, *(self.region.narrow(minishard.place) for minishard in self.minishards))

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
        return sum(len(minishard.encoded) for minishard in self.minishards)

    def table(self) -> Table:
        """Decode the minishard indexes, and check all that they name."""
        faults = [Fault(self.shard.key, reason) for reason in self.faults]
        table = self._reader.read(self.minishards)
        return table if not faults else Table(table.entries, 0, [*faults, *table.faults])

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
        minishards = self.minishards
        start = room - nbytes
        before = bisect_left(minishards, room, key=lambda minishard: minishard.place.start)
        if nbytes and before and minishards[before - 1].place.stop > start:
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


type _Place = tuple[int, ByteRange]
"""The number of a minishard, and where its index lies."""


class _Plan(NamedTuple):
    places: list[_Place]
    faults: list[str]


def _plan(index: ShardIndex, length: int, most_nbytes: int) -> _Plan:
    """Find the minishard indexes in *length* bytes, by their places, none over another."""
    plan = _Plan([], [])
    starts, stops = np.frombuffer(index.entries, "<u8").reshape(-1, 2).T
    filled = np.flatnonzero(starts != stops)
    end = 0
    for number in filled[np.argsort(starts[filled], kind="stable")].tolist():
        start, stop = int(starts[number]), int(stops[number])
        named = f"minishard index {number} at [{start}, {stop})"
        if start > stop:
            plan.faults.append(f"minishard index {number} ends at {stop}, before {start}")
        elif stop > length:
            plan.faults.append(f"{named} ends past {length} bytes")
        elif stop - start > most_nbytes:
            plan.faults.append(f"{named} has over {most_nbytes} bytes")
        elif start < end:
            plan.faults.append(f"{named} overlaps another")
        else:
            plan.places.append((number, ByteRange(start, stop)))
            end = stop
    return plan


def _runs(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    """Put neighbours together that are read at once."""
    run: list[_Place] = []
    for number, place in places:
        if run and (
            place.start - run[-1][1].stop > _GAP_NBYTES
            or place.stop - run[0][1].start > _SPAN_NBYTES
        ):
            yield run
            run = []
        run.append((number, place))
    if run:
        yield run
