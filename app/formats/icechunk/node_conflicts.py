"""Nodes that both changed, or that one made where the other left no place for them."""

from collections.abc import Iterator

from app.formats.icechunk.change_set import ChangeSet
from app.formats.icechunk.conflict_kinds import Conflict, ConflictKind
from app.formats.icechunk.stored_nodes import StoredNode
from app.formats.icechunk.their_changes import TheirChanges
from app.formats.icechunk.tree import parent_of


def find_node_conflicts(ours: ChangeSet, theirs: TheirChanges) -> Iterator[Conflict]:
    """Find what keeps our nodes from theirs."""
    yield from _find_updates(ours, theirs)
    yield from _find_deletes(ours, theirs)
    yield from _find_places(ours, theirs)


def _find_updates(ours: ChangeSet, theirs: TheirChanges) -> Iterator[Conflict]:
    for node_id in ours.updated:
        node = theirs.before[node_id]
        if theirs.is_gone(node_id):
            kind = ConflictKind.ZARR_METADATA_UPDATE_OF_DELETED_ARRAY
            if node.array is None:
                kind = ConflictKind.ZARR_METADATA_UPDATE_OF_DELETED_GROUP
            yield Conflict(kind, node.path)
        elif theirs.is_updated(node_id):
            yield Conflict(ConflictKind.ZARR_METADATA_DOUBLE_UPDATE, node.path)


def _find_deletes(ours: ChangeSet, theirs: TheirChanges) -> Iterator[Conflict]:
    """Find what they did to nodes that we deleted, or in groups that we did."""
    for node_id in ours.deleted:
        if theirs.is_gone(node_id):
            continue
        node, is_updated = theirs.before[node_id], theirs.is_updated(node_id)
        if node.array is None and is_updated:
            yield Conflict(ConflictKind.DELETE_OF_UPDATED_GROUP, node.path)
        elif node.array is not None and (is_updated or theirs.chunks(node_id)):
            yield Conflict(ConflictKind.DELETE_OF_UPDATED_ARRAY, node.path)
    for node in theirs.arrived():
        group = theirs.paths.get(parent_of(node.path))
        if group is not None and group.node_id in ours.deleted:
            yield Conflict(ConflictKind.DELETE_OF_UPDATED_GROUP, group.path)


def _find_places(ours: ChangeSet, theirs: TheirChanges) -> Iterator[Conflict]:
    """Find what is where we make nodes, and the groups that are missing there."""
    own = {node.path for node in ours.new.values()}
    for path in sorted(own):
        if _staying(path, ours, theirs) is not None:
            yield Conflict(ConflictKind.NEW_NODE_CONFLICTS_WITH_EXISTING_NODE, path)
        if path != "/" and parent_of(path) not in own:
            group = _staying(parent_of(path), ours, theirs)
            if group is None or group.array is not None:
                yield Conflict(ConflictKind.NEW_NODE_IN_INVALID_GROUP, path)


def _staying(path: str, ours: ChangeSet, theirs: TheirChanges) -> StoredNode | None:
    """Find the node at *path* that is there already, and that we leave there."""
    node = theirs.paths.get(path)
    if node is None or node.node_id in ours.deleted:
        return None
    return node
