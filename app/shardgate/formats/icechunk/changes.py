"""Change sets of commits: made against a parent snapshot, and checked."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from shardgate.errors import BadBodyError, NotAllowedError
from shardgate.formats.icechunk.config import Config, VirtualContainer
from shardgate.formats.icechunk.coords import Coords, last_of_each
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.manifest import PayloadKind
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import StoredSnapshot
from shardgate.formats.reading import DecodeError
from shardgate.formats.references import Allowed, resolve
from shardgate.model import MAX_KEY_NBYTES, ByteRange

_AFTER_SLASH: Final = chr(ord("/") + 1)
_CHANGE_NBYTES: Final = 512
_MAX_MOVES: Final = 100_000
"""Most nodes that the moves of one commit rename, each counted as often as it is moved."""
_MAX_MOVED_LETTERS: Final = 16 * 1024**2  # most letters of the paths that these nodes get


@dataclass(frozen=True, slots=True, eq=False)
class ChunkChanges:
    """Changed chunks of one array; equal only if identical, since they are large."""

    coords: Coords
    """Of shape ``(count, ndim)``, in C order, each once."""
    payloads: Payloads


class NodeDocument(NamedTuple):
    """A node that the parent does not have."""

    path: str
    """Absolute path: ``/a/b``, or ``/``."""
    document: bytes


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """Changes of a snapshot, the parent, by node id. A replaced node is *deleted*, and another one
    *new*; all nodes below a deleted group are *deleted*.
    """

    new: Mapping[bytes, NodeDocument] = field(default_factory=dict)
    updated: Mapping[bytes, bytes] = field(default_factory=dict)
    """``zarr.json`` of nodes of the parent: new ones, and those that were changed and changed back,
    which are updates for the library too."""
    deleted: frozenset[bytes] = frozenset()
    chunks: Mapping[bytes, ChunkChanges] = field(default_factory=dict)
    """Chunks of arrays that are *new* or in the parent, and not *deleted*."""
    moves: Mapping[bytes, str] = field(default_factory=dict)
    """New paths of nodes of the parent, also of every node below a moved group."""

    @property
    def is_empty(self) -> bool:
        return not (self.new or self.updated or self.deleted or self.chunks or self.moves)

    @property
    def nbytes(self) -> int:
        documents = [each.document for each in self.new.values()] + list(self.updated.values())
        count = len(documents) + len(self.deleted) + len(self.chunks) + len(self.moves)
        paths = [each.path for each in self.new.values()] + list(self.moves.values())
        chunks = sum(each.coords.nbytes + each.payloads.nbytes for each in self.chunks.values())
        return _CHANGE_NBYTES * count + sum(map(len, documents)) + sum(map(len, paths)) + chunks


class PutNode(NamedTuple):
    """Edit that creates a node or replaces its metadata."""

    path: str
    document: bytes
    is_array: bool


class DeleteNode(NamedTuple):
    """Edit that deletes a node and all nodes below it."""

    path: str


class MoveNode(NamedTuple):
    """Edit that moves a node, and all nodes below it, to a path where none is."""

    path: str
    target: str


class SetChunks(NamedTuple):
    """Edit that sets or deletes chunks of an array."""

    path: str
    coords: Coords
    payloads: Payloads


type Edit = PutNode | DeleteNode | MoveNode | SetChunks
"""One change; each applies to the result of those before it."""
type NewId = Callable[[], bytes]


def edit(parent: StoredSnapshot, edits: Sequence[Edit], new_id: NewId) -> ChangeSet:
    """Apply *edits* to *parent*, in order. Raises: `BadBodyError` for an impossible one."""
    editing = _Editing(parent, new_id)
    for each in edits:
        editing.apply(each)
    return editing.finish()


def nbytes_of(edits: Sequence[Edit]) -> int:
    """Estimate the bytes of memory that *edits* hold."""
    documents = sum(len(each.document) for each in edits if isinstance(each, PutNode))
    sets = [each for each in edits if isinstance(each, SetChunks)]
    paths = sum(len(each.path) for each in edits)
    paths += sum(len(each.target) for each in edits if isinstance(each, MoveNode))
    chunks = sum(each.coords.nbytes + each.payloads.nbytes for each in sets)
    return _CHANGE_NBYTES * len(edits) + documents + paths + chunks


class _Editing:
    """Nodes of a snapshot while edits are applied."""

    def __init__(self, parent: StoredSnapshot, new_id: NewId) -> None:
        self._new_id = new_id
        self._before = {node.node_id: path for path, node in parent.nodes.items()}
        self._occupants = parent.nodes
        self._ids = {path: node.node_id for path, node in parent.nodes.items()}
        self._nodes = {
            path: PutNode(path, node.document, node.array is not None)
            for path, node in parent.nodes.items()
        }
        self._paths = sorted(self._nodes)
        """In order, for requests of a hundred thousand edits."""
        self._chunks: defaultdict[bytes, list[SetChunks]] = defaultdict(list)
        self._updated = set[bytes]()
        """Ids of nodes whose documents were replaced by others, and perhaps changed back."""
        self._moves: list[bytes] = []
        """Node ids, one for each move of the node."""
        self._moved_letters = 0

    def apply(self, each: Edit) -> None:
        match each:
            case PutNode():
                self._put(each)
            case DeleteNode(path):
                self._existing(path)
                self._delete(path)
            case MoveNode(path, target):
                self._move(self._existing(path), target)
            case SetChunks(path, coords):
                if not self._existing(path).is_array:
                    raise BadBodyError(f"{path} is no array, and has no chunks")
                if len(coords):
                    self._chunks[self._ids[path]].append(each)

    def finish(self) -> ChangeSet:
        new: dict[bytes, NodeDocument] = {}
        updated: dict[bytes, bytes] = {}
        for path, document, _ in self._nodes.values():
            node_id = self._ids[path]
            if node_id not in self._before:
                new[node_id] = NodeDocument(path, document)
            elif node_id in self._updated:
                updated[node_id] = document
        deleted = frozenset(self._before).difference(self._ids.values())
        chunks = {node_id: _join_chunks(some) for node_id, some in self._chunks.items()}
        return ChangeSet(new, updated, deleted, chunks=chunks, moves=self._net_moves())

    def _net_moves(self) -> dict[bytes, str]:
        """Return the new paths of nodes of the parent. Raises: `BadBodyError` for a place that a
        node of the parent has left by deletion, as the specification says of ``moved_nodes``.
        """
        if not self._moves:
            return {}
        wanted = frozenset(self._moves)
        paths = {node_id: path for path, node_id in self._ids.items() if node_id in wanted}
        moves = {
            node_id: path
            for node_id, path in paths.items()
            if self._before.get(node_id, path) != path
        }
        for path in moves.values():
            occupant = self._occupants.get(path)
            if occupant is not None and occupant.node_id not in moves:
                raise BadBodyError(f"{path} is deleted here: move a node there by another commit")
        return moves

    def _put(self, each: PutNode) -> None:
        """Replace the metadata of a node; a node of the other kind is deleted first."""
        old = self._nodes.get(each.path)
        if old is not None and old.is_array != each.is_array:
            self._delete(each.path)
            old = None
        if old is None:
            insort(self._paths, each.path)
            self._ids[each.path] = self._new_id()
        # The same document again is no change, neither here nor for the library.
        elif old.document != each.document:
            self._updated.add(self._ids[each.path])
        self._nodes[each.path] = each

    def _delete(self, path: str) -> None:
        """Delete the node at *path* and all nodes below it."""
        for each in self._take_paths(path):
            del self._nodes[each]
            self._chunks.pop(self._ids.pop(each), None)

    def _move(self, node: PutNode, target: str) -> None:
        """Move *node* and all nodes below it to *target*, whose group exists."""
        path = node.path
        if f"{target}/".startswith(f"{path.rstrip('/')}/"):
            raise BadBodyError(f"{path} cannot be moved to {target}, which is in it")
        if target in self._nodes:
            raise BadBodyError(f"{path} cannot be moved: there is a node {target} already")
        group = self._nodes.get(target.rpartition("/")[0] or "/")
        if group is None or group.is_array:
            raise BadBodyError(f"{path} cannot be moved to {target}: there is no such group")
        # The library can leave nodes in no group, whose places the moved ones might take.
        if orphans := self._paths[self._below(target)]:
            raise BadBodyError(f"{path} cannot be moved: there is a node {orphans[0]} already")
        before = sorted(self._take_paths(path))
        self._check_moved(path, before, target)
        after = [target + each.removeprefix(path) for each in before]
        insort(self._paths, target)
        self._paths[self._below(target)] = after[1:]
        for old, new in zip(before, after, strict=True):
            self._nodes[new] = self._nodes.pop(old)._replace(path=new)
            self._ids[new] = self._ids.pop(old)
            self._moves.append(self._ids[new])

    def _check_moved(self, path: str, before: Sequence[str], target: str) -> None:
        """Check the number and the lengths of new paths before they take memory."""
        if len(self._moves) + len(before) > _MAX_MOVES:
            raise BadBodyError(f"the commit moves more than {_MAX_MOVES} nodes")
        more = len(target) - len(path)
        if max(map(len, before)) + more > MAX_KEY_NBYTES:
            raise BadBodyError(f"{path}: a path below {target} would be too long for a key")
        self._moved_letters += sum(map(len, before)) + more * len(before)
        if self._moved_letters > _MAX_MOVED_LETTERS:
            raise BadBodyError(f"new paths have more than {_MAX_MOVED_LETTERS} letters in all")

    def _take_paths(self, path: str) -> set[str]:
        """Remove *path* and all below it from the ordered paths, and return them."""
        at = bisect_left(self._paths, path)
        below = self._below(path)
        taken = {path, *self._paths[below]}
        del self._paths[below]
        if path != "/":
            del self._paths[at]
        return taken

    def _below(self, path: str) -> slice:
        """Return where the paths below *path* are in the ordered paths."""
        prefix = path.rstrip("/")
        # They come between ``prefix/`` and ``prefix0``, the next character.
        start = bisect_left(self._paths, prefix + "/")
        return slice(start, bisect_left(self._paths, prefix + _AFTER_SLASH))

    def _existing(self, path: str) -> PutNode:
        if path not in self._nodes:
            raise BadBodyError(f"there is no node {path}: not in the parent, or deleted before")
        return self._nodes[path]


def _join_chunks(edits: Sequence[SetChunks]) -> ChunkChanges:
    """Join edits of one array; of several edits of a chunk the last one counts."""
    if len({each.coords.shape[1] for each in edits}) > 1:
        raise BadBodyError(f"{edits[0].path}: coords are of one length, that of its shape")
    coords = np.concatenate([each.coords for each in edits])
    payloads = Payloads.joined([each.payloads for each in edits])
    order = last_of_each(coords)
    return ChunkChanges(coords[order], payloads.take(order))


def check_references(
    changes: ChangeSet, config: Config, allowed: Sequence[Allowed]
) -> Mapping[bytes, int]:
    """Check inline chunks and virtual references against *config*, and return the least size of
    each chunk file that *changes* refer to, in bytes. Raises: `NotAllowedError`, `BadBodyError`.
    """
    wanted: dict[bytes, int] = {}
    locations: dict[bytes, None] = {}
    most_nbytes = config.inline_chunk_threshold_bytes
    for changed in changes.chunks.values():
        payloads = changed.payloads
        for data in payloads.values_of(PayloadKind.INLINE):
            if len(data) > most_nbytes:
                raise BadBodyError(
                    f"an inline chunk has {len(data)} bytes, and the repository allows "
                    f"{most_nbytes}: POST it to /chunks"
                )
        locations |= dict.fromkeys(payloads.values_of(PayloadKind.LOCATION))
        natives = payloads.of_kind(PayloadKind.NATIVE)
        stops = natives["start"] + natives["length"]
        for chunk_id, stop in zip(natives["chunk_id"].tolist(), stops.tolist(), strict=True):
            wanted[chunk_id] = max(wanted.get(chunk_id, 0), stop)
    _check_virtual(map(bytes.decode, locations), allowed, config.containers)
    return wanted


def _check_virtual(
    locations: Iterable[str], allowed: Sequence[Allowed], containers: Sequence[VirtualContainer]
) -> None:
    """Check that this service and the library, in *containers*, may follow virtual references."""
    named = {each.name: each.url_prefix for each in containers if each.name is not None}
    prefixes = tuple(each.url_prefix for each in containers)
    for location in locations:
        try:
            resolve(location, allowed, named)
        except DecodeError as error:
            raise BadBodyError(str(error)) from None
        if not location.startswith(("vcc://", *prefixes)):
            raise NotAllowedError(
                f"no virtual chunk container of the repository has {location[:200]!r}: the "
                "library would not read it"
            )


def check_natives(
    changes: ChangeSet, wanted: Mapping[bytes, int], lengths: Mapping[bytes, int]
) -> None:
    """Check that native references lie in chunk files of these *lengths*: that all have at least
    the *wanted* ones. Raises: `BadBodyError` for the first reference that does not.
    """
    if all(lengths.get(chunk_id, 0) >= nbytes for chunk_id, nbytes in wanted.items()):
        return
    for changed in changes.chunks.values():
        is_native = changed.payloads.rows["kind"] == PayloadKind.NATIVE
        coords = changed.coords[is_native]
        rows = changed.payloads.rows[is_native]
        stops = rows["start"] + rows["length"]
        references = zip(rows["chunk_id"].tolist(), stops.tolist(), strict=True)
        for number, (chunk_id, stop) in enumerate(references):
            length = lengths.get(chunk_id)
            if length is not None and length >= stop:
                continue
            found = "does not exist" if length is None else f"has {length} bytes"
            byte_range = ByteRange(int(rows["start"][number]), stop)
            chunk = f"chunk {coords[number].tolist()} refers to {byte_range} of"
            raise BadBodyError(f"{chunk} {encode_id(chunk_id)}, which {found}")
