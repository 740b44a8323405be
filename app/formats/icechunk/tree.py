"""The nodes of a snapshot after a commit: each in a group, each at a path of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from app.errors import BadBodyError, ConflictError
from app.formats.icechunk.array_grids import read_grid
from app.formats.icechunk.change_set import ChangeSet
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.stored_nodes import StoredArray, StoredNode
from app.formats.reading import DecodeError

type Nodes = Mapping[str, StoredNode]


def parent_of(path: str) -> str:
    """Give the path of the group that *path*, which is not the root, is in."""
    return path.rpartition("/")[0] or "/"


def by_id(nodes: Nodes) -> dict[bytes, StoredNode]:
    """Find nodes by their ids; of two with one id the first."""
    found: dict[bytes, StoredNode] = {}
    for node in nodes.values():
        found.setdefault(node.node_id, node)
    return found


def change_nodes(nodes: Nodes, changes: ChangeSet) -> dict[str, StoredNode]:
    """Give what becomes of *nodes*; arrays keep the manifests that they have.

    Nodes that were in no group before, as the library can leave them, may stay as they are.

    Raises: `BadBodyError` for a path or a document that cannot be, `ConflictError` for nodes that
    are not there, or not where they have to be.
    """
    found = by_id(nodes)
    for node_id in (*changes.updated, *changes.deleted):
        if node_id not in found:
            raise ConflictError(f"there is no node {encode_id(node_id)}")
    changed = {
        path: _update(node, changes)
        for path, node in nodes.items()
        if node.node_id not in changes.deleted
    }
    entering = list(_new(found, changes))
    for node in entering:
        _check_path(node.path)
        if node.path in changed:
            raise ConflictError(f"{node.path}: there is a node already")
        changed[node.path] = node
    left = {node.path for node in nodes.values() if node.node_id in changes.deleted}
    _check_groups(changed, {node.path for node in entering}, left)
    return changed


def _new(found: Mapping[bytes, StoredNode], changes: ChangeSet) -> Iterator[StoredNode]:
    for node_id, (path, document) in changes.new.items():
        if node_id in found:
            raise ConflictError(f"{path}: another node has the id {encode_id(node_id)}")
        yield StoredNode(node_id, path, document, _read(path, document))


def _update(node: StoredNode, changes: ChangeSet) -> StoredNode:
    """Give *node* its new document, if it has one."""
    document = changes.updated.get(node.node_id, node.document)
    if document == node.document:
        return node
    array = _read(node.path, document)
    if (array is None) != (node.array is None):
        raise BadBodyError(f"{node.path}: no array becomes a group, and no group an array")
    if array is not None and node.array is not None:
        array = replace(array, manifests=node.array.manifests)
    return replace(node, document=document, array=array)


def _read(path: str, document: bytes) -> StoredArray | None:
    try:
        grid = read_grid(document)
    except DecodeError as error:
        raise BadBodyError(f"{path}: {error}") from error
    return None if grid is None else grid.array


def _check_path(path: str) -> None:
    segments = path[1:].split("/") if path != "/" else ["root"]
    if not path.startswith("/") or not {"", ".", ".."}.isdisjoint(segments):
        raise BadBodyError(f"{path!r} is no path of a node")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise BadBodyError(f"{path!r} is no path of a node: it is no UTF-8") from None


def _check_groups(nodes: Nodes, entered: set[str], left: set[str]) -> None:
    """Return if all that *entered*, and all that is where others *left*, is in groups."""
    for path in nodes:
        above = parent_of(path)
        if path == "/" or not (path in entered or above in left or above in entered):
            continue
        parent = nodes.get(above)
        if parent is None:
            raise ConflictError(f"{path}: the group {above} that it is in does not exist")
        if parent.array is not None:
            raise ConflictError(f"{path}: {above}, which it is in, is an array")
