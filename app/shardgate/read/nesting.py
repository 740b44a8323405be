"""Containers among the members of another one, such as an array in an archive.

Its layout reads through a `MemberReader`, as if each member were an object, and its locations are
translated to where the members lie: an inner chunk of a shard in an archive is one range.
"""

from collections.abc import AsyncIterator, Callable, Sequence
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
from shardgate.formats.contract import Layout, StoredObjects, Target
from shardgate.formats.listing import (
    GridWalk,
    Item,
    ListingIO,
    ListingRules,
    Rows,
    Walk,
    Wanted,
    Window,
)
from shardgate.formats.members import MemberLayout, Place, refer
from shardgate.formats.reading import (
    BoundDecoder,
    DecodeError,
    Fetch,
    Opaque,
    Read,
    RunInThread,
    Versioned,
    Weighable,
)
from shardgate.formats.surveying import (
    ChunkCollection,
    Listing,
    MissingBytes,
    Shard,
    Shards,
    Survey,
    misfit,
)
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
    VirtualKey,
    Whole,
)
from shardgate.read.perform import max_nbytes_on_loop
from shardgate.storage.contract import Listed

_LISTED_AT_ONCE: Final = 128
_LOCATED_AT_ONCE: Final = 64
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


@dataclass(frozen=True, slots=True)
class _PartMemory:
    """Memory that `_decode_part` takes; see `Read.memory_nbytes`."""

    content_nbytes: int
    part_nbytes: int
    decoding: Callable[[bytes | None, int], int] | None

    def __call__(self, data: bytes | None, _: int) -> int:
        nbytes = self.content_nbytes + (0 if data is None else len(data))
        return nbytes + (self.decoding(None, self.part_nbytes) if self.decoding else 0)


def _clip(place: Place, request: ByteRequest | None) -> tuple[int, int, int]:
    """Return where the part *request* of the member at *place* starts and stops, and the size of
    the member.
    """
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


type _InPlace = Stored | Part | Inline | Missing


@dataclass(slots=True)
class MemberReader:
    """Reads and lists the members of *outer*, which *fetch* reads, as if they were objects: an
    implementation of `Fetch` and `ListsObjects`.

    One read of a member with a content coding removes that and decodes the content, so that the
    cache holds what it was decoded to. Small parts share the content in memory.
    """

    outer: MemberLayout
    fetch: Fetch
    _place: tuple[ObjectRef, Place] | None = None
    """The last place: a chunk lies in the shard whose index was just read."""
    _content: tuple[ObjectRef, Inline] | None = None

    async def place(self, ref: ObjectRef) -> Place:
        """Return the place of the member *ref*."""
        if self._place is None or self._place[0] != ref:
            self._place = ref, await self.outer.find(self.outer.name_of(ref), self.fetch)
        return self._place[1]

    async def content(self, ref: ObjectRef) -> _InPlace:
        """Return the place of the member *ref*, in memory if it has a content coding."""
        place = await self.place(ref)
        if not isinstance(place, Coded):
            return place
        if self._content is None or self._content[0] != ref:
            if (found := await self(Read("member", ref, None, Opaque))) is None:
                return MISSING
            self._content = ref, Inline(found.value.data, found.etag)
        return self._content[1]

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, allow_stale: bool = False
    ) -> Versioned[T] | None:
        place = await self.place(read.ref)
        start, stop, nbytes = _clip(place, read.request)
        is_small_part = stop - start < nbytes and stop - start <= _SMALL_PART_NBYTES
        if isinstance(place, Coded) and is_small_part and read.memory_nbytes is None:
            place = await self.content(read.ref)
        match place:
            case Missing():
                return None
            case Inline(data, etag):
                return await _decode(read, data[start:stop], etag, nbytes)
            case Coded(stored, coding):
                place = cast("Stored", stored)
                inside = self._inflating(read, place, coding, ByteRange(start, stop))
            case Stored() | Part() if start == stop:
                etag = place.etag if isinstance(place, Stored) else ETag('"empty"')
                return await _decode(read, b"", etag, nbytes)
            case Stored() | Part():
                begin = place.byte_range.start
                request = ByteRange(begin + start, begin + stop)
                inside = read._replace(ref=place.ref, request=request, version=place.version)
        if inside.kind == "metadata" and inside.version is not None:
            inside = inside._replace(kind="member")  # it is no marker: its archive has a history
        ref, whole, _ = place
        try:
            found = await self.fetch(inside, allow_stale=allow_stale)
        except DamagedError as error:
            at_fault = ref if isinstance(error.reason, MissingBytes) else read.ref
            raise DamagedError(at_fault, error.reason) from error
        if found is None or found.size < whole.stop:
            raise DamagedError(ref, misfit(None if found is None else found.size, whole.stop))
        etag = place.etag if isinstance(place, Stored) else found.etag
        return found._replace(etag=etag, size=nbytes)

    def _inflating[T: Weighable](
        self, read: Read[T], place: Stored, coding: str, part: ByteRange
    ) -> Read[T]:
        """Return the read of the member at *place* that decodes *part* of its content."""
        nbytes, most_nbytes = announced_nbytes(coding, b""), self.outer.decoded_nbytes
        if reason := find_excess(coding, most_nbytes):
            raise DamagedError(read.ref, reason)
        decode = BoundDecoder(_decode_part, (coding, most_nbytes, part, read.decode))
        memory = _PartMemory(nbytes, part.length, read.memory_nbytes)
        return Read(read.kind, place.ref, place.byte_range, decode, place.version, memory)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        directory = self.outer.directory.prefix
        within = Window(prefix.key, after, delimiter).below(directory.key)
        damages: list[DamagedError] = []

        async def find_names() -> AsyncIterator[tuple[str, int | None]]:
            try:
                async for name in self.outer.below(*within, self.fetch):
                    yield name
            except DamagedError as damage:  # the names before it come first
                damages.append(damage)

        names = find_names()
        while batch := await take(names, _LISTED_AT_ONCE):
            sizes = await bounded_gather(self._size, batch, limit=_LOCATED_AT_ONCE)
            for (name, _), nbytes in zip(batch, sizes, strict=True):
                ref = ObjectRef(directory.bucket, directory.key + name)
                yield Listed(ref, nbytes, modified_s=self.outer.modified_s)
        for damage in damages:
            raise damage

    async def _size(self, member: tuple[str, int | None]) -> int | None:
        """Return the size of a *member* of `MemberLayout.below`; 0 where only its object tells, and
        that is not read.
        """
        name, nbytes = member
        if nbytes is not None or name.endswith("/"):
            return nbytes
        try:
            place = await self.outer.find(name, self.fetch)
        except UNREADABLE:
            return 0
        _, nbytes, _ = _clip(place, None)
        return nbytes


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


@dataclass(frozen=True, slots=True)
class MemberFolder(StoredObjects):
    """Layout of a folder of members without containers on the way to it."""

    def encloses(self, key: VirtualKey) -> bool:
        return "/" not in key


@dataclass(frozen=True, slots=True)
class NestedLayout(Layout):
    """The layout *inner*, opened among the members of *outer*."""

    outer: MemberLayout
    inner: Layout

    @property
    def is_read_only(self) -> bool:
        return self.outer.is_read_only

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        reading = MemberReader(self.outer, fetch)
        return await self._translate(await self.inner.locate(key, reading), reading)

    async def locate_listed(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate *key* as far as a listing needs it: `Whole` for a member that is served as it is,
        whose place may cost a read, or may not be allowed.
        """
        reading = MemberReader(self.outer, fetch)
        location = await self.inner.locate(key, reading)
        return location if isinstance(location, Whole) else await self._translate(location, reading)

    async def _translate(self, location: Location, reading: MemberReader) -> Location:
        match location:
            case Whole(ref):
                return await self.outer.locate(self.outer.name_of(ref), reading.fetch)
            case Stored(ref, part):
                place = _narrow(await reading.content(ref), part)
                return refer(place) if isinstance(place, Part) else place
            case Coded(Stored(ref, part), coding):
                place = _narrow(await reading.content(ref), part)
                if isinstance(place, Stored | Inline):
                    return Coded(place, coding)
                raise DamagedError(ref, f"a chunk with the coding {coding} has no known version")
        return location

    async def target(self, key: VirtualKey, fetch: Fetch) -> Target:
        return await self.outer.target(key, fetch)

    def encloses(self, key: VirtualKey) -> bool:
        return self.inner.encloses(key)

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        rules = await self.inner.listing_rules(directory, MemberReader(self.outer, fetch))
        return replace(rules, walks=[self._walking(walk) for walk in rules.walks])

    def _walking(self, walk: Walk) -> Walk:
        async def nested(wanted: Wanted, io: ListingIO) -> AsyncIterator[Item | str | Walk]:
            reading = MemberReader(self.outer, io.fetch)
            async for found in walk(wanted, io._replace(fetch=reading)):
                if isinstance(found, Item) and found.location is not None:
                    location = await self._translate(found.location, reading)
                    yield found._replace(location=location)
                elif isinstance(found, Item | str):
                    yield found
                else:
                    yield self._walking(found)

        if not isinstance(walk, GridWalk):
            return nested

        def stored(io: ListingIO) -> AsyncIterator[AsyncIterator[Rows]]:
            return walk.stored(io._replace(fetch=MemberReader(self.outer, io.fetch)))

        return replace(walk, walk=nested, stored=stored)

    async def collections(
        self, fetch: Fetch, listing: Listing, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        reading = MemberReader(self.outer, fetch)
        return await self.inner.collections(reading, listing, run_in_thread)

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        return await self.inner.shards_at(key, MemberReader(self.outer, fetch))

    async def survey(self, shard: Shard, fetch: Fetch) -> Survey | None:
        reading = MemberReader(self.outer, fetch)
        if (survey := await self.inner.survey(shard, reading)) is None:
            return None
        ref, part, version = survey.whole
        match await reading.content(ref):
            case Stored() | Part() as place:
                version = place.version if isinstance(place, Stored) else version
                whole = Stored(place.ref, place.byte_range.narrow(part), version)
                return replace(survey, whole=whole)
            case Inline(data, etag):
                return replace(survey, whole=Stored(ref, part, Fixed(etag)), data=data)
        return None

    async def explain_absence(self, key: VirtualKey, fetch: Fetch) -> str:
        return await self.inner.explain_absence(key, MemberReader(self.outer, fetch))

    def names_below(self) -> Sequence[str] | None:
        return self.inner.names_below()


def time_of_members(layout: Layout | None) -> int | None:
    """Return the time of the object that has all members of *layout*; see `MemberLayout`."""
    return layout.outer.modified_s if isinstance(layout, NestedLayout) else None


def _narrow(place: _InPlace, part: ByteRange) -> _InPlace:
    match place:
        case Inline(data, etag):
            name = ETag(f'{etag[:-1]}-{part.start:x}-{part.length:x}"')
            return Inline(data[part.start : part.stop], name)
        case Stored(_, whole) | Part(_, whole):
            return place._replace(byte_range=whole.narrow(part))
    return place
