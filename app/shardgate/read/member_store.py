"""Members of archives and reference sets, read and listed as if they were objects.

Their bytes lie in the objects of stores, and are read there: `read_member` reads a part of such an
object in place of a member, and `resolve` locates the bytes of a chunk in it. So an inner chunk of
a shard in an archive is one range of the archive.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final, cast

from shardgate.concurrency import bounded_gather, run_in_thread, take
from shardgate.errors import (
    DamagedError,
    NotAllowedError,
    StorageDeniedError,
    StorageRedirectError,
    StorageUnusableError,
)
from shardgate.formats.compression import announced_nbytes, decode_content, find_excess
from shardgate.formats.members import Members, Place, members_of, refer
from shardgate.formats.reading import (
    BoundDecoder,
    DecodeError,
    Fetch,
    Opaque,
    Read,
    Versioned,
    Weighable,
)
from shardgate.formats.surveying import MissingBytes, Shard, Survey, misfit
from shardgate.model import (
    MISSING,
    ByteRange,
    ByteRequest,
    Coded,
    ETag,
    Fixed,
    Inline,
    Location,
    Missing,
    ObjectRef,
    Part,
    Stored,
    SuffixRange,
    Whole,
)
from shardgate.read.perform import max_nbytes_on_loop
from shardgate.storage.contract import Listed

UNREADABLE: Final = (
    DamagedError,
    NotAllowedError,
    StorageDeniedError,
    StorageRedirectError,
    StorageUnusableError,
)
"""Errors of the object behind one member, which another attempt would not cure."""
_SMALL_PART_NBYTES: Final = 64 * 1024
"""Parts of up to so many bytes are decoded each time, from the content of their member."""

type _InPlace = Stored | Part | Inline | Missing


async def read_member[T: Weighable](
    members: Members, read: Read[T], fetch: Fetch, *, allow_stale: bool = False
) -> Versioned[T] | None:
    """Perform *read* of one of *members* by *fetch*.

    One read of a member with a content coding removes that and decodes the content, so that the
    cache holds what it was decoded to. Small parts share the content in memory.
    """
    place = await members.find(read.ref.key, fetch)
    start, stop, nbytes = _clip(place, read.request)
    is_small_part = stop - start < nbytes and stop - start <= _SMALL_PART_NBYTES
    if isinstance(place, Coded) and is_small_part and read.memory_nbytes is None:
        place = await _content(members, read.ref, fetch)
    match place:
        case Missing():
            return None
        case Inline(data, etag):
            return await _decode(read, data[start:stop], etag, nbytes)
        case Coded(stored, coding):
            encoded = cast("Stored", stored)
            inside = _inflating(members, read, encoded, coding, ByteRange(start, stop))
            outer: Stored | Part = encoded
        case Stored() | Part() if start == stop:
            etag = place.etag if isinstance(place, Stored) else ETag('"empty"')
            return await _decode(read, b"", etag, nbytes)
        case Stored() | Part():
            outer = place
            begin = place.byte_range.start
            request = ByteRange(begin + start, begin + stop)
            inside = read._replace(ref=place.ref, request=request, version=place.version)
    if inside.is_marker and inside.version is not None:
        inside = inside._replace(kind="member", is_marker=False)  # its archive is the marker
    ref, whole, _ = outer
    try:
        found = await fetch(inside, allow_stale=allow_stale)
    except DamagedError as error:
        at_fault = ref if isinstance(error.reason, MissingBytes) else read.ref
        raise DamagedError(at_fault, error.reason) from error
    if found is None or found.size < whole.stop:
        raise DamagedError(ref, misfit(None if found is None else found.size, whole.stop))
    etag = place.etag if isinstance(place, Stored) else found.etag
    return found._replace(etag=etag, size=nbytes)


async def resolve(location: Location, fetch: Fetch) -> Location:
    """Return where the bytes at *location* lie in an object of a store, if that is in a member."""
    source = location.place if isinstance(location, Coded) else location
    if not isinstance(source, Whole | Stored) or (members := members_of(source.ref)) is None:
        return location
    if isinstance(source, Whole):
        member = await members.find(source.ref.key, fetch)
        return refer(member) if isinstance(member, Part) else member
    place = _narrow(await _content(members, source.ref, fetch), source.byte_range)
    if not isinstance(location, Coded):
        return refer(place) if isinstance(place, Part) else place
    if isinstance(place, Stored | Inline):
        return Coded(place, location.coding)
    reason = f"a chunk with the coding {location.coding} has no known version"
    raise DamagedError(source.ref, reason)


async def survey_shard(shard: Shard, fetch: Fetch) -> Survey | None:
    """Read the indexes of *shard*, where it lies in an object of a store; see `Shard.survey`."""
    if (survey := await shard.survey(fetch)) is None:
        return None
    ref, part, version = survey.whole
    if (members := members_of(ref)) is None:
        return survey
    match await _content(members, ref, fetch):
        case Stored() | Part() as place:
            version = place.version if isinstance(place, Stored) else version
            whole = Stored(place.ref, place.byte_range.narrow(part), version)
            return replace(survey, whole=whole)
        case Inline(data, etag):
            return replace(survey, whole=Stored(ref, part, Fixed(etag)), data=data)
    return None


async def list_members(
    members: Members, prefix: ObjectRef, fetch: Fetch, *, delimiter: str, after: str
) -> AsyncGenerator[Listed]:
    """List the members below *prefix*; see `ObjectReader.list`."""
    damages: list[DamagedError] = []

    async def find_names() -> AsyncIterator[tuple[str, int | None]]:
        try:
            async for name in members.below(prefix.key, after, delimiter, fetch):
                yield name
        except DamagedError as damage:  # the names before it come first
            damages.append(damage)

    async def find_size(member: tuple[str, int | None]) -> int | None:
        name, nbytes = member
        if nbytes is not None or name.endswith("/"):
            return nbytes
        try:
            place = await members.find(name, fetch)
        except UNREADABLE:  # only its object tells, and is not read
            return 0
        return _clip(place, None)[2]

    names = find_names()
    while batch := await take(names, 128):
        sizes = await bounded_gather(find_size, batch, limit=64)
        for (name, _), nbytes in zip(batch, sizes, strict=True):
            yield Listed(ObjectRef(prefix.bucket, name), nbytes, modified_s=members.modified_s)
    for damage in damages:
        raise damage


async def _content(members: Members, ref: ObjectRef, fetch: Fetch) -> _InPlace:
    """Return the place of the member *ref*, in memory if it has a content coding."""
    place = await members.find(ref.key, fetch)
    if not isinstance(place, Coded):
        return place
    found = await read_member(members, Read("member", ref, None, Opaque), fetch)
    return MISSING if found is None else Inline(found.value.data, found.etag)


def _inflating[T: Weighable](
    members: Members, read: Read[T], place: Stored, coding: str, part: ByteRange
) -> Read[T]:
    """Return the read of the member at *place* that decodes *part* of its content."""
    nbytes = announced_nbytes(coding, b"")
    most_nbytes = members.decoded_nbytes
    if reason := find_excess(coding, most_nbytes):
        raise DamagedError(read.ref, reason)
    decode = BoundDecoder(_decode_part, (coding, most_nbytes, part, read.decode))
    memory = _PartMemory(nbytes, part.length, read.memory_nbytes)
    return read._replace(
        ref=place.ref,
        request=place.byte_range,
        decode=decode,
        version=place.version,
        memory_nbytes=memory,
    )


@dataclass(frozen=True, slots=True)
class _PartMemory:
    """Memory that `_decode_part` takes; see `Read.memory_nbytes`."""

    content_nbytes: int
    part_nbytes: int
    decoding: Callable[[bytes | None, int], int] | None

    def __call__(self, data: bytes | None, _: int) -> int:
        nbytes = self.content_nbytes + (0 if data is None else len(data))
        return nbytes + (self.decoding(None, self.part_nbytes) if self.decoding else 0)


def _decode_part[T](
    data: bytes, coding: str, most_nbytes: int, part: ByteRange, decode: Callable[[bytes], T]
) -> T:
    """Remove a content coding, of at most *most_nbytes*, and decode *part* of the content."""
    content = decode_content(coding, data, most_nbytes)
    return decode(content[part.start : part.stop])


async def _decode[T: Weighable](
    read: Read[T], data: bytes, etag: ETag, nbytes: int
) -> Versioned[T]:
    """Decode *data* of a member of *nbytes*, in a thread if that may take long."""
    is_long = len(data) > max_nbytes_on_loop(read, data)
    try:
        value = await run_in_thread(read.decode, data, is_long=is_long)
    except DecodeError as error:
        raise DamagedError(read.ref, str(error)) from error
    return Versioned(value, etag, nbytes)


def _clip(place: Place, request: ByteRequest | None) -> tuple[int, int, int]:
    """Return start and stop of the part *request* of the member at *place*, and its whole size."""
    match place:
        case Stored(_, (begin, end)) | Part(_, (begin, end)):
            nbytes = end - begin
        case Coded(_, coding):
            nbytes = announced_nbytes(coding, b"")
        case Inline(data):
            nbytes = len(data)
        case Missing():
            nbytes = 0
    match request:
        case None:
            return 0, nbytes, nbytes
        case ByteRange(start, stop):
            return min(start, nbytes), min(stop, nbytes), nbytes
        case SuffixRange(length):
            return max(0, nbytes - length), nbytes, nbytes


def _narrow(place: _InPlace, part: ByteRange) -> _InPlace:
    match place:
        case Inline(data, etag):
            name = ETag(f'{etag[:-1]}-{part.start:x}-{part.length:x}"')
            return Inline(data[part.start : part.stop], name)
        case Stored(_, whole) | Part(_, whole):
            return place._replace(byte_range=whole.narrow(part))
    return place
