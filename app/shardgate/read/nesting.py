"""Containers among the members of another one, such as an array in an archive.

Its layout reads through a `MemberFetch`, as if each member were an object, and its locations are
translated to where the members lie: an inner chunk of a shard in an archive is one range.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from shardgate.errors import DamagedError
from shardgate.formats.compression import decode_content
from shardgate.formats.contract import Layout, StoredObjects, Target
from shardgate.formats.listing import GridWalk, Item, ListingIO, ListingRules, Rows, Walk, Wanted
from shardgate.formats.members import MemberLayout, refer
from shardgate.formats.reading import (
    DecodeError,
    Fetch,
    Opaque,
    Read,
    RunInThread,
    Versioned,
    Weighable,
)
from shardgate.formats.surveying import ChunkCollection, Listing, Shard, Shards, Survey
from shardgate.model import (
    MISSING,
    ByteRange,
    ByteRequest,
    Coded,
    ETag,
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


@dataclass(frozen=True, slots=True)
class _ContentDecoder:
    """Removes a content coding, of at most *most_nbytes*."""

    coding: str
    most_nbytes: int

    def __call__(self, data: bytes) -> Opaque:
        return Opaque(decode_content(self.coding, data, self.most_nbytes))


@dataclass(frozen=True, slots=True)
class _ContentMemory:
    """Memory that removing a content coding takes. A value: methods of equal values differ."""

    most_nbytes: int

    def __call__(self, data: bytes | None, _: int) -> int:
        return self.most_nbytes if data is None else len(data) + self.most_nbytes


def _clip(request: ByteRequest | None, nbytes: int) -> ByteRange:
    """Return the part *request* of a member of *nbytes*."""
    match request:
        case None:
            return ByteRange(0, nbytes)
        case ByteRange(start, stop):
            return ByteRange(min(start, nbytes), min(stop, nbytes))
        case SuffixRange(length):
            return ByteRange(max(0, nbytes - length), nbytes)


type _InPlace = Stored | Part | Inline | Missing


@dataclass(slots=True)
class MemberFetch:
    """Implementation of `Fetch` for the members of *outer*, which *fetch* reads."""

    outer: MemberLayout
    fetch: Fetch
    _last: tuple[ObjectRef, _InPlace] | None = None

    async def place(self, ref: ObjectRef) -> _InPlace:
        """Return the place of the member *ref*; one with a content coding is decoded into memory.

        The last one is remembered: that of the shard whose index has just been read.
        """
        if self._last is not None and self._last[0] == ref:
            return self._last[1]
        place = await self.outer.members.find(self.outer.name_of(ref), self.fetch)
        if isinstance(place, Coded):
            place = await self._decoded(place)
        self._last = ref, place
        return place

    async def _decoded(self, coded: Coded) -> Inline | Missing:
        (archive, byte_range, version), coding, _ = coded
        most_nbytes = self.outer.decoded_nbytes
        decode, memory = _ContentDecoder(coding, most_nbytes), _ContentMemory(most_nbytes)
        read = Read("member", archive, byte_range, decode, version, memory)
        found = await self.fetch(read)
        return MISSING if found is None else Inline(found.value.data, coded.place.etag)

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, allow_stale: bool = False
    ) -> Versioned[T] | None:
        place = await self.place(read.ref)
        if isinstance(place, Missing):
            return None
        if isinstance(place, Inline):
            part, etag = _clip(read.request, len(place.data)), place.etag
            return Versioned(
                _decode(read, place.data[part.start : part.stop]), etag, len(place.data)
            )
        ref, whole, version = place
        if not (part := _clip(read.request, whole.length)).length:
            etag = place.etag if isinstance(place, Stored) else ETag('"empty"')
            return Versioned(_decode(read, b""), etag, whole.length)
        inside = read._replace(ref=ref, request=whole.narrow(part), version=version)
        try:
            found = await self.fetch(inside, allow_stale=allow_stale)
        except DamagedError as error:
            raise DamagedError(read.ref, error.reason) from error
        if found is None or found.size < whole.stop:
            size = "does not exist" if found is None else f"has {found.size} bytes"
            raise DamagedError(ref, f"{size}, and {whole} is referred to as {read.ref}")
        etag = place.etag if isinstance(place, Stored) else found.etag
        return found._replace(etag=etag, size=whole.length)


def _decode[T: Weighable](read: Read[T], data: bytes) -> T:
    try:
        return read.decode(data)
    except DecodeError as error:
        raise DamagedError(read.ref, str(error)) from error


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

    def reading(self, fetch: Fetch) -> MemberFetch:
        return MemberFetch(self.outer, fetch)

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        reading = self.reading(fetch)
        return await self._translate(await self.inner.locate(key, reading), reading)

    async def locate_listed(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate *key* as far as a listing needs it: `Whole` for a member that is served as it is,
        whose place may cost a read, or may not be allowed.
        """
        reading = self.reading(fetch)
        location = await self.inner.locate(key, reading)
        return location if isinstance(location, Whole) else await self._translate(location, reading)

    async def _translate(self, location: Location, reading: MemberFetch) -> Location:
        match location:
            case Whole(ref):
                return await self.outer.locate(self.outer.name_of(ref), reading.fetch)
            case Stored(ref, part):
                place = _narrow(await reading.place(ref), part)
                return refer(place) if isinstance(place, Part) else place
            case Coded(Stored(ref, part), coding):
                match _narrow(await reading.place(ref), part):
                    case Stored() as place:
                        return Coded(place, coding)
                    case Inline(data, etag):
                        return Inline(decode_content(coding, data, self.outer.decoded_nbytes), etag)
                raise DamagedError(ref, f"a chunk with the coding {coding} has no known version")
        return location

    async def target(self, key: VirtualKey, fetch: Fetch) -> Target:
        return await self.outer.target(key, fetch)

    def encloses(self, key: VirtualKey) -> bool:
        return self.inner.encloses(key)

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        rules = await self.inner.listing_rules(directory, self.reading(fetch))
        return replace(rules, walks=[self._walking(walk) for walk in rules.walks])

    def _walking(self, walk: Walk) -> Walk:
        async def nested(wanted: Wanted, io: ListingIO) -> AsyncIterator[Item | str | Walk]:
            async for found in walk(wanted, self._inside(io)):
                if isinstance(found, Item) and found.location is not None:
                    location = await self._translate(found.location, self.reading(io.fetch))
                    yield found._replace(location=location)
                elif isinstance(found, Item | str):
                    yield found
                else:
                    yield self._walking(found)

        if not isinstance(walk, GridWalk):
            return nested

        def stored(io: ListingIO) -> AsyncIterator[AsyncIterator[Rows]]:
            return walk.stored(self._inside(io))

        return replace(walk, walk=nested, stored=stored)

    def _inside(self, io: ListingIO) -> ListingIO:
        return io._replace(fetch=self.reading(io.fetch))

    async def collections(
        self, fetch: Fetch, listing: Listing, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        found = await self.inner.collections(self.reading(fetch), listing, run_in_thread)
        return [
            replace(each, shards=each.shards and NestedShards(self, each.shards))
            if isinstance(each, ChunkCollection)
            else each
            for each in found
        ]

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        shards = await self.inner.shards_at(key, self.reading(fetch))
        return None if shards is None else NestedShards(self, shards)

    async def explain_absence(self, key: VirtualKey, fetch: Fetch) -> str:
        return await self.inner.explain_absence(key, self.reading(fetch))

    def expects(self, path: str) -> bool:
        return self.inner.expects(path)

    def names_below(self) -> Sequence[str] | None:
        return self.inner.names_below()

    async def whole(self, shard: Stored, fetch: Fetch) -> Stored | None:
        """Return where *shard*, a member or a part of one, lies; `None` for one in memory."""
        match _narrow(await self.reading(fetch).place(shard.ref), shard.byte_range):
            case Stored() as place:
                return place
            case Part(ref, byte_range):
                return Stored(ref, byte_range, shard.version)
        return None


def _narrow(place: _InPlace, part: ByteRange) -> _InPlace:
    match place:
        case Inline(data, etag):
            name = ETag(f'{etag[:-1]}-{part.start:x}-{part.length:x}"')
            return Inline(data[part.start : part.stop], name)
        case Stored(_, whole) | Part(_, whole):
            return place._replace(byte_range=whole.narrow(part))
    return place


@dataclass(frozen=True, slots=True)
class NestedShards:
    """The shards *inner* of a layout among members."""

    layout: NestedLayout
    inner: Shards

    @property
    def prefix(self) -> str:
        return self.inner.prefix

    @property
    def is_checkable(self) -> bool:
        return self.inner.is_checkable

    def named(self, key: str) -> "NestedShard | None":
        return self._nested(self.inner.named(key))

    def holding(self, key: VirtualKey) -> "NestedShard | None":
        return self._nested(self.inner.holding(key))

    def every(self) -> Iterator[Shard] | None:
        every = self.inner.every()
        return None if every is None else (NestedShard(self.layout, shard) for shard in every)

    def _nested(self, shard: Shard | None) -> "NestedShard | None":
        return None if shard is None else NestedShard(self.layout, shard)


@dataclass(frozen=True, slots=True)
class NestedShard:
    """One shard among members; one that is not stored by itself, but deflated, has no survey."""

    layout: NestedLayout
    inner: Shard

    @property
    def ref(self) -> ObjectRef:
        return self.inner.ref

    @property
    def key(self) -> VirtualKey:
        return self.inner.key

    async def survey(self, fetch: Fetch) -> Survey | None:
        survey = await self.inner.survey(self.layout.reading(fetch))
        if survey is None or (whole := await self.layout.whole(survey.whole, fetch)) is None:
            return None
        if (inner := survey.inner) is None:
            return replace(survey, whole=whole)
        return replace(
            survey, whole=whole, inner=lambda entry: NestedShard(self.layout, inner(entry))
        )
