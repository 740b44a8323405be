"""Commits of the model: what they are to come to, and what they did."""

from typing import Any, Final

import httpx
import icechunk

from tests.clients.icechunk.model.merging import Ours, Theirs, Touched, merge
from tests.clients.icechunk.model.state import INLINE_NBYTES, Begun, Commit, State
from tests.clients.icechunk.model.trees import Coords, Draft, Edit, Node, Tree, Write

_SOLVERS: Final = {
    "ours": icechunk.VersionSelection.UseOurs,
    "theirs": icechunk.VersionSelection.UseTheirs,
}


class Making(State):
    """Commits."""

    def _commit_at_once(self, begun: Begun, by: int, policy: str, *, amend: bool) -> None:
        expected = self._expect(begun, policy, begun.touched(), amend=amend)
        answer = self.replicas[by].commit(
            _fitting(begun.draft), inline=INLINE_NBYTES, branch=begun.branch,
            parent_id=begun.parent_id, message=self._message(), on_conflict=policy, amend=amend,
            allow_empty=True,
        )  # fmt: skip
        self._settle(begun, answer, expected, by, amend=amend)

    def _settle(
        self, begun: Begun, answer: httpx.Response, expected: Tree | None, by: int, *, amend: bool
    ) -> None:
        if expected is None:
            assert answer.status_code == (409 if begun.branch in self.branches else 404), (
                answer.text
            )
            return
        assert answer.status_code == 201, answer.text
        self._committed(begun, answer.json()["snapshot_id"], expected, amend=amend)
        assert answer.json()["parent_id"] == self.commits[self.branches[begun.branch]].parent_id
        self.wrote = by

    def _rebase_by_library(self, begun: Begun, policy: str) -> None:
        """Demand nothing where the library refuses, nor let it do what it does wrong."""
        expected = self._expect(begun, policy, begun.touched(), amend=False)
        if expected is None:
            return
        solver: Any = icechunk.ConflictDetector()
        if policy in _SOLVERS:
            solver = icechunk.BasicConflictSolver(on_chunk_conflict=_SOLVERS[policy])
        try:
            made = begun.session.commit(self._message(), rebase_with=solver, allow_empty=True)
        except icechunk.IcechunkError:
            return
        self._committed(begun, made, expected, amend=False)

    def _commit_by_library(self, begun: Begun, *, amend: bool) -> None:
        if amend and self._expect(begun, "fail", {}, amend=True) is None:
            return
        if amend:
            made = begun.session.amend(self._message(), allow_empty=True)
        else:
            made = begun.session.commit(self._message(), allow_empty=True)
        self._committed(begun, made, begun.draft.after, amend=amend)

    def _expect(
        self, begun: Begun, policy: str, touched: Touched, *, amend: bool
    ) -> dict[str, Node] | None:
        """Tell what a commit comes to; `None` where it has to be refused."""
        if (tip := self.branches.get(begun.branch)) is None:
            return None
        if amend and (tip != begun.parent_id or not self._may_amend(begun, tip)):
            return None
        if tip == begun.parent_id:
            return begun.draft.after
        if begun.parent_id not in self._ancestors(tip):
            return None
        ours = Ours(begun.draft.before, begun.draft.after, touched)
        return merge(ours, self._theirs(begun.parent_id, tip), policy)

    def _amends(self, begun: Begun, *, amend: bool) -> bool:
        """Amend, but for what nobody can foresee: the library tells of joined logs as of one."""
        before = self.commits.get(self.branches.get(begun.branch, ""))
        has_moves = before is not None and (before.has_moves or begun.is_moving)
        return amend and not (has_moves and before is not None and before.is_joined)

    def _may_amend(self, begun: Begun, tip: str) -> bool:
        before = self.commits[tip]
        if before.parent_id is None:
            return False
        return not (before.has_more if begun.is_moving else before.has_moves)

    def _theirs(self, start: str, stop: str) -> Theirs:
        diff = self.repo.diff(from_snapshot_id=start, to_snapshot_id=stop)
        chunks = {
            path: frozenset(map(tuple, coords)) for path, coords in diff.updated_chunks.items()
        }
        updated = frozenset(diff.updated_arrays) | frozenset(diff.updated_groups)
        return Theirs(self.commits[stop].tree, updated, chunks, bool(diff.moved_nodes))

    def _committed(self, begun: Begun, made: str, tree: Tree, *, amend: bool) -> None:
        tip = self.branches[begun.branch]
        parent_id = self.commits[tip].parent_id if amend else tip
        assert parent_id is not None
        assert made not in self.commits
        is_joined = amend and self.commits[tip].is_joined
        log = self.commits[tip].log if is_joined else self.repo.inspect_transaction_log(made)
        self.commits[made] = Commit(tree, parent_id, log, is_joined)
        self.branches[begun.branch] = made
        self.kinds.append("commit_amended" if amend else "new_commit")
        self._check_log(begun, parent_id, made, is_whole=tip == begun.parent_id and not amend)

    def _check_log(self, begun: Begun, start: str, stop: str, *, is_whole: bool) -> None:
        """Be sure that the log tells of all chunks that changed, and no others."""
        before, after = self.commits[start].tree, self.commits[stop].tree
        told = self.repo.diff(from_snapshot_id=start, to_snapshot_id=stop).updated_chunks
        old = {node.uid: node for node in before.values()}
        wrote: dict[int, set[Coords]] = {}
        for edit in begun.draft.edits:
            if isinstance(edit, Write):
                wrote.setdefault(edit.uid, set()).add(edit.coords)
        for path, node in after.items():
            if path in before and before[path].uid != node.uid:
                continue
            was = dict(old[node.uid].chunks) if node.uid in old else {}
            now = dict(node.chunks)
            changed = {at for at in {*was, *now} if was.get(at) != now.get(at)}
            found = set(map(tuple, told.get(path, [])))
            if begun.is_of_library:  # it may leave out what a smaller grid drops
                changed = {at for at in changed if node.has(at)}
            assert changed <= found, (path, changed, found)
            if is_whole:
                assert found <= wrote.get(node.uid, set()) | was.keys(), (path, found)


def _fitting(draft: Draft) -> list[Edit]:
    """Leave out chunks that are in no array's grid at last: a request may not tell of them."""
    nodes = {node.uid: node for node in draft.tree.values()}
    return [
        edit
        for edit in draft.edits
        if not isinstance(edit, Write) or edit.uid not in nodes or nodes[edit.uid].has(edit.coords)
    ]
