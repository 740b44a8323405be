"""From the changes that a request asks for to what a commit is to change, by the ids of nodes."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from app.errors import BadBodyError
from app.formats.icechunk.change_set import ChangeSet, ChunkChanges, NodeDocument
from app.formats.icechunk.payloads import Payloads
from app.formats.icechunk.requested import DeleteNode, Edit, PutNode, SetChunks
from app.formats.icechunk.stored_nodes import StoredSnapshot
from app.formats.icechunk.updated_chunks import Coords

_AFTER_SLASH: Final = chr(ord("/") + 1)

type NewId = Callable[[], bytes]
"""Makes the id of a node that no other has."""


def edit(parent: StoredSnapshot, edits: Sequence[Edit], new_id: NewId) -> ChangeSet:
    """Tell what *edits* change in *parent*, one after the other.

    Raises: `BadBodyError` for an edit of what is not there, or that cannot be.
    """
    editing = _Editing(parent, new_id)
    for each in edits:
        editing.make(each)
    return editing.finish()


class _Editing:
    """A snapshot as edits leave it."""

    def __init__(self, parent: StoredSnapshot, new_id: NewId) -> None:
        self._new_id = new_id
        self._ids = {path: node.node_id for path, node in parent.nodes.items()}
        self._paths = SortedPaths(self._ids)
        self._arrays = {path for path, node in parent.nodes.items() if node.array is not None}
        self._documents = {node.node_id: node.document for node in parent.nodes.values()}
        self._new: dict[bytes, NodeDocument] = {}
        self._updated: dict[bytes, bytes] = {}
        self._deleted: set[bytes] = set()
        self._chunks: defaultdict[bytes, list[SetChunks]] = defaultdict(list)

    def make(self, each: Edit) -> None:
        """Make one edit."""
        match each:
            case PutNode():
                self._put(each)
            case DeleteNode(path):
                self._delete(self._demand(path))
            case SetChunks(path, coords):
                if self._demand(path) not in self._arrays:
                    raise BadBodyError(f"{path} is no array, and has no chunks")
                if len(coords):
                    self._chunks[self._ids[path]].append(each)

    def finish(self) -> ChangeSet:
        """Give all that was changed."""
        chunks = {node_id: _joined(some) for node_id, some in self._chunks.items()}
        return ChangeSet(self._new, self._updated, frozenset(self._deleted), chunks=chunks)

    def _put(self, each: PutNode) -> None:
        """Replace the metadata of a node; one of the other kind makes way, with all in it."""
        path, document, is_array = each
        if path in self._ids and (path in self._arrays) != is_array:
            self._delete(path)
        if (node_id := self._ids.get(path)) is None:
            node_id = self._ids[path] = self._new_id()
            self._paths.add(path)
            self._new[node_id] = NodeDocument(path, document)
        elif node_id in self._new:
            self._new[node_id] = NodeDocument(path, document)
        elif document != self._documents[node_id]:
            self._updated[node_id] = document
        else:
            self._updated.pop(node_id, None)
        if is_array:
            self._arrays.add(path)

    def _delete(self, path: str) -> None:
        for each in self._paths.take(path):
            node_id = self._ids.pop(each)
            self._arrays.discard(each)
            self._new.pop(node_id, None)
            self._updated.pop(node_id, None)
            self._chunks.pop(node_id, None)
            if node_id in self._documents:
                self._deleted.add(node_id)

    def _demand(self, path: str) -> str:
        if path not in self._ids:
            raise BadBodyError(f"there is no node {path} in the parent, or no more")
        return path


def _joined(edits: Sequence[SetChunks]) -> ChunkChanges:
    """Put the changed chunks of one array in C order; of several edits of one the last counts.

    Raises: `BadBodyError` where the coordinates are not all of one length.
    """
    if len({each.coords.shape[1] for each in edits}) > 1:
        raise BadBodyError(f"{edits[0].path}: coords are of one length, that of its shape")
    coords = np.concatenate([each.coords for each in edits])
    payloads = Payloads.joined([each.payloads for each in edits])
    order = _last_of_each(coords)
    return ChunkChanges(coords[order], payloads.take(order))


def _last_of_each(coords: Coords) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Give the places of *coords* in C order, of those that are alike only the last."""
    if not coords.shape[1]:
        return np.arange(len(coords))[-1:]
    order = np.lexsort(coords.T[::-1])
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (coords[order[1:]] != coords[order[:-1]]).any(axis=1)
    return order[is_last]


class SortedPaths:
    """Paths that come and go, a hundred thousand of them in one request."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._sorted = sorted(paths)

    def add(self, path: str) -> None:
        """Add *path*, which is none of them."""
        insort(self._sorted, path)

    def take(self, path: str) -> list[str]:
        """Take *path*, which is one of them, and all below it away, and list them."""
        prefix = path.rstrip("/")
        start = bisect_left(self._sorted, prefix + "/")
        stop = bisect_left(self._sorted, prefix + _AFTER_SLASH)
        below = [each for each in self._sorted[start:stop] if each != path]
        del self._sorted[start:stop]
        if path != "/":
            del self._sorted[bisect_left(self._sorted, path)]
        return [path, *below]
