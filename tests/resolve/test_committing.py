"""Commits in one process, with a clock and a store that go wrong."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import icechunk
import pytest

from app.errors import ClockSkewError, CommitConflictError, StorageTimeoutError
from app.formats.icechunk.changes import ChangeSet, NodeDocument
from app.formats.icechunk.refs import RepoRefs
from app.formats.icechunk.repository import Repository
from app.formats.icechunk.write_ids import WriteId
from app.model import ETag, ObjectRef, Piece
from app.resolve.budget import ByteBudget
from app.resolve.icechunk.commit_request import CommitRequest, Committed
from app.resolve.icechunk.committing import Committer
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.listing import list_names
from app.resolve.metadata_cache import MetadataCache, ReadCache
from app.storage.contract import NO_HEADERS, Conflict, Expected, ObjectHeaders
from app.storage.local import LocalStore
from tests.writable_repositories import Place, new_place

LIMIT: Final = 2**24
ROOT: Final = "1CECHNKREP0F1RSTCMT0"
GROUP: Final = b'{"zarr_format":3,"node_type":"group"}'


class FailingStore(LocalStore):
    """Fails at one of the writes, before or after it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = -1
        self.is_done = False
        self.written: list[str] = []
        self.before_logs: Callable[[], object] = lambda: None
        """Is done right before the log of a commit is written."""

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Write, unless it is this one's turn to fail."""
        fails = len(self.written) == self.failing
        self.written.append(ref.key.partition("/")[0])
        if self.written[-1] == "transactions":
            self.before_logs()
        if fails and not self.is_done:
            raise StorageTimeoutError(ref, "no answer")
        done = await super().put(ref, pieces, expected=expected, headers=headers)
        if fails:
            raise StorageTimeoutError(ref, "no answer")
        return done


@dataclass
class Committing:
    """A repository of the library, and who commits to it."""

    place: Place
    store: FailingStore = field(default_factory=FailingStore)
    ahead_s: float = 0.0

    def __post_init__(self) -> None:
        self.place.create()
        fetch = ReadCache(self.store, MetadataCache(LIMIT), ttl_s=60)
        swaps = RepoSwaps(self.store, fetch, clock=lambda: time.time() + self.ahead_s)
        self.committer = Committer(swaps, ByteBudget(LIMIT, wait_s=1))
        directory = ObjectRef(self.place.folder.as_uri(), "")
        repository = Repository(directory, RepoRefs(directory, LIMIT), LIMIT, ())
        self.opened = OpenedRepository(
            repository, fetch, partial(list_names, self.store, directory)
        )

    async def add(
        self, name: str, parent_id: str = ROOT, key: str = "", *, amend: bool = False
    ) -> Committed:
        """Commit a group."""
        path = "/" if name == "root" else f"/{name}"
        changes = ChangeSet(new={name.encode().ljust(8): NodeDocument(path, GROUP)})
        write_id = WriteId(key or f"id-{name}")
        request = CommitRequest("main", parent_id, name, write_id, amend=amend)
        return await self.committer.commit(self.opened, changes, request)

    @property
    def tip(self) -> str:
        """The snapshot that ``main`` is at."""
        return self.place.open().lookup_branch("main")

    def messages(self) -> list[str]:
        """Tell the history, newest first, but for the first commit."""
        repo: icechunk.Repository = self.place.open()
        return [each.message for each in repo.ancestry(branch="main")][:-1]


@pytest.fixture
def committing(tmp_path: Path) -> Committing:
    """Make a repository."""
    return Committing(new_place(tmp_path))


async def test_many_commits_at_once_are_all_made(committing: Committing) -> None:
    """Each is put on top of those that were faster."""
    parent = (await committing.add("root")).snapshot_id
    names = [f"g{number}" for number in range(20)]

    made = await asyncio.gather(*(committing.add(name, parent) for name in names))

    assert sorted(committing.messages()) == sorted(["root", *names])
    assert len({each.snapshot_id for each in made}) == len(names)


async def test_one_request_that_comes_twice_at_once_is_made_once(committing: Committing) -> None:
    """Both are told of the same commit."""
    parent = (await committing.add("root")).snapshot_id

    made = await asyncio.gather(*(committing.add("g", parent) for _ in range(5)))

    assert len(set(made)) == 1
    assert committing.messages() == ["g", "root"]


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_write_that_fails_leaves_nothing_half_done(
    committing: Committing, *, is_done: bool
) -> None:
    """Whichever it is, the same request makes the commit then, or finds it."""
    store = committing.store
    store.is_done = is_done
    parent = (await committing.add("root")).snapshot_id
    failures, is_reached, nth = 0, True, 0
    while is_reached:
        name = f"g{nth}"
        store.written.clear()
        store.failing = nth
        try:
            await committing.add(name, parent)
        except StorageTimeoutError:
            failures += 1
            assert name not in committing.messages()
        is_reached = len(store.written) > nth
        store.failing = -1
        made = await committing.add(name, parent)
        assert (await committing.add(name, parent)) == made
        assert committing.messages().count(name) == 1
        nth += 1
    assert nth == 5  # snapshot, log, backup, repo, and none
    assert failures == (3 if is_done else 4)


async def test_what_comes_before_an_amended_commit_may_expire_meanwhile(
    committing: Committing,
) -> None:
    """The commit comes after what the amended one comes after by then."""
    for name in ("root", "a", "b"):
        last = (await committing.add(name, committing.tip)).snapshot_id
    expire = committing.place.open().expire_snapshots
    committing.store.before_logs = lambda: expire(datetime.now(UTC))

    await committing.add("c", last, amend=True)

    assert committing.messages() == ["c"]
    changed = committing.place.open().diff(from_snapshot_id=ROOT, to_branch="main")
    assert changed.new_groups == {"/", "/a", "/b", "/c"}


@pytest.mark.parametrize("ahead_s", [1200.0, -1200.0])
async def test_a_wrong_clock_commits_nothing(committing: Committing, ahead_s: float) -> None:
    """Others could not commit on top, or it would not be later than what is there."""
    committing.ahead_s = ahead_s

    with pytest.raises(ClockSkewError):
        await committing.add("root")

    assert committing.messages() == []


async def test_what_nothing_tells_of_is_a_conflict(committing: Committing) -> None:
    """Without the log of a commit nobody knows what it has changed."""
    parent = (await committing.add("root")).snapshot_id
    repo = committing.place.open()
    session = repo.writable_session("main")
    theirs = session.commit("theirs", allow_empty=True)
    (committing.place.folder / "transactions" / theirs).unlink()

    with pytest.raises(CommitConflictError) as raised:
        await committing.add("g", parent)

    assert [each["kind"] for each in raised.value.conflicts] == ["missing_transaction_log"]
    assert raised.value.actual_parent == theirs
