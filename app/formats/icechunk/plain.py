"""A chunk with a checksum at its end, seen as a shard of one chunk that has no index."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import crc32c

from app.errors import DamagedError
from app.formats.reading import Fetch, Opaque, Read
from app.formats.surveying import Entry, Shard, Table
from app.model import ByteRange, ObjectRef, Part, Stored, VirtualKey

_CHECKSUM_NBYTES: Final = 4


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
        found = await fetch(Read("chunk", self.ref, ByteRange(0, 1), Opaque))
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
        body, checksum = data[:-_CHECKSUM_NBYTES], data[-_CHECKSUM_NBYTES:]
        if len(checksum) == _CHECKSUM_NBYTES and crc32c.crc32c(body) == int.from_bytes(
            checksum, "little"
        ):
            return None
        return "the checksum of the chunk does not match"
