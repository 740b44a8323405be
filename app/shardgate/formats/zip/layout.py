"""The entries of an archive found, and located in it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from zlib_ng import zlib_ng

from shardgate.errors import DamagedError, lost
from shardgate.formats.compression import raw_deflate
from shardgate.formats.documents import Marked
from shardgate.formats.members import ARCHIVE_SUFFIXES, MemberLayout, Place
from shardgate.formats.reading import DecodeError, Fetch, Read, Versioned
from shardgate.formats.zip.directory import (
    LOCAL_HEADER,
    STORED,
    TAIL_NBYTES,
    UNREADABLE,
    CentralDirectory,
    CentralDirectoryDecoder,
    EndRecord,
    TailDecoder,
    memory_nbytes,
)
from shardgate.model import (
    MISSING,
    ByteRange,
    Coded,
    ETag,
    Inline,
    ObjectRef,
    Stored,
    SuffixRange,
)


@dataclass(frozen=True, slots=True)
class Zip:
    """Format of objects named ``.zip`` or ``.ozx``, whose directory has at most *limit_nbytes*."""

    limit_nbytes: int
    decoded_nbytes: int
    """See `MemberLayout`."""
    root: ObjectRef | None = None
    """The object that the settings name, which may have any name."""

    @property
    def patterns(self) -> Sequence[str]:
        return [f"*{suffix}" for suffix in ARCHIVE_SUFFIXES]

    def is_container(self, name: str) -> bool:
        return name.lower().endswith(ARCHIVE_SUFFIXES)

    async def open(self, directory: ObjectRef, fetch: Fetch) -> MemberLayout | None:
        if directory != self.root and not self.is_container(directory.key):
            return None
        decode = TailDecoder(self.limit_nbytes)
        found = await fetch(Read("metadata", directory, SuffixRange(TAIL_NBYTES), decode))
        if found is None:
            return None
        members = await _open_members(directory, found, fetch)
        return MemberLayout(directory, members, self.decoded_nbytes, found.modified_s)


async def _open_members(
    archive: ObjectRef, found: Versioned[Marked[EndRecord]], fetch: Fetch
) -> "ZipMembers":
    if (end := found.value.spec) is None:
        raise found.value.refusal(archive, "no zip archive")
    try:
        shift = end.shift(found.size)
    except DecodeError as error:
        raise DamagedError(archive, str(error)) from error
    if end.directory is not None:
        return ZipMembers(archive, found.etag, shift, end.directory)
    start, decode = shift + end.start, CentralDirectoryDecoder(end)
    place = ByteRange(start, start + end.directory_nbytes)
    read = Read("zip-directory", archive, place, decode, found.etag, memory_nbytes)
    members = ZipMembers(archive, found.etag, shift, read)
    await members.open_directory(fetch)
    return members


@dataclass(frozen=True, slots=True)
class ZipMembers:
    """The entries of one version of an archive, which begins *shift* bytes into the object."""

    archive: ObjectRef
    etag: ETag
    shift: int
    directory: CentralDirectory | Read[CentralDirectory]
    """A long one is left to the cache, which may drop it."""

    async def open_directory(self, fetch: Fetch) -> CentralDirectory:
        """Return the directory. Raises: `DamagedError`, `StorageError`."""
        if isinstance(self.directory, CentralDirectory):
            return self.directory
        if (found := await fetch(self.directory)) is None:
            raise lost(self.archive, self.etag)
        return found.value

    async def find(self, name: str, fetch: Fetch) -> Place:
        """Find the entry *name*: by the local header in front of it, checked against the directory,
        since only that tells where its data begin.
        """
        directory = await self.open_directory(fetch)
        if (entry := directory.lookup(name)) is None:
            return MISSING
        if entry.fault:
            raise DamagedError(self.archive, f"{name}: {entry.fault}")
        start = self.shift + entry.start
        if not entry.size:
            nothing = Stored(self.archive, ByteRange(start, start), self.etag)
            return Inline(b"", nothing.etag)
        place = ByteRange(start, start + LOCAL_HEADER.size + entry.name_nbytes)
        decode = LocalHeaderDecoder(entry.name_crc, entry.name_nbytes, entry.method)
        header = await fetch(Read("zip-header", self.archive, place, decode, self.etag))
        if header is None:
            raise lost(self.archive, self.etag)
        begin = place.stop + header.value.extra_nbytes
        if begin + entry.nbytes > self.shift + entry.stop:
            raise DamagedError(self.archive, f"{name}: it overlaps the next entry")
        data = Stored(self.archive, ByteRange(begin, begin + entry.nbytes), self.etag)
        return data if entry.method == STORED else Coded(data, raw_deflate(entry.size, entry.crc))

    async def below(
        self, prefix: str, after: str, delimiter: str, fetch: Fetch
    ) -> AsyncIterator[tuple[str, int | None]]:
        directory = await self.open_directory(fetch)
        sizes = directory.rows["size"]
        for name, at in directory.names.below(prefix, after, delimiter):
            yield name, None if at is None else sizes.item(at)


@dataclass(frozen=True, slots=True)
class LocalHeader:
    """The part of a local header that the directory does not tell."""

    extra_nbytes: int
    """Bytes of extra fields between the name and the data."""

    @property
    def nbytes(self) -> int:
        return 8


@dataclass(frozen=True, slots=True)
class LocalHeaderDecoder:
    """Decodes the local header, up to the name, of an entry that the directory describes so."""

    name_crc: int
    name_nbytes: int
    method: int

    def __call__(self, data: bytes) -> LocalHeader:
        if len(data) != LOCAL_HEADER.size + self.name_nbytes or not data.startswith(b"PK\3\4"):
            raise DecodeError("no local header begins where the central directory has one")
        _, flags, method, name_nbytes, extra_nbytes = LOCAL_HEADER.unpack_from(data)
        name = data[LOCAL_HEADER.size :]
        is_same = (method, name_nbytes) == (self.method, self.name_nbytes)
        if not is_same or flags & UNREADABLE or zlib_ng.crc32(name) != self.name_crc:
            raise DecodeError(f"the local header of {name[:64]!r} is not as in the directory")
        return LocalHeader(extra_nbytes)
