"""Repository as a dict of nodes: steps that change it, edits that a client makes, and their merging."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from hypothesis import strategies as st

from tests.sessions import GROUP, array_document

type Coords = tuple[int, ...]
type Chunks = Mapping[Coords, bytes]
type Tree = Mapping[str, Node]

NAMES: Final = ("a", "a-", "b", "é")
_CHUNK: Final = 2


@dataclass(frozen=True)
class Node:
    """An array or, without a shape, a group; *uid* is its own, whatever becomes of it."""

    uid: int
    label: int = 0
    shape: tuple[int, ...] | None = None
    chunks: Chunks = MappingProxyType({})
    """Also those out of the grid, while they may come back."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the chunk grid."""
        return tuple(-(-length // _CHUNK) for length in self.shape or ())

    @property
    def document(self) -> dict[str, Any]:
        """Its ``zarr.json``."""
        attributes = {"attributes": {"label": self.label}}
        if self.shape is None:
            group: dict[str, Any] = json.loads(GROUP)
            return group | attributes
        return array_document(self.shape, (2,) * len(self.shape), **attributes)

    def places(self) -> list[Coords]:
        """Return all coords of the grid."""
        return [] if self.shape is None else list(itertools.product(*map(range, self.grid)))

    def has(self, coords: Coords) -> bool:
        """Return whether *coords* are in the grid."""
        return all(at < count for at, count in zip(coords, self.grid, strict=True))

    def pruned(self) -> "Node":
        """Forget the chunks out of the grid."""
        return replace(self, chunks={at: self.chunks[at] for at in self.chunks if self.has(at)})


@dataclass(frozen=True)
class Put:
    """A node that gets this document, or is made with it."""

    path: str
    document: Mapping[str, Any]


@dataclass(frozen=True)
class Delete:
    """A node that goes, with all below."""

    path: str


@dataclass(frozen=True)
class Write:
    """A chunk that is written or, without data, deleted."""

    path: str
    uid: int
    coords: Coords
    data: bytes | None


@dataclass(frozen=True)
class Move:
    """A node that goes elsewhere, with all below."""

    source: str
    target: str


type Edit = Put | Delete | Write | Move


@dataclass(frozen=True)
class Step:
    """One thing to do; numbers choose where, and what cannot be is not done."""

    what: str
    where: int
    to: int
    value: int


def steps(*what: str) -> st.SearchStrategy[Step]:
    """Return a strategy of steps of some kinds."""
    number = st.integers(0, 99)
    return st.builds(Step, st.sampled_from(what), number, number, st.integers(0, 9))


STEP: Final = steps(
    "group", "array", "table", "write", "write", "write", "erase", "edit", "resize", "delete"
)
STEPS: Final = st.lists(STEP, min_size=1, max_size=6)
FEW: Final = st.lists(
    steps(*["write"] * 7, "erase", "group", "array", "edit", "resize", "delete"),
    min_size=1,
    max_size=3,
)
FIRST: Final = st.lists(steps("group", "array", "table", "write"), min_size=4, max_size=10)
MOVES: Final = st.lists(steps("move"), min_size=1, max_size=2)


class Draft:
    """A tree that is being changed, and by which edits."""

    def __init__(self, tree: Tree, uids: Iterator[int]) -> None:
        self.before = tree
        self.tree = dict(tree)
        self.edits: list[Edit] = []
        self._uids = uids

    def take(self, steps: Iterable[Step]) -> Sequence[Edit]:
        """Take *steps*, and tell the edits that they come to."""
        start = len(self.edits)
        for step in steps:
            self._take(step)
        return self.edits[start:]

    @property
    def after(self) -> dict[str, Node]:
        """The tree that a commit leaves."""
        return {path: node.pruned() for path, node in self.tree.items()}

    def touched(self) -> dict[int, dict[Coords, bytes | None]]:
        """Return the last write to each remaining coords of remaining arrays."""
        nodes = {node.uid: node for node in self.tree.values()}
        found: dict[int, dict[Coords, bytes | None]] = {}
        for edit in self.edits:
            if isinstance(edit, Write) and edit.uid in nodes and nodes[edit.uid].has(edit.coords):
                found.setdefault(edit.uid, {})[edit.coords] = edit.data
        return found

    def _take(self, step: Step) -> None:
        if self.tree:
            self._take_in(step)
        elif step.what != "move":
            self._put("/", Node(next(self._uids)))
            self._take_in(step)

    def _take_in(self, step: Step) -> None:
        path = sorted(self.tree)[step.where % len(self.tree)]
        node = self.tree[path]
        group = path if node.shape is None else parent_of(path)
        child = f"{group.rstrip('/')}/{NAMES[step.to % len(NAMES)]}"
        match step.what:
            case "group" | "array" | "table" if child not in self.tree:
                shape = {"group": None, "array": (step.value,), "table": (step.value, 3)}
                self._put(child, Node(next(self._uids), step.value, shape[step.what], {}))
            case "write" | "erase":
                data = b"%d|" % next(self._uids) * (1 + step.value)
                self._write_somewhere(step, data if step.what == "write" else None)
            case "edit":
                self._put(path, replace(node, label=step.value))
            case "resize" if node.shape is not None:
                self._put(path, replace(node, shape=(step.value, *node.shape[1:])))
            case "delete" if path != "/":
                for each in below(self.tree, path):
                    del self.tree[each]
                self.edits.append(Delete(path))
            case "move":
                self._move(path, step)

    def _put(self, path: str, node: Node) -> None:
        self.tree[path] = node
        self.edits.append(Put(path, node.document))

    def _write_somewhere(self, step: Step, data: bytes | None) -> None:
        """Write a chunk: one of few, so that others write the same."""
        arrays = sorted(path for path, node in self.tree.items() if node.places())
        if arrays:
            path = arrays[step.where % len(arrays)]
            places = self.tree[path].places()
            self._write(path, places[step.to % min(3, len(places))], data)

    def _write(self, path: str, coords: Coords, data: bytes | None) -> None:
        node = self.tree[path]
        chunks = {at: node.chunks[at] for at in node.chunks if at != coords}
        if data is not None:
            chunks[coords] = data
        self.tree[path] = replace(node, chunks=chunks)
        self.edits.append(Write(path, node.uid, coords, data))

    def _move(self, source: str, step: Step) -> None:
        groups = sorted(path for path, node in self.tree.items() if node.shape is None)
        group = groups[step.to % len(groups)]
        target = f"{group.rstrip('/')}/{NAMES[step.value % len(NAMES)]}"
        if source == "/" or target in self.tree or f"{target}/".startswith(f"{source}/"):
            return
        for path in below(self.tree, source):
            self.tree[target + path[len(source) :]] = self.tree.pop(path)
        self.edits.append(Move(source, target))


def parent_of(path: str) -> str:
    """Name the group that a node is in."""
    return path[: path.rindex("/")] or "/"


def below(tree: Iterable[str], path: str) -> list[str]:
    """Name a node and all that is in it."""
    return [at for at in tree if path in (at, "/") or at.startswith(f"{path}/")]


def spelled(document: Mapping[str, Any]) -> bytes:
    """Write a document as clients do."""
    return json.dumps(document).encode()


def key_of(path: str, name: str) -> str:
    """Name something in a node by its Zarr key."""
    return f"{path.strip('/')}/{name}".lstrip("/")


def chunk_key(path: str, coords: Coords) -> str:
    """Name a chunk by its Zarr key."""
    return key_of(path, "/".join(("c", *map(str, coords))))


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
