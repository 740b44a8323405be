"""Conflicts between two commits on one parent, and the rebase of the later one.

Stricter than the library, whose rebase can leave nodes in no group, two nodes at one path, or
chunks that no reader can decode.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from heapq import merge
from itertools import islice
from typing import Final

import numpy as np

from shardgate.formats.icechunk.apply import by_id, parent_of, read_grid
from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges
from shardgate.formats.icechunk.coords import Coords, Mask, rows_in, union
from shardgate.formats.icechunk.snapshot import StoredNode, StoredSnapshot
from shardgate.formats.icechunk.transaction_log import TransactionLog
from shardgate.formats.reading import DecodeError

_MAX_LISTED: Final = 100


class ConflictKind(StrEnum):
    """Kinds of conflicts, as the library calls them; *they* committed first."""

    CHUNK_DOUBLE_UPDATE = "chunk_double_update"
    CHUNKS_UPDATED_IN_UPDATED_ARRAY = "chunks_updated_in_updated_array"
    """One changed chunks, the other the metadata that decide how they are read."""
    CHUNKS_UPDATED_IN_DELETED_ARRAY = "chunks_updated_in_deleted_array"
    ZARR_METADATA_DOUBLE_UPDATE = "zarr_metadata_double_update"
    ZARR_METADATA_UPDATE_OF_DELETED_ARRAY = "zarr_metadata_update_of_deleted_array"
    ZARR_METADATA_UPDATE_OF_DELETED_GROUP = "zarr_metadata_update_of_deleted_group"
    DELETE_OF_UPDATED_ARRAY = "delete_of_updated_array"
    DELETE_OF_UPDATED_GROUP = "delete_of_updated_group"
    """They changed its metadata, or created nodes in it."""
    NEW_NODE_CONFLICTS_WITH_EXISTING_NODE = "new_node_conflicts_with_existing_node"
    NEW_NODE_IN_INVALID_GROUP = "new_node_in_invalid_group"
    """The group no longer exists, or became an array."""
    MOVE_OPERATION_CANNOT_BE_REBASED = "move_operation_cannot_be_rebased"
    """They moved nodes, or changed a node that we move, or created one in it."""


_K: Final = ConflictKind


class Policy(StrEnum):
    """Resolution of chunks that both changed; nothing else can be resolved."""

    FAIL = "fail"
    OURS = "ours"
    THEIRS = "theirs"


@dataclass(frozen=True, slots=True)
class CommitConflict:
    """A reason why our changes cannot be rebased on theirs."""

    kind: str
    path: str
    count: int = 0
    """Number of the chunks that conflict."""
    chunks: Sequence[list[int]] = ()
    """Coordinates of the first of them: of shards, where the array is sharded."""


def rebase(
    ours: ChangeSet,
    parent: StoredSnapshot,
    logs: Sequence[TransactionLog],
    tip: StoredSnapshot,
    policy: Policy = Policy.FAIL,
) -> ChangeSet | list[CommitConflict]:
    """Convert *ours*, changes of *parent*, to changes of *tip*; the result may be empty. *logs* are
    those of all commits since *parent*, oldest first. Conflicts are ordered by path.
    """
    theirs = _TheirChanges(parent, logs, tip)
    if (source := theirs.former_path()) is not None:
        return [CommitConflict(_K.MOVE_OPERATION_CANNOT_BE_REBASED, source)]
    finders = (
        _find_moves(ours, theirs),
        _find_updates(ours, theirs),
        _find_deletes(ours, theirs),
        _find_places(ours, theirs),
        _find_chunks(ours, theirs, policy),
    )
    # Each kind once for a path, whatever number of finders sees it.
    found = {(each.path, each.kind): each for finder in finders for each in finder}
    if found:
        return [found[at] for at in sorted(found)]
    return replace(
        ours,
        deleted=frozenset(node_id for node_id in ours.deleted if not theirs.is_gone(node_id)),
        chunks=_resolve_chunks(ours.chunks, theirs, policy),
    )


class _TheirChanges:
    """Changes between *parent* and *tip*: nodes by comparing the two, updates from the logs."""

    def __init__(
        self, parent: StoredSnapshot, logs: Sequence[TransactionLog], tip: StoredSnapshot
    ) -> None:
        self.before = by_id(parent.nodes)
        self.now = by_id(tip.nodes)
        self.paths = tip.nodes
        self._logs = logs

    def is_gone(self, node_id: bytes) -> bool:
        return node_id not in self.now

    def is_updated(self, node_id: bytes) -> bool:
        if node_id in self._updated:
            return True
        before = self.before.get(node_id)
        return before is not None and self.now[node_id].document != before.document

    def entered(self) -> Iterator[StoredNode]:
        """Yield the groups in which they created nodes, one for each node."""
        for node_id, node in self.now.items():
            group = self.paths.get(parent_of(node.path))
            if node_id not in self.before and group is not None:
                yield group

    def former_path(self) -> str | None:
        """Return the former path of a node that they moved, if there is one."""
        for log in self._logs:
            for move in log.moves:
                return move.source
        former_path = (
            self.before[node_id].path
            for node_id in self.now.keys() & self.before.keys()
            if self.before[node_id].path != self.now[node_id].path
        )
        return min(former_path, default=None)

    def chunks(self, node_id: bytes) -> tuple[Coords, ...]:
        return union(
            *(coords for log in self._logs for coords in log.updated_chunks.get(node_id, ()))
        )

    @cached_property
    def written(self) -> frozenset[bytes]:
        """Arrays whose chunks they changed."""
        return frozenset(
            node_id for log in self._logs for node_id, some in log.updated_chunks.items() if some
        )

    @cached_property
    def _updated(self) -> frozenset[bytes]:
        return frozenset().union(*(log.updated_arrays | log.updated_groups for log in self._logs))


def _find_moves(ours: ChangeSet, theirs: _TheirChanges) -> Iterator[CommitConflict]:
    for node_id in ours.moves:
        if theirs.is_gone(node_id) or theirs.is_updated(node_id) or node_id in theirs.written:
            path = theirs.before[node_id].path
            yield CommitConflict(_K.MOVE_OPERATION_CANNOT_BE_REBASED, path)
    for group in theirs.entered():
        if group.node_id in ours.moves:
            yield CommitConflict(_K.MOVE_OPERATION_CANNOT_BE_REBASED, group.path)


def _find_updates(ours: ChangeSet, theirs: _TheirChanges) -> Iterator[CommitConflict]:
    for node_id in ours.updated:
        node = theirs.before[node_id]
        if theirs.is_gone(node_id):
            kind = _K.ZARR_METADATA_UPDATE_OF_DELETED_ARRAY
            if node.array is None:
                kind = _K.ZARR_METADATA_UPDATE_OF_DELETED_GROUP
            yield CommitConflict(kind, node.path)
        elif theirs.is_updated(node_id):
            yield CommitConflict(_K.ZARR_METADATA_DOUBLE_UPDATE, node.path)


def _find_deletes(ours: ChangeSet, theirs: _TheirChanges) -> Iterator[CommitConflict]:
    for node_id in ours.deleted:
        before = theirs.before[node_id]
        # As in the library, a node of the same kind that they made in its place counts for it.
        node = theirs.now.get(node_id) or theirs.paths.get(before.path)
        if node is None or (node.array is None) != (before.array is None):
            continue
        is_updated = theirs.is_updated(node.node_id)
        if node.array is None and is_updated:
            yield CommitConflict(_K.DELETE_OF_UPDATED_GROUP, node.path)
        elif node.array is not None and (is_updated or theirs.chunks(node.node_id)):
            yield CommitConflict(_K.DELETE_OF_UPDATED_ARRAY, node.path)
    for group in theirs.entered():
        if group.node_id in ours.deleted:
            yield CommitConflict(_K.DELETE_OF_UPDATED_GROUP, group.path)


def _find_places(ours: ChangeSet, theirs: _TheirChanges) -> Iterator[CommitConflict]:
    own = {node.path for node in ours.new.values()} | {*ours.moves.values()}
    for path in sorted(own):
        if _staying(path, ours, theirs) is not None:
            yield CommitConflict(_K.NEW_NODE_CONFLICTS_WITH_EXISTING_NODE, path)
        if path != "/" and parent_of(path) not in own:
            group = _staying(parent_of(path), ours, theirs)
            if group is None or group.array is not None:
                yield CommitConflict(_K.NEW_NODE_IN_INVALID_GROUP, path)


def _staying(path: str, ours: ChangeSet, theirs: _TheirChanges) -> StoredNode | None:
    """Return their node at *path*, unless we delete or move it."""
    node = theirs.paths.get(path)
    if node is None or node.node_id in ours.deleted or node.node_id in ours.moves:
        return None
    return node


def _find_chunks(
    ours: ChangeSet, theirs: _TheirChanges, policy: Policy
) -> Iterator[CommitConflict]:
    for node_id, changes in ours.chunks.items():
        node = theirs.before.get(node_id)
        if node is not None and len(changes.coords):
            yield from _find_in_array(node, changes.coords, theirs, policy)
    for node_id, document in ours.updated.items():
        if not theirs.is_gone(node_id):
            node = theirs.before[node_id]
            if lost := tuple(_lost(node, document, theirs.chunks(node_id))):
                yield CommitConflict(
                    _K.CHUNKS_UPDATED_IN_UPDATED_ARRAY, node.path, *_list_chunks(*lost)
                )


def _find_in_array(
    node: StoredNode, coords: Coords, theirs: _TheirChanges, policy: Policy
) -> Iterator[CommitConflict]:
    if theirs.is_gone(node.node_id):
        yield CommitConflict(_K.CHUNKS_UPDATED_IN_DELETED_ARRAY, node.path, *_list_chunks(coords))
        return
    if theirs.is_updated(node.node_id):
        yield CommitConflict(_K.CHUNKS_UPDATED_IN_UPDATED_ARRAY, node.path, *_list_chunks(coords))
    double = coords[_changed_by_both(coords, theirs, node.node_id)]
    if policy is Policy.FAIL and len(double):
        yield CommitConflict(_K.CHUNK_DOUBLE_UPDATE, node.path, *_list_chunks(double))


def _lost(node: StoredNode, document: bytes, chunks: tuple[Coords, ...]) -> Iterator[Coords]:
    """Yield those of their *chunks* that our *document* drops or gives another meaning."""
    if not chunks:
        return
    try:
        after = read_grid(document)
        before = read_grid(node.document)
    except DecodeError:
        yield from chunks
        return
    if after is not None and before is not None:
        for coords in chunks:
            if len(lost := coords[~after.keeps(coords, before)]):
                yield lost


def _list_chunks(*batches: Coords) -> tuple[int, list[list[int]]]:
    every = union(*batches)
    first = merge(*(coords[:_MAX_LISTED].tolist() for coords in every))
    return sum(map(len, every)), list(islice(first, _MAX_LISTED))


def _resolve_chunks(
    ours: Mapping[bytes, ChunkChanges], theirs: _TheirChanges, policy: Policy
) -> dict[bytes, ChunkChanges]:
    if policy is not Policy.THEIRS:
        return dict(ours)
    resolved: dict[bytes, ChunkChanges] = {}
    for node_id, changes in ours.items():
        rows = np.flatnonzero(~_changed_by_both(changes.coords, theirs, node_id))
        if len(rows):
            resolved[node_id] = ChunkChanges(changes.coords[rows], changes.payloads.take(rows))
    return resolved


def _changed_by_both(coords: Coords, theirs: _TheirChanges, node_id: bytes) -> Mask:
    found = np.zeros(len(coords), np.bool_)
    for others in theirs.chunks(node_id):
        found |= rows_in(coords, others)
    return found
