"""From a dataset and a virtual key to the bytes, and nothing but the bytes."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, NamedTuple, cast

from app.errors import DamagedError, RangeNotSatisfiedError, VersionChangedError, lost
from app.formats.listing import Name, Window
from app.model import (
    ByteRange,
    ByteRequest,
    Gzipped,
    Inline,
    Missing,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    SuffixRange,
    UnmodifiedSince,
    VirtualKey,
    Whole,
)
from app.resolve.bodies import BodyReader
from app.resolve.budget import ByteBudget
from app.resolve.chunks import ChunkReader
from app.resolve.containers import Containers
from app.resolve.entity import Choice, Coding, Entity, Opened
from app.resolve.fetch import OVERHEAD_NBYTES, ReadCache, Remembered
from app.resolve.flight import Apart, SingleFlight
from app.resolve.listing import Page, list_page
from app.resolve.noting import TRUSTED_S, Noting
from app.resolve.opening import Held, Opening
from app.resolve.settling import settled
from app.resolve.walk import Root
from app.setting_fields import PUBLIC
from app.storage.contract import Found, ObjectHeaders, ObjectReader, Stat
from app.storage.http_headers import object_headers


@dataclass(frozen=True, slots=True)
class Dataset:
    """A root that is served."""

    name: str
    root: ObjectRef
    containers: Containers
    format: str
    """As it is configured: ``zarr``, or ``auto``."""
    cache_control: bytes
    """The header of answers that can change."""
    is_writable: bool = False
    readers: frozenset[str] = frozenset({PUBLIC})
    """Of whose grants one lets a caller read."""
    writers: frozenset[str] = frozenset({PUBLIC})
    """Of whose grants one lets a caller write, where that can be done."""
    is_public: bool = field(init=False)
    """Whether everybody may read."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_public", PUBLIC in self.readers)


_NAMES: Final = 1000
"""So many names of a page of links are gathered at a time."""


type _First = tuple[ObjectRef, ByteRequest, UnmodifiedSince | None]


class _Found(NamedTuple):
    """What a key was found to name, good while *generation* lasts and until *expires_at*."""

    entity: Entity | None
    generation: int
    expires_at: float
    oldest: tuple[float, ObjectRef] | None
    """When that was asked for which is known longest of what told this, and its name."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the entry holds."""
        if self.entity is None:
            return OVERHEAD_NBYTES
        source, headers = self.entity.source, self.entity.headers
        nbytes = len(source.data) if isinstance(source, Inline) else 0
        return OVERHEAD_NBYTES + nbytes + headers.nbytes


class Resolver:
    """Looks keys up, reads bodies, and begins anew when an object changes in between."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        store: ObjectReader,
        fetch: ReadCache,
        chunks: ChunkReader,
        budget: ByteBudget,
        *,
        stream_bytes: int,
        decoded_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._bodies = BodyReader(
            store, chunks, stream_bytes=stream_bytes, decoded_bytes=decoded_bytes
        )
        self._budget = budget
        self._stream_bytes = stream_bytes
        self._clock = clock
        self._firsts: SingleFlight[_First] | Apart[_First]
        self._firsts = SingleFlight() if fetch.is_shared else Apart()

    def recall(self, dataset: Dataset, key: VirtualKey) -> Entity | None:
        """Give the entity of *key* if it is known, without waiting."""
        found = self._recall(dataset, key)
        return None if found is None else found.entity

    def at_hand(self, entity: Entity, wanted: ByteRange | None) -> bytes | None:
        """Give the bytes *wanted* of *entity* if they need no reading; none wanted are none."""
        return self._bodies.at_hand(entity, wanted)

    def open[C: Choice](
        self,
        dataset: Dataset,
        key: VirtualKey,
        choose: Callable[[Entity], C | None],
        reading: ByteRequest | None = None,
        held: Held | None = None,
    ) -> AbstractAsyncContextManager[Opened[C] | None]:
        """Look *key* up, let *choose* decide what of it is wanted, and hold those bytes.

        `None` proves that there are no such bytes. *reading* is the part that will be read
        whatever the entity turns out to be: it saves asking for the size of an object that is
        served as it is. Where *choose* gives `None` for gzip it is asked again with what that
        holds. The bytes are reserved in *held* until the block ends.

        Raises: `VersionChangedError` only where the object never holds still, `StorageError`,
        `DamagedError`, `BusyError`.
        """

        async def attempt(held: Held) -> Opened[C] | None:
            entity = await self._find(dataset, key, reading, held)
            if entity is None:
                return None
            if (choice := choose(entity)) is None:
                entity = await self._bodies.inflate(held, entity)
                choice = cast("C", choose(entity))
            try:
                return Opened(entity, choice, await self._bodies.read(held, entity, choice.reads))
            except DamagedError as error:
                if (ref := self._told_long_ago(dataset, key)) is None:
                    raise
                raise VersionChangedError(ref) from error

        return Opening(attempt, self._fetch, held or Held(self._budget))

    async def _find(
        self, dataset: Dataset, key: VirtualKey, reading: ByteRequest | None, held: Held
    ) -> Entity | None:
        """Find what *key* names; `None` proves that it is nothing.

        Data that were rewritten in another form look damaged, absent or otherwise to who knows
        only half of the news. So damage is believed once everything about it has been asked for
        within `TRUSTED_S`, and an index that is read anew only beside metadata that are as new.
        """
        found = self._recall(dataset, key)
        if found is not None:
            return found.entity
        noting = Noting(self._fetch)
        try:
            entity = await self._look_up(dataset, key, reading, noting, held)
        except DamagedError:
            if not noting.old:
                raise
            for ref in noting.old:
                self._fetch.forget(ref, noting.began_at)
            noting = Noting(self._fetch)
            entity = await self._look_up(dataset, key, reading, noting, held)
        if any([await self._fetch.has_changed(read) for read in noting.outdated]):
            noting = Noting(self._fetch)
            entity = await self._look_up(dataset, key, reading, noting, held)
        lasting = entity and entity._replace(first=None)
        found = _Found(lasting, noting.generation, noting.expires_at, noting.oldest)
        self._fetch.memory.put((dataset.name, key), found)
        return entity

    async def _look_up(
        self,
        dataset: Dataset,
        key: VirtualKey,
        reading: ByteRequest | None,
        noting: Noting,
        held: Held,
    ) -> Entity | None:
        layout, rest = await dataset.containers.find(dataset.root, key, noting)
        match await layout.locate(rest, noting):
            case Missing():
                return None
            case Stored() as place:
                return Entity.at(place, noting.modified_s(place.ref))
            case Inline() as document:
                return Entity.at(document, noting.modified_s(dataset.root.join(key)))
            case Gzipped(place):
                entity = Entity.at(place, noting.modified_s(place.ref))
                return entity._replace(coding=Coding.GZIP)
            case Whole(ref):
                return await self._whole(ref, reading, noting, held)
            case Referenced(place, by, is_lasting, modified_s):
                if isinstance(place, Part):
                    entity = await self._part(place, reading, noting, held)
                    modified_s = max(modified_s or 0, entity.modified_s or 0) or None
                else:
                    entity = Entity.at(place)
                entity = entity._replace(modified_s=modified_s)
                return entity.referenced(by, is_lasting=is_lasting)

    def _told_long_ago(self, dataset: Dataset, key: VirtualKey) -> ObjectRef | None:
        """Name what told of *key* so long ago that what it names may be deleted by now."""
        found = cast("_Found | None", self._fetch.memory.get((dataset.name, key)))
        asked_at, ref = (found and found.oldest) or (inf, None)
        return ref if asked_at < self._clock() - TRUSTED_S else None

    def _recall(self, dataset: Dataset, key: VirtualKey) -> _Found | None:
        found = cast("_Found | None", self._fetch.memory.get((dataset.name, key)))
        if found is None or found.generation != self._fetch.generation:
            return None
        return found if self._clock() < found.expires_at else None

    async def is_group(self, dataset: Dataset, key: VirtualKey) -> bool:
        """Tell whether *key* names a container that may hold others."""
        below = VirtualKey(f"{key}/")
        layout, rest = await dataset.containers.find(dataset.root, below, self._fetch)
        if (names := await layout.names(rest, self._fetch)) is not None:
            return bool(names)
        return not rest and not layout.encloses(rest)

    async def list(self, dataset: Dataset, prefix: VirtualKey) -> AsyncGenerator[Name]:
        """Name what is right below *prefix* and can be asked for."""
        layout, rest = await dataset.containers.find(dataset.root, prefix, self._fetch)
        if (names := await layout.names(rest, self._fetch)) is not None:
            for each in names:
                yield each
            return
        after: str | None = ""
        while after is not None:
            page = await self.page(dataset, Window(prefix, after, "/"), _NAMES)
            for entry in page.entries:
                yield Name(entry.key.removeprefix(prefix), entry.nbytes)
            after = page.after

    async def page(self, dataset: Dataset, window: Window, limit: int) -> Page:
        """List up to *limit* keys of *window*, as they can be asked for.

        Raises: `StorageError`, where the store cannot be listed one that is ``lasting``;
        `DamagedError`.
        """

        async def attempt(noting: Noting) -> Page:
            root = Root(dataset.root, self._store, dataset.containers, noting)
            return await list_page(root, window, limit, noting.modified_s)

        return await settled(self._fetch, attempt)

    def root(self, dataset: Dataset) -> Root:
        """Give what is needed to look around in *dataset*."""
        return Root(dataset.root, self._store, dataset.containers, self._fetch)

    async def check_reachable(self, dataset: Dataset) -> None:
        """Return if the root of *dataset* answers, else raise."""
        await self._store.check_reachable(dataset.root)

    async def _whole(
        self, ref: ObjectRef, reading: ByteRequest | None, noting: Noting, held: Held
    ) -> Entity | None:
        stat, first = await self._see(ref, _clip(reading, self._stream_bytes), noting, held)
        if stat is None:
            return None
        place = Stored(ref, ByteRange(0, stat.size), stat.etag)
        coding = Coding.GZIP if stat.is_gzip else Coding.PLAIN
        entity = Entity(stat.etag, stat.size, place, first, coding)
        return entity._replace(modified_s=stat.modified_s, headers=stat.headers)

    async def _part(
        self, part: Part, reading: ByteRequest | None, noting: Noting, held: Held
    ) -> Entity:
        """Find *part* in the object as it is now.

        Raises: `DamagedError` where there is no such object, not enough of it, or another one.
        """
        ref, place, condition = part
        request = _clip(_inside(reading, place), self._stream_bytes)
        if request is None and condition is not None and place.length:
            request = ByteRange(place.start, place.start + 1)
        stat, first = await self._see(ref, request, noting, held, condition)
        if stat is None:
            raise DamagedError(ref, "does not exist, though it is referred to")
        if stat.size < place.stop:
            raise DamagedError(ref, f"{place} is referred to, and it has {stat.size} bytes")
        entity = Entity.at(Stored(ref, place, stat.etag), stat.modified_s)
        if first is None:
            return entity
        start, stop = first.byte_range
        seen = ByteRange(start - place.start, stop - place.start)
        return entity._replace(first=replace(first, byte_range=seen))

    async def _see(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        noting: Noting,
        held: Held,
        condition: UnmodifiedSince | None = None,
    ) -> tuple[Stat | None, Found | None]:
        """Learn what *ref* is now, by reading *request* of it if there is one.

        What is known of it does not tell whether it fulfils a *condition*.
        """
        remembered, first = (self._fetch.recall(ref) if condition is None else None), None
        if remembered is None and request is not None:
            await held.reserve(request.length)
            with suppress(RangeNotSatisfiedError):  # an empty object, or a range past the end
                remembered, first = await self._firsts.run(
                    (ref, request, condition), lambda: self._first(ref, request, condition)
                )
        stat = noting.note(ref, remembered or await self._fetch.stat(ref))
        return (stat, first) if isinstance(stat, Stat) else (None, None)

    async def _first(
        self, ref: ObjectRef, request: ByteRequest, condition: UnmodifiedSince | None
    ) -> tuple[Remembered, Found | None]:
        """Learn size and version of an object from the answer that brings its first bytes.

        Raises: `DamagedError` where it does not fulfil *condition*.
        """
        asked_at = self._clock()
        try:
            found = await self._store.get(ref, request, if_match=condition)
        except VersionChangedError as error:
            raise error if condition is None else lost(ref, condition) from error
        if not isinstance(found, Found):
            return self._fetch.learn(ref, None, asked_at), None
        headers = found.headers
        kept = headers if isinstance(headers, ObjectHeaders) else object_headers(headers)
        stat = Stat(found.size, found.etag, found.is_gzip, found.modified_s, kept)
        return self._fetch.learn(ref, stat, asked_at), found


def _inside(reading: ByteRequest | None, place: ByteRange) -> ByteRequest | None:
    """Count *reading*, which is a part of *place*, in the object; `None` if it is no such part."""
    match reading:
        case ByteRange(start, stop) if start < place.length:
            return place.narrow(ByteRange(start, min(stop, place.length)))
        case SuffixRange(length):
            return ByteRange(max(place.start, place.stop - length), place.stop)
        case _:
            return None


def _clip(reading: ByteRequest | None, most_bytes: int) -> ByteRequest | None:
    """Bound what is read before the size is known; `None` where the size must come first."""
    match reading:
        case ByteRange(start, stop):
            return ByteRange(start, min(stop, start + most_bytes))
        case SuffixRange(length) if length <= most_bytes:
            return reading
        case _:
            return None
