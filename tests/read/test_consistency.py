"""What is concluded from several objects is believed only when all of them are as new."""

from collections.abc import Callable
from typing import NoReturn

import pytest

from shardgate.concurrency import Backoff
from shardgate.errors import BusyError, DamagedError, StorageUnusableError, VersionChangedError
from shardgate.formats.reading import Opaque, Read
from shardgate.read.consistency import FreshnessTracker, consistent
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from tests.support.clocks import Clock
from tests.support.read.stores import REF, WatchedStore

_READ = Read("metadata", REF, None, Opaque, is_marker=True)
_ATTEMPTS = 20


class _Case:
    """A cached object, which look-ups read."""

    def __init__(self) -> None:
        self.store, self.clock = WatchedStore(), Clock()
        self.store.place(REF, b"old")
        self.fetch = ReadCache(self.store, MetadataCache(2**20), ttl_s=60, clock=self.clock)
        self.attempts = 0

    async def look_up(self, conclude: Callable[[bytes], None]) -> bytes:
        """Read the object, and return its bytes unless *conclude* raises."""

        async def attempt(tracker: FreshnessTracker) -> bytes:
            self.attempts += 1
            found = await tracker(_READ)
            assert found is not None
            conclude(found.value.data)
            return found.value.data

        return await consistent(self.fetch, attempt)


def _damaged(_: bytes) -> NoReturn:
    raise DamagedError(REF, "looks damaged")


@pytest.mark.parametrize(("age_s", "attempts"), [(0, 1), (1, 1), (1.5, 2)])
async def test_damage_is_believed_of_young_reads_only(age_s: float, attempts: int) -> None:
    """Damage that follows from a read older than a second is looked for again in a new one."""
    case = _Case()
    await case.fetch(_READ)
    case.clock.now += age_s

    with pytest.raises(DamagedError):
        await case.look_up(_damaged)

    assert (case.attempts, len(case.store.calls)) == (attempts, attempts)


@pytest.mark.parametrize("allow_stale", [False, True])
async def test_damage_of_an_older_version_is_not_reported(*, allow_stale: bool) -> None:
    """A look-up that takes an outdated read, of any age, for damage returns the new result."""
    case = _Case()

    async def attempt(tracker: FreshnessTracker) -> bytes:
        found = await tracker(_READ, allow_stale=allow_stale)
        assert found is not None
        if found.value.data == b"old":
            _damaged(found.value.data)
        return found.value.data

    with pytest.raises(DamagedError):
        await consistent(case.fetch, attempt)
    case.store.place(REF, b"new")
    case.clock.now += 2

    assert await consistent(case.fetch, attempt) == b"new"


@pytest.mark.parametrize(("reason", "error"), [("", BusyError), ("odd", StorageUnusableError)])
async def test_object_replaced_during_each_attempt_ends_the_look_up(
    reason: str, error: type[Exception]
) -> None:
    """A look-up whose object is replaced each time fails after twenty attempts."""
    case = _Case()

    def conclude(_: bytes) -> None:
        case.clock.now += 0.1
        raise VersionChangedError(REF, reason)

    with pytest.raises(error, match=REF.key):
        await case.look_up(conclude)

    assert case.attempts == _ATTEMPTS


async def test_confirmed_read_is_repeated_with_its_etag() -> None:
    """To confirm a read of an object that is the same takes one conditional request."""
    case = _Case()
    tracker = FreshnessTracker(case.fetch)
    await tracker(_READ)
    await tracker.confirm([_READ])
    case.store.place(REF, b"new")

    with pytest.raises(VersionChangedError):
        await tracker.confirm([_READ])

    assert [call.if_none_match is None for call in case.store.calls] == [True, False, False]


async def test_object_that_the_cache_dropped_has_not_changed() -> None:
    """An unchanged object is confirmed, and outdates nothing, though the cache has dropped it."""
    store = WatchedStore()
    store.place(REF, b"same")
    fetch = ReadCache(store, MetadataCache(0), ttl_s=60)
    tracker = FreshnessTracker(fetch)
    await tracker(_READ)

    await tracker.confirm([_READ])

    assert (len(store.calls), fetch.generation) == (2, tracker.generation)


async def test_newer_version_in_the_cache_is_a_change() -> None:
    """An object is replaced though the cache has its new version already, by another look-up."""
    case = _Case()
    tracker = FreshnessTracker(case.fetch)
    await tracker(_READ)
    case.store.place(REF, b"new")
    await case.fetch.refresh(_READ)

    with pytest.raises(VersionChangedError):
        await tracker.confirm([_READ])


@pytest.mark.parametrize(
    ("data", "age_s", "outdated"), [(b"old", 5, []), (b"old", 5.5, [_READ]), (b"new", 5, [_READ])]
)
async def test_read_that_another_look_up_repeated_is_as_new(
    data: bytes, age_s: float, outdated: list[Read[Opaque]]
) -> None:
    """An old read is not outdated if it was repeated at most 5 s before the newest, unchanged."""
    case = _Case()
    tracker = FreshnessTracker(case.fetch)
    await tracker(_READ)
    case.clock.now += 10
    case.store.place(REF, data)
    await case.fetch.refresh(_READ)
    case.clock.now += age_s
    await tracker(_READ._replace(kind="shard-index"))

    assert tracker.outdated == outdated


async def test_attempts_pause_with_a_backoff() -> None:
    """A backoff pauses before each attempt but the first ones."""
    case, pauses = _Case(), list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def attempt(_: FreshnessTracker) -> None:
        raise VersionChangedError(REF)

    backoff = Backoff(0.1, 1, at_once=1, sleep=sleep, uniform=lambda _, longest: longest)
    with pytest.raises(BusyError):
        await consistent(case.fetch, attempt, backoff=backoff)

    assert pauses[:5] == [0.1, 0.2, 0.4, 0.8, 1]
    assert len(pauses) == _ATTEMPTS - 1
