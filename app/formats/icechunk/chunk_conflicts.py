"""Chunks that both changed, or that one changed and the other made unreadable."""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from app.formats.icechunk.array_grids import read_grid
from app.formats.icechunk.change_set import ChangeSet, ChunkChanges
from app.formats.icechunk.conflict_kinds import Conflict, ConflictKind, Policy, tell_chunks
from app.formats.icechunk.coords_set import rows_in
from app.formats.icechunk.stored_nodes import StoredNode
from app.formats.icechunk.their_changes import TheirChanges
from app.formats.icechunk.updated_chunks import Coords
from app.formats.reading import DecodeError


def find_chunk_conflicts(
    ours: ChangeSet, theirs: TheirChanges, policy: Policy
) -> Iterator[Conflict]:
    """Find what keeps our chunks from theirs, and from their metadata; and theirs from ours."""
    for node_id, changes in ours.chunks.items():
        node = theirs.before.get(node_id)
        if node is not None and len(changes.coords):
            yield from _find_in_array(node, changes.coords, theirs, policy)
    for node_id, document in ours.updated.items():
        if not theirs.is_gone(node_id):
            node = theirs.before[node_id]
            if lost := tuple(_lost(node, document, theirs.chunks(node_id))):
                kind = ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY
                yield Conflict(kind, node.path, tell_chunks(*lost))


def settle_chunks(
    ours: Mapping[bytes, ChunkChanges], theirs: TheirChanges, policy: Policy
) -> dict[bytes, ChunkChanges]:
    """Give up our changes of chunks that they changed, if that is the *policy*."""
    if policy is not Policy.THEIRS:
        return dict(ours)
    settled = {node_id: _without(changes, theirs, node_id) for node_id, changes in ours.items()}
    return {node_id: changes for node_id, changes in settled.items() if len(changes.coords)}


def _find_in_array(
    node: StoredNode, coords: Coords, theirs: TheirChanges, policy: Policy
) -> Iterator[Conflict]:
    if theirs.is_gone(node.node_id):
        kind = ConflictKind.CHUNKS_UPDATED_IN_DELETED_ARRAY
        yield Conflict(kind, node.path, tell_chunks(coords))
        return
    if theirs.is_updated(node.node_id):
        kind = ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY
        yield Conflict(kind, node.path, tell_chunks(coords))
    double = coords[_changed_by_both(coords, theirs, node.node_id)]
    if policy is Policy.FAIL and len(double):
        yield Conflict(ConflictKind.CHUNK_DOUBLE_UPDATE, node.path, tell_chunks(double))


def _changed_by_both(coords: Coords, theirs: TheirChanges, node_id: bytes) -> npt.NDArray[np.bool_]:
    """Tell of each of our chunks whether they changed it too."""
    found = np.zeros(len(coords), np.bool_)
    for others in theirs.chunks(node_id):
        found |= rows_in(coords, others)
    return found


def _without(changes: ChunkChanges, theirs: TheirChanges, node_id: bytes) -> ChunkChanges:
    ours = np.flatnonzero(~_changed_by_both(changes.coords, theirs, node_id))
    if len(ours) == len(changes.coords):
        return changes
    return ChunkChanges(changes.coords[ours], changes.payloads.take(ours))


def _lost(node: StoredNode, document: bytes, chunks: tuple[Coords, ...]) -> Iterator[Coords]:
    """Give those *chunks* of theirs that are no more, or others, by our *document*.

    What is no document at all is told of where it is put to the snapshot.
    """
    if not chunks:
        return
    try:
        after, before = read_grid(document), read_grid(node.document)
    except DecodeError:
        yield from chunks
        return
    for coords in chunks:
        if after is not None and before is not None:
            lost = coords[~after.keeps(coords, before)]
            if len(lost):
                yield lost
