"""Rebases of change sets and their conflicts, compared with those of the library."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import icechunk
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.apply import apply_changes
from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges, NodeDocument
from shardgate.formats.icechunk.conflicts import CommitConflict, ConflictKind, Policy, rebase
from shardgate.formats.icechunk.manifest import InlineChunk
from shardgate.formats.icechunk.manifest_writer import Rewritten
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import StoredSnapshot
from shardgate.formats.icechunk.transaction_log import MoveOperation, TransactionLog
from tests.support.formats.icechunk.peer import (
    change_set,
    logged,
    open_array,
    open_root,
    read_manifest,
    stored,
)
from tests.support.formats.icechunk.repositories import array, group
from tests.support.formats.icechunk.trees import (
    EMPTY,
    MOVING,
    STEP,
    Step,
    TreeStore,
    array_in_a_group,
    by_uid,
    difference,
    merge,
    run,
)

A, B, C, D, E = (b"%08d" % number for number in range(5))
NOTHING = apply_changes(ChangeSet(), EMPTY).log


def _over(
    ours: ChangeSet, *theirs: ChangeSet, policy: Policy = Policy.FAIL
) -> ChangeSet | list[CommitConflict]:
    """Rebase *ours* over *theirs*, each of which is a commit."""
    parent = tip = array_in_a_group(2000)
    logs: list[TransactionLog] = []
    for changes in theirs:
        applied = apply_changes(changes, tip)
        tip = replace(tip, nodes=applied.nodes)
        logs.append(applied.log)
    return rebase(ours, parent, logs, tip, policy)


def _chunks(*at: int) -> ChangeSet:
    coords = np.array(at, np.uint32).reshape(len(at), 1)
    return ChangeSet(
        chunks={C: ChunkChanges(coords, Payloads.of(InlineChunk(b"%d" % n) for n in at))}
    )


def _kinds(found: ChangeSet | list[CommitConflict]) -> list[tuple[str, str]]:
    assert isinstance(found, list)
    return [(str(conflict.kind), conflict.path) for conflict in found]


def test_conflict_counts_all_chunks_and_lists_the_first_hundred() -> None:
    """A conflict counts all chunks that both sides changed, and lists the first hundred."""
    found = _over(_chunks(*range(999)), _chunks(*range(700)), _chunks(*range(600, 1000)))

    assert isinstance(found, list)
    (conflict,) = found
    assert (conflict.kind, conflict.path) == (ConflictKind.CHUNK_DOUBLE_UPDATE, "/g/a")
    assert conflict.count == 999
    assert conflict.chunks == [[at] for at in range(100)]


@pytest.mark.parametrize(
    ("document", "lost"),
    [
        (array([2004], [2]), None),
        (array([1400], [2]), [[700], [701], [999]]),
        (array([2000], [4]), [[5], [499], [500], [700], [701], [999]]),
        (array([2000], [2], ["gzip"]), [[5], [499], [500], [700], [701], [999]]),
        (array([2000, 1], [2, 1]), [[5], [499], [500], [700], [701], [999]]),
        (b"", [[5], [499], [500], [700], [701], [999]]),
    ],
)
def test_chunks_lost_by_our_new_grid_are_a_conflict(
    document: bytes, lost: list[list[int]] | None
) -> None:
    """Chunks of theirs that our new document drops or reinterprets are a conflict.

    The library lets this pass.
    """
    theirs = (_chunks(5, 499, 500), _chunks(700, 701, 999))
    found = _over(ChangeSet(updated={C: document}), *theirs)

    if lost is None:
        assert isinstance(found, ChangeSet)
        return
    assert _kinds(found) == [("chunks_updated_in_updated_array", "/g/a")]
    assert isinstance(found, list)
    assert found[0].chunks == lost


def test_node_that_they_created_and_deleted_is_no_conflict() -> None:
    """A node that they created is a conflict with ours at its path, unless they deleted it."""
    made = ChangeSet(new={D: NodeDocument("/x", group())})
    ours = ChangeSet(new={E: NodeDocument("/x", array([2], [2]))})

    assert _kinds(_over(ours, made)) == [("new_node_conflicts_with_existing_node", "/x")]
    assert _over(ours, made, ChangeSet(deleted=frozenset([D]))) == ours


def test_move_of_theirs_is_the_only_conflict() -> None:
    """A move of theirs, even one that was undone, is the only reported conflict."""
    parent = array_in_a_group(2000)
    moved = replace(parent.nodes["/g/a"], path="/b")
    there = {path: node for path, node in parent.nodes.items() if path != "/g/a"} | {"/b": moved}
    log = replace(NOTHING, moves=(MoveOperation("/g/a", "/g/b", C, is_array=True),))
    for nodes, logs in ((there, [NOTHING]), (there, [log]), (parent.nodes, [log, log])):
        found = rebase(_chunks(1), parent, logs, replace(parent, nodes=nodes))
        assert _kinds(found) == [("move_operation_cannot_be_rebased", "/g/a")]


@pytest.mark.parametrize(
    ("theirs", "kinds"),
    [
        (ChangeSet(updated={A: group() + b" "}), []),
        (ChangeSet(new={E: NodeDocument("/y", group())}), []),
        (_chunks(1), [("move_operation_cannot_be_rebased", "/g/a")]),
        (
            ChangeSet(updated={B: group() + b" "}),
            [("move_operation_cannot_be_rebased", "/g")],
        ),
        (ChangeSet(deleted=frozenset([C])), [("move_operation_cannot_be_rebased", "/g/a")]),
        (
            ChangeSet(new={E: NodeDocument("/g/n", group())}),
            [("move_operation_cannot_be_rebased", "/g")],
        ),
        (
            ChangeSet(new={E: NodeDocument("/x", group())}),
            [("new_node_conflicts_with_existing_node", "/x")],
        ),
    ],
)
def test_move_is_rebased_only_over_commits_that_touch_neither_path(
    theirs: ChangeSet, kinds: list[tuple[str, str]]
) -> None:
    """A move of a group conflicts with changes in it and with a node in its new place only."""
    ours = ChangeSet(moves={B: "/x", C: "/x/a"})
    found = _over(ours, theirs)

    assert (found == ours) if not kinds else (_kinds(found) == kinds)


def test_conflicts_are_listed_once_per_kind_and_path() -> None:
    """Conflicts are listed once for each kind and path, sorted by path."""
    theirs = ChangeSet(
        new={D: NodeDocument("/g/x", group()), E: NodeDocument("/g/y", group())},
        updated={B: group() + b" ", C: array([8], [2])},
    )

    assert _kinds(_over(ChangeSet(deleted=frozenset([B, C])), theirs)) == [
        ("delete_of_updated_group", "/g"),
        ("delete_of_updated_array", "/g/a"),
    ]


@settings(max_examples=60)
@given(
    st.lists(STEP, max_size=15),
    st.lists(MOVING, max_size=5),
    st.lists(st.lists(STEP, max_size=5), max_size=2),
    st.sampled_from(Policy),
)
def test_rebase_without_conflict_merges_both_sides(
    steps: list[Step], ours: list[Step], theirs: list[list[Step]], policy: Policy
) -> None:
    """A rebase without conflict gives the three-way merge of both sides."""
    store, ids = TreeStore(), count()
    parent_tree = run({}, steps, ids)
    parent, _ = store.commit(difference({}, parent_tree), EMPTY, parent_tree)
    tip, tip_tree, logs = parent, parent_tree, []
    for each in theirs:
        after = run(tip_tree, each, ids)
        tip, log = store.commit(difference(tip_tree, after), tip, after)
        tip_tree = after
        logs.append(log)
    our_tree = run(parent_tree, ours, ids)
    rebased = rebase(difference(parent_tree, our_tree), parent, logs, tip, policy)
    if isinstance(rebased, list):
        assert rebased
        return
    expected = by_uid(merge(parent_tree, our_tree, tip_tree, yields=policy is Policy.THEIRS))
    applied = apply_changes(rebased, tip)
    found = {int(node.node_id): (path, node) for path, node in applied.nodes.items()}
    for uid, (path, node) in expected.items():
        assert found[uid][1].document == node.data
        if uid in by_uid(our_tree):
            assert found[uid][0] == path
    assert found.keys() == expected.keys()
    merged = {path: expected[uid][1] for uid, (path, _) in found.items()}
    snapshot, _ = store.commit(rebased, tip, merged)
    assert store.tree(snapshot) == merged


type Change = Callable[[icechunk.Session, str], object]


def _create(path: str) -> Change:
    fields: Any = {"shape": (8,), "chunks": (2,), "dtype": "u1"}
    return lambda session, _: open_root(session).create_array(path, **fields)


def _fill(path: str, start: int) -> Change:
    place = slice(start, start + 2)
    return lambda session, _: open_array(session, path).__setitem__(place, 5)


def _erase(session: icechunk.Session, _: str) -> None:
    asyncio.run(session.store.delete("g/arr/c/0"))


def _resize(length: int) -> Change:
    return lambda session, _: open_array(session, "g/arr").resize((length,))


def _annotate(path: str) -> Change:
    return lambda session, who: open_root(session)[path].attrs.update({"who": who})


def _delete(path: str) -> Change:
    return lambda session, _: open_root(session).__delitem__(path)


def _group(path: str) -> Change:
    return lambda session, _: open_root(session).create_group(path)


def _move(source: str, target: str) -> Change:
    return lambda session, _: session.move(source, target)


def _create_all(session: icechunk.Session, _: str) -> None:
    root = open_root(session)
    for path in ("n/x", "n/x-", "n/y/z"):
        names = ["y", None]
        array = root.create_array(
            path, shape=(5, 7), chunks=(2, 3), dtype="i2", dimension_names=names
        )
        array[1:, 2:] = 4
    root.create_array("scalar", shape=(), dtype="i2")[...] = 4
    root.create_array("none", shape=(0, 5), chunks=(2, 5), dtype="i2")
    with zarr.config.set({"array.rectilinear_chunks": True}):
        root.create_array("rect", shape=(10, 6), chunks=[[4, 4, 2], [3, 3]], dtype="i2")[:] = 4
    root.create_array("shards", shape=(9,), chunks=(2,), shards=(4,), dtype="i2")[:] = 4


CHANGES: dict[str, tuple[Change, ...]] = {
    "set chunk 0": (_fill("g/arr", 0),),
    "set chunk 3": (_fill("g/arr", 6),),
    "delete chunk 0": (_erase,),
    "edit arr": (_annotate("g/arr"),),
    "grow arr": (_resize(12),),
    "shrink arr": (_resize(4),),
    "delete arr": (_delete("g/arr"),),
    "replace arr": (_delete("g/arr"), _create("g/arr")),
    "arr to group": (_delete("g/arr"), _group("g/arr")),
    "create g/new": (_create("g/new"),),
    "edit g": (_annotate("g"),),
    "delete g": (_delete("g"),),
    "replace g": (_delete("g"), _group("g")),
    "g to array": (_delete("g"), _create("g")),
    "create q": (_create("q"),),
    "create all": (_create_all,),
    "shrink and fill": (_resize(4), _fill("g/arr", 2)),
    "move a-b to q": (_move("/a-b", "/q"),),
    "move g to h": (_move("/g", "/h"),),
}
_REGROUPED = {"delete g", "replace g", "g to array"}
_REPLACED = {"replace g", "g to array"}
_INSIDE = {"create g/new", "replace arr", "arr to group"}
_ADDED = {"replace arr", "arr to group"}
HOLES = {
    # a: a node is made in a group that is deleted, or the other way round
    *((ours, theirs) for ours in _REGROUPED for theirs in _INSIDE),
    *((ours, "delete g") for ours in _INSIDE),
    # b, c: a node is made at the path of another one that both replaced
    *((ours, theirs) for ours in _ADDED for theirs in _ADDED),
    *((ours, theirs) for ours in _REPLACED for theirs in _REPLACED),
    # d: the grid drops a chunk that was written
    ("shrink arr", "set chunk 3"),
    ("shrink and fill", "set chunk 3"),
}
"""Conflicts that the library misses, as ours over theirs."""
OURS = [name for name in CHANGES if not name.startswith("move")]
"""Changes without moves, which only the library makes."""
_SHRINKING = {"shrink arr", "shrink and fill"}


class Tip(NamedTuple):
    """A commit of the library."""

    snapshot_id: str
    snapshot: StoredSnapshot
    log: TransactionLog

    @classmethod
    def of(cls, folder: Path, snapshot_id: str) -> "Tip":
        """Read the commit."""
        return cls(snapshot_id, stored(folder, snapshot_id), logged(folder, snapshot_id))


@dataclass
class Written:
    """A repository with each change committed on a branch of its own."""

    folder: Path
    repo: icechunk.Repository
    base: Tip
    tips: dict[str, Tip]

    def session(self, change: str, branch: str) -> icechunk.Session:
        """Begin a session at the tip of *branch* for a change."""
        is_move = change.startswith("move")
        start = self.repo.rearrange_session if is_move else self.repo.writable_session
        return start(branch)

    def rebase_theirs(self, ours: str, theirs: str) -> set[str] | StoredSnapshot | None:
        """Let the library rebase one change over another; return the conflicts or the snapshot.

        The result is None if the library finds no conflict and cannot commit.
        """
        self.repo.reset_branch("main", self.base.snapshot_id)
        session = self.session(ours, "main")
        for change in CHANGES[ours]:
            change(session, "ours")
        self.repo.reset_branch("main", self.tips[theirs].snapshot_id)
        try:
            session.rebase(icechunk.ConflictDetector())
        except icechunk.RebaseFailedError as error:
            return {str(each.conflict_type).lower().replace(" ", "_") for each in error.conflicts}
        try:
            return stored(self.folder, session.commit("ours", allow_empty=True))
        except icechunk.NodeNotFoundError:
            return None

    def changes(self, name: str) -> ChangeSet:
        """Return a change as a change set."""
        _, snapshot, log = self.tips[name]
        return change_set(self.base.snapshot, snapshot, log)

    def rebase_ours(
        self, ours: str, theirs: str, policy: Policy = Policy.FAIL
    ) -> list[CommitConflict] | StoredSnapshot:
        """Rebase one change over another; return the conflicts or the snapshot."""
        changes = self.changes(f"{ours} (ours)")
        _, tip, log = self.tips[theirs]
        rebased = rebase(changes, self.base.snapshot, [log], tip, policy)
        if isinstance(rebased, list):
            return rebased
        applied = apply_changes(rebased, tip)
        return StoredSnapshot(b"", applied.nodes, {}, 0, "", tip.metadata)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write the repository."""
    folder = tmp_path_factory.mktemp("conflicts")
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    session = repo.writable_session("main")
    for path in ("g/arr", "a-b"):
        _create(path)(session, "")
        open_array(session, path)[:] = 1
    found = Written(folder, repo, Tip.of(folder, session.commit("base")), {})
    for name, changes in CHANGES.items():
        for branch, who in ((name, "theirs"), (f"{name} (ours)", "ours")):
            repo.create_branch(branch, found.base.snapshot_id)
            session = found.session(name, branch)
            for change in changes:
                change(session, who)
            found.tips[branch] = Tip.of(folder, session.commit(name))
    return found


def _plain(log: TransactionLog) -> tuple[TransactionLog, dict[bytes, list[object]]]:
    chunks = {
        node_id: [coords.tolist() for coords in batches]
        for node_id, batches in log.updated_chunks.items()
    }
    return replace(log, updated_chunks={}), chunks


@pytest.mark.parametrize("name", OURS)
def test_commit_equals_that_of_the_library(written: Written, name: str) -> None:
    """A commit has the nodes, listed manifests and log of the library's commit."""
    _, after, log = written.tips[name]
    applied = apply_changes(written.changes(name), written.base.snapshot)
    rewritten: dict[bytes, Rewritten] = {}
    for rewrite in applied.rewrites:
        array = after.nodes[rewrite.path].array
        assert array is not None
        ids = [ref.object_id for ref in rewrite.leaving]
        dropped = rewrite.dropped({each: read_manifest(written.folder, each) for each in ids})
        files = tuple(after.manifest_files.values())
        rewritten[rewrite.node_id] = Rewritten(array.manifests, dropped, files)
    finished = applied.finish(rewritten)

    assert finished.nodes == after.nodes
    assert finished.manifest_files == after.manifest_files
    assert _plain(finished.log) == _plain(log)


@pytest.mark.parametrize("ours", OURS)
def test_conflicts_equal_those_of_the_library_except_its_misses(
    written: Written, ours: str
) -> None:
    """Rebases have the conflicts or the result of the library, and those that it misses.

    To the library, a smaller array is one with deleted chunks.
    """
    for theirs in CHANGES:
        expected = written.rebase_theirs(ours, theirs)
        found = written.rebase_ours(ours, theirs)
        at = f"{ours} over {theirs}"
        if isinstance(expected, set):
            assert isinstance(found, list), at
            kinds = {str(conflict.kind) for conflict in found}
            assert kinds == expected or (kinds and ours in _SHRINKING), at
        elif (ours, theirs) in HOLES:
            assert isinstance(found, list), at
        else:
            assert not isinstance(found, list), at
            documents = {path: node.document for path, node in found.nodes.items()}
            if expected is not None:
                assert documents == {p: node.document for p, node in expected.nodes.items()}, at


@pytest.mark.parametrize("ours", OURS)
def test_policy_resolves_only_chunk_conflicts(written: Written, ours: str) -> None:
    """A policy resolves conflicts of chunks that both changed, and no others."""
    for theirs in CHANGES:
        failing = written.rebase_ours(ours, theirs)
        for policy in (Policy.OURS, Policy.THEIRS):
            settled = written.rebase_ours(ours, theirs, policy)
            if isinstance(failing, list):
                left = [each for each in failing if each.kind != "chunk_double_update"]
                assert (settled if isinstance(settled, list) else []) == left
            else:
                assert settled == failing
