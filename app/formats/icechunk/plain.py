"""A chunk with a checksum at its end, seen as a shard of one chunk that has no index."""

from collections.abc import Callable
from dataclasses import dataclass

from app.errors import DamagedError
from app.formats.reading import Fetch, Opaque, Read
from app.formats.surveying import Entry, Shard, Table
from app.formats.zarr_sharding_indexed.chunk import has_intact_checksum
from app.model import ByteRange, ObjectRef, Part, Stored, VirtualKey


@dataclass(frozen=True, slots=True)
class PlainChunk:
    """The chunk *key* of an array that is not sharded."""

    key: VirtualKey
    place: Stored | Part

    @property
    def ref(self) -> ObjectRef:
        """The object it is in."""
        return self.place.ref

    async def survey(self, fetch: Fetch) -> "PlainSurvey":
        """Learn the version of the object where that is not told."""
        if isinstance(self.place, Stored):
            return PlainSurvey(self, self.place)
        found = await fetch(Read("chunk", self.ref, ByteRange(0, 1), Opaque, self.place.version))
        if found is None:
            raise DamagedError(self.ref, "does not exist, though it is referred to")
        return PlainSurvey(self, Stored(self.ref, self.place.byte_range, found.etag))


@dataclass(frozen=True, slots=True)
class PlainSurvey:
    """The place of the chunk in one version of its object."""

    chunk: PlainChunk
    whole: Stored
    indexes: tuple[ByteRange, ...] = ()
    index_location: str = "end"
    checksummed: tuple[ByteRange, ...] = ()
    count: int = 1

    @property
    def inner(self) -> Callable[[Entry], Shard] | None:
        """It is a chunk."""
        return None

    def table(self) -> Table:
        """Name all of it."""
        return Table((Entry(0, ByteRange(0, self.whole.byte_range.length)),), 0, ())

    def key(self, _: Entry) -> VirtualKey:
        """Spell the only key."""
        return self.chunk.key

    def check(self, _: Entry, data: bytes) -> str | None:
        """Compare the checksum."""
        return None if has_intact_checksum(data) else "the checksum of the chunk does not match"
