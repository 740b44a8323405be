"""Trees of nodes as a dict, changed step by step, and as snapshots with manifests."""

import itertools
import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from hypothesis import strategies as st

from app.formats.icechunk.changes import ChangeSet, ChunkChanges, NodeDocument
from app.formats.icechunk.commit import Applied, Rewritten, apply_changes
from app.formats.icechunk.manifest import Manifest, ManifestDecoder
from app.formats.icechunk.manifest_writer import ArrayRewrite
from app.formats.icechunk.payloads import Inlaid, Payloads
from app.formats.icechunk.repo_info import Metadata
from app.formats.icechunk.snapshot import (
    ManifestFile,
    ManifestRef,
    StoredSnapshot,
    StoredSnapshotDecoder,
    write_snapshot,
)
from app.formats.icechunk.transaction_log import TransactionLog
from tests.formats.icechunk.building import MANIFEST, Ref, envelope, manifest

NAMES = ("a", "a-", "b", "é")


@dataclass
class Node:
    """An array of chunks of two elements, or a group, which has no length."""

    node_id: bytes
    label: int = 0
    length: int | None = None
    chunks: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many chunks there can be."""
        return -(-(self.length or 0) // 2)

    @property
    def document(self) -> bytes:
        """Write its ``zarr.json``."""
        kind = "group" if self.length is None else "array"
        fields: dict[str, Any] = {"zarr_format": 3, "node_type": kind, "label": self.label}
        if self.length is not None:
            grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
            fields |= {"shape": [self.length], "chunk_grid": grid}
        return json.dumps(fields).encode()


type Tree = dict[str, Node]


def parent(path: str) -> str:
    """Name the group that a node is in."""
    return path[: path.rindex("/")] or "/"


def below(tree: Iterable[str], path: str) -> list[str]:
    """Name a node and all that is in it."""
    return [at for at in tree if path in (at, "/") or at.startswith(f"{path}/")]


@dataclass(frozen=True)
class Step:
    """One thing to do; numbers choose where, and what cannot be is not done."""

    what: str
    where: int
    to: int
    value: int


STEPS = st.builds(
    Step,
    st.sampled_from(["group", "array", "write", "write", "erase", "edit", "resize", "delete"]),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 9),
)


def take(tree: Tree, step: Step, ids: "itertools.count[int]") -> None:
    """Change *tree*."""
    paths = sorted(tree)
    if not paths:
        tree["/"] = Node(b"%08d" % next(ids))
        return
    path = paths[step.where % len(paths)]
    node = tree[path]
    group = path if node.length is None else parent(path)
    child = f"{group.rstrip('/')}/{NAMES[step.to % len(NAMES)]}"
    match step.what:
        case "group" | "array" if child not in tree:
            length = None if step.what == "group" else step.value
            tree[child] = Node(b"%08d" % next(ids), step.value, length)
        case "write" if node.count:
            node.chunks[step.to % node.count] = step.value
        case "erase" if node.count:
            node.chunks.pop(step.to % node.count, None)
        case "edit":
            node.label = step.value
        case "resize" if node.length is not None:
            node.length = step.value
            node.chunks = {at: node.chunks[at] for at in node.chunks if at < node.count}
        case "delete" if path != "/":
            for at in below(tree, path):
                del tree[at]


def run(tree: Tree, steps: Sequence[Step], ids: "itertools.count[int]") -> Tree:
    """Take all *steps*, and give the tree that comes out."""
    changed = deepcopy(tree)
    for step in steps:
        take(changed, step, ids)
    return changed


def difference(before: Tree, after: Tree) -> ChangeSet:
    """Make the change set that leads from one tree to the other."""
    old, new = by_id(before), by_id(after)
    both = old.keys() & new.keys()
    return ChangeSet(
        new={
            node_id: NodeDocument(path, node.document)
            for node_id, (path, node) in new.items()
            if node_id not in old
        },
        updated={
            node_id: new[node_id][1].document
            for node_id in both
            if old[node_id][1].document != new[node_id][1].document
        },
        deleted=frozenset(old.keys() - new.keys()),
        chunks={
            node_id: _chunks(at)
            for node_id, (_, node) in new.items()
            if (at := changed(old[node_id][1].chunks if node_id in old else {}, node))
        },
    )


def changed(before: dict[int, int], node: Node) -> dict[int, int | None]:
    """Return what became of the chunks that are in the grid."""
    return {
        at: node.chunks.get(at) for at in range(node.count) if before.get(at) != node.chunks.get(at)
    }


def _chunks(at: dict[int, int | None]) -> ChunkChanges:
    coords = np.array(sorted(at), np.uint32).reshape(len(at), 1)
    values = [at[key] for key in sorted(at)]
    return ChunkChanges(
        coords, Payloads.of(None if each is None else Inlaid(bytes([each])) for each in values)
    )


def by_id(tree: Tree) -> dict[bytes, tuple[str, Node]]:
    """Return the path and the node of each id."""
    return {node.node_id: (path, node) for path, node in tree.items()}


LIMIT = 2**24
EMPTY = StoredSnapshot(b"the first id", {}, {}, 1, "first", Metadata(2, ()))


class TreeStore:
    """Keeps manifests, and commits change sets as whoever writes them would."""

    def __init__(self) -> None:
        self.manifests: dict[bytes, Manifest] = {}
        self.chunks: dict[bytes, dict[int, int]] = {}
        """What is in each manifest."""

    def commit(
        self, changes: ChangeSet, before: StoredSnapshot, after: Tree
    ) -> tuple[StoredSnapshot, TransactionLog]:
        """Put *changes* to a snapshot, of which *after* is to become, and store what comes out."""
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
        """Read a snapshot back."""
        return {
            path: Node(
                node.node_id,
                int(node.document.split(b'"label": ')[1][:1]),
                node.array.dimensions[0].length if node.array else None,
                {
                    at: value
                    for ref in (node.array.manifests if node.array else ())
                    for at, value in self.chunks[ref.object_id].items()
                },
            )
            for path, node in snapshot.nodes.items()
        }

    def _write(self, node: Node) -> tuple[ManifestRef, ...]:
        object_id = blake2b(repr(node).encode(), digest_size=12).digest()
        refs = [Ref(index=[at], inline=bytes([node.chunks[at]])) for at in sorted(node.chunks)]
        data = envelope(manifest(object_id, [(node.node_id, refs)]), MANIFEST)
        self.manifests[object_id] = ManifestDecoder(object_id, LIMIT)(data)
        self.chunks[object_id] = dict(node.chunks)
        return (ManifestRef(object_id, ((min(node.chunks), max(node.chunks) + 1),)),)

    def _check(self, rewrite: ArrayRewrite, before: StoredSnapshot) -> None:
        """Compare what is said to be of the array until now."""
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
