"""Cache of decoded indexes and metadata, and shared reads."""

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from functools import partial
from math import inf, nextafter
from sys import getsizeof
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote

from cachetools import LRUCache, TTLCache

from shardgate.concurrency import SingleFlight
from shardgate.errors import DamagedError, MetadataMissingError
from shardgate.formats.members import MemberBucket
from shardgate.formats.reading import DecodedMetadata, Read, Versioned, Weighable
from shardgate.model import ETag, Fixed, ObjectRef, VolatileBucket
from shardgate.read.budget import ByteBudget
from shardgate.read.member_store import read_member
from shardgate.read.perform import perform
from shardgate.storage.contract import NotModified, ObjectReader, Stat
from shardgate.storage.local_files import CODED

_log = logging.getLogger(__name__)

OVERHEAD_NBYTES: Final = 1024
"""Memory of a cache entry without its value: the key, its reference, its place in the order."""
TRUSTED_S: Final = 1.0
"""Younger answers of a store are believed even if they contradict one another."""
_MAX_FORGOTTEN: Final = 65536
_MAX_MARKERS: Final = 65536


@dataclass(slots=True)
class CacheCounters:
    """Counters of cache look-ups."""

    hits: int = 0
    joins: int = 0
    """Look-ups that waited for a read that another caller had started."""
    misses: int = 0
    """Look-ups that started a read of a store."""
    merged: int = 0
    """Chunks read together with a neighbour."""
    overfetched_nbytes: int = 0
    """Bytes that were read between and around such chunks, for no request."""


class SizedLRUCache[K: Hashable, V]:
    """LRU cache of at most *maxsize* bytes; *sizeof* returns the bytes of a key and its value.

    A hit in `cachetools.LRUCache` takes five calls, and a request looks into several caches.
    """

    def __init__(self, maxsize: int, sizeof: Callable[[K, V], int]) -> None:
        self.maxsize = maxsize
        self.currsize = 0
        self.evictions = 0
        self._sizeof = sizeof
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Return the value of *key*, from now on the one that was used last."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def values(self) -> list[V]:
        """Return all values, the least recently used one first."""
        return [value for value, _ in self._entries.values()]

    def put(self, key: K, value: V) -> None:
        """Replace the value of *key*; a value larger than the cache is not stored."""
        if not self.maxsize:
            return
        nbytes = self._sizeof(key, value)
        _, old_nbytes = self._entries.pop(key, (None, 0))
        self.currsize -= old_nbytes
        if nbytes > self.maxsize:
            return
        self._entries[key] = value, nbytes
        self.currsize += nbytes
        while self.currsize > self.maxsize:
            _, (_, dropped_nbytes) = self._entries.popitem(last=False)
            self.currsize -= dropped_nbytes
            self.evictions += 1


class MetadataCache(SizedLRUCache[Hashable, Any]):
    """Cache of values with the attribute ``nbytes``, and a budget for decoding in progress."""

    def __init__(self, max_bytes: int, decoding: ByteBudget | None = None) -> None:
        """Make a cache of *max_bytes*; by default decoding is not bounded."""
        super().__init__(max_bytes, _entry_nbytes)
        self.decoding = decoding or ByteBudget(2**63, wait_s=0)


class CachedRead(NamedTuple):
    """State of an object at *requested_at*: a decoded part, its stat, or `None` for absence.

    Times are those of `ReadCache.clock`; `expires_at` is infinite for pinned reads.
    """

    known: Versioned[Any] | Stat | None
    requested_at: float
    expires_at: float

    @property
    def nbytes(self) -> int:
        if isinstance(self.known, Versioned):
            return OVERHEAD_NBYTES + cast("Weighable", self.known.value).nbytes
        return OVERHEAD_NBYTES + (0 if self.known is None else self.known.headers.nbytes)


class _KnownDamage(NamedTuple):
    ref: ObjectRef
    reason: str
    requested_at: float
    version: ETag | None
    """Version of the object when its size was read last, if it was."""


class ReadCache:
    """Performs the reads that formats describe, shares them, and keeps the results in *cache*.

    The state of a mutable object is fresh for *ttl_s*, then it is revalidated by its ETag; reads
    of one version never expire. Damage is remembered for `TRUSTED_S`, other failures are not. A
    caller that finds an entry outdated calls `forget`, which outdates everything read before of
    that object, damage too. In a volatile bucket no state is fresh, or shared: each read is newer
    than the call, and absence is believed at once.
    """

    def __init__(
        self,
        store: ObjectReader,
        cache: MetadataCache,
        *,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self.cache = cache
        self._ttl_s = ttl_s
        self.clock = clock
        self._flights = SingleFlight[tuple[Hashable, float]]()
        self._forgotten = TTLCache[str, float](_MAX_FORGOTTEN, max(ttl_s, TRUSTED_S), clock)
        self._all_forgotten_at = -inf
        self._damage = SizedLRUCache[Hashable, _KnownDamage](
            4 * 1024**2,  # some 3,000 damaged objects
            lambda _, damage: OVERHEAD_NBYTES + getsizeof(damage.reason),
        )
        self._markers = LRUCache[str, float](_MAX_MARKERS)
        """Markers that were present, with the time since when each is missing, or `inf`."""
        self._reported = LRUCache[ObjectRef, ETag](_MAX_MARKERS)
        """Versions of metadata whose `why_sharded` is in the log."""
        self.counters = CacheCounters()
        self.generation = 0
        """Incremented whenever cached state turns out to be outdated."""

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, allow_stale: bool = False
    ) -> Versioned[T] | None:
        bucket = read.ref.bucket
        if isinstance(bucket, MemberBucket):
            return await read_member(bucket.members, read, self, allow_stale=allow_stale)
        cached = await self.get_or_fetch(read, allow_stale=allow_stale, repeats_damage=False)
        return cast("Versioned[T] | None", cached.known)

    async def get_or_fetch(
        self, read: Read[Any], *, allow_stale: bool = False, repeats_damage: bool = True
    ) -> CachedRead:
        """Return the cached result of *read*, or perform it; *repeats_damage* that is known."""
        entry = self._fresh(read, read.ref) or (self._last(read) if allow_stale else None)
        if entry is None:
            share = partial(self._share, read, read.ref, lambda: self._perform(read))
            entry = await (self.repeat_damage(read, read.ref, share) if repeats_damage else share())
        else:
            self.counters.hits += 1
        return entry._replace(expires_at=inf) if allow_stale and entry.known is not None else entry

    async def repeat_damage[T](
        self, key: Hashable, ref: ObjectRef, call: Callable[[], Awaitable[T]]
    ) -> T:
        """Raise the damage of *ref* that a call with *key* found within `TRUSTED_S`, unless *ref*
        was forgotten, or read in another version, since. Otherwise return the result of *call*.
        """
        # Mostly none is known, which takes no call to see.
        known = self._known_damage(key, ref) if self._damage.currsize else None
        if known is not None:
            self.counters.hits += 1
            raise DamagedError(known.ref, known.reason)
        requested_at = self.clock()
        try:
            return await call()
        except DamagedError as error:  # not kept itself: its traceback refers to the data
            if not isinstance(ref.bucket, VolatileBucket):
                damage = _KnownDamage(error.ref, error.reason, requested_at, self._version_of(ref))
                self._damage.put(key, damage)
            raise

    def _known_damage(self, key: Hashable, ref: ObjectRef) -> _KnownDamage | None:
        damage = self._damage.get(key)
        if damage is None or self.clock() >= damage.requested_at + TRUSTED_S:
            return None
        is_outdated = self._is_forgotten(damage, ref) or damage.version != self._version_of(ref)
        return None if is_outdated else damage

    def _version_of(self, ref: ObjectRef) -> ETag | None:
        stat: CachedRead | None = self.cache.get(ref)
        return None if stat is None else _version(stat.known)

    def prefetch(self, read: Read[Any]) -> None:
        """Start *read* if nothing of it is cached; whoever asks for it then waits less."""
        is_known = read in self.cache or self._known_damage(read, read.ref) is not None
        if is_known or isinstance(read.ref.bucket, VolatileBucket):
            return
        if (flight := (read, self.forgotten_at(read.ref))) not in self._flights:
            self._flights.start(flight, lambda: self._perform(read))

    async def refresh(self, read: Read[Any], known: CachedRead | None = None) -> bool:
        """Perform *read* again, and return whether it found another version than *known*."""
        try:
            after = await self._share(read, read.ref, lambda: self._perform(read))
        except MetadataMissingError:
            return True
        return known is None or _version(known.known) != _version(after.known)

    def has_confirmed(self, read: Read[Any], known: CachedRead, since: float) -> bool:
        """Return whether *read* found the version of *known* at *since* or later."""
        entry = self._fresh(read, read.ref)
        if entry is None or entry.requested_at < since:
            return False
        return _version(entry.known) == _version(known.known)

    def holds(self, read: Read[Any], entry: CachedRead) -> bool:
        """Return whether *entry* is still the cached result of *read*, and not outdated."""
        return self.cache.get(read) is entry and not self._is_forgotten(entry, read.ref)

    async def stat(self, ref: ObjectRef) -> CachedRead:
        """Return the cached size and version of *ref*, or ask the store."""
        if (entry := self.cached_stat(ref)) is None:
            return await self._share(ref, ref, lambda: self._perform_stat(ref))
        self.counters.hits += 1
        return entry

    def cached_stat(self, ref: ObjectRef) -> CachedRead | None:
        """Return the size and version of *ref* if they are cached and fresh."""
        return self._fresh(ref, ref)

    def decoded[T: Weighable](self, read: Read[T], etag: ETag) -> T | None:
        """Return the result of *read* in the version *etag*, if that is the last that was read."""
        entry: CachedRead | None = self.cache.get(read)
        if entry is None or not isinstance(known := entry.known, Versioned):
            return None
        return known.value if known.etag == etag and not known.coding else None

    def put(
        self,
        key: Read[Any] | ObjectRef,
        known: Versioned[Any] | Stat | None,
        requested_at: float | None = None,
    ) -> CachedRead:
        """Cache *known*, the result of a read, or size and version of an object, at *requested_at*.

        Without *requested_at* it was just written: a `forget` before this call does not outdate it.
        """
        if requested_at is None:
            requested_at = nextafter(self.clock(), inf)
        ref, version = (key.ref, key.version) if isinstance(key, Read) else (key, None)
        is_volatile = isinstance(ref.bucket, VolatileBucket)
        before = self.cache.get(key)
        if before is not None and not is_volatile and _version(before.known) != _version(known):
            self.generation += 1
        is_pinned = known is not None and isinstance(version, str | Fixed)
        expires_at = inf if is_pinned else requested_at + (0 if is_volatile else self._ttl_s)
        entry = CachedRead(known, requested_at, expires_at)
        self.cache.put(key, entry)
        return entry

    def put_written(self, read: Read[Any], written: Versioned[Any]) -> None:
        """Cache *written*, whose time in the store is not known, for `decoded` and stale reads."""
        self.cache.put(read, self.put(read, written)._replace(expires_at=-inf))

    def forget(self, ref: ObjectRef, known_at: float = inf) -> None:
        """Outdate everything cached of *ref*, unless another reader did so since *known_at*."""
        if not isinstance(ref.bucket, VolatileBucket) and self.forgotten_at(ref) < known_at:
            if self._forgotten.currsize >= _MAX_FORGOTTEN:  # else the oldest would be fresh again
                self._forgotten.clear()
                self._all_forgotten_at = self.clock()
            self._forgotten[_name(ref)] = self.clock()
            self.generation += 1

    def mark_present(self, ref: ObjectRef) -> None:
        """Record that the marker *ref* exists; for `ttl_s` reads that miss it will fail."""
        if not isinstance(ref.bucket, VolatileBucket):
            self._markers[_path(ref)] = inf

    def mark_removed(self, ref: ObjectRef) -> None:
        """Record that the marker *ref* is absent, because this process removed it."""
        for name in (_path(ref), _name(ref)):
            self._markers.pop(name, None)

    def _check_absence(self, ref: ObjectRef, requested_at: float) -> None:
        """Raise `MetadataMissingError` until the marker *ref* has been missing for `ttl_s`."""
        if (missing_since := self._markers.get(_path(ref))) is None:
            return
        if missing_since == inf:
            self._markers[_path(ref)] = requested_at
            self.forget(ref)
        elif requested_at >= missing_since + self._ttl_s:
            self.mark_removed(ref)
            return
        raise MetadataMissingError(ref)

    def _report(self, ref: ObjectRef, found: Versioned[Any]) -> None:
        """Log once why an array or a part of a volume is served as it is stored."""
        value = found.value
        if not isinstance(value, DecodedMetadata) or not (reason := value.why_sharded):
            return
        if self._reported.get(ref) != found.etag:
            self._reported[ref] = found.etag
            _log.info("%s: served as stored: %s", ref, reason)

    def forgotten_at(self, ref: ObjectRef) -> float:
        """Return the time up to which everything read of *ref* is outdated."""
        return max(self._forgotten.get(_name(ref), -inf), self._all_forgotten_at)

    def _fresh(self, key: Hashable, ref: ObjectRef) -> CachedRead | None:
        entry: CachedRead | None = self.cache.get(key)
        if entry is None or entry.expires_at == inf:
            return entry
        is_outdated = entry.expires_at <= self.clock() or self._is_forgotten(entry, ref)
        return None if is_outdated else entry

    def _last(self, read: Read[Any]) -> CachedRead | None:
        entry: CachedRead | None = self.cache.get(read)
        if entry is None or entry.known is None or self._is_forgotten(entry, read.ref):
            return None
        return entry

    def _is_forgotten(self, entry: CachedRead | _KnownDamage, ref: ObjectRef) -> bool:
        if not self._forgotten:
            return entry.requested_at <= self._all_forgotten_at
        return entry.requested_at <= self.forgotten_at(ref)

    async def _share(
        self, key: Hashable, ref: ObjectRef, call: Callable[[], Coroutine[Any, Any, CachedRead]]
    ) -> CachedRead:
        """Join a call of *key* that started after *ref* was last forgotten, or start one."""
        if isinstance(ref.bucket, VolatileBucket):
            self.counters.misses += 1
            return await call()
        flight = (key, self.forgotten_at(ref))
        if flight in self._flights:
            self.counters.joins += 1
        else:
            self.counters.misses += 1
        return await self._flights.run(flight, call)

    async def _perform_stat(self, ref: ObjectRef) -> CachedRead:
        requested_at = self.clock()
        return self.put(ref, await self._store.stat(ref), requested_at)

    async def _perform[T: Weighable](self, read: Read[T]) -> CachedRead:
        requested_at = self.clock()
        last = self._last(read)
        # Without its time, an unchanged one has to be read again too.
        known = None if last is None or last.expires_at == -inf else last.known
        found = await perform(self._store, read, _version(known), self.cache.decoding)
        if read.is_marker:
            self._check_marker(read.ref, found, requested_at)
        if isinstance(found, NotModified):
            return self.put(read, known, requested_at)
        if found is not None:
            self._report(read.ref, found)
        return self.put(read, found, requested_at)

    def _check_marker(
        self, ref: ObjectRef, found: Versioned[Any] | NotModified | None, requested_at: float
    ) -> None:
        """Note whether the marker *ref* exists. Raises: `MetadataMissingError`, `DamagedError`."""
        value = found.value if isinstance(found, Versioned) else None
        metadata = value if isinstance(value, DecodedMetadata) else None
        if found is None or (metadata is not None and metadata.is_page):
            self._check_absence(ref, requested_at)
        elif metadata is not None and not metadata.is_metadata:
            if _path(ref) in self._markers:
                raise DamagedError(ref, "it was metadata before, and no longer is")
        elif requested_at > self.forgotten_at(ref):
            self.mark_present(ref)


def uncached_reads(store: ObjectReader) -> ReadCache:
    """Return reads that ask *store* each time."""
    # Decoders of unknown needs wait for one another, however long.
    return ReadCache(store, MetadataCache(0, ByteBudget(2**63, wait_s=3600)), ttl_s=0)


def _entry_nbytes(key: Hashable, entry: Any) -> int:
    """Weigh an entry, and the text of its key, which clients choose: up to four bytes a letter."""
    nbytes: int = entry.nbytes
    match key:
        case Read(ref=ObjectRef(_, text)) | ObjectRef(_, text) | (*_, str(text)):
            nbytes += getsizeof(text)
    return nbytes


def _path(ref: ObjectRef) -> str:
    """Return the one name of an object that several roots, or stores of one bucket, reach."""
    return f"{unquote(ref.bucket.partition('://')[2])}/{ref.key}"


def _name(ref: ObjectRef) -> str:
    """Return the path without the ending of a coded file: folders serve it by both names."""
    plain, dot, ending = (path := _path(ref)).rpartition(".")
    return plain if dot + ending in CODED else path


def _version(known: Versioned[Any] | Stat | None) -> ETag | None:
    return None if known is None else known.etag
