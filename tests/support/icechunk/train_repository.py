"""Commits of many chunks through replicas in this process, and a look at them with the library."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import icechunk
import numpy as np
import zarr

from shardgate.errors import CommitConflictError, ShardgateError
from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges
from shardgate.formats.icechunk.ids import decode_id
from shardgate.formats.icechunk.manifest import InlineChunk
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.repo_writer import WriteId
from shardgate.formats.icechunk.snapshot import StoredSnapshotDecoder
from shardgate.icechunk.commit import CommitRequest, CommitResult
from tests.support.files import read_files
from tests.support.icechunk.sessions.replicas import (
    ROOT,
    Counting,
    Replica,
    opened_by_library,
    stored,
)
from tests.support.repositories import ROOT_ID

CHUNKS: Final = 8
"""Chunks of each array, of one byte."""
ARRAYS: Final = ("a", "b")
_UPDATES: Final = 3
_numbers = itertools.count(1)


@cache
def new_files() -> Mapping[str, bytes]:
    """Write a repository by the library, whose file ``repo`` lists few operations."""
    with TemporaryDirectory() as folder:
        config = icechunk.RepositoryConfig(num_updates_per_repo_info_file=_UPDATES)
        storage = icechunk.local_filesystem_storage(folder)
        repo = icechunk.Repository.create(storage, config=config)
        session = repo.writable_session("main")
        group = zarr.create_group(session.store)
        options: Any = {"chunks": (1,), "dtype": "u1", "compressors": None, "fill_value": 255}
        for name in ARRAYS:
            group.create_array(name, shape=(CHUNKS,), **options)[:] = 0
        session.commit("first")
        return read_files(Path(folder))


@dataclass(frozen=True)
class Update:
    """A commit to be made; *array* is by number."""

    array: int = 0
    chunks: tuple[int, ...] = (0,)
    value: int = field(default_factory=lambda: next(_numbers) % 251)
    key: str = field(default_factory=lambda: f"key {next(_numbers)}")
    amend: bool = False
    data: bytes = b""
    """Bytes of the chunks, by default the value."""

    @property
    def updated(self) -> dict[str, list[list[int]]]:
        """The diff of the commit, as the library has it."""
        return {f"/{ARRAYS[self.array]}": [[chunk] for chunk in sorted(self.chunks)]}


type Outcome = CommitResult | BaseException


async def commit_all(replica: Replica, parent_id: str, *updates: Update) -> list[Outcome]:
    """Commit all *updates* at once, which are one train, and return what came of each."""
    tasks = [asyncio.create_task(commit(replica, parent_id, update)) for update in updates]
    return list(await asyncio.gather(*tasks, return_exceptions=True))


@cache
def _node_ids() -> dict[str, bytes]:
    """Return the ids of the arrays by name."""
    names = [name for name in new_files() if name.startswith("snapshots/")]
    (name,) = (name for name in names if ROOT_ID not in name)
    object_id = decode_id(name.partition("/")[2])
    assert object_id is not None
    snapshot = StoredSnapshotDecoder(object_id, 2**24)(new_files()[name])
    return {path.strip("/"): node.node_id for path, node in snapshot.nodes.items()}


async def commit(replica: Replica, parent_id: str, update: Update) -> CommitResult:
    """Commit one update, whose message is its key."""
    coords = np.array([[chunk] for chunk in sorted(update.chunks)], np.uint32)
    data = update.data or bytes([update.value])
    payloads = Payloads.of(InlineChunk(data) for _ in update.chunks)
    changes = ChangeSet(chunks={_node_ids()[ARRAYS[update.array]]: ChunkChanges(coords, payloads)})
    write_id = WriteId(update.key, f"{update.chunks}")
    request = CommitRequest("main", parent_id, update.key, write_id, amend=update.amend)
    return await replica.committer.commit(replica.opened, changes, request)


def snapshot_ids(outcomes: list[Outcome]) -> list[str]:
    """Return the ids of the snapshots; all must be made."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert not failed, failed
    return [outcome.snapshot_id for outcome in outcomes if isinstance(outcome, CommitResult)]


class TrainRepository:
    """A repository in memory."""

    def __init__(self, folder: Path) -> None:
        self._folders = (folder / f"{number}" for number in itertools.count())
        self.memory = stored(new_files())
        self.counting = Counting(self.memory)

    async def replica(self, store: Any = None) -> Replica:
        """Start a replica, by default on a store that counts its calls."""
        return await Replica.of(store or self.counting)

    async def library(self) -> icechunk.Repository:
        """Open a copy of the repository with the library."""
        self._opened = next(self._folders)
        self._opened.mkdir(parents=True)
        return await opened_by_library(self.memory, self._opened)

    def take_back(self) -> None:
        """Store what the library has written to the copy that it opened last."""
        for name, data in read_files(self._opened).items():
            self.memory.place(ROOT.join(name), data)

    async def tip(self) -> str:
        """Return the snapshot of ``main``."""
        return (await self.library()).lookup_branch("main")

    async def expect(
        self, *updates: Update, repo: icechunk.Repository | None = None
    ) -> icechunk.Repository:
        """Assert that exactly the commits of *updates*, in this order, were made since the first.

        The library must read the parents, the diff and the operation of each, and all values, from
        the opened copy *repo* if that is given.
        """
        repo = repo or await self.library()
        history = consistent_history(repo)
        assert [each.message for each in history[2:]] == [update.key for update in updates]
        line = [each.id for each in history]
        for (before, after), update in zip(pairwise(line[1:]), updates, strict=True):
            diff = repo.diff(from_snapshot_id=before, to_snapshot_id=after)
            assert diff.updated_chunks == update.updated, update
        self._expect_values(repo, updates)
        return repo

    def _expect_values(self, repo: icechunk.Repository, updates: tuple[Update, ...]) -> None:
        expected = [[0] * CHUNKS for _ in ARRAYS]
        for update in updates:
            for chunk in update.chunks:
                expected[update.array][chunk] = update.value
        store = repo.readonly_session("main").store
        for name, values in zip(ARRAYS, expected, strict=True):
            found: Any = zarr.open_array(store, path=name, mode="r")[...]
            assert found.tolist() == values


def consistent_history(repo: icechunk.Repository) -> list[icechunk.SnapshotInfo]:
    """Return the snapshots of ``main``, oldest first.

    Assert that parents, times and operations belong to one line of commits, each made once.
    """
    history = list(repo.ancestry(branch="main"))[::-1]
    line = [each.id for each in history]
    assert [each.parent_id for each in history[1:]] == line[:-1]
    moments = [each.written_at for each in history]
    assert sorted(set(moments)) == moments
    log = list(repo.ops_log())
    moments = [each.updated_at for each in log]
    assert sorted(set(moments), reverse=True) == moments
    logged = [str(each.kind) for each in log if "new_snap_id" in str(each.kind)]
    listed = [made for made in line[1:] if any(made in kind for kind in logged)]
    assert listed == line[1:]
    assert len(set(logged)) == len(logged)
    return history


def is_conflict(outcome: Outcome) -> bool:
    """Return whether a commit was refused for a conflict; other errors must be of this service."""
    assert isinstance(outcome, CommitResult | ShardgateError), outcome
    return isinstance(outcome, CommitConflictError)
