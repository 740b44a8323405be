"""A repository that the service and the library change by turns, and dictionaries of it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import httpx
import icechunk
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from tests.clients.icechunk.model.merging import Touched
from tests.clients.icechunk.model.trees import (
    FIRST,
    Draft,
    Step,
    Tree,
)
from tests.clients.icechunk.model.writers import Replica, edit_by_library

INLINE_NBYTES: Final = 8
NUMBER: Final = st.integers(0, 99)
POLICIES: Final = st.sampled_from(["fail", "ours", "theirs"])
SELDOM: Final = st.sampled_from([False, False, False, True])
REPLICA: Final = st.integers(0, 1)
LIBRARY: Final = 2
BY: Final = st.integers(0, LIBRARY)
NAMES_OF_BRANCHES: Final = st.sampled_from(["main", "dev", "é/1", "x"])
ABSENT_ID: Final = "1CECHNKREP0F1RSTCMT1"
_NODES: Final = ("new_groups", "new_arrays", "deleted_groups", "deleted_arrays")
_UPDATES: Final = ("updated_groups", "updated_arrays", "updated_chunks")


@dataclass(frozen=True)
class Commit:
    """A snapshot."""

    tree: Tree
    parent_id: str | None
    log: Mapping[str, Any] = MappingProxyType({})
    """What the library tells of its own log."""
    is_joined: bool = False
    """Whether commits before it have expired."""

    @property
    def has_moves(self) -> bool:
        """Tell whether nodes were moved."""
        return bool(self.log.get("moved_nodes"))

    @property
    def has_more(self) -> bool:
        """Tell whether anything else was done."""
        return any(self.log.get(name) for name in (*_NODES, *_UPDATES))


@dataclass
class Begun:
    """Changes that are not committed yet."""

    branch: str
    parent_id: str
    draft: Draft
    session: Any
    """Of the library, or the id of one of the service."""
    is_moving: bool = False

    @property
    def is_of_library(self) -> bool:
        """Tell who made them."""
        return isinstance(self.session, icechunk.Session)

    def touched(self, *, is_session: bool = False) -> Touched:
        """Tell the changed chunks; sessions know nothing of those that only came and went."""
        before = {node.uid: node for node in self.draft.before.values()}
        return {
            uid: {
                at: data
                for at, data in chunks.items()
                if data is not None
                or not is_session
                or (uid in before and at in before[uid].chunks)
            }
            for uid, chunks in self.draft.touched().items()
        }


@dataclass(frozen=True)
class Lab:
    """Two services in front of one folder, and a name for each repository in it."""

    folder: Path
    clients: tuple[httpx.Client, httpx.Client]
    """The first looks for what is new each time; the second knows what it has done itself."""
    names: "itertools.count[int]"


class State(RuleBasedStateMachine):
    """One repository, and what it is to be."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        name = f"repo-{next(lab.names)}"
        self.folder = lab.folder / name
        self.replicas = [Replica(client, name) for client in lab.clients]
        self.uids = itertools.count(1)
        self.wrote: int | None = None
        self.begun: list[Begun] = []
        self.begun_by_library: list[Begun] = []
        self.tags: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.kinds = ["repo_initialized"]

    @initialize(
        split=st.sampled_from([None, 1, 2]), updates=st.sampled_from([3, 1000]), steps=FIRST
    )
    def create(self, split: int | None, updates: int, steps: list[Step]) -> None:
        """Let the library make it, and put something there."""
        manifest = icechunk.ManifestConfig()
        if split is not None:
            axis: Any = {icechunk.ManifestSplitDimCondition.Axis(0): split}
            every = {icechunk.ManifestSplitCondition.AnyArray(): axis}
            splitting = icechunk.ManifestSplittingConfig.from_dict(every)
            manifest = icechunk.ManifestConfig(splitting=splitting)
        config = icechunk.RepositoryConfig(
            inline_chunk_threshold_bytes=INLINE_NBYTES,
            num_updates_per_repo_info_file=updates,
            manifest=manifest,
        )
        storage = icechunk.local_filesystem_storage(str(self.folder))
        self.repo = icechunk.Repository.create(storage, config=config)
        root = self.repo.lookup_branch("main")
        self.commits = {root: Commit({}, None)}
        self.branches = {"main": root}
        begun = self._begin(0, 0)
        begun.session = self.repo.writable_session("main")
        edit_by_library(begun.session, begun.draft.take(steps))
        tip = begun.session.commit(self._message())
        log = self.repo.inspect_transaction_log(tip)
        self.commits[tip] = Commit(begun.draft.after, root, log)
        self.branches["main"] = tip
        self.kinds.append("new_commit")

    def _begin(self, where: int, back: int) -> Begun:
        branch = choose(sorted(self.branches), where)
        chain = self._ancestors(self.branches[branch])
        parent_id = chain[min(back, len(chain) - 1)]
        return Begun(branch, parent_id, Draft(self.commits[parent_id].tree, self.uids), None)

    def _did(self, kind: str, by: int) -> None:
        self.kinds.append(kind)
        self.wrote = by

    def _ancestors(self, snapshot_id: str) -> list[str]:
        found = [snapshot_id]
        while (parent_id := self.commits[found[-1]].parent_id) is not None:
            found.append(parent_id)
        return found

    def _message(self) -> str:
        return f"number {next(self.uids)}"


def quoted(name: str) -> str:
    """Spell the name of a ref in a URL."""
    return quote(name, safe="")


def choose[T](items: Sequence[T], number: int) -> T:
    """Let a number choose."""
    return items[number % len(items)]
