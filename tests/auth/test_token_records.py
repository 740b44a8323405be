"""`shardgate.auth.token_records`: who made which tokens, and which have ended."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardgate.auth import token_records
from shardgate.auth.token_records import CHECKED_S, TokenRecord, TokenRecords
from shardgate.errors import (
    StorageUnavailableError,
    TokenRecordsError,
    TooManyRequestsError,
    UnknownTokenError,
)
from shardgate.model import ObjectRef
from shardgate.storage.contract import Listed, ObjectStore
from shardgate.storage.local import LocalStore
from shardgate.storage.memory import MemoryStore
from tests.support.clocks import Clock

NOW = 1_000_000.0
NAIVE = b'{"token_id": "x", "datasets": [], "expires_at": "2026-01-01T00:00:00", "made_at": 5}'


async def nothing() -> None:
    """Let a store list what it has."""


class HookedStore(MemoryStore):
    """Calls `after_list` at the end of each list."""

    after_list: Callable[[], Awaitable[object]] = staticmethod(nothing)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        """List, and call the hook."""
        async for each in super().list(prefix, delimiter=delimiter, after=after):
            yield each
        await self.after_list()


async def fail() -> None:
    """Fail to list."""
    raise StorageUnavailableError(ObjectRef("memory://tokens", ""), "no answer")


def record(token_id: str, lifetime_s: float = 60, **more: Any) -> TokenRecord:
    """Return the record of a token for `em`."""
    expires_at = datetime.fromtimestamp(NOW + lifetime_s, UTC)
    return TokenRecord(token_id=token_id, datasets=["em"], expires_at=expires_at, **more)


def records_of(store: ObjectStore, clock: Clock, folder: Path | None = None) -> TokenRecords:
    """Return records in *store*, of a process of their own."""
    bucket = "memory://tokens" if folder is None else folder.as_uri()
    return TokenRecords(store, ObjectRef(bucket, "" if folder else "a/b"), clock, clock)


async def ids(records: TokenRecords, owner: str = "ada") -> list[str]:
    """Return the ids of the tokens of *owner*."""
    return [each.token_id for each in (await records.list(owner)).tokens]


@pytest.fixture
def clock() -> Clock:
    """Return the clock of both processes."""
    return Clock(NOW)


@pytest.fixture(params=["memory", "file"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> tuple[TokenRecords, TokenRecords]:
    """Return the records of two processes at one place."""
    store = MemoryStore() if request.param == "memory" else LocalStore()
    folder = None if request.param == "memory" else tmp_path
    return records_of(store, clock, folder), records_of(store, clock, folder)


async def test_records_are_those_of_the_owner(pair: tuple[TokenRecords, TokenRecords]) -> None:
    """A process lists what another one has recorded for the same owner, and nothing of others."""
    here, there = pair
    await here.add("ada", record("one"))
    await here.add("a/../b\ud800", record("two"))

    assert (await there.list("ada")).tokens == (await here.list("ada")).tokens
    assert await ids(there) == ["one"]
    assert await ids(there, "a/../b\ud800") == ["two"]
    assert await ids(there, "eve") == []


async def test_newest_record_comes_first() -> None:
    """Records are listed by the time at which they were made, whenever they expire."""
    records = records_of(MemoryStore(), Clock(NOW))
    for at, (token_id, lifetime_s) in enumerate([("a", 90), ("b", 30), ("c", 60)]):
        made_at = datetime.fromtimestamp(NOW + at, UTC)
        await records.add("ada", record(token_id, lifetime_s, made_at=made_at))

    assert await ids(records) == ["c", "b", "a"]


async def test_expired_record_is_removed() -> None:
    """What has expired is not listed, and its object is removed."""
    store, clock = MemoryStore(), Clock(NOW)
    records = records_of(store, clock)
    await records.add("ada", record("short", 60))
    await records.add("ada", record("long", 120))
    await records.revoke("ada", "short")
    clock.now += 60
    listed = await ids(records)
    root = ObjectRef("memory://tokens", "")

    await records.add("ada", record("more", 120))

    assert listed == ["long"]
    left = [each.ref.key async for each in store.list(root)]
    assert sorted(key.rpartition("-")[2] for key in left) == ["long", "more", "short"]
    clock.now += 60
    await records.refresh()
    assert not [each async for each in store.list(ObjectRef("memory://tokens", "a/b/ended/"))]


async def test_end_is_known_elsewhere_within_seconds(
    pair: tuple[TokenRecords, TokenRecords], clock: Clock
) -> None:
    """What ends in one process has ended in another one when that looks again."""
    here, there = pair
    await there.refresh()
    await here.add("ada", record("one"))
    await here.revoke("ada", "one")
    before = there.has_ended("one")
    clock.now += CHECKED_S
    await there.refresh()

    assert here.has_ended("one")
    assert not before
    assert there.has_ended("one")


async def test_unknown_token_cannot_be_revoked() -> None:
    """A token that the owner has not made, or that has expired, is unknown."""
    clock = Clock(NOW)
    records = records_of(MemoryStore(), clock)
    await records.add("ada", record("one"))
    with pytest.raises(UnknownTokenError):
        await records.revoke("eve", "one")
    clock.now += 60
    with pytest.raises(UnknownTokenError):
        await records.revoke("ada", "one")


async def test_tokens_of_one_caller_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller with as many valid tokens as are allowed makes no more; another caller does."""
    monkeypatch.setattr(token_records, "_MOST", 5)
    records = records_of(MemoryStore(), Clock(NOW))
    for number in range(5):
        await records.add("ada", record(f"{number}"))
    with pytest.raises(TooManyRequestsError, match="have not expired"):
        await records.add("ada", record("more"))
    await records.add("eve", record("one"))

    assert await ids(records, "eve") == ["one"]


async def test_list_has_the_tokens_that_expire_last() -> None:
    """A list of more than a hundred tokens has those that expire last."""
    records = records_of(MemoryStore(), Clock(NOW))
    for number in range(105):
        await records.add("ada", record(f"{number}", 1000 + number))

    assert set(await ids(records)) == {f"{number}" for number in range(5, 105)}


async def test_end_during_a_refresh_is_kept() -> None:
    """A token that ends here while the others are being read has ended afterwards as well."""
    store = HookedStore()
    records = records_of(store, Clock(NOW))
    store.after_list = partial(records.end, "one", NOW + 60)
    await records.refresh()

    assert records.has_ended("one")


async def test_failing_store_forgets_no_end() -> None:
    """While the store fails, what has ended stays so; before the first answer nothing is known."""
    store, clock = HookedStore(), Clock(NOW)
    records, fresh = records_of(store, clock), records_of(store, clock)
    await records.refresh()
    await records.end("one", NOW + 600)
    store.after_list = fail
    clock.now += CHECKED_S
    await records.refresh()
    with pytest.raises(TokenRecordsError):
        await fresh.refresh()

    assert records.has_ended("one")


async def test_hanging_store_holds_no_request_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short wait requests work with what is known; there is one attempt for all."""
    monkeypatch.setattr(token_records, "_WAIT_S", 0.01)
    store, clock = HookedStore(), Clock(NOW)
    records = records_of(store, clock)
    await records.refresh()
    attempts = []

    async def hang() -> None:
        attempts.append(clock.now)
        await asyncio.Event().wait()

    store.after_list = hang
    clock.now += CHECKED_S
    for _ in range(3):
        await records.refresh()
    clock.now += CHECKED_S
    await records.refresh()

    assert len(attempts) == 1
    assert records.fresh_s > 0
    await records.aclose()


async def test_failure_tells_no_place_of_the_records() -> None:
    """What fails because of the store says neither where the records are, nor whose they are."""
    store = HookedStore()
    records = records_of(store, Clock(NOW))
    await records.refresh()
    store.after_list = fail
    for attempt in (records.add("ada", record("one")), records.revoke("ada", "x")):
        with pytest.raises(TokenRecordsError) as caught:
            await attempt
        assert "memory" not in str(caught.value)


async def test_end_outlasts_the_tokens_that_it_ends() -> None:
    """A token that was made just before the end of its session never becomes valid again."""
    clock = Clock(NOW)
    records = records_of(MemoryStore(), clock)
    await records.end("session", NOW + 60)
    clock.now += 60 + CHECKED_S
    await records.refresh()

    assert records.has_ended("session")


@pytest.mark.parametrize("data", [b"", b"{}", b"[", b"\xff", b'{"token_id": 5}', NAIVE])
async def test_foreign_object_is_passed_over(data: bytes) -> None:
    """An object that is no record does not keep the others from being listed."""
    store = MemoryStore()
    records = records_of(store, Clock(NOW))
    await records.add("ada", record("one"))
    [made] = [each.ref async for each in store.list(ObjectRef("memory://tokens", "a/b/made/"))]
    for name in ("999999999999-x", "x", "999999999999", "9" * 5000 + "-x", "٩" * 12 + "-x"):
        store.place(ObjectRef(made.bucket, f"{made.key.rpartition('/')[0]}/{name}"), data)

    assert await ids(records) == ["one"]
