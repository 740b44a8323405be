"""Change sets applied to a snapshot: the nodes, the log, and the manifests to rewrite.

Chunk grids are read from ``zarr.json`` documents that a client or a repository has.

The chunks that a smaller grid drops are known only after the manifests are read that have them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from shardgate.errors import BadBodyError, ConflictError
from shardgate.formats.documents import Json, check_levels
from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges
from shardgate.formats.icechunk.config import Splitting
from shardgate.formats.icechunk.coords import Coords, Mask, increases, inside, union
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.manifest_writer import ArrayRewrite, Rewritten
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import (
    Dimension,
    ManifestFile,
    StoredArray,
    StoredNode,
    StoredSnapshot,
    is_node_path,
)
from shardgate.formats.icechunk.transaction_log import MoveOperation, TransactionLog
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.codecs import shape_of
from shardgate.formats.zarr.grid import ChunkGrid, parse_grid

MAX_CHUNKS: Final = 2**32 - 1
"""Limit along one dimension: coordinates are stored in 4 bytes."""
_UNSPLIT: Final = Splitting()
_FORM: Final = ("data_type", "codecs", "storage_transformers")

type StoredNodes = Mapping[str, StoredNode]


@dataclass(frozen=True, slots=True)
class ArrayGrid:
    """Chunks that an array can have: shards, where it is sharded."""

    array: StoredArray
    """Without manifests."""
    chunks: ChunkGrid
    form: tuple[Json, ...]
    """The other metadata that decide how the bytes of a chunk are read."""

    def keeps(self, coords: Coords, before: "ArrayGrid") -> Mask:
        """Return for each of *coords* `True` if the same chunk had that key *before*."""
        if self.form != before.form or len(self.chunks.edges) != coords.shape[1]:
            return np.zeros(len(coords), np.bool_)
        kept = inside(coords, self.array.grid) & inside(coords, before.array.grid)
        within = coords[kept]
        alike = np.ones(len(within), np.bool_)
        for axis, at in enumerate(within.T):
            same = self.chunks.extents(axis, at) == before.chunks.extents(axis, at)
            alike &= same.all(axis=0)
        kept[kept] = alike
        return kept


def read_document(document: bytes) -> dict[str, Json]:
    """Parse the ``zarr.json`` of an array or a group. Raises: `DecodeError`."""
    try:
        check_levels(document)
        node = json.loads(document.decode())
    except ValueError as error:
        raise DecodeError(f"zarr.json is not JSON: {error}") from None
    if not isinstance(node, dict) or node.get("zarr_format") != 3:  # noqa: PLR2004
        raise DecodeError("zarr.json is not Zarr v3 metadata: zarr_format is not 3")
    if (kind := node.get("node_type")) not in ("array", "group"):
        raise DecodeError(f"node_type is neither array nor group: {str(kind)[:80]}")
    return node


def read_grid(document: bytes) -> ArrayGrid | None:
    """Return the grid of an array's ``zarr.json``; `None` for a group. Raises: `DecodeError`."""
    node = read_document(document)
    if node["node_type"] == "group":
        return None
    shape = shape_of(node.get("shape"), "shape", least=0)
    chunks = parse_grid(node.get("chunk_grid"), shape)
    counts = chunks.counts
    if max(counts, default=0) > MAX_CHUNKS:
        raise DecodeError(f"it has {max(counts)} chunks along a dimension, more than 2^32-1")
    names = _read_names(node.get("dimension_names"), len(shape))
    array = StoredArray(tuple(map(Dimension, shape, counts)), names)
    return ArrayGrid(array, chunks, tuple(node.get(name) for name in _FORM))


def _read_names(names: Json, ndim: int) -> tuple[str | None, ...] | None:
    """Read ``dimension_names``; the library treats an empty one as absent."""
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != ndim:
        raise DecodeError(f"dimension_names are not {ndim} names: {str(names)[:80]}")
    if not all(name is None or isinstance(name, str) for name in names):
        raise DecodeError("a name in dimension_names is not text")
    try:
        "".join(filter(None, names)).encode()
    except UnicodeEncodeError:
        raise DecodeError("a name in dimension_names is not UTF-8") from None
    return tuple(name or None for name in names)


@dataclass(frozen=True, slots=True)
class Applied:
    """A change set applied to a snapshot; complete if there are no *rewrites*."""

    nodes: StoredNodes
    """Arrays to be rewritten have the manifests that they had before."""
    manifest_files: Mapping[bytes, ManifestFile]
    """Once complete, exactly the manifests to which *nodes* refer."""
    log: TransactionLog
    rewrites: tuple[ArrayRewrite, ...] = ()

    @property
    def is_empty(self) -> bool:
        """`True` if nothing changes, and no node and no chunk was written."""
        return not (self.rewrites or any(getattr(self.log, each.name) for each in fields(self.log)))

    def finish(self, rewritten: Mapping[bytes, Rewritten]) -> "Applied":
        """Insert the results of all *rewrites*, by node id."""
        nodes = dict(self.nodes)
        known = dict(self.manifest_files)
        chunks = dict(self.log.updated_chunks)
        for rewrite in self.rewrites:
            node_id = rewrite.node_id
            became = rewritten[node_id]
            node = nodes[rewrite.path]
            if node.array is not None:
                array = replace(node.array, manifests=became.manifests)
                nodes[rewrite.path] = replace(node, array=array)
            if became.dropped:
                chunks[node_id] = union(*chunks.get(node_id, ()), *became.dropped)
            known |= {file.object_id: file for file in became.files}
        log = replace(self.log, updated_chunks=dict(sorted(chunks.items())))
        return Applied(nodes, dict(_referred(nodes.values(), known)), log)


def apply_changes(
    changes: ChangeSet, before: StoredSnapshot, splitting: Splitting = _UNSPLIT
) -> Applied:
    """Apply *changes* to *before*. Raises: `BadBodyError` if impossible, else `ConflictError`."""
    nodes = _change_nodes(before.nodes, changes)
    then = by_id(before.nodes)
    now = by_id(nodes)
    for node_id in changes.chunks:
        if node_id not in now:
            raise ConflictError(f"there is no array {encode_id(node_id)}")
    touched = sorted({*changes.chunks, *changes.updated} & now.keys())
    plans = (
        _plan_rewrite(now[node_id], changes.chunks.get(node_id), then.get(node_id), splitting)
        for node_id in touched
    )
    rewrites = tuple(plan for plan in plans if plan is not None)
    return Applied(nodes, before.manifest_files, _make_log(changes, then, now), rewrites)


def parent_of(path: str) -> str:
    """Return the path of the group of *path*, which is not the root."""
    return path.rpartition("/")[0] or "/"


def by_id(nodes: StoredNodes) -> dict[bytes, StoredNode]:
    """Index nodes by their ids; of two with one id the first counts."""
    found: dict[bytes, StoredNode] = {}
    for node in nodes.values():
        found.setdefault(node.node_id, node)
    return found


def _change_nodes(nodes: StoredNodes, changes: ChangeSet) -> dict[str, StoredNode]:
    """Return the nodes after the commit; nodes that were in no group before may stay so."""
    found = by_id(nodes)
    for node_id in (*changes.updated, *changes.deleted, *changes.moves):
        if node_id not in found:
            raise ConflictError(f"there is no node {encode_id(node_id)}")
    changed: dict[str, StoredNode] = {}
    leaving = [node for node in nodes.values() if node.node_id in changes.moves]
    for path, node in nodes.items():
        if node.node_id not in changes.deleted and node.node_id not in changes.moves:
            changed[path] = _update(node, changes)
    for node in leaving:
        target = changes.moves[node.node_id]
        _enter(changed, replace(_update(node, changes), path=target))
    for node_id, (path, document) in changes.new.items():
        if node_id in found:
            raise ConflictError(f"{path}: another node has the id {encode_id(node_id)}")
        _check_path(path)
        _enter(changed, StoredNode(node_id, path, document, _read_array(path, document)))
    # Only groups that this commit touches are checked: the library leaves nodes in none.
    entered = {path for path, _ in changes.new.values()} | {*changes.moves.values()}
    left = {node.path for node in nodes.values() if node.node_id in changes.deleted}
    left |= {node.path for node in leaving}
    _check_groups(changed, entered, left)
    return changed


def _enter(nodes: dict[str, StoredNode], node: StoredNode) -> None:
    if node.path in nodes:
        raise ConflictError(f"{node.path}: there is a node already")
    nodes[node.path] = node


def _update(node: StoredNode, changes: ChangeSet) -> StoredNode:
    document = changes.updated.get(node.node_id, node.document)
    if document == node.document:
        return node
    array = _read_array(node.path, document)
    if (array is None) != (node.array is None):
        raise BadBodyError(f"{node.path}: an array cannot become a group, nor a group an array")
    if array is not None and node.array is not None:
        array = replace(array, manifests=node.array.manifests)
    return replace(node, document=document, array=array)


def _read_array(path: str, document: bytes) -> StoredArray | None:
    try:
        grid = read_grid(document)
    except DecodeError as error:
        raise BadBodyError(f"{path}: {error}") from error
    return None if grid is None else grid.array


def _check_path(path: str) -> None:
    if not is_node_path(path):
        raise BadBodyError(f"{path!r} is no path of a node")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise BadBodyError(f"{path!r} is no path of a node: it is not UTF-8") from None


def _check_groups(nodes: StoredNodes, entered: set[str], left: set[str]) -> None:
    for path in nodes:
        above = parent_of(path)
        is_touched = path in entered or above in entered or above in left
        if path == "/" or not is_touched:
            continue
        parent = nodes.get(above)
        if parent is None:
            raise ConflictError(f"{path}: its group {above} does not exist")
        if parent.array is not None:
            raise ConflictError(f"{path}: {above} is an array, not a group")


def _make_log(
    changes: ChangeSet, then: Mapping[bytes, StoredNode], now: Mapping[bytes, StoredNode]
) -> TransactionLog:
    new_groups, new_arrays = _split_kinds(now[node_id] for node_id in changes.new)
    deleted_groups, deleted_arrays = _split_kinds(then[node_id] for node_id in changes.deleted)
    updated_groups, updated_arrays = _split_kinds(
        now[node_id] for node_id in changes.updated if node_id in now
    )
    return TransactionLog(
        new_groups,
        new_arrays,
        deleted_groups,
        deleted_arrays,
        updated_arrays,
        updated_groups,
        updated_chunks={
            node_id: (chunks.coords,)
            for node_id, chunks in sorted(changes.chunks.items())
            if len(chunks.coords)
        },
        moves=tuple(
            MoveOperation(then[node_id].path, path, node_id, then[node_id].array is not None)
            for node_id, path in changes.moves.items()
        ),
    )


def _split_kinds(nodes: Iterable[StoredNode]) -> tuple[frozenset[bytes], frozenset[bytes]]:
    every = list(nodes)
    groups = frozenset(node.node_id for node in every if node.array is None)
    return groups, frozenset(node.node_id for node in every) - groups


def _referred(
    nodes: Iterable[StoredNode], known: Mapping[bytes, ManifestFile]
) -> Iterator[tuple[bytes, ManifestFile]]:
    for node in nodes:
        for object_id, _ in () if node.array is None else node.array.manifests:
            if object_id not in known:
                name = encode_id(object_id)
                raise DecodeError(f"it does not list manifest {name}, which {node.path} refers to")
            yield object_id, known[object_id]


def _plan_rewrite(
    node: StoredNode, chunks: ChunkChanges | None, before: StoredNode | None, splitting: Splitting
) -> ArrayRewrite | None:
    if node.array is None:
        if chunks is not None:
            raise BadBodyError(f"{node.path}: a group has no chunks")
        return None
    grid = node.array.grid
    if chunks is None:
        chunks = ChunkChanges(np.empty((0, len(grid)), np.uint32), Payloads.gone(0))
    _check_chunks(node.path, grid, chunks)
    kept = node.array.manifests
    if before is not None and before.array is not None and len(before.array.grid) != len(grid):
        # With another number of dimensions no old chunk keeps its coordinates: all leave.
        leaving = kept
        kept = ()
    else:
        leaving = tuple(
            ref
            for ref in kept
            if len(ref.extents) == len(grid)  # early writers gave scalars a dimension
            and any(stop > count for (_, stop), count in zip(ref.extents, grid, strict=True))
        )
    if not leaving and not len(chunks.coords):
        return None
    splits = splitting.splits(node.path, node.array.names, len(grid))
    return ArrayRewrite(node.node_id, grid, kept, chunks, splits, node.path, leaving)


def _check_chunks(path: str, grid: tuple[int, ...], chunks: ChunkChanges) -> None:
    coords = chunks.coords
    outside = np.flatnonzero(~inside(coords, grid))
    if len(outside):
        first = coords[outside[0]].tolist()
        raise BadBodyError(f"{path}: chunk {first} is outside of the grid of {list(grid)} chunks")
    if not (increases(coords).all() if grid else len(coords) <= 1):
        raise BadBodyError(f"{path}: chunks are not in C order, or listed twice")
