"""The shards of a part, and all chunks that their two levels of index name."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from shardgate.errors import DamagedError, VersionChangedError
from shardgate.formats.compression import inflate
from shardgate.formats.listing import ListNames
from shardgate.formats.neuroglancer_precomputed.index import (
    MAX_WHOLE_INDEX_NBYTES,
    Encoding,
    Minishard,
    MinishardIndex,
    ShardObject,
    decode_manifest,
    decode_minishard,
    open_shard,
)
from shardgate.formats.neuroglancer_precomputed.keys import ID_NAMES, Ids
from shardgate.formats.neuroglancer_precomputed.metadata import Kind, ShardedPart
from shardgate.formats.reading import BoundDecoder, DecodeError, Fetch, Opaque, Read
from shardgate.formats.surveying import EntryTable, Fault, IndexEntry, Ranges, Survey
from shardgate.model import ByteRange, ETag, ObjectRef, Stored, VirtualKey, etag_of, join_path

_NAME: Final = re.compile(r"([0-9a-f]{1,16})\.(?:shard|data)", re.ASCII)
_EVERY_BITS: Final = 12  # with more the shards are too many to try each
_INDEXES: Final = 4  # so many times the limit of one all minishard indexes of a shard may hold
_COMPRESSED_SEGMENTATION: Final = "compressed_segmentation"
_EDGES: Final = {
    "jpeg": (b"\xff\xd8\xff", b"\xff\xd9"),
    "png": (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),
}
"""First and last bytes of images."""
_CHECKED: Final = frozenset({*_EDGES, _COMPRESSED_SEGMENTATION})
_NAMED_FAULTS: Final = 100  # so many chunks with the same fault are named; the rest is counted


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

    @property
    def is_checkable(self) -> bool:
        part = self.part
        is_known = part.voxel_nbytes is not None or str(part.member.get("encoding")) in _CHECKED
        return is_known or part.kind is Kind.MANIFESTS or part.sharding.data_encoding == "gzip"

    def named(self, key: str) -> "PrecomputedShard | None":
        found = _NAME.fullmatch(key.removeprefix(self.prefix))
        if found is None or not key.startswith(self.prefix):
            return None
        sharding = self.part.sharding
        number = int(found[1], 16)
        if number >> sharding.shard_bits or sharding.shard_name(number) != found[1]:
            return None
        return self.numbered(number)

    def holding(self, key: VirtualKey) -> "PrecomputedShard | None":
        path, _, name = key.rpartition("/")
        if path != self.part.path:
            return None
        chunk_id = self.part.names.parse(name)
        if chunk_id is None:
            chunk_id = ID_NAMES.parse(name)
        if chunk_id is None or not self.part.may_have(chunk_id):
            return None
        return self.numbered(self.part.sharding.address(chunk_id)[0])

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
    def _name(self) -> ObjectRef:
        """The name of the object without its ending."""
        return self.directory.join(self.part.path).join(self.part.sharding.shard_name(self.number))

    @property
    def decoder(self) -> BoundDecoder[Encoding, int, MinishardIndex]:
        """Decoder of minishard indexes."""
        encoding = self.part.sharding.minishard_index_encoding
        return BoundDecoder(decode_minishard, (encoding, self.most_nbytes))

    def chunk_key(self, chunk_id: int) -> VirtualKey:
        return VirtualKey(join_path(self.part.path, self.part.names.format(chunk_id)))

    async def open_minishard(
        self, minishard: int, whole_index_nbytes: int, fetch: Fetch
    ) -> Minishard | None:
        """Open *minishard*; `None` if it is empty, or there is no such shard. A shard index of more
        than *whole_index_nbytes* is read one entry at a time.
        """
        sharding = self.part.sharding
        whole_nbytes = min(whole_index_nbytes, MAX_WHOLE_INDEX_NBYTES)
        needed = None if sharding.index_nbytes <= whole_nbytes else minishard
        if (shard := await open_shard(self._name, sharding, needed, fetch)) is None:
            return None
        ref, region, version = shard.region
        try:
            if (place := shard.find(minishard, self.most_nbytes)) is None:
                return None
            read = Read("minishard-index", ref, region.narrow(place), self.decoder, version)
            found = await fetch(read)
        except DamagedError:
            # An index beside newer data only looks damaged.
            await shard.confirm(fetch)
            raise
        if found is None:
            raise VersionChangedError(ref)
        return Minishard(place, found.value, shard.region)

    async def locate_fragments(
        self, minishard: Minishard, manifest: Stored, fetch: Fetch
    ) -> Stored:
        """Return the place of the fragment data of a mesh, which ends where *manifest* begins."""
        ref, place, version = manifest
        if place.length > self.most_nbytes:
            reason = f"the manifest at {place} is longer than {self.most_nbytes} bytes"
            raise DamagedError(ref, reason)
        encoding = self.part.sharding.data_encoding
        decode = BoundDecoder(decode_manifest, (encoding, self.most_nbytes))
        if (found := await fetch(Read("mesh-manifest", ref, place, decode, version))) is None:
            raise VersionChangedError(ref)
        start = place.start - found.value.fragments_nbytes
        if start < minishard.region.byte_range.start:
            raise DamagedError(
                ref,
                f"the manifest at {place} is of {found.value.fragments_nbytes} bytes of fragments,"
                " more than lie before it",
            )
        fragments = ByteRange(start, place.start)
        if fragments.overlaps(minishard.region.byte_range.narrow(minishard.place)):
            raise DamagedError(ref, f"the fragments at {fragments} overlap their minishard index")
        return Stored(ref, fragments, version)

    async def survey(self, fetch: Fetch) -> Survey | None:
        """Read the shard index, and all minishard indexes, of one version of both objects."""
        if (tables := await self.open(fetch)) is None:
            return None
        await tables.opened.confirm(fetch)
        whole = tables.region._replace(byte_range=ByteRange(0, tables.size))
        return Survey(
            whole=whole,
            table=tables.decode,
            key=self.chunk_key,
            check=tables.check,
            indexes=tables.indexes,
            index_location="start",
        )

    async def open(self, fetch: Fetch) -> "ShardTables | None":
        """Read all indexes, if there is a shard. Raises: `DamagedError`, `VersionChangedError`."""
        sharding = self.part.sharding
        is_large = sharding.index_nbytes > self.most_nbytes
        needed = 0 if is_large else None  # one entry shows whether there is a shard
        if (opened := await open_shard(self._name, sharding, needed, fetch)) is None:
            return None
        if is_large:
            reason = f"a shard index of {sharding.index_nbytes} bytes, over {self.most_nbytes}"
            raise DamagedError(opened.index_ref, reason)
        ref, region, etag = opened.region
        numbers, places = _find_indexes(opened, self.most_nbytes)
        if (nbytes := places.nbytes) > _INDEXES * self.most_nbytes:
            reason = f"minishard indexes of {nbytes} bytes, over {_INDEXES * self.most_nbytes}"
            raise DamagedError(ref, reason)
        pieces: list[bytes] = []
        for run in coalesce(places):
            starts, stops = (column[run].tolist() for column in places)
            span = region.narrow(ByteRange(starts[0], stops[-1]))
            if (found := await fetch(Read("minishard-index", ref, span, Opaque, etag))) is None:
                raise VersionChangedError(ref)
            pieces += _without_gaps(found.value.data, starts, stops)
        return ShardTables(self, opened, numbers, places, b"".join(pieces))


def _has_channels(data: bytes) -> bool:
    """Return whether the offsets of channels (words of 4 bytes) ascend from the header's end."""
    words = np.frombuffer(data, "<u4", len(data) // 4)
    count = int(words[0]) if len(words) else 0
    edges = np.append(words[:count], len(words))
    return 0 < count < len(words) and edges[0] == count and bool((edges[:-1] < edges[1:]).all())


def _find_indexes(shard: ShardObject, most_nbytes: int) -> tuple[Ids, Ranges]:
    """Return the numbers and places of all minishard indexes, by their places, in *region*."""
    entries = np.frombuffer(shard.index.entries, "<u8").reshape(-1, 2)
    filled = np.flatnonzero(entries[:, 0] != entries[:, 1])
    numbers = filled[np.argsort(entries[filled, 0], kind="stable")]
    starts, stops = entries[numbers].T
    length = np.uint64(shard.region.byte_range.length)
    is_wrong = (starts > stops) | (stops > length) | (stops - starts > np.uint64(most_nbytes))
    is_wrong[1:] |= stops[:-1] > starts[1:]
    if is_wrong.any():
        number = int(numbers[is_wrong][0])
        place = shard.find(number, most_nbytes)  # raises where it is not only the place
        raise DamagedError(shard.index_ref, f"minishard index {number} at {place} overlaps another")
    return numbers.astype(np.uint64), Ranges(starts, stops)


def coalesce(places: Ranges) -> list[slice]:
    """Group ranges, which are disjoint and in order, to read each group with one request."""
    starts, stops = places
    is_far = starts[1:] - stops[:-1] > np.uint64(64 * 1024)
    spans = starts // np.uint64(8 * 1024**2)  # limits the length of a group, most simply so
    cuts = np.flatnonzero(is_far | (spans[1:] != spans[:-1])) + 1
    edges = [0, *cuts.tolist(), len(starts)] if len(starts) else []
    return [slice(first, end) for first, end in pairwise(edges)]


def _without_gaps(data: bytes, starts: list[int], stops: list[int]) -> Iterable[bytes]:
    if len(data) == sum(stops) - sum(starts):
        return [data]
    first = starts[0]
    places = zip(starts, stops, strict=True)
    return [data[start - first : stop - first] for start, stop in places]


@dataclass(frozen=True, slots=True, eq=False)
class ShardTables:
    """All indexes of one version of a shard; fragments before manifests count as gaps."""

    shard: PrecomputedShard
    opened: ShardObject
    numbers: Ids
    """Of the minishards that are not empty, by the places of their indexes."""
    places: Ranges
    """Of the minishard indexes, counted from the end of the shard index."""
    data: bytes
    """The minishard indexes, one behind the other."""
    _found: dict[int, Minishard | None] = field(default_factory=dict)

    @property
    def region(self) -> Stored:
        """The shard behind its shard index."""
        return self.opened.region

    @property
    def etag(self) -> ETag:
        return etag_of(self.region.version)

    @property
    def size(self) -> int:
        return self.region.byte_range.stop

    @property
    def indexes(self) -> Ranges:
        """The shard index, unless it is a separate object, and the minishard indexes."""
        start = np.uint64(self.region.byte_range.start)
        starts, stops = self.places
        return Ranges(np.append(np.uint64(0), starts + start), np.append(start, stops + start))

    def lookup(self, entry: tuple[int, ...]) -> ByteRange | None:
        """Return the range in the object of the chunk whose id is the only number of *entry*."""
        _, number = self.shard.part.sharding.address(entry[0])
        if number not in self._found:
            self._found[number] = self._open(number)
        minishard = self._found[number]
        found = None if minishard is None else minishard.locate(entry[0])
        return None if found is None else found.byte_range

    def _open(self, number: int) -> Minishard | None:
        found = np.flatnonzero(self.numbers == np.uint64(number))
        if not found.size:
            return None
        at = int(found[0])
        place = ByteRange(*(int(column[at]) for column in self.places))
        try:
            index = self.shard.decoder(next(self._encoded(slice(at, at + 1))))
        except DecodeError as error:
            raise DamagedError(self.region.ref, f"minishard index {number}: {error}") from error
        return Minishard(place, index, self.region)

    def _encoded(self, rows: slice) -> Iterator[bytes]:
        nbytes = self.places.stops - self.places.starts
        ends = np.cumsum(nbytes)
        edges = zip((ends - nbytes)[rows].tolist(), ends[rows].tolist(), strict=True)
        return (self.data[begin:end] for begin, end in edges)

    def decode(self) -> EntryTable:
        """Decode and check all indexes; places count from the start of the object."""
        faults: list[Fault] = []
        ids, starts, stops, owners = self._columns(faults)
        part = self.shard.part
        region = self.region.byte_range
        shards, minishards = part.sharding.addresses(ids)
        _, which, counts = np.unique(ids, return_inverse=True, return_counts=True)
        checks = {
            "is not on the grid": ~part.names.covers(ids),
            "is not in the minishard where readers look for it": (minishards != owners)
            | (shards != np.uint64(self.shard.number)),
            "is twice in the minishard indexes": counts[which] > 1,
            f"ends past {region.length} bytes": stops > np.uint64(region.length),
        }
        sound = np.ones(len(ids), np.bool_)
        for reason, is_wrong in checks.items():
            faults += self._faults(np.unique(ids[sound & is_wrong]), reason)
            sound &= ~is_wrong
        first = np.uint64(region.start)
        places = Ranges(starts[sound] + first, stops[sound] + first)
        return EntryTable.by_place(ids[sound], places, faults=faults)

    def _columns(self, faults: list[Fault]) -> tuple[Ids, Ids, Ids, Ids]:
        """Decode all minishard indexes: ids, starts, stops and minishards of their chunks."""
        most_nbytes = _INDEXES * self.shard.most_nbytes
        room = most_nbytes
        decoder = self.shard.decoder
        found: dict[int, MinishardIndex] = {}
        for number, data in zip(self.numbers.tolist(), self._encoded(slice(None)), strict=True):
            try:
                index = decoder(data)
            except DecodeError as error:
                faults.append(Fault(self.shard.key, f"minishard index {number}: {error}"))
                continue
            if (room := room - index.nbytes) < 0:
                reason = f"its minishard indexes hold over {most_nbytes} bytes in all"
                faults.append(Fault(self.shard.key, reason))
                break
            found[number] = index
        none = np.empty(0, np.uint64)
        ids, starts, stops = (
            np.concatenate([none, *(getattr(index, name) for index in found.values())])
            for name in ("ids", "starts", "stops")
        )
        counts = np.array(list(map(len, found.values())), np.int64)
        return ids, starts, stops, np.repeat(np.array(list(found), np.uint64), counts)

    def _faults(self, ids: Ids, reason: str) -> Iterator[Fault]:
        """Yield a fault for each of the first chunks *ids*, and one for all others."""
        covered = self.shard.part.names.covers(ids)
        named = zip(ids[:_NAMED_FAULTS].tolist(), covered.tolist(), strict=False)
        for chunk_id, is_chunk in named:
            key = self.shard.chunk_key(chunk_id) if is_chunk else self.shard.key
            yield Fault(key, f"chunk {chunk_id} {reason}")
        if (more := len(ids) - _NAMED_FAULTS) > 0:
            yield Fault(self.shard.key, f"{more:,} more chunks: each {reason}")

    def check(self, entry: IndexEntry, data: bytes) -> str | None:
        """Check gzip, the encoding of voxels, or that the fragments of a manifest fit before it."""
        part = self.shard.part
        most_nbytes = self.shard.most_nbytes
        encoding = part.sharding.data_encoding
        try:
            if part.kind is Kind.MANIFESTS:
                manifest = decode_manifest(data, encoding, most_nbytes)
                return self._check_fragments(entry, manifest.fragments_nbytes)
            if encoding == "gzip":
                data = inflate(data, most_nbytes)
        except DecodeError as error:
            return str(error)
        return self._check_voxels(entry, data) if part.kind is Kind.VOLUME else None

    def _check_voxels(self, entry: IndexEntry, data: bytes) -> str | None:
        part = self.shard.part
        encoding = str(part.member.get("encoding"))
        if (nbytes := part.chunk_nbytes(entry.number)) is not None:
            is_whole = len(data) == nbytes
            return None if is_whole else f"the chunk has {len(data)} bytes instead of {nbytes}"
        if (edges := _EDGES.get(encoding)) is not None:
            begins, ends = edges
            is_whole = data.startswith(begins) and data.endswith(ends)
            return None if is_whole else f"no whole {encoding}: it does not begin or end like one"
        if encoding == _COMPRESSED_SEGMENTATION and not _has_channels(data):
            return "no compressed segmentation: the offsets of its channels are invalid"
        return None

    def _check_fragments(self, manifest: IndexEntry, nbytes: int) -> str | None:
        room = manifest.place.start - self.region.byte_range.start
        if nbytes > room:
            return f"its fragments have {nbytes} bytes, and there are {room} before it"
        before = int(np.searchsorted(self.places.starts, np.uint64(room)))
        if nbytes and before and self.places.stops[before - 1] > room - nbytes:
            return "its fragments overlap a minishard index"
        return None
