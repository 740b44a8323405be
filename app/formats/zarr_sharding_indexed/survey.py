"""The shards of an array, and all that their indexes name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter, floordiv, lt, mul

from app.errors import DamagedError
from app.formats.reading import DecodeError, Fetch, Opaque, Read, Versioned
from app.formats.surveying import Entry, Fault, Shard, Table
from app.formats.zarr_sharding_indexed.index import CHECKSUM_NBYTES
from app.formats.zarr_sharding_indexed.metadata import ArraySpec
from app.formats.zarr_sharding_indexed.unshard import ShardingLevel
from app.model import ByteRange, ObjectRef, Part, Stored, VirtualKey


@dataclass(frozen=True, slots=True)
class ZarrShards:
    """The shards of *array*, which lies in *directory*."""

    directory: ObjectRef
    array: ArraySpec
    prefix: str = ""

    def named(self, key: str) -> "ZarrShard | None":
        """Take *key* for a shard of the grid."""
        coords = self.array.keys.parse(key)
        if coords is None or not all(map(lt, coords, self._counts)):
            return None
        return self._shard(coords)

    def holding(self, key: VirtualKey) -> "ZarrShard | None":
        """Find the shard of the inner chunk *key*."""
        coords = self.array.keys.parse(key)
        if coords is None or (origin := self.array.origin(coords)) is None:
            return None
        return self._shard(tuple(map(floordiv, origin, self.array.shard_shape)))

    def every(self) -> Iterator["ZarrShard"]:
        """Give all shards of the grid."""
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
    """Where a shard lies that is not an object: in another, or where something refers to."""

    @property
    def key(self) -> VirtualKey:
        """The key of the inner chunk at the origin."""
        coords = tuple(map(floordiv, self.origin, self.array.inner_chunk_shape))
        return VirtualKey(self.array.keys.format(coords))

    @property
    def level(self) -> ShardingLevel:
        """The sharding codec that wrote it."""
        return self.array.unsharded.levels[self.depth]

    async def survey(self, fetch: Fetch) -> "ZarrSurvey | None":
        """Read the index; indexes of the shards inside are theirs to read."""
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
        """The only one."""
        return (self.index_place,)

    @property
    def index_location(self) -> str:
        """What the metadata says."""
        return self.shard.level.index.location.value

    @property
    def checksummed(self) -> tuple[ByteRange, ...]:
        """All before each checksum that a codec put behind the shard, the last one first."""
        length, trailer_nbytes = self.whole.byte_range.length, self.shard.level.index.trailer_nbytes
        behind = range(0, trailer_nbytes, CHECKSUM_NBYTES)
        return tuple(ByteRange(0, length - nbytes) for nbytes in behind)

    @property
    def count(self) -> int:
        """As many as the shard has room for chunks."""
        return self.shard.level.index.entry_count

    def table(self) -> Table:
        """Decode the index, and check each entry against the size of the shard."""
        codec, length = self.shard.level.index, self.whole.byte_range.length
        try:
            index = codec(self.encoded)
        except DecodeError as error:
            return Table((), 0, (Fault(self.shard.key, str(error)),))
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
        return Table(entries, len(index) - len(entries) - len(faults), faults)

    def key(self, entry: Entry) -> VirtualKey:
        """Spell the key of the first inner chunk at the place of *entry* in the array."""
        return self._key(entry.number)

    @property
    def inner(self) -> Callable[[Entry], Shard] | None:
        """Only the innermost shards name chunks."""
        is_innermost = self.shard.depth + 1 == len(self.shard.array.unsharded.levels)
        return None if is_innermost else self._inner

    def check(self, _: Entry, data: bytes) -> str | None:
        """Compare with what can be told of all inner chunks."""
        return self.shard.array.chunk.fault(data)

    def _inner(self, entry: Entry) -> ZarrShard:
        whole = self.whole
        inside = Stored(whole.ref, whole.byte_range.narrow(entry.place), whole.version)
        origin = self._origin(entry.number)
        return replace(self.shard, origin=origin, depth=self.shard.depth + 1, inside=inside)

    def _key(self, number: int) -> VirtualKey:
        return replace(self.shard, origin=self._origin(number)).key

    def _origin(self, number: int) -> tuple[int, ...]:
        """Find the first array element of entry *number*."""
        level = self.shard.level
        return tuple(
            start + number // stride % count * size
            for start, stride, count, size in zip(
                self.shard.origin,
                level.strides,
                level.chunks_per_shard,
                level.inner_chunk_shape,
                strict=True,
            )
        )
