"""The entries of an archive found, and located in it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from zlib_ng import zlib_ng

from shardgate.errors import DamagedError, lost
from shardgate.formats.compression import raw_deflate
from shardgate.formats.members import ARCHIVE_SUFFIXES, Members, Place
from shardgate.formats.reading import BoundDecoder, DecodeError, Fetch, Read, RunInThread
from shardgate.formats.surveying import ChunkCollection, Listing
from shardgate.formats.zip.directory import (
    LOCAL_HEADER,
    STORED,
    TAIL_NBYTES,
    UNREADABLE,
    CentralDirectory,
    ZipEntry,
    decode_directory,
    decode_tail,
    memory_nbytes,
    unwrap,
)
from shardgate.model import MISSING, ByteRange, Coded, Inline, ObjectRef, Stored, SuffixRange

_MOST_PLACES: Final = 256


@dataclass(frozen=True, slots=True)
class Zip:
    """Format of objects named ``.zip`` or ``.ozx``, whose directory has at most *limit_nbytes*."""

    limit_nbytes: int
    decoded_nbytes: int
    """See `Members`."""
    root: ObjectRef | None = None
    """The object that the settings name, which may have any name."""

    @property
    def patterns(self) -> Sequence[str]:
        return [f"*{suffix}" for suffix in ARCHIVE_SUFFIXES]

    def is_container(self, name: str) -> bool:
        return name.lower().endswith(ARCHIVE_SUFFIXES)

    async def open(self, ref: ObjectRef, fetch: Fetch) -> Members | None:
        if ref != self.root and not self.is_container(ref.key):
            return None
        decode = BoundDecoder(decode_tail, (self.limit_nbytes,))
        found = await fetch(Read("metadata", ref, SuffixRange(TAIL_NBYTES), decode, is_marker=True))
        if found is None:
            return None
        if found.value.spec is None:
            raise found.value.refusal(ref, "no zip archive")
        start = found.size - found.value.spec.directory_from_end
        end = unwrap(found.value.spec, start)
        # Other data may stand before the archive, such as a program that extracts it.
        shift = start - end.directory_start
        if shift < 0:
            reason = f"its end record places the central directory {-shift} bytes too far behind"
            raise DamagedError(ref, reason)
        table: CentralDirectory | Read[CentralDirectory] | None = end.directory
        if table is None:
            place = ByteRange(start, start + end.directory_nbytes)
            decode_rest = BoundDecoder(decode_directory, (end,))
            table = Read("zip-directory", ref, place, decode_rest, found.etag, memory_nbytes)
        members = ZipMembers(ref, found.etag, self.decoded_nbytes, found.modified_s, shift, table)
        await members.open_table(fetch)
        return members


@dataclass(frozen=True, slots=True)
class ZipMembers(Members):
    """The entries of one version of an archive, which begins *shift* bytes into the object."""

    shift: int
    table: CentralDirectory | Read[CentralDirectory]
    """A long one is left to the cache, which may drop it."""
    places: dict[str, Place] = field(default_factory=dict, compare=False)
    """Places of the entries that were found last."""

    async def open_table(self, fetch: Fetch) -> CentralDirectory:
        """Return the central directory. Raises: `DamagedError`, `StorageError`."""
        if isinstance(self.table, CentralDirectory):
            return self.table
        if (found := await fetch(self.table)) is None:
            raise lost(self.ref, self.etag)
        return found.value

    async def find(self, name: str, fetch: Fetch) -> Place:
        if (place := self.places.get(name)) is None:
            place = await self._locate(name, fetch)
            if place is MISSING:  # which costs no read to find again
                return place
            if len(self.places) >= _MOST_PLACES:
                del self.places[next(iter(self.places))]
            self.places[name] = place
        return place

    async def _locate(self, name: str, fetch: Fetch) -> Place:
        """Locate the entry *name* by the local header in front of it, checked against the
        directory, since only that tells where its data begin.
        """
        if (entry := (await self.open_table(fetch)).lookup(name)) is None:
            return MISSING
        if entry.fault:
            raise DamagedError(self.ref, f"{name}: {entry.fault}")
        start = self.shift + entry.start
        if not entry.size:
            nothing = Stored(self.ref, ByteRange(start, start), self.etag)
            return Inline(b"", nothing.etag)
        place = ByteRange(start, start + LOCAL_HEADER.size + entry.name_nbytes)
        decode = BoundDecoder(decode_local_header, (entry,))
        header = await fetch(Read("zip-header", self.ref, place, decode, self.etag))
        if header is None:
            raise lost(self.ref, self.etag)
        begin = place.stop + header.value.item()
        if begin + entry.nbytes > self.shift + entry.stop:
            raise DamagedError(self.ref, f"{name}: it overlaps the next entry")
        data = Stored(self.ref, ByteRange(begin, begin + entry.nbytes), self.etag)
        return data if entry.method == STORED else Coded(data, raw_deflate(entry.size, entry.crc))

    async def below(
        self, prefix: str, after: str, delimiter: str, fetch: Fetch
    ) -> AsyncIterator[tuple[str, int | None]]:
        table = await self.open_table(fetch)
        sizes = table.rows["size"]
        for name, at in table.names.below(prefix, after, delimiter):
            yield name, None if at is None else sizes.item(at)

    async def collections(
        self, fetch: Fetch, _: Listing, __: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        return (await self.open_table(fetch)).left_out.describe("zip")


def decode_local_header(data: bytes, entry: ZipEntry) -> np.uint16:
    """Return the bytes of extra fields between the name and the data of *entry*, from its local
    header up to the name; as a numpy integer, which has the `nbytes` that caches ask for.
    """
    if len(data) != LOCAL_HEADER.size + entry.name_nbytes or not data.startswith(b"PK\3\4"):
        raise DecodeError("no local header begins where the central directory has one")
    _, flags, method, name_nbytes, extra_nbytes = LOCAL_HEADER.unpack_from(data)
    name = data[LOCAL_HEADER.size :]
    is_same = (method, name_nbytes) == (entry.method, entry.name_nbytes)
    if not is_same or flags & UNREADABLE or zlib_ng.crc32(name) != entry.name_crc:
        raise DecodeError(f"the local header of {name[:64]!r} is not as in the directory")
    return np.uint16(extra_nbytes)
