"""Changes on top of each other: what the library refuses we refuse, and what it spoils besides."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import icechunk
import pytest

from app.formats.icechunk.changes import ChangeSet
from app.formats.icechunk.commit import apply_changes
from app.formats.icechunk.conflicts import CommitConflict, Policy, rebase
from app.formats.icechunk.snapshot import StoredSnapshot
from tests.formats.icechunk.peer import change_set, logged, open_array, open_root, stored

type Change = Callable[[icechunk.Session, str], None]


def _create(path: str) -> Change:
    def create(session: icechunk.Session, _: str) -> None:
        open_root(session).create_array(path, shape=(8,), chunks=(2,), dtype="u1")

    return create


def _fill(path: str, start: int) -> Change:
    def fill(session: icechunk.Session, _: str) -> None:
        open_array(session, path)[start : start + 2] = 5

    return fill


def _erase(session: icechunk.Session, _: str) -> None:
    asyncio.run(session.store.delete("g/arr/c/0"))


def _resize(length: int) -> Change:
    return lambda session, _: open_array(session, "g/arr").resize((length,))


def _annotate(path: str) -> Change:
    return lambda session, who: open_root(session)[path].attrs.update({"who": who})


def _delete(path: str) -> Change:
    def delete(session: icechunk.Session, _: str) -> None:
        del open_root(session)[path]

    return delete


def _group(path: str) -> Change:
    def create(session: icechunk.Session, _: str) -> None:
        open_root(session).create_group(path)

    return create


def _move(source: str, target: str) -> Change:
    return lambda session, _: session.move(source, target)


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
}
"""What the library lets pass, ours over theirs."""
OURS = [name for name in CHANGES if not name.startswith("move")]
"""Only the library moves nodes."""


@dataclass
class Written:
    """A repository with every change committed on a branch of its own."""

    folder: Path
    repo: icechunk.Repository
    base: str
    tips: dict[str, str]

    def session(self, change: str, branch: str) -> icechunk.Session:
        """Begin a session at the tip of *branch*, which makes a change."""
        is_move = change.startswith("move")
        start = self.repo.rearrange_session if is_move else self.repo.writable_session
        return start(branch)

    def rebase_theirs(self, ours: str, theirs: str) -> set[str] | StoredSnapshot | None:
        """Let the library put one change over another: the kinds of conflicts, or the outcome.

        There is none where it finds no conflict and cannot commit.
        """
        branch = f"{ours} over {theirs}"
        self.repo.create_branch(branch, self.base)
        session = self.session(ours, branch)
        for change in CHANGES[ours]:
            change(session, "ours")
        self.repo.reset_branch(branch, self.tips[theirs])
        try:
            session.rebase(icechunk.ConflictDetector())
        except icechunk.RebaseFailedError as error:
            return {str(each.conflict_type).lower().replace(" ", "_") for each in error.conflicts}
        try:
            return stored(self.folder, session.commit("ours", allow_empty=True))
        except icechunk.NodeNotFoundError:
            return None

    def changes(self, name: str) -> ChangeSet:
        """Give a change as a change set of ours."""
        tip = self.tips[name]
        base = stored(self.folder, self.base)
        return change_set(base, stored(self.folder, tip), logged(self.folder, tip))

    def rebase_ours(
        self, ours: str, theirs: str, policy: Policy = Policy.FAIL
    ) -> list[CommitConflict] | StoredSnapshot:
        """Put one change over another: conflicts, or the outcome, but for manifests."""
        changes = self.changes(f"{ours} (ours)")
        tip = stored(self.folder, self.tips[theirs])
        logs = [logged(self.folder, self.tips[theirs])]
        rebased = rebase(changes, stored(self.folder, self.base), logs, tip, policy)
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
    found = Written(folder, repo, session.commit("base"), {})
    for name, changes in CHANGES.items():
        for branch, who in ((name, "theirs"), (f"{name} (ours)", "ours")):
            repo.create_branch(branch, found.base)
            session = found.session(name, branch)
            for change in changes:
                change(session, who)
            found.tips[branch] = session.commit(name)
    return found


@pytest.mark.parametrize("ours", OURS)
def test_we_let_pass_what_the_library_does_but_for_its_holes(written: Written, ours: str) -> None:
    """Where it finds conflicts we find the same; where it finds none, the same comes out.

    To the library a smaller array is one of which chunks were deleted.
    """
    for theirs in CHANGES:
        expected = written.rebase_theirs(ours, theirs)
        found = written.rebase_ours(ours, theirs)
        at = f"{ours} over {theirs}"
        if isinstance(expected, set):
            assert isinstance(found, list), at
            kinds = {str(conflict.kind) for conflict in found}
            assert kinds == expected or (kinds and ours == "shrink arr"), at
        elif (ours, theirs) in HOLES:
            assert isinstance(found, list), at
        else:
            assert not isinstance(found, list), at
            documents = {path: node.document for path, node in found.nodes.items()}
            if expected is not None:
                assert documents == {p: node.document for p, node in expected.nodes.items()}, at


@pytest.mark.parametrize("policy", [Policy.OURS, Policy.THEIRS])
@pytest.mark.parametrize("ours", OURS)
def test_a_policy_settles_nothing_but_chunks_that_both_changed(
    written: Written, ours: str, policy: Policy
) -> None:
    """All other conflicts stay as they are."""
    for theirs in CHANGES:
        failing, settled = (
            written.rebase_ours(ours, theirs, each) for each in (Policy.FAIL, policy)
        )
        if isinstance(failing, list):
            left = [each for each in failing if each.kind != "chunk_double_update"]
            assert (settled if isinstance(settled, list) else []) == left
        else:
            assert settled == failing
