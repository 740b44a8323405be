"""Expected result of a rebase; nodes are identified by uid, not by path."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tests.clients.icechunk.model.trees import Coords, Node, Tree, parent_of

type Touched = Mapping[int, Mapping[Coords, bytes | None]]


@dataclass(frozen=True)
class Theirs:
    """Changes since the parent, by the paths of the library's diff."""

    tree: Tree
    updated: frozenset[str]
    chunks: Mapping[str, frozenset[Coords]]
    has_moves: bool


@dataclass(frozen=True)
class Ours:
    """Our changes of the parent *before*; *touched* are chunks of remaining arrays."""

    before: Tree
    after: Tree
    touched: Touched


def merge(ours: Ours, theirs: Theirs, policy: str) -> dict[str, Node] | None:
    """Put *ours* on top of *theirs*; `None` where they do not go together."""
    return None if theirs.has_moves else _Merge(ours, theirs, policy).merge()


def by_uid(tree: Tree) -> dict[int, tuple[str, Node]]:
    """Find nodes by what they are."""
    return {node.uid: (path, node) for path, node in tree.items()}


class _Merge:
    def __init__(self, ours: Ours, theirs: Theirs, policy: str) -> None:
        self.before, self.after = by_uid(ours.before), by_uid(ours.after)
        self.tip = by_uid(theirs.tree)
        self.touched, self.theirs, self.policy = ours.touched, theirs, policy
        self.deleted = self.before.keys() - self.after.keys()
        self.new = self.after.keys() - self.before.keys()
        self.updated = {
            uid
            for uid, (_, node) in self.before.items()
            if uid in self.after and self.after[uid][1].document != node.document
        }

    def merge(self) -> dict[str, Node] | None:
        if self._nodes_conflict() or self._chunks_conflict():
            return None
        merged = {uid: at for uid, at in self.tip.items() if uid not in self.deleted}
        for uid in self.updated:
            path, node = merged[uid]
            mine = self.after[uid][1]
            merged[uid] = path, replace(node, label=mine.label, shape=mine.shape)
        for uid, chunks in self.touched.items():
            if uid in self.before and chunks:
                path, node = merged[uid]
                merged[uid] = path, replace(node, chunks=self._settle(uid, node, chunks))
        merged |= {uid: self.after[uid] for uid in self.new}
        tree = {path: node.pruned() for path, node in merged.values()}
        if len(tree) < len(merged) or any(_is_lost(path, tree) for path in tree):
            return None
        return tree

    def _settle(
        self, uid: int, node: Node, chunks: Mapping[Coords, bytes | None]
    ) -> dict[Coords, bytes]:
        found = dict(node.chunks)
        for coords, data in chunks.items():
            if self.policy == "theirs" and coords in self._their_chunks(uid):
                continue
            found.pop(coords, None)
            if data is not None:
                found[coords] = data
        return found

    def _nodes_conflict(self) -> bool:
        gone = self.before.keys() - self.tip.keys()
        updated = {uid for uid in self.before if uid in self.tip and self._is_updated(uid)}
        changed = updated | {uid for uid in self.before if self._their_chunks(uid)}
        arrived = (path for uid, (path, _) in self.tip.items() if uid not in self.before)
        into = (self.theirs.tree.get(parent_of(path)) for path in arrived if path != "/")
        return bool(
            self.updated & (gone | updated)
            or (self.deleted - gone) & changed
            or any(group is not None and group.uid in self.deleted for group in into)
        )

    def _chunks_conflict(self) -> bool:
        for uid, chunks in self.touched.items():
            if uid not in self.before or not chunks:
                continue
            if uid not in self.tip or self._is_updated(uid):
                return True
            if self.policy == "fail" and self._their_chunks(uid) & chunks.keys():
                return True
        return any(
            not self.after[uid][1].has(coords)
            for uid in self.updated
            for coords in self._their_chunks(uid)
        )

    def _is_updated(self, uid: int) -> bool:
        path, node = self.tip[uid]
        return path in self.theirs.updated or node.document != self.before[uid][1].document

    def _their_chunks(self, uid: int) -> frozenset[Coords]:
        if uid not in self.tip:
            return frozenset()
        return self.theirs.chunks.get(self.tip[uid][0], frozenset())


def _is_lost(path: str, tree: Tree) -> bool:
    if path == "/":
        return False
    group = tree.get(parent_of(path))
    return group is None or group.shape is not None
