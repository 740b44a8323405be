"""Changes of the nodes of a session, and what all of them come to against its parent."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from app.errors import BadBodyError, ConflictError
from app.formats.icechunk.change_set import ChangeSet, ChunkChanges, NodeDocument
from app.formats.icechunk.session_document import ChangedNode, SessionDocument
from app.formats.icechunk.session_view import SessionView, ViewedNode, read_grid
from app.formats.reading import DecodeError

type Nodes = dict[str, ChangedNode | None]


def put_node(view: SessionView, path: str, document: bytes, new_id: bytes) -> SessionDocument:
    """Give the node at *path* the metadata *document*; one that is new gets *new_id*.

    What becomes of another kind, or gets other dimensions, is another node: what was there is
    gone, with everything below.

    Raises: `BadBodyError`, `ConflictError` where an array is in the way.
    """
    try:
        document.decode()
        grid = read_grid(document)
    except DecodeError as error:
        raise BadBodyError(f"{path}/zarr.json: {error}") from None
    except UnicodeDecodeError:
        raise BadBodyError(f"{path}/zarr.json: no UTF-8") from None
    for above in _above(path):
        if (node := view.node(above)) is not None and node.grid is not None:
            raise ConflictError(f"/{above} is an array: there is no node in it, such as /{path}")
    old = view.node(path)
    if old is not None and _is_alike(old, ViewedNode(new_id, path, document, grid)):
        return _with(view, {path: ChangedNode(old.node_id, document)})
    if old is None and grid is not None and any(view.below(path)):
        raise ConflictError(f"/{path} has nodes below: it cannot be an array")
    gone: Nodes = dict.fromkeys([] if old is None else view.below(path))
    return _with(view, {**gone, path: ChangedNode(new_id, document)})


def delete_nodes(view: SessionView, path: str) -> SessionDocument:
    """Take the node at *path* away, and all below it."""
    return _with(view, dict.fromkeys([path, *view.below(path)]))


def make_changes(view: SessionView, chunks: Mapping[bytes, ChunkChanges]) -> ChangeSet:
    """Tell what the session comes to, with *chunks*, which are of arrays that it has.

    Raises: `ConflictError` where a new node is in no group.
    """
    new, updated, deleted = {}, {}, set()
    for path, changed in view.session.nodes.items():
        stored = view.parent.nodes.get(f"/{path}")
        if stored is not None and (changed is None or changed.node_id != stored.node_id):
            deleted.add(stored.node_id)
        if changed is None:
            continue
        if stored is None or changed.node_id != stored.node_id:
            _demand_group(view, path)
            new[changed.node_id] = NodeDocument(f"/{path}", changed.document)
        elif changed.document != stored.document:
            updated[changed.node_id] = changed.document
    return ChangeSet(new, updated, frozenset(deleted), chunks=chunks)


def _demand_group(view: SessionView, path: str) -> None:
    """Raise unless the new node at *path* is in a group."""
    if not path:
        return
    above = path.rpartition("/")[0]
    parent = view.node(above)
    if parent is None:
        raise ConflictError(f"there is no group /{above} for /{path}: its zarr.json is missing")
    if parent.grid is not None:
        raise ConflictError(f"/{above} is an array: there is no node in it, such as /{path}")


def _above(path: str) -> Iterable[str]:
    while path:
        path = path.rpartition("/")[0]
        yield path


def _is_alike(old: ViewedNode, new: ViewedNode) -> bool:
    """Tell whether *new* can have the chunks of *old*."""
    if old.grid is None or new.grid is None:
        return old.grid is new.grid
    return len(old.grid.shape) == len(new.grid.shape)


def _with(view: SessionView, changed: Mapping[str, ChangedNode | None]) -> SessionDocument:
    """Put *changed* in; of what the parent has not either nothing is told."""
    nodes = {**view.session.nodes, **changed}
    for path, node in changed.items():
        if node is None and f"/{path}" not in view.parent.nodes:
            nodes.pop(path)
    return replace(view.session, nodes=nodes)
