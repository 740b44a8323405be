"""A repository changed in turns by service and library, compared with a dict."""

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import icechunk
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.support.clients.icechunk.model import (
    Content,
    Replica,
    by_library,
    by_service,
    compare_history,
    compare_operations,
    compare_tree,
    edit_by_library,
)
from tests.support.formats.icechunk.trees import (
    FIRST,
    MOVES,
    MOVING,
    STEPS,
    Draft,
    Edit,
    Step,
    Tree,
    Write,
    merge,
)
from tests.support.serving import client_of

INLINE_NBYTES: Final = 8
NUMBER: Final = st.integers(0, 99)
SELDOM: Final = st.sampled_from([False, False, False, True])
REPLICA: Final = st.integers(0, 1)
BRANCHES: Final = ("main", "dev", "é/1")


@dataclass(frozen=True)
class Commit:
    """A snapshot of the model."""

    tree: Tree
    parent_id: str | None


@dataclass
class Begun:
    """Changes that are not committed yet."""

    branch: str
    parent_id: str
    draft: Draft
    session: Any
    """A session of the library, or the id of a session of the service."""
    is_moving: bool = False


@dataclass(frozen=True)
class Lab:
    """Two services in front of one folder, and a name for each repository in it."""

    folder: Path
    clients: tuple[httpx.Client, httpx.Client]
    """Clients of a service that revalidates each time, and of one that trusts its cache."""
    names: "itertools.count[int]"


class Repository(RuleBasedStateMachine):
    """One repository, changed by rules and compared after each of them."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        name = f"repo-{next(lab.names)}"
        self.folder = lab.folder / name
        self.replicas = [Replica(client, name) for client in lab.clients]
        self.uids = itertools.count(1)
        self.wrote: int | None = None
        self.begun: list[Begun] = []
        self.contents: dict[str, Content] = {}
        """What the library reads of each snapshot."""
        self.kinds = ["repo_initialized"]

    @initialize(split=st.sampled_from([1, 2, 99]), updates=st.sampled_from([3, 1000]), steps=FIRST)
    def create(self, split: int, updates: int, steps: list[Step]) -> None:
        """Create and fill the repository by the library."""
        axis: Any = {icechunk.ManifestSplitDimCondition.Axis(0): split}
        every = {icechunk.ManifestSplitCondition.AnyArray(): axis}
        splitting = icechunk.ManifestSplittingConfig.from_dict(every)
        config = icechunk.RepositoryConfig(
            inline_chunk_threshold_bytes=INLINE_NBYTES,
            num_updates_per_repo_info_file=updates,
            manifest=icechunk.ManifestConfig(splitting=splitting),
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
        self.commits[tip] = Commit(begun.draft.after, root)
        self.kinds.append("new_commit")
        for branch in BRANCHES[1:]:
            self.repo.create_branch(branch, tip)
            self.kinds.append("branch_created")
        self.branches = dict.fromkeys(BRANCHES, tip)

    def _begin(self, where: int, back: int) -> Begun:
        branch = choose(sorted(self.branches), where)
        chain = self._ancestors(self.branches[branch])
        parent_id = chain[min(back, len(chain) - 1)]
        return Begun(branch, parent_id, Draft(self.commits[parent_id].tree, self.uids), None)

    def _ancestors(self, snapshot_id: str) -> list[str]:
        found = [snapshot_id]
        while (parent_id := self.commits[found[-1]].parent_id) is not None:
            found.append(parent_id)
        return found

    def _message(self) -> str:
        return f"number {next(self.uids)}"

    @rule(
        where=NUMBER,
        back=st.sampled_from([0, 0, 0, 1, 2, 3]),
        steps=STEPS,
        by=REPLICA,
        amend=SELDOM,
    )
    def commit_at_once(
        self, where: int, back: int, steps: list[Step], by: int, *, amend: bool
    ) -> None:
        """Commit without a session, perhaps onto a parent that is no longer the tip."""
        begun = self._begin(where, back)
        begun.draft.take(steps)
        answer = self.replicas[by].commit(
            _fitting(begun.draft), inline=INLINE_NBYTES, branch=begun.branch,
            parent_id=begun.parent_id, message=self._message(), amend=amend, allow_empty=True,
        )  # fmt: skip
        self._settle(begun, answer, by, amend=amend)

    @rule(where=NUMBER, back=st.sampled_from([0, 0, 1]), steps=st.lists(MOVING), by=REPLICA)
    def move_at_once(self, where: int, back: int, steps: list[Step], by: int) -> None:
        """Commit moves among other changes, if no node takes the place of a deleted one."""
        begun = self._begin(where, back)
        begun.draft.take(steps)
        answer = self.replicas[by].commit(
            _fitting(begun.draft), inline=INLINE_NBYTES, branch=begun.branch,
            parent_id=begun.parent_id, message=self._message(), allow_empty=True,
        )  # fmt: skip
        if answer.status_code == 400:
            assert "is deleted here" in answer.json()["detail"]
            return
        self._settle(begun, answer, by, amend=False)

    @rule(where=NUMBER, back=st.sampled_from([0, 1]), steps=STEPS, by=REPLICA)
    def commit_detached(self, where: int, back: int, steps: list[Step], by: int) -> None:
        """Make a snapshot that no branch leads to."""
        begun = self._begin(where, back)
        begun.draft.take(steps)
        answer = self.replicas[by].commit(
            _fitting(begun.draft), inline=INLINE_NBYTES, branch=None,
            parent_id=begun.parent_id, message=self._message(), allow_empty=True,
        )  # fmt: skip
        assert answer.status_code == 201, answer.text
        assert answer.json()["parent_id"] == begun.parent_id
        self.commits[answer.json()["snapshot_id"]] = Commit(begun.draft.after, begun.parent_id)
        self.kinds.append("new_detached_snapshot")
        self.wrote = by

    @rule(where=NUMBER, steps=STEPS, amend=SELDOM)
    def commit_by_library(self, where: int, steps: list[Step], *, amend: bool) -> None:
        """Commit by the library."""
        begun = self._begin(where, 0)
        self._take_by_library(begun, steps)
        self._commit_by_library(begun, amend=amend)

    @rule(where=NUMBER, steps=MOVES, amend=SELDOM)
    def move_by_library(self, where: int, steps: list[Step], *, amend: bool) -> None:
        """Move nodes by the library."""
        begun = self._begin(where, 0)
        begun.is_moving = True
        self._take_by_library(begun, steps)
        if begun.draft.edits:
            self._commit_by_library(begun, amend=amend)

    @rule(where=NUMBER, steps=STEPS, by=REPLICA)
    def begin(self, where: int, steps: list[Step], by: int) -> None:
        """Begin a session of the service."""
        begun = self._begin(where, 0)
        told = self.replicas[0].begin(begun.branch)
        assert told["parent_id"] == begun.parent_id
        begun.session = told["session_id"]
        self.begun.append(begun)
        self._edit_session(begun, steps, by)

    @precondition(lambda self: self.begun)
    @rule(which=NUMBER, steps=STEPS, by=REPLICA)
    def go_on(self, which: int, steps: list[Step], by: int) -> None:
        """Write more changes to a session."""
        self._edit_session(choose(self.begun, which), steps, by)

    @precondition(lambda self: self.begun)
    @rule(which=NUMBER, by=REPLICA, amend=SELDOM)
    def commit_session(self, which: int, by: int, *, amend: bool) -> None:
        """Commit a session twice; one that conflicts with other commits stays open."""
        begun = choose(self.begun, which)
        options = {"message": self._message(), "amend": amend, "allow_empty": True}
        answer = self.replicas[by].commit_session(begun.session, **options)
        if self._settle(begun, answer, by, amend=amend):
            self.begun.remove(begun)
            again = self.replicas[1 - by].commit_session(begun.session, message="again")
            assert again.json() == answer.json()

    def _take_by_library(self, begun: Begun, steps: list[Step]) -> None:
        begin = self.repo.rearrange_session if begun.is_moving else self.repo.writable_session
        begun.session = begin(begun.branch)
        edit_by_library(begun.session, begun.draft.take(steps))

    def _edit_session(self, begun: Begun, steps: list[Step], by: int) -> None:
        self.replicas[by].edit_session(begun.session, begun.draft.take(steps))
        tree = begun.draft.after
        for replica in self.replicas:
            content = by_service(replica, f"@session.{begun.session}", tree)
            compare_tree(content, tree)

    def _settle(self, begun: Begun, answer: httpx.Response, by: int, *, amend: bool) -> bool:
        """Return whether a commit was made; a conflict requires changes by others since."""
        tip = self.branches[begun.branch]
        if answer.status_code == 409:
            assert amend or tip != begun.parent_id
            return False
        assert answer.status_code == 201, answer.text
        assert not amend or tip == begun.parent_id
        assert begun.parent_id in self._ancestors(tip)
        tree = merge(begun.draft.before, begun.draft.after, self.commits[tip].tree)
        self._committed(begun, answer.json()["snapshot_id"], tree, amend=amend)
        assert answer.json()["parent_id"] == self.commits[self.branches[begun.branch]].parent_id
        self.wrote = by
        return True

    def _commit_by_library(self, begun: Begun, *, amend: bool) -> None:
        if not amend:
            made = begun.session.commit(self._message(), allow_empty=True)
        else:
            try:
                made = begun.session.amend(self._message(), allow_empty=True)
            except icechunk.IcechunkError:  # the first commit, or one with moves
                return
        self._committed(begun, made, begun.draft.after, amend=amend)

    def _committed(self, begun: Begun, made: str, tree: Tree, *, amend: bool) -> None:
        tip = self.branches[begun.branch]
        parent_id = self.commits[tip].parent_id if amend else tip
        assert parent_id is not None
        assert made not in self.commits
        self.commits[made] = Commit(tree, parent_id)
        self.branches[begun.branch] = made
        self.kinds.append("commit_amended" if amend else "new_commit")

    @invariant()
    def agree(self) -> None:
        """Compare all that library and service read with the model."""
        found = {name: self.repo.lookup_branch(name) for name in self.repo.list_branches()}
        assert found == self.branches
        self._agree(self.replicas[0])
        if self.wrote == 1:
            self._agree(self.replicas[1])
        self.wrote = None

    def teardown(self) -> None:
        """Delete open sessions."""
        for begun in self.begun:
            self.replicas[0].send("DELETE", f"/sessions/{begun.session}")

    def _agree(self, replica: Replica) -> None:
        told = replica.tell("/branches")["branches"]
        assert {each["name"]: each["snapshot_id"] for each in told} == self.branches
        kinds = compare_operations(replica, self.repo)
        assert kinds == self.kinds[::-1]
        refs = self._refs()
        for ref, snapshot_id in refs.items():
            tree, expected = self.commits[snapshot_id].tree, self._content(snapshot_id)
            content = by_service(replica, ref, tree)
            compare_tree(content, tree)
            for key, data in content.items():
                assert key == "zarr.json" or data == expected[key], (ref, key)
        for name, tip in self.branches.items():
            ancestry = list(self.repo.ancestry(branch=name))
            assert [each.id for each in ancestry] == self._ancestors(tip)
            compare_history(replica, f"@branch.{quote(name, safe='')}", ancestry)

    def _content(self, snapshot_id: str) -> Content:
        """Read a snapshot with the library, once: it does not change."""
        if snapshot_id not in self.contents:
            tree = self.commits[snapshot_id].tree
            session = self.repo.readonly_session(snapshot_id=snapshot_id)
            self.contents[snapshot_id] = by_library(session, tree)
            compare_tree(self.contents[snapshot_id], tree)
        return self.contents[snapshot_id]

    def _refs(self) -> dict[str, str]:
        branches = {f"@branch.{quote(at, safe='')}": tip for at, tip in self.branches.items()}
        others = [each for each in self.commits if each not in self.branches.values()][-2:]
        return branches | {f"@{each}": each for each in others}


def _fitting(draft: Draft) -> list[Edit]:
    """Return the edits without chunks outside of their array's final grid."""
    nodes = {node.uid: node for node in draft.tree.values()}
    return [
        edit
        for edit in draft.edits
        if not isinstance(edit, Write) or edit.uid not in nodes or nodes[edit.uid].has(edit.coords)
    ]


def choose[T](items: Sequence[T], number: int) -> T:
    """Return the item that *number* selects."""
    return items[number % len(items)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Run two services before a folder: one without a cache lifetime, the other with a long one."""
    folder = tmp_path_factory.mktemp("repositories")
    datasets = {"repo": DatasetSettings(url=folder.as_uri(), writable=True)}
    doubting, trusting = (
        Settings(datasets=datasets, cache=CacheSettings(ttl_s=ttl_s)) for ttl_s in (1e-6, 600)
    )
    with client_of(doubting) as one, client_of(trusting) as other:
        yield Lab(folder, (one, other), itertools.count())


@pytest.mark.parametrize(
    ("examples", "steps"), [(1, 10), pytest.param(100, 40, marks=pytest.mark.soak)]
)
def test_service_and_library_agree_with_a_model(lab: Lab, examples: int, steps: int) -> None:
    """After random commits, sessions and moves, service and library read what a model has."""
    config = settings(
        max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck)
    )
    factory: Any = lambda: Repository(lab)  # noqa: E731 - it is typed as a class
    run_state_machine_as_test(factory, settings=config)
