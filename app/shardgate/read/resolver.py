"""Resolve a dataset and a virtual key to an entity and its bytes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, cast

from shardgate.concurrency import SingleFlight, run_in_thread, yield_to_loop
from shardgate.errors import (
    DamagedError,
    RangeNotSatisfiedError,
    ReadOnlyError,
    ShardgateError,
    VersionChangedError,
    lost,
)
from shardgate.formats.listing import Name, Window
from shardgate.model import (
    ByteRange,
    ByteRequest,
    Coded,
    Inline,
    Missing,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    SuffixRange,
    UnmodifiedSince,
    VirtualKey,
    VolatileBucket,
    Whole,
)
from shardgate.read.bodies import BodyReader, Entity, Opened, Selection
from shardgate.read.budget import ByteBudget, ByteReservation
from shardgate.read.chunks import ChunkReader
from shardgate.read.consistency import FreshnessTracker, consistent
from shardgate.read.containers import Container, Dataset, Routes
from shardgate.read.listing import Page, Root, list_page
from shardgate.read.member_store import resolve
from shardgate.read.metadata_cache import OVERHEAD_NBYTES, CachedRead, ReadCache
from shardgate.storage.contract import NO_HEADERS, Found, ObjectHeaders, ObjectReader, Stat
from shardgate.storage.http_headers import object_headers

_ROOT: Final = VirtualKey("")
_NO_HEADS: Final[Mapping[Selection, bytes]] = {}
type _FirstRead = tuple[ObjectRef, ByteRequest, UnmodifiedSince | None, float]


class CachedEntity(NamedTuple):
    """Result of a look-up, `None` for a key that names nothing."""

    entity: Entity | None
    generation: int
    """`ReadCache.generation` of the look-up; a later one makes the entry stale."""
    expires_at: float
    oldest: tuple[float, ObjectRef]
    """See `FreshnessTracker.oldest`."""
    heads: Mapping[Selection, bytes] = _NO_HEADS
    """Encoded headers of responses, by the selection from the entity."""

    @property
    def nbytes(self) -> int:
        if self.entity is None:
            return OVERHEAD_NBYTES
        source = self.entity.source
        headers = self.entity.headers
        nbytes = len(source.data) if isinstance(source, Inline) else 0
        nbytes += sum(map(len, self.heads.values()))
        return OVERHEAD_NBYTES + nbytes + (0 if headers is NO_HEADERS else headers.nbytes)


class _Wanted(NamedTuple):
    """Context manager of the part of a key that an *attempt* opens, whose bytes are *held* until
    the block ends; see `Resolver.open`.
    """

    reads: ReadCache
    attempt: Callable[["_Wanted", FreshnessTracker], Awaitable[Opened | None]]
    dataset: Dataset
    key: VirtualKey
    choose: Callable[[Entity], Selection | None]
    reading: ByteRequest | None
    held: ByteReservation

    # A coroutine that is returned, and not awaited here, is one less to resume.
    def __aenter__(self) -> Coroutine[Any, Any, Opened | None]:
        return consistent(self.reads, partial(self.attempt, self))

    def __aexit__(self, *_: object) -> Coroutine[Any, Any, None]:
        return self.held.release()


class Resolver:
    """Resolves keys to entities, reads their bodies, and starts anew if an object changes."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        store: ObjectReader,
        reads: ReadCache,
        chunks: ChunkReader,
        budgets: Mapping[str, ByteBudget],
        *,
        stream_bytes: int,
        decoded_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._reads = reads
        self._bodies = BodyReader(
            store, chunks, stream_bytes=stream_bytes, decoded_bytes=decoded_bytes
        )
        self._routes = Routes(reads)
        self._budgets = budgets
        self._stream_bytes = stream_bytes
        self._clock = clock
        self._first_reads = SingleFlight[_FirstRead]()
        self.cached_body = self._bodies.cached_body

    def get_cached(self, dataset: Dataset, key: VirtualKey) -> CachedEntity | None:
        """Return the result of the look-up of *key* if it is cached and fresh."""
        found: CachedEntity | None = self._reads.cache.get((dataset.name, key))
        if found is None or found.generation != self._reads.generation:
            return None
        return found if self._clock() < found.expires_at else None

    def keep_head(
        self,
        dataset: Dataset,
        key: VirtualKey,
        found: CachedEntity,
        selected: Selection,
        head: bytes,
    ) -> None:
        """Keep the *head* of responses with *selected* of the cached entity *found*."""
        heads = {**found.heads, selected: head}
        self._reads.cache.put((dataset.name, key), found._replace(heads=heads))

    def open(
        self,
        dataset: Dataset,
        key: VirtualKey,
        choose: Callable[[Entity], Selection | None],
        reading: ByteRequest | None = None,
        held: ByteReservation | None = None,
    ) -> AbstractAsyncContextManager[Opened | None]:
        """Resolve *key*, let *choose* select a part of the entity, and hold its bytes.

        `None` proves that there are no such bytes. *reading* is the part that will be read in any
        case; of an object that is served unchanged it saves the request for the size. If *choose*
        returns `None` for an entity with a coding, it is called again with the inflated one. The
        bytes are reserved in *held* until the block ends.
        """
        if held is None:
            held = ByteReservation(self._budgets[dataset.root.bucket])
        return _Wanted(self._reads, self._open, dataset, key, choose, reading, held)

    async def _open(self, wanted: _Wanted, tracker: FreshnessTracker) -> Opened | None:
        try:
            if (entity := await self._resolve(wanted, tracker)) is None:
                return None
            selection = wanted.choose(entity)
            read = partial(self._read, wanted, entity, selection)
            source = entity.source
            if not isinstance(source, Stored):
                return await read()
            return await self._reads.repeat_damage((source, selection), source.ref, read)
        except BaseException:
            await wanted.held.release()
            raise

    async def _read(self, wanted: _Wanted, entity: Entity, selection: Selection | None) -> Opened:
        """Read what is selected; without a *selection*, of the inflated *entity*."""
        held = wanted.held
        if selection is None:
            named = wanted.dataset.root.join(wanted.key)
            entity = await self._bodies.inflate(held, entity, named)
            selection = cast("Selection", wanted.choose(entity))
        return Opened(entity, selection, await self._bodies.read(held, entity, selection.reads))

    async def _resolve(self, wanted: _Wanted, tracker: FreshnessTracker) -> Entity | None:
        """Resolve the key; `None` proves its absence.

        A newly read index is believed only together with metadata that are as new.
        """
        if (cached := self.get_cached(wanted.dataset, wanted.key)) is not None:
            tracker.adopt_age(cached.oldest)
            return cached.entity
        entity = await self._look_up(wanted, tracker)
        if outdated := tracker.outdated:
            await tracker.confirm(outdated)
        if not isinstance(wanted.dataset.root.bucket, VolatileBucket):
            cacheable = entity and entity._replace(first=None)
            found = CachedEntity(cacheable, tracker.generation, tracker.expires_at, tracker.oldest)
            self._reads.cache.put((wanted.dataset.name, wanted.key), found)
        return entity

    async def _look_up(self, wanted: _Wanted, tracker: FreshnessTracker) -> Entity | None:
        dataset = wanted.dataset
        key = wanted.key
        layout, rest, _, members = await self._routes.find(dataset, key, tracker)
        location = await layout.locate(rest, tracker)
        if members is not None:
            location = await resolve(location, tracker)
        match location:
            case Missing():
                return None
            case (Stored(ref) as place) | (Coded(Stored(ref)) as place):
                return Entity.at(place, tracker.modified.get(ref))
            case (Inline() | Coded()) as document:
                modified_s = None if members is None else members.modified_s
                modified_s = tracker.modified.get(dataset.root.join(key), modified_s)
                return Entity.at(document, modified_s)
            case Whole(ref):
                return await self._whole(ref, wanted, tracker)
            case Referenced(place, reference_id, is_immutable, modified_s):
                if isinstance(place, Part):
                    read_part = partial(self._part, place, wanted, tracker)
                    entity = await self._reads.repeat_damage(place, place.ref, read_part)
                    modified_s = max(modified_s or 0, entity.modified_s or 0) or None
                else:
                    entity = Entity.at(place)
                entity = entity._replace(modified_s=modified_s)
                return entity.referenced(reference_id, is_immutable=is_immutable)

    async def find_container(self, dataset: Dataset, key: VirtualKey) -> Container:
        return await consistent(self._reads, partial(self._routes.find, dataset, key))

    async def is_read_only(self, dataset: Dataset, key: VirtualKey = _ROOT) -> bool:
        """Return whether *key*, or by default every key, can never be written.

        If that is not found out in time it is false: the write will tell.
        """
        with suppress(ShardgateError, TimeoutError):
            async with asyncio.timeout(2):
                if not key:
                    return (await self.find_container(dataset, key)).is_read_only
                try:
                    await consistent(self._reads, partial(self._routes.target, dataset, key))
                except ReadOnlyError:
                    return True
        return False

    async def explain_absence(self, dataset: Dataset, key: VirtualKey) -> str:
        """Return why *key*, which names nothing, cannot name anything, where metadata tell."""
        with suppress(ShardgateError):  # absence is proved whatever this finds
            container = await self.find_container(dataset, key)
            return await container.layout.explain_absence(container.rest, self._reads)
        return ""

    def new_tracker(self) -> FreshnessTracker:
        """Return the tracker of a look-up, which repeats known damage as those of requests do."""
        return FreshnessTracker(self._reads)

    async def is_group(self, dataset: Dataset, key: VirtualKey) -> bool:
        """Return whether *key* names a container that may hold others."""
        container, names = await self._names(dataset, VirtualKey(f"{key}/"))
        if names is not None:
            return bool(names)
        return not container.rest and not container.layout.encloses(container.rest)

    async def list(self, dataset: Dataset, prefix: VirtualKey) -> AsyncGenerator[Name]:
        """Yield the names right below *prefix* that clients can request."""
        _, names = await self._names(dataset, prefix)
        if names is not None:
            for each in names:
                yield each
            return
        after: str | None = ""
        while after is not None:
            page = await self.page(dataset, Window(prefix, after, "/"), 1000)
            for entry in page.entries:
                yield Name(entry.key.removeprefix(prefix), entry.nbytes)
            after = page.after

    async def first_names(self, dataset: Dataset, prefix: VirtualKey, most: int) -> Sequence[Name]:
        """Return up to *most* names right below *prefix*; see `list`."""
        found: list[Name] = []
        async with aclosing(self.list(dataset, prefix)) as names:
            async for name in names:
                found.append(name)
                if len(found) == most:
                    break
                await yield_to_loop(len(found))
        return found

    async def _names(
        self, dataset: Dataset, prefix: VirtualKey
    ) -> tuple[Container, Sequence[Name] | None]:
        async def attempt(tracker: FreshnessTracker) -> tuple[Container, Sequence[Name] | None]:
            found = await self._routes.find(dataset, prefix, tracker)
            return found, await found.layout.names(found.rest, tracker, run_in_thread)

        return await consistent(self._reads, attempt)

    async def page(self, dataset: Dataset, window: Window, limit: int) -> Page:
        """List up to *limit* keys of *window*; `StorageUnusableError` means: no listing."""

        async def attempt(tracker: FreshnessTracker) -> Page:
            root = Root(dataset.root, self._store, dataset.containers, tracker)
            page = await list_page(root, window, limit, partial(_modified_s, tracker.modified))
            await tracker.confirm([read for read in tracker.outdated if read.is_marker])
            return page

        return await consistent(self._reads, attempt)

    def root(self, dataset: Dataset) -> Root:
        return Root(dataset.root, self._store, dataset.containers, self._reads)

    async def check_reachable(self, dataset: Dataset) -> None:
        await self._store.check_reachable(dataset.root)

    async def _whole(
        self, ref: ObjectRef, wanted: _Wanted, tracker: FreshnessTracker
    ) -> Entity | None:
        request = _clip(wanted.reading, self._stream_bytes)
        stat, first = await self._stat(ref, request, wanted, tracker)
        if stat is None:
            return None
        place = Stored(ref, ByteRange(0, stat.size), stat.etag)
        coding = stat.coding if stat.size else ""  # tools name one for empty objects too
        entity = Entity(stat.etag, stat.size, place, first, coding)
        return entity._replace(modified_s=stat.modified_s, headers=stat.headers)

    async def _part(self, part: Part, wanted: _Wanted, tracker: FreshnessTracker) -> Entity:
        """Resolve *part* in the current version; raise `DamagedError` if that does not fit."""
        ref, place, condition = part
        request = _clip(_inside(wanted.reading, place), self._stream_bytes)
        if request is None and condition is not None and place.length:
            request = ByteRange(place.start, place.start + 1)
        stat, first = await self._stat(ref, request, wanted, tracker, condition)
        if stat is None:
            raise DamagedError(ref, "does not exist, though it is referred to")
        if stat.size < place.stop:
            raise DamagedError(ref, f"{place} is referred to, and it has {stat.size} bytes")
        entity = Entity.at(Stored(ref, place, stat.etag), stat.modified_s)
        if first is None:
            return entity
        start, stop = first.byte_range
        inside = ByteRange(start - place.start, stop - place.start)
        return entity._replace(first=replace(first, byte_range=inside))

    async def _stat(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        wanted: _Wanted,
        tracker: FreshnessTracker,
        condition: UnmodifiedSince | None = None,
    ) -> tuple[Stat | None, Found | None]:
        """Return size and version of *ref*, cached or, for a *condition*, read with *request*."""
        cached = self._reads.cached_stat(ref) if condition is None else None
        first = None
        if cached is None and request is not None:
            await wanted.held.reserve(request.length)
            with suppress(RangeNotSatisfiedError):  # an empty object, or a range past the end
                first_read = partial(self._first_read, ref, request, condition)
                if isinstance(ref.bucket, VolatileBucket):
                    cached, first = await first_read()
                else:
                    flight = (ref, request, condition, self._reads.forgotten_at(ref))
                    cached, first = await self._first_reads.run(flight, first_read)
        stat = tracker.track(ref, cached or await self._reads.stat(ref))
        return (stat, first) if isinstance(stat, Stat) else (None, None)

    async def _first_read(
        self, ref: ObjectRef, request: ByteRequest, condition: UnmodifiedSince | None
    ) -> tuple[CachedRead, Found | None]:
        """Read the first bytes, and cache size and version; raise unless *condition* holds."""
        requested_at = self._clock()
        try:
            found = await self._store.get(ref, request, if_match=condition)
        except VersionChangedError as error:
            raise error if condition is None else lost(ref, condition) from error
        if not isinstance(found, Found):
            return self._reads.put(ref, None, requested_at), None
        headers = found.headers
        kept = headers if isinstance(headers, ObjectHeaders) else object_headers(headers)
        stat = Stat(found.size, found.etag, found.coding, found.modified_s, kept)
        return self._reads.put(ref, stat, requested_at), found


def _inside(reading: ByteRequest | None, place: ByteRange) -> ByteRequest | None:
    """Translate *reading*, a part of *place*, into the object; `None` if it is no such part."""
    match reading:
        case ByteRange(start, stop) if start < place.length:
            return place.narrow(ByteRange(start, min(stop, place.length)))
        case SuffixRange(length):
            return ByteRange(max(place.start, place.stop - length), place.stop)
        case _:
            return None


def _clip(reading: ByteRequest | None, max_bytes: int) -> ByteRequest | None:
    """Limit the bytes read before the size is known; `None` if the size must be known first."""
    match reading:
        case ByteRange(start, stop):
            return ByteRange(start, min(stop, start + max_bytes))
        case SuffixRange(length) if length <= max_bytes:
            return reading
        case _:
            return None


def _modified_s(times: Mapping[ObjectRef, int | None], ref: ObjectRef) -> int | None:
    """Return when *ref* was modified; of a shard of a session, which has no time, now: clients that
    compare times then read its chunks.
    """
    return times.get(ref) or (int(time.time()) if isinstance(ref.bucket, VolatileBucket) else None)
