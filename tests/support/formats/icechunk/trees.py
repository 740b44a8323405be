"""Trees of nodes as a dict, changed step by step, and stored as snapshots with manifests."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from shardgate.formats.icechunk.apply import Applied, apply_changes
from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges, NodeDocument
from shardgate.formats.icechunk.manifest import InlineChunk, Manifest, ManifestDecoder
from shardgate.formats.icechunk.manifest_writer import ArrayRewrite, Rewritten
from shardgate.formats.icechunk.metadata_items import Metadata
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import (
    ManifestFile,
    ManifestRef,
    StoredSnapshot,
    StoredSnapshotDecoder,
    write_snapshot,
)
from shardgate.formats.icechunk.transaction_log import TransactionLog
from tests.support.formats.icechunk.building import MANIFEST, Ref, envelope, manifest
from tests.support.formats.icechunk.repositories import array, group
from tests.support.sessions import GROUP, array_document

NAMES = ("a", "a-", "b", "é")


def parent(path: str) -> str:
    """Return the path of the group that holds *path*."""
    return path[: path.rindex("/")] or "/"


def below(tree: Iterable[str], path: str) -> list[str]:
    """Return *path* and the paths of all nodes below it."""
    return [at for at in tree if path in (at, "/") or at.startswith(f"{path}/")]


@dataclass(frozen=True)
class Step:
    """A random change: numbers choose where, and an impossible change is skipped."""

    what: str
    where: int
    to: int
    value: int


type Coords = tuple[int, ...]
type Chunks = Mapping[Coords, bytes]
type Tree = Mapping[str, Node]

_CHUNK: Final = 2


@dataclass(frozen=True)
class Node:
    """An array or, without a shape, a group; *uid* stays through all changes."""

    uid: int
    label: int = 0
    shape: tuple[int, ...] | None = None
    chunks: Chunks = MappingProxyType({})
    """Chunks by coordinates, including those outside of the grid that may come back."""

    @property
    def node_id(self) -> bytes:
        """Id of the node in our own files; the library draws its own."""
        return b"%08d" % self.uid

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the chunk grid."""
        return tuple(-(-length // _CHUNK) for length in self.shape or ())

    @property
    def document(self) -> dict[str, Any]:
        """Parsed ``zarr.json``."""
        attributes = {"attributes": {"label": self.label}}
        if self.shape is None:
            group: dict[str, Any] = json.loads(GROUP)
            return group | attributes
        return array_document(self.shape, (2,) * len(self.shape), **attributes)

    @property
    def data(self) -> bytes:
        """Stored bytes of the document."""
        return json.dumps(self.document).encode()

    def places(self) -> list[Coords]:
        """Return the coordinates of all chunks in the grid."""
        return [] if self.shape is None else list(itertools.product(*map(range, self.grid)))

    def has(self, coords: Coords) -> bool:
        """Return whether *coords* are in the grid."""
        return all(at < count for at, count in zip(coords, self.grid, strict=True))

    def pruned(self) -> "Node":
        """Return the node without chunks outside of the grid."""
        return replace(self, chunks={at: self.chunks[at] for at in self.chunks if self.has(at)})


@dataclass(frozen=True)
class Put:
    """An edit that creates or updates a node; without a document it deletes all below."""

    path: str
    document: Mapping[str, Any] | None

    @property
    def key(self) -> str:
        """Key of the document."""
        return key_of(self.path, "zarr.json")

    @property
    def data(self) -> bytes | None:
        """Document as clients write it."""
        return None if self.document is None else json.dumps(self.document).encode()

    @property
    def change(self) -> dict[str, Any]:
        """The edit as part of a request to commit."""
        if self.document is None:
            return {"op": "delete_node", "path": self.path}
        return {"op": "put_node", "path": self.path, "metadata": self.document}


@dataclass(frozen=True)
class Write:
    """An edit that writes a chunk or, without data, deletes it."""

    path: str
    uid: int
    coords: Coords
    data: bytes | None

    @property
    def key(self) -> str:
        """Key of the chunk."""
        return chunk_key(self.path, self.coords)


@dataclass(frozen=True)
class Move:
    """An edit that moves a node with all below."""

    source: str
    target: str


type Edit = Put | Write | Move


def steps(*what: str) -> st.SearchStrategy[Step]:
    """Return a strategy of steps of some kinds."""
    number = st.integers(0, 99)
    return st.builds(Step, st.sampled_from(what), number, number, st.integers(0, 9))


STEP: Final = steps(
    "group", "array", "table", "write", "write", "write", "erase", "edit", "resize", "delete"
)
STEPS: Final = st.lists(STEP, min_size=1, max_size=6)
FIRST: Final = st.lists(steps("group", "array", "table", "write"), min_size=4, max_size=10)
MOVING: Final = st.one_of(STEP, STEP, steps("move"))
MOVES: Final = st.lists(steps("move"), min_size=1, max_size=2)


class Draft:
    """A tree under change, and its edits."""

    def __init__(self, tree: Tree, uids: Iterator[int]) -> None:
        self.before = tree
        self.tree = dict(tree)
        self.edits: list[Edit] = []
        self._uids = uids

    def take(self, steps: Iterable[Step]) -> Sequence[Edit]:
        """Apply *steps*; return the edits that they result in."""
        start = len(self.edits)
        for step in steps:
            self._take(step)
        return self.edits[start:]

    @property
    def after(self) -> dict[str, Node]:
        """The tree that a commit of the edits leaves."""
        return {path: node.pruned() for path, node in self.tree.items()}

    def _take(self, step: Step) -> None:
        if self.tree:
            self._take_in(step)
        elif step.what != "move":
            self._put("/", Node(next(self._uids)))
            self._take_in(step)

    def _take_in(self, step: Step) -> None:
        path = sorted(self.tree)[step.where % len(self.tree)]
        node = self.tree[path]
        group = path if node.shape is None else parent(path)
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
                self.edits.append(Put(path, None))
            case "move":
                self._move(path, step)

    def _put(self, path: str, node: Node) -> None:
        """Put a node, unless it stays equal."""
        if self.tree.get(path) == node:
            return
        self.tree[path] = node
        self.edits.append(Put(path, node.document))

    def _write_somewhere(self, step: Step, data: bytes | None) -> None:
        """Write one of few chunks, so that concurrent writers choose the same."""
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


def key_of(path: str, name: str) -> str:
    """Return the Zarr key of *name* in a node."""
    return f"{path.strip('/')}/{name}".lstrip("/")


def chunk_key(path: str, coords: Coords) -> str:
    """Return the Zarr key of a chunk."""
    return key_of(path, "/".join(("c", *map(str, coords))))


def changed(before: Node | None, node: Node) -> dict[Coords, bytes | None]:
    """Return the changed chunks in the grid, with None for deleted ones."""
    old = {} if before is None else before.chunks
    return {at: node.chunks.get(at) for at in node.places() if old.get(at) != node.chunks.get(at)}


def merge(parent: Tree, ours: Tree, theirs: Tree, *, yields: bool = False) -> dict[str, Node]:
    """Return the three-way merge; of chunks that both changed, ours count unless it *yields*."""
    old, new, merged = by_uid(parent), by_uid(ours), by_uid(theirs)
    merged = {uid: at for uid, at in merged.items() if uid in new or uid not in old}
    merged |= {uid: at for uid, at in new.items() if uid not in old}
    for uid in old.keys() & new.keys() & merged.keys():
        (path, node), was, mine = merged[uid], old[uid][1], new[uid][1]
        if old[uid][0] != new[uid][0]:
            path = new[uid][0]
        kept = changed(was, node) if yields else {}
        if mine.document != was.document:
            node = replace(node, label=mine.label, shape=mine.shape)
        chunks = dict(node.chunks) | {
            at: data for at, data in changed(was, mine).items() if at not in kept
        }
        there = {at: data for at, data in chunks.items() if data is not None}
        merged[uid] = path, replace(node, chunks=there)
    return {path: node.pruned() for path, node in merged.values()}


def by_uid(tree: Tree) -> dict[int, tuple[str, Node]]:
    """Return paths and nodes by uid."""
    return {node.uid: (path, node) for path, node in tree.items()}


def run(tree: Tree, steps: Sequence[Step], uids: Iterator[int]) -> Tree:
    """Apply *steps* to *tree* and return the result."""
    draft = Draft(tree, uids)
    draft.take(steps)
    return draft.after


def difference(before: Tree, after: Tree) -> ChangeSet:
    """Return the change set between two trees."""
    old, new = by_uid(before), by_uid(after)
    both = old.keys() & new.keys()
    return ChangeSet(
        new={
            node.node_id: NodeDocument(path, node.data)
            for uid, (path, node) in new.items()
            if uid not in old
        },
        updated={
            new[uid][1].node_id: new[uid][1].data
            for uid in both
            if old[uid][1].document != new[uid][1].document
        },
        deleted=frozenset(old[uid][1].node_id for uid in old.keys() - new.keys()),
        chunks={
            node.node_id: _chunks(chunks, node)
            for uid, (_, node) in new.items()
            if (chunks := changed(old[uid][1] if uid in old else None, node))
        },
        moves={new[uid][1].node_id: new[uid][0] for uid in both if old[uid][0] != new[uid][0]},
    )


def _chunks(chunks: Mapping[Coords, bytes | None], node: Node) -> ChunkChanges:
    coords = np.array(sorted(chunks), np.uint32).reshape(len(chunks), len(node.grid))
    bodies = [chunks[at] for at in sorted(chunks)]
    payloads = (None if each is None else InlineChunk(each) for each in bodies)
    return ChunkChanges(coords, Payloads.of(payloads))


LIMIT = 2**24
EMPTY = StoredSnapshot(b"the first id", {}, {}, 1, "first", Metadata(2, ()))


def array_in_a_group(length: int) -> StoredSnapshot:
    """Return a snapshot of a group and an array in it; their ids are those of `Node` 0 to 2."""
    documents = {"/": group(), "/g": group(), "/g/a": array([length], [2])}
    new = {b"%08d" % n: NodeDocument(*each) for n, each in enumerate(documents.items())}
    return replace(EMPTY, nodes=apply_changes(ChangeSet(new=new), EMPTY).nodes)


class TreeStore:
    """Manifests in memory, and commits of change sets to them."""

    def __init__(self) -> None:
        self.manifests: dict[bytes, Manifest] = {}
        self.chunks: dict[bytes, Chunks] = {}
        """Chunks of each manifest."""

    def commit(
        self, changes: ChangeSet, before: StoredSnapshot, after: Tree
    ) -> tuple[StoredSnapshot, TransactionLog]:
        """Apply *changes* to a snapshot, store the manifests of *after*, and return the result."""
        applied = apply_changes(changes, before)
        rewritten: dict[bytes, Rewritten] = {}
        for rewrite in applied.rewrites:
            node = after[rewrite.path]
            dropped = rewrite.dropped(self.manifests)
            refs = self._write(node) if node.chunks else ()
            files = tuple(ManifestFile(ref.object_id, 99, len(node.chunks)) for ref in refs)
            rewritten[rewrite.node_id] = Rewritten(refs, dropped, files)
            self._check(rewrite, before)
        return self._store(applied.finish(rewritten), before)

    def tree(self, snapshot: StoredSnapshot) -> Tree:
        """Return the tree of a snapshot."""
        return {
            path: Node(
                int(node.node_id),
                json.loads(node.document)["attributes"]["label"],
                tuple(each.length for each in node.array.dimensions) if node.array else None,
                {
                    at: data
                    for ref in (node.array.manifests if node.array else ())
                    for at, data in self.chunks[ref.object_id].items()
                },
            )
            for path, node in snapshot.nodes.items()
        }

    def _write(self, node: Node) -> tuple[ManifestRef, ...]:
        object_id = blake2b(repr(node).encode(), digest_size=12).digest()
        refs = [Ref(index=at, inline=node.chunks[at]) for at in sorted(node.chunks)]
        data = envelope(manifest(object_id, [(node.node_id, refs)]), MANIFEST)
        self.manifests[object_id] = ManifestDecoder(object_id, LIMIT)(data)
        self.chunks[object_id] = dict(node.chunks)
        axes = zip(*node.chunks, strict=True)
        return (ManifestRef(object_id, tuple((min(axis), max(axis) + 1) for axis in axes)),)

    def _check(self, rewrite: ArrayRewrite, before: StoredSnapshot) -> None:
        """Compare the rewrite's array with that of the snapshot before."""
        known = {node.node_id: node for node in before.nodes.values()}
        old = known.get(rewrite.node_id)
        assert rewrite.manifests == (old.array.manifests if old and old.array else ())

    def _store(
        self, outcome: Applied, before: StoredSnapshot
    ) -> tuple[StoredSnapshot, TransactionLog]:
        snapshot = replace(
            before, nodes=outcome.nodes, manifest_files=outcome.manifest_files, nbytes=0
        )
        data = write_snapshot(snapshot)
        found = StoredSnapshotDecoder(snapshot.object_id, LIMIT)(data)
        assert replace(found, nbytes=0) == snapshot
        return found, outcome.log
