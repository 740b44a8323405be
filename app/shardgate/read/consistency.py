"""The one rule for conclusions from several objects, which others may replace at any time.

A look-up reads objects one after the other, and some from the cache. If data are rewritten in
another form, a mixture of old and new state looks damaged, or as if something were absent. So a
conclusion is believed only if everything that led to it is as new as the conclusion has to be;
otherwise older results are read again, and the look-up is repeated. Reads, listings and writes are
attempts of `consistent`; those that conclude from absence or from an old index `confirm` it first.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Any, Final, cast

from shardgate.concurrency import Backoff, bounded_gather
from shardgate.errors import BusyError, DamagedError, StorageUnusableError, VersionChangedError
from shardgate.formats.members import MemberBucket
from shardgate.formats.reading import Read, Versioned, Weighable
from shardgate.model import ObjectRef
from shardgate.read.member_store import read_member
from shardgate.read.metadata_cache import TRUSTED_S, CachedRead, ReadCache
from shardgate.storage.contract import Stat

_ATTEMPTS: Final = 20
"""Most attempts; each but the last failed because an object was replaced during it. Many clients
replace a shard several times a second: with the pauses between writes, 20 attempts take seconds.
"""
_MAX_AGE_DIFFERENCE_S: Final = 5.0
"""Metadata older than an index by more than this may belong to another version of the array."""
NOT_READ: Final = (inf, ObjectRef("", ""))
"""`FreshnessTracker.oldest` where nothing was read that can change."""


async def consistent[T](
    reads: ReadCache,
    attempt: Callable[["FreshnessTracker"], Awaitable[T]],
    *,
    backoff: Backoff | None = None,
) -> T:
    """Return the result of *attempt*, repeated until everything that led to it is as new.

    Each attempt reads through a tracker of its own. `VersionChangedError` of an object outdates
    its cached state; `DamagedError` is believed once all reads are younger than a second.

    Raises: `BusyError` if an object is replaced during each attempt, `StorageUnusableError` if
    it merely looks so every time.
    """
    for number in range(_ATTEMPTS):
        if backoff is not None:
            await backoff.pause(number)
        tracker = FreshnessTracker(reads)
        try:
            return await attempt(tracker)
        except VersionChangedError as error:
            reads.forget(error.ref, tracker.began_at)
            changed = error
        except DamagedError as error:
            old = tracker.old
            if not old or number + 1 == _ATTEMPTS:
                raise  # the reads that show it stay cached: they are young enough for others too
            for ref in (error.ref, *old):
                reads.forget(ref, tracker.began_at)
    if changed.is_immutable:
        raise StorageUnusableError(changed.ref, changed.reason) from changed
    reason = f"gave up after {_ATTEMPTS} attempts, each of which found it replaced"
    raise BusyError(f"{changed.ref}: {reason}") from changed


class FreshnessTracker:
    """Implementation of `Fetch` that tracks the age and lifetime of all results of one look-up."""

    def __init__(self, reads: ReadCache) -> None:
        self._reads = reads
        self.began_at = reads.clock()
        self.generation = reads.generation
        self.expires_at = inf
        self.oldest = NOT_READ
        """Time and object of the oldest read of a present, mutable object."""
        self.newest_at = -inf
        """Time of the newest of `uses`."""
        self._more_old: dict[ObjectRef, None] = {}
        """Those of `old` that are in no result of `uses`."""
        self.uses: dict[Read[Any], CachedRead] = {}
        """Results that can change."""
        self.modified: dict[ObjectRef, int | None] = {}
        """When the objects were last modified, as far as their stores say so."""
        self.kept: FreshnessTracker | None = None
        """Tracker of some of these reads that the next look-ups adopt; `confirm` ends it."""

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, allow_stale: bool = False
    ) -> Versioned[T] | None:
        bucket = read.ref.bucket
        if isinstance(bucket, MemberBucket):
            return await read_member(bucket.members, read, self, allow_stale=allow_stale)
        cached = await self._reads.get_or_fetch(read, allow_stale=allow_stale)
        if cached.expires_at < inf:
            self.uses[read] = cached
            self.newest_at = max(self.newest_at, cached.requested_at)
            if cached.known is not None:
                self.oldest = min(self.oldest, (cached.requested_at, read.ref))
        elif allow_stale and cached.requested_at < self.began_at - TRUSTED_S:
            self._more_old[read.ref] = None  # damage is not believed of a stale result
        return cast("Versioned[T] | None", self.track(read.ref, cached))

    def track(self, ref: ObjectRef, cached: CachedRead) -> Versioned[Any] | Stat | None:
        """Track *cached*, the state of *ref*, and return its content."""
        self.expires_at = min(self.expires_at, cached.expires_at)
        if cached.requested_at < self.began_at - TRUSTED_S and cached.expires_at < inf:
            self._more_old[ref] = None
        if (known := cached.known) is not None:
            self.modified[ref] = known.modified_s
        return known

    @property
    def old(self) -> Mapping[ObjectRef, None]:
        """Objects whose state was older than `TRUSTED_S`."""
        trusted_s = self.began_at - TRUSTED_S
        used = {read.ref: None for read, use in self.uses.items() if use.requested_at < trusted_s}
        return used | self._more_old

    @property
    def outdated(self) -> list[Read[Any]]:
        """Reads of present objects that are much older than another read of just now.

        Not those that another look-up has repeated since, and found unchanged.
        """
        if self.newest_at < self.began_at - TRUSTED_S:
            return []
        oldest = self.newest_at - _MAX_AGE_DIFFERENCE_S
        return [
            read
            for read, use in self.uses.items()
            if use.known is not None
            and use.requested_at < oldest
            and not self._reads.has_confirmed(read, use, oldest)
        ]

    @property
    def ends_in_absence(self) -> bool:
        """True if the last read found no object, or there was no read."""
        last = next(reversed(self.uses.values()), None)
        return last is None or last.known is None

    async def confirm_older(
        self, began_at: float, present_s: float = 0, absent_s: float = 0
    ) -> None:
        """Confirm the reads older than *present_s*, or *absent_s* for absence, at *began_at*."""
        older = [
            read
            for read, use in self.uses.items()
            if use.requested_at < began_at - (absent_s if use.known is None else present_s)
        ]
        if older:
            await self.confirm(older)

    async def confirm(self, reads: Sequence[Read[Any]]) -> None:
        """Perform *reads* again. Raises: `VersionChangedError` if one finds another version."""
        if not reads:
            return
        if self.kept is not None:
            self.kept.expires_at = -inf  # else the next look-up would take the old results
        # With what was used here: the cache may have dropped it, or have a newer version.
        changes = await bounded_gather(
            lambda read: self._reads.refresh(read, self.uses[read]), reads
        )
        for read, has_changed in zip(reads, changes, strict=True):
            if has_changed:
                raise VersionChangedError(read.ref)

    @property
    def is_current(self) -> bool:
        """True until a read expires, or turns out to be outdated."""
        reads = self._reads
        if reads.clock() >= self.expires_at:
            return False
        if self.generation != reads.generation:
            if not all(reads.holds(read, use) for read, use in self.uses.items()):
                return False
            self.generation = reads.generation
        return True

    @property
    def nbytes(self) -> int:
        """Weight of all results in a cache."""
        return sum(use.nbytes for use in self.uses.values())

    def copy(self) -> "FreshnessTracker":
        """Return a tracker of the same reads, for `adopt`."""
        copied = FreshnessTracker(self._reads)
        copied.generation = self.generation
        copied.expires_at = self.expires_at
        copied.oldest = self.oldest
        copied.newest_at = self.newest_at
        copied.uses = dict(self.uses)
        copied.modified = dict(self.modified)
        return copied

    def adopt(self, earlier: "FreshnessTracker") -> None:
        """Track all reads of an *earlier* look-up too."""
        self.kept = earlier
        self.expires_at = min(self.expires_at, earlier.expires_at)
        self.modified |= earlier.modified
        self.uses |= earlier.uses
        self.oldest = min(self.oldest, earlier.oldest)
        self.newest_at = max(self.newest_at, earlier.newest_at)

    def adopt_age(self, oldest: tuple[float, ObjectRef]) -> None:
        """Track the `oldest` read of a look-up whose result is cached."""
        requested_at, ref = oldest
        if requested_at < self.began_at - TRUSTED_S:
            self._more_old[ref] = None
