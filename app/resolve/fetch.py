"""Perform, share and remember the reads that formats describe."""

import time
from collections.abc import Callable, Coroutine, Hashable
from math import inf, nextafter
from sys import getsizeof
from typing import Any, Final, NamedTuple, Protocol, cast

import cachetools

from app.errors import MetadataMissingError
from app.formats.reading import Read, Versioned, Weighable
from app.model import ETag, ObjectRef
from app.resolve.budget import ByteBudget
from app.resolve.flight import Apart, SingleFlight
from app.resolve.perform import perform
from app.resolve.tally import Tally, kind_of_read
from app.resolve.weighed import WeighedCache
from app.storage.contract import NotModified, ObjectReader, Stat

OVERHEAD_NBYTES: Final = 1024
"""Memory around a cached value: its key, its reference, its place in the order."""
_FORGOTTEN_MAX: Final = 65536
_MARKERS: Final = frozenset({"metadata", "repo"})
"""Kinds of reads that decide what the keys below a directory mean."""
_MARKERS_MAX: Final = 65536
_FILE_NBYTES: Final = 512 * 1024**2
_FILES: Final = 2
"""All that is being decoded may take so many times the largest file, and one of them more."""
_DECODING_WAIT_S: Final = 120


class Holding(Protocol):
    """An entry of the `Memory`."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the entry holds, its key's text apart."""
        ...


class Memory(WeighedCache[Hashable, Holding]):
    """One bound for everything decoded and found out, and one for what is being decoded."""

    def __init__(
        self, max_bytes: int, file_bytes: int = _FILE_NBYTES, *, wait_s: float = _DECODING_WAIT_S
    ) -> None:
        """Let all decodes together take a few times *file_bytes*, the largest file of metadata."""
        super().__init__(max_bytes, lambda key, entry: entry.nbytes + _text_nbytes(key))
        self.decoding = ByteBudget(_FILES * file_bytes, wait_s=wait_s)


class Remembered(NamedTuple):
    """What is known of an object since *asked_at*: a decoded part, its stat, or its absence."""

    known: Versioned[Any] | Stat | None
    asked_at: float
    expires_at: float

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the entry holds."""
        if isinstance(self.known, Versioned):
            return OVERHEAD_NBYTES + cast("Weighable", self.known.value).nbytes
        return OVERHEAD_NBYTES + (0 if self.known is None else self.known.headers.nbytes)


class ReadCache:
    """Performs the reads that formats describe, and keeps what they told in *memory*.

    What was asked of a mutable object is good for *ttl_s*, then revalidated by its ETag; what
    was read of a named version is good for ever. Failures are never kept. Who finds that an
    object is not as it was told forgets it: what was asked before is then good no longer.
    """

    def __init__(
        self,
        store: ObjectReader,
        memory: Memory,
        *,
        ttl_s: float,
        is_shared: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Share reads that are under way, unless what they tell may be too old even so."""
        self._store = store
        self.memory = memory
        self._ttl_s = ttl_s
        self.clock = clock
        self.is_shared = is_shared
        self._flights: SingleFlight[tuple[Hashable, float]] | Apart[tuple[Hashable, float]]
        self._flights = SingleFlight() if is_shared else Apart()
        self._forgotten = cachetools.TTLCache[ObjectRef, float](_FORGOTTEN_MAX, ttl_s, clock)
        self._all_forgotten_at = -inf
        self._markers = cachetools.LRUCache[ObjectRef, float](_MARKERS_MAX)
        """Markers that were there, and since when each is missing: `inf` while it is not."""
        self.tally = Tally()
        self.generation = 0
        """Grows when something that was known turns out to be otherwise."""

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, ever: bool = False
    ) -> Versioned[T] | None:
        """Perform *read* unless its answer is known; see `Fetch`."""
        return cast("Versioned[T] | None", (await self.remember(read, ever=ever)).known)

    async def remember(self, read: Read[Any], *, ever: bool = False) -> Remembered:
        """Perform *read* unless its answer is known, and tell how long that is good."""
        entry = self._fresh(read, read.ref) or (self._ever(read) if ever else None)
        if entry is None:
            entry = await self._share(read, read.ref, lambda: self._perform(read))
        else:
            self._note_hit(read)
        return entry._replace(expires_at=inf) if ever and entry.known is not None else entry

    async def has_changed(self, read: Read[Any]) -> bool:
        """Perform *read* again, and tell whether that brought another version."""
        before = cast("Remembered | None", self.memory.get(read))
        try:
            after = await self._share(read, read.ref, lambda: self._perform(read))
        except MetadataMissingError:
            return True
        return before is None or _version(before.known) != _version(after.known)

    async def stat(self, ref: ObjectRef) -> Remembered:
        """Ask for the size and version of *ref* unless they are known."""
        entry = self.recall(ref)
        if entry is None:
            return await self._share(ref, ref, lambda: self._perform_stat(ref))
        self._note_hit(ref)
        return entry

    def recall(self, ref: ObjectRef) -> Remembered | None:
        """Tell what is known of *ref* as a whole, without asking; `None` is nothing."""
        return self._fresh(ref, ref)

    def learn(self, ref: ObjectRef, stat: Stat | None, asked_at: float) -> Remembered:
        """Remember what an answer told about *ref* besides its bytes."""
        return self._keep(ref, stat, asked_at)

    def keep(self, read: Read[Any], known: Versioned[Any]) -> None:
        """Remember what *read* would bring, for it has just been written.

        All that was known before is forgotten; this is known since a moment later.
        """
        self._keep(read, known, nextafter(self.clock(), inf))

    def forget(self, ref: ObjectRef, known_at: float = inf) -> None:
        """Take nothing that is known of *ref* for current, unless that was done since *known_at*.

        Of many who learn at once that an object was replaced only the first brings news.
        """
        if self._forgotten_at(ref) < known_at:
            if self._forgotten.currsize >= _FORGOTTEN_MAX:  # or the oldest were known again
                self._forgotten.clear()
                self._all_forgotten_at = self.clock()
            self._forgotten[ref] = self.clock()
            self.generation += 1

    def mark_present(self, ref: ObjectRef) -> None:
        """Take the marker *ref* for present; reads that do not find it fail for `ttl_s`."""
        if self.is_shared:  # others remove what is in a session, and are believed at once
            self._markers[ref] = inf

    def mark_removed(self, ref: ObjectRef) -> None:
        """Take the absence of *ref* for proved, as this process removed it."""
        self._markers.pop(ref, None)

    def _check_absence(self, ref: ObjectRef, asked_at: float) -> None:
        """Return if a marker that was not found at *asked_at* can be taken for absent.

        Raises: `MetadataMissingError` until it has been missing for `ttl_s`.
        """
        if (missing_since := self._markers.get(ref)) is None:
            return
        if missing_since == inf:
            self._markers[ref] = asked_at
            self.forget(ref)
        elif asked_at >= missing_since + self._ttl_s:
            self.mark_removed(ref)
            return
        raise MetadataMissingError(ref)

    def _forgotten_at(self, ref: ObjectRef) -> float:
        """Tell until when nothing that was asked of *ref* is taken for current."""
        return max(self._forgotten.get(ref, -inf), self._all_forgotten_at)

    def _fresh(self, key: Hashable, ref: ObjectRef) -> Remembered | None:
        entry = cast("Remembered | None", self.memory.get(key))
        if entry is None or entry.expires_at <= self.clock():
            return None
        return None if self._is_forgotten(entry, ref) else entry

    def _ever(self, read: Read[Any]) -> Remembered | None:
        """Find what *read* brought once."""
        entry = cast("Remembered | None", self.memory.get(read))
        if entry is None or entry.known is None or self._is_forgotten(entry, read.ref):
            return None
        return entry

    def _is_forgotten(self, entry: Remembered, ref: ObjectRef) -> bool:
        if entry.expires_at == inf:
            return False
        if not self._forgotten:
            return entry.asked_at <= self._all_forgotten_at
        return entry.asked_at <= self._forgotten_at(ref)

    def _keep(
        self,
        key: Hashable,
        known: Versioned[Any] | Stat | None,
        asked_at: float,
        *,
        is_pinned: bool = False,
    ) -> Remembered:
        before = cast("Remembered | None", self.memory.get(key))
        if before is not None and _version(before.known) != _version(known):
            self.generation += 1
        entry = Remembered(known, asked_at, inf if is_pinned else asked_at + self._ttl_s)
        self.memory.put(key, entry)
        return entry

    def _note_hit(self, _: Hashable) -> None:
        self.tally.hits += 1

    async def _share(
        self, key: Hashable, ref: ObjectRef, call: Callable[[], Coroutine[Any, Any, Remembered]]
    ) -> Remembered:
        """Join a call of *key* that began after *ref* was last forgotten, or begin one."""
        flight = (key, self._forgotten_at(ref))
        if flight in self._flights:
            self.tally.joins += 1
        else:
            self.tally.misses += 1
        return await self._flights.run(flight, call)

    async def _perform_stat(self, ref: ObjectRef) -> Remembered:
        asked_at = self.clock()
        return self._keep(ref, await self._store.stat(ref), asked_at)

    async def _perform[T: Weighable](self, read: Read[T]) -> Remembered:
        asked_at = self.clock()
        known = self._stale(read)
        etag = None if known is None else known.etag
        before = kind_of_read.set(read.kind)
        try:
            found = await perform(self._store, read, etag, self.memory.decoding)
        finally:
            kind_of_read.reset(before)
        if read.kind in _MARKERS:
            if found is None or not _is_metadata(found):
                self._check_absence(read.ref, asked_at)
            elif asked_at > self._forgotten_at(read.ref):
                self.mark_present(read.ref)
        if isinstance(found, NotModified):
            return self._keep(read, known, asked_at)
        is_pinned = read.is_pinned and found is not None
        return self._keep(read, found, asked_at, is_pinned=is_pinned)

    def _stale(self, read: Read[Any]) -> Versioned[Any] | None:
        """Find what a conditional read could confirm."""
        entry = self._ever(read)
        return None if entry is None else cast("Versioned[Any]", entry.known)


def _is_metadata(found: Versioned[Any] | NotModified) -> bool:
    """Return whether what was read of a marker can be one: an error page can not."""
    return isinstance(found, NotModified) or getattr(found.value, "is_metadata", True)


def _text_nbytes(key: Hashable) -> int:
    """Weigh the text in a key of the `Memory`, which clients choose: up to four bytes a letter."""
    match key:
        case Read(ref=ObjectRef(_, text)) | ObjectRef(_, text) | (_, str(text)):
            return getsizeof(text)
        case _:
            return 0


def _version(known: Versioned[Any] | Stat | None) -> ETag | None:
    return None if known is None else known.etag
