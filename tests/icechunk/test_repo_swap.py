"""Swaps of `repo` while others write, clocks differ and stores fail."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from shardgate import errors
from shardgate.concurrency import Backoff
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.repo_info import RepoInfo
from shardgate.formats.icechunk.repo_writer import RefUpdate
from shardgate.formats.icechunk.repository_files import FileRefs, RepoRefs, Repository
from shardgate.icechunk.repo_swap import Planned, RefUpdates, RepoFile, RepoSwaps
from shardgate.icechunk.repository import OpenedRepository
from shardgate.model import ObjectRef
from shardgate.read.listing import list_names
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.storage.memory import MemoryStore
from tests.support.clocks import Clock
from tests.support.formats.icechunk.building_repo import FIRST, NOON, Repo, update
from tests.support.write.writers import Between

ROOT = ObjectRef("memory://bucket", "data")
LATER_S = NOON / 1e6 + 60


@dataclass
class Swapping:
    """A repository in a store, and its changes of refs."""

    clock: Clock = field(default_factory=lambda: Clock(LATER_S))
    before: list[Callable[[], object]] = field(default_factory=list)
    """Calls before the next swaps, one each: another writer's put, or a failure."""
    steady: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.store: Any = Between(MemoryStore(self.clock), self._overtake)
        self.fetch = ReadCache(self.store, MetadataCache(2**20), ttl_s=60, clock=self.steady)
        self.swaps = RepoSwaps(self.store, self.fetch, clock=self.clock, backoff=Backoff(0, 0))
        repository = Repository(ROOT, RepoRefs(ROOT, 2**20), 2**20, ())
        self.opened = OpenedRepository(
            repository, self.fetch, partial(list_names, self.store, ROOT)
        )
        self.changes = RefUpdates(self.swaps, self.opened)

    def _overtake(self, name: str, ref: ObjectRef) -> None:
        if name == "put" and ref == ROOT.join("repo") and self.before:
            self.before.pop(0)()

    def place(self, repo: Repo) -> None:
        """Store a `repo` file."""
        self.store.place(ROOT.join("repo"), repo.file())

    async def info(self) -> RepoInfo:
        """Read the file as a reader of this process does."""
        info = await self.opened.info()
        assert info is not None
        return info


@pytest.fixture
def swapping() -> Swapping:
    """Store a repository."""
    made = Swapping()
    made.place(Repo())
    return made


def tagged(name: str) -> Repo:
    """Return the repository with a tag that another writer has added."""
    ours = Repo()
    return Repo(
        tags=[{0: name, 1: ours.branches[0][1]}],
        updates=(update(5, {0: name}, at=NOON + 1), update(1, {}, "repo.0.A")),
    )


async def test_swap_is_visible_at_once_and_backed_up(swapping: Swapping) -> None:
    """A change of refs is visible in this process at once, and the old file is in `overwritten`.

    The backup's name is in the log and sorts newest first. A plan without a change writes nothing.
    """
    assert "t" not in (await swapping.info()).tags
    swapped = await swapping.swaps.update(swapping.opened, lambda _: Planned("done"))
    assert swapped.answer == "done"
    assert [each.ref.key async for each in swapping.store.list(ROOT.prefix)] == ["data/repo"]
    await swapping.changes.create("tag", "t", encode_id(FIRST))

    info = await swapping.info()
    assert info.tags["t"] == encode_id(FIRST)
    (_, first) = info.updates()
    assert first.backup_path is not None
    prefix, number, unique = first.backup_path.split(".")
    assert (prefix, int(number)) == ("repo", 32503680000000 - int(LATER_S * 1000))
    assert (len(number), len(unique)) == (14, 20)
    kept = await swapping.store.get(ROOT.join(f"overwritten/{first.backup_path}"))
    assert getattr(kept, "data", None) == Repo().file()


async def test_overtaken_change_is_planned_again(swapping: Swapping) -> None:
    """A change that is overtaken is planned again, and keeps the other writer's tags.

    A tag of the same name is a conflict, and a hundred lost races are BusyError.
    """
    swapping.before = [lambda: swapping.place(tagged("theirs"))]
    await swapping.changes.create("tag", "ours", encode_id(FIRST))
    assert set((await swapping.info()).tags) == {"theirs", "ours"}

    swapping.before = [lambda: swapping.place(tagged("same"))]
    with pytest.raises(errors.ConflictError):
        await swapping.changes.create("tag", "same", encode_id(FIRST))

    races = (lambda n=n: swapping.place(tagged(f"{n}")) for n in range(101))
    swapping.before = list(races)
    with pytest.raises(errors.BusyError):
        await swapping.changes.create("tag", "t", encode_id(FIRST))

    assert len(swapping.before) == 1


async def test_wrong_clock_writes_nothing(swapping: Swapping) -> None:
    """A clock far behind the newest update raises ClockSkewError, and writes nothing.

    A clock that is a little behind writes one microsecond after the newest update.
    """
    swapping.clock.now = NOON / 1e6 - 10.5
    with pytest.raises(errors.ClockSkewError) as raised:
        await swapping.changes.create("tag", "t", encode_id(FIRST))
    assert "10 s ahead of 2023-11-14 22:13:09.5" in str(raised.value)
    assert "t" not in (await swapping.info()).tags

    swapping.clock.now += 1
    for name in ("a", "b"):
        await swapping.changes.create("tag", name, encode_id(FIRST))
    times = [each.updated_at.timestamp() for each in (await swapping.info()).updates()]
    assert [round(each * 1e6) for each in times] == [NOON + 2, NOON + 1, NOON]


async def test_clocks_are_compared_at_times() -> None:
    """The time of a written object is asked for by the first change, ten minutes after the last
    comparison, and once the clock here was set.
    """
    steady = Clock()
    swapping = Swapping(steady=steady)
    swapping.place(Repo())

    async def is_compared(name: str, passed_s: float, set_s: float = 0) -> bool:
        steady.now += passed_s
        swapping.clock.now += passed_s + set_s
        swapping.store.calls.clear()
        await swapping.changes.create("tag", name, encode_id(FIRST))
        return any(call == "stat" for call, _ in swapping.store.calls)

    assert await is_compared("a", 0)
    assert not await is_compared("b", 1)
    assert not await is_compared("c", 598)
    assert await is_compared("d", 1)
    assert await is_compared("e", 1, set_s=2)
    assert not await is_compared("f", 1)
    assert await is_compared("g", 1, set_s=-1.5)


async def test_file_that_was_read_a_moment_ago_is_swapped(swapping: Swapping) -> None:
    """A change that starts from a file read before reads nothing, unless another version is known,
    or is found by the swap.
    """

    def reads() -> int:
        return sum(name == "get" for name, _ in swapping.store.calls)

    async def add(name: str, file: RepoFile) -> None:
        change = Planned(None, [RefUpdate("tag_created", name, FIRST)])
        await swapping.swaps.update(swapping.opened, lambda _: change, file)

    file = await swapping.swaps.read(swapping.opened)
    await add("a", file)
    assert reads() == 1

    other = await swapping.swaps.read(swapping.opened)
    assert other is not file
    assert await swapping.swaps.read(swapping.opened) is other
    await add("b", file)
    assert reads() == 4

    file = await swapping.swaps.read(swapping.opened)
    swapping.before = [lambda: swapping.place(tagged("theirs"))]
    await add("c", file)
    assert reads() == 6
    assert set((await swapping.info()).tags) == {"theirs", "c"}


async def test_invalid_repo_file_is_not_replaced(swapping: Swapping) -> None:
    """Changes of a version 1 repository, a damaged one and a missing one have their own errors."""
    opened = swapping.opened
    old = Repository(ROOT, FileRefs(ROOT), 2**20, ())
    change = Planned(None, [RefUpdate("tag_created", "t", FIRST)])
    for repository, data, error in (
        (old, Repo().file(), errors.ReadOnlyError),
        (opened.repository, b"no repository", errors.DamagedError),
        (opened.repository, Repo(more={13: b"new"}).file(), errors.DamagedError),
        (opened.repository, None, errors.UnknownRepositoryError),
    ):
        swapping.store.remove(ROOT.join("repo"))
        if data is not None:
            swapping.store.place(ROOT.join("repo"), data)
        other = OpenedRepository(repository, swapping.fetch, opened.listing)
        with pytest.raises(error):
            await swapping.swaps.update(other, lambda _: change)
