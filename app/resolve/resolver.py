"""From a dataset and a virtual key to the bytes, and nothing but the bytes."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple, cast

from app.errors import DamagedError, RangeNotSatisfiedError
from app.formats.contract import Read, Versioned, Weighable
from app.model import (
    ByteRange,
    ByteRequest,
    ETag,
    Gzipped,
    Inline,
    Missing,
    ObjectRef,
    Stored,
    SuffixRange,
    VirtualKey,
    Whole,
)
from app.resolve.bodies import BodyReader
from app.resolve.budget import ByteBudget
from app.resolve.chunks import ChunkReader
from app.resolve.containers import Containers
from app.resolve.entity import Choice, Coding, Entity, Opened
from app.resolve.fetch import OVERHEAD_NBYTES, ReadCache, Remembered
from app.resolve.flight import SingleFlight
from app.resolve.opening import Held, Opening
from app.resolve.walk import Root
from app.storage.contract import Found, Listed, ObjectReader, Stat

_TRUSTED_S: Final = 1.0
"""How long what was asked of a store is not asked again because it does not fit together."""
_TOGETHER_S: Final = 5.0
"""Documents that were read longer before an index may be of another time than the index."""


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


class _Found(NamedTuple):
    """What a key was found to name, good while *generation* lasts and until *expires_at*."""

    entity: Entity | None
    generation: int
    expires_at: float

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the entry holds."""
        inline = self.entity is not None and isinstance(self.entity.source, Inline)
        return OVERHEAD_NBYTES + (self.entity.length if self.entity and inline else 0)


class _Noting:
    """A `Fetch` that notes how long everything it told is good, and what of it was old."""

    def __init__(self, fetch: ReadCache) -> None:
        self._fetch = fetch
        self.began_at = fetch.clock()
        self.generation = fetch.generation
        self.expires_at = inf
        self.old: list[ObjectRef] = []
        self._told: list[tuple[Read[Any], Remembered]] = []

    @property
    def outdated(self) -> list[Read[Any]]:
        """What was known long before something else was read anew just now."""
        newest = max((told.asked_at for _, told in self._told), default=-inf)
        if newest < self.began_at - _TRUSTED_S:
            return []
        return [
            read
            for read, told in self._told
            if told.known is not None and told.asked_at < newest - _TOGETHER_S
        ]

    async def __call__[T: Weighable](self, read: Read[T], /) -> Versioned[T] | None:
        remembered = await self._fetch.remember(read)
        if read.if_match is None:
            self._told.append((read, remembered))
        return cast("Versioned[T] | None", self.note(read.ref, remembered))

    def note(self, ref: ObjectRef, remembered: Remembered) -> Versioned[Any] | Stat | None:
        """Count *remembered*, which is known of *ref*, in."""
        self.expires_at = min(self.expires_at, remembered.expires_at)
        if remembered.asked_at < self.began_at - _TRUSTED_S and remembered.expires_at < inf:
            self.old.append(ref)
        return remembered.known


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
        self._firsts = SingleFlight[tuple[ObjectRef, ByteRequest]]()

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
    ) -> AbstractAsyncContextManager[Opened[C] | None]:
        """Look *key* up, let *choose* decide what of it is wanted, and hold those bytes.

        `None` proves that there are no such bytes. *reading* is the part that will be read
        whatever the entity turns out to be: it saves asking for the size of an object that is
        served as it is. Where *choose* gives `None` for gzip it is asked again with what that
        holds.

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
            return Opened(entity, choice, await self._bodies.read(held, entity, choice.reads))

        return Opening(attempt, self._fetch, Held(self._budget))

    async def _find(
        self, dataset: Dataset, key: VirtualKey, reading: ByteRequest | None, held: Held
    ) -> Entity | None:
        """Find what *key* names; `None` proves that it is nothing.

        Data that were rewritten in another form look damaged, absent or otherwise to who knows
        only half of the news. So damage is believed once everything about it has been asked for
        within `_TRUSTED_S`, and an index that is read anew only beside metadata that are as new.
        """
        found = self._recall(dataset, key)
        if found is not None:
            return found.entity
        noting = _Noting(self._fetch)
        try:
            entity = await self._look_up(dataset, key, reading, noting, held)
        except DamagedError:
            if not noting.old:
                raise
            for ref in noting.old:
                self._fetch.forget(ref, noting.began_at)
            noting = _Noting(self._fetch)
            entity = await self._look_up(dataset, key, reading, noting, held)
        if any([await self._fetch.has_changed(read) for read in noting.outdated]):
            noting = _Noting(self._fetch)
            entity = await self._look_up(dataset, key, reading, noting, held)
        lasting = entity and entity._replace(first=None)
        found = _Found(lasting, noting.generation, noting.expires_at)
        self._fetch.memory.put((dataset.name, key), found)
        return entity

    async def _look_up(
        self,
        dataset: Dataset,
        key: VirtualKey,
        reading: ByteRequest | None,
        noting: _Noting,
        held: Held,
    ) -> Entity | None:
        layout, rest = await dataset.containers.find(dataset.root, key, noting)
        match await layout.locate(rest, noting):
            case Missing():
                return None
            case Stored() as place:
                return _entity(place)
            case Gzipped(place):
                return _entity(place)._replace(coding=Coding.GZIP)
            case Inline(data, etag) as place:
                return Entity(etag, len(data), place)
            case Whole(ref):
                return await self._whole(ref, reading, noting, held)

    def _recall(self, dataset: Dataset, key: VirtualKey) -> _Found | None:
        found = cast("_Found | None", self._fetch.memory.get((dataset.name, key)))
        if found is None or found.generation != self._fetch.generation:
            return None
        return found if self._clock() < found.expires_at else None

    async def is_group(self, dataset: Dataset, key: VirtualKey) -> bool:
        """Tell whether *key* names a container that may hold others."""
        below = VirtualKey(f"{key}/")
        layout, rest = await dataset.containers.find(dataset.root, below, self._fetch)
        return not rest and not layout.encloses(rest)

    async def list(self, dataset: Dataset, prefix: VirtualKey) -> AsyncGenerator[Listed]:
        """List the objects and prefixes right below *prefix* that are served by their names."""
        layout, rest = await dataset.containers.find(dataset.root, prefix, self._fetch)
        directory = dataset.root.join(prefix).prefix
        async for listed in self._store.list(directory, delimiter="/"):
            if layout.shows(VirtualKey(rest + listed.ref.key.removeprefix(directory.key))):
                yield listed

    def root(self, dataset: Dataset) -> Root:
        """Give what is needed to look around in *dataset*."""
        return Root(dataset.root, self._store, dataset.containers, self._fetch)

    async def reach(self, dataset: Dataset) -> None:
        """Return if the root of *dataset* answers, else raise."""
        await self._store.reach(dataset.root)

    async def _whole(
        self, ref: ObjectRef, reading: ByteRequest | None, noting: _Noting, held: Held
    ) -> Entity | None:
        request = _clip(reading, self._stream_bytes)
        remembered, first = self._fetch.recall(ref), None
        if remembered is None and request is not None:
            await held.reserve(request.length)
            with suppress(RangeNotSatisfiedError):  # an empty object, or a range past the end
                remembered, first = await self._firsts.run(
                    (ref, request), lambda: self._first(ref, request)
                )
        stat = noting.note(ref, remembered or await self._fetch.stat(ref))
        if not isinstance(stat, Stat):
            return None
        place = Stored(ref, ByteRange(0, stat.size), stat.etag)
        coding = Coding.GZIP if stat.is_gzip else Coding.PLAIN
        return Entity(stat.etag, stat.size, place, first, coding)

    async def _first(self, ref: ObjectRef, request: ByteRequest) -> tuple[Remembered, Found | None]:
        """Learn size and version of an object from the answer that brings its first bytes."""
        asked_at = self._clock()
        found = await self._store.get(ref, request)
        if not isinstance(found, Found):
            return self._fetch.learn(ref, None, asked_at), None
        return self._fetch.learn(ref, Stat(found.size, found.etag, found.is_gzip), asked_at), found


def _entity(place: Stored) -> Entity:
    """Name a part of an object by the object's version and the place of the part."""
    _, byte_range, etag = place
    tag = f'{etag[:-1]}-{byte_range.start:x}-{byte_range.length:x}"'
    return Entity(ETag(tag), byte_range.length, place)


def _clip(reading: ByteRequest | None, most_bytes: int) -> ByteRequest | None:
    """Bound what is read before the size is known; `None` where the size must come first."""
    match reading:
        case ByteRange(start, stop):
            return ByteRange(start, min(stop, start + most_bytes))
        case SuffixRange(length) if length <= most_bytes:
            return reading
        case _:
            return None
