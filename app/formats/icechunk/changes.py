"""Change sets of commits: read from requests, made against a parent snapshot, and checked.

Chunks are columns, not objects: one request may set a million of them.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from app.errors import BadBodyError, NotAllowedError
from app.formats.icechunk.config import Config, VirtualContainer
from app.formats.icechunk.coords import Coords, last_of_each
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.manifest import Native
from app.formats.icechunk.payloads import PayloadKind, Payloads, read_coords, read_payloads
from app.formats.icechunk.snapshot import StoredSnapshot, is_node_path
from app.formats.icechunk.virtual import Allowed, resolve
from app.formats.reading import DecodeError

_AFTER_SLASH: Final = chr(ord("/") + 1)
_COLUMNS: Final = {
    "chunk_id": "chunk_ids",
    "offset": "offsets",
    "length": "lengths",
    "inline": "inlines",
    "location": "locations",
    "etag": "etags",
    "last_modified": "last_modified",
}
_KINDS: Final = ("chunk_id", "inline", "location")


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
    """New ``zarr.json`` of nodes of the parent."""
    deleted: frozenset[bytes] = frozenset()
    chunks: Mapping[bytes, ChunkChanges] = field(default_factory=dict)
    """Chunks of arrays that are *new* or in the parent, and not *deleted*."""

    @property
    def is_empty(self) -> bool:
        """`True` if there is nothing to commit."""
        return not (self.new or self.updated or self.deleted or self.chunks)


class PutNode(NamedTuple):
    """Edit that creates a node or replaces its metadata."""

    path: str
    document: bytes
    is_array: bool


class DeleteNode(NamedTuple):
    """Edit that deletes a node and all nodes below it."""

    path: str


class SetChunks(NamedTuple):
    """Edit that sets or deletes chunks of an array."""

    path: str
    coords: Coords
    payloads: Payloads


type Edit = PutNode | DeleteNode | SetChunks
"""One change; each applies to the result of those before it."""
type NewId = Callable[[], bytes]


def read_edits(items: object) -> list[Edit]:
    """Read the list ``changes`` of a request. Raises: `BadBodyError`, with its position."""
    edits: list[Edit] = []
    for number, item in enumerate(_expect(items, list, "changes is a list of objects")):
        where = f"changes[{number}]"
        members = dict(_expect(item, dict, f"{where} is an object"))
        op = members.pop("op", None)
        if (read := _OPS.get(op) if isinstance(op, str) else None) is None:
            raise BadBodyError(f"{where}.op is one of {', '.join(_OPS)}")
        edits.append(read(where, members))
    return edits


def _read_put_node(where: str, members: dict[str, Any]) -> PutNode:
    path, document = _take(where, members, "path", "metadata")
    node_type = _expect(document, dict, f"{where}.metadata is an object").get("node_type")
    if node_type not in ("array", "group"):
        raise BadBodyError(f"{where}.metadata.node_type is array or group")
    try:
        encoded = orjson.dumps(document)
    except orjson.JSONEncodeError:
        raise BadBodyError(f"{where}.metadata nests too deep") from None
    return PutNode(_path(where, path), encoded, node_type == "array")


def _read_delete_node(where: str, members: dict[str, Any]) -> DeleteNode:
    (path,) = _take(where, members, "path")
    return DeleteNode(_path(where, path))


def _read_put_chunks(where: str, members: dict[str, Any]) -> SetChunks:
    """Read chunks that are listed as objects in ``chunks``, or as columns."""
    path = _path(where, members.pop("path", None))
    if "chunks" not in members:
        coords = read_coords(where, members.pop("coords", None))
        return SetChunks(path, coords, read_payloads(where, members, len(coords)))
    (chunks,) = _take(where, members, "chunks")
    where = f"{where}.chunks"
    entries = _expect(chunks, list, f"{where} is a list of objects")
    shapes = _entry_shapes(where, entries)
    by_kind = {kind: [entry for entry in entries if kind in entry] for kind in _KINDS}
    coords = read_coords(where, [entry["coords"] for some in by_kind.values() for entry in some])
    payloads: list[Payloads] = []
    for kind, some in by_kind.items():
        names = {name for shape in shapes if kind in shape for name in shape if name in _COLUMNS}
        columns = {_COLUMNS[name]: [entry.get(name) for entry in some] for name in names}
        if some:
            payloads.append(read_payloads(where, columns, len(some)))
    return SetChunks(path, coords, Payloads.joined(payloads))


def _read_delete_chunks(where: str, members: dict[str, Any]) -> SetChunks:
    path, coords = _take(where, members, "path", "coords")
    found = read_coords(where, coords)
    return SetChunks(_path(where, path), found, Payloads.gone(len(found)))


def _entry_shapes(where: str, entries: list[Any]) -> set[tuple[str, ...]]:
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadBodyError(f"{where}[{number}] is an object")
    shapes = set(map(tuple, entries))
    for shape in shapes:
        what = None
        if not {"coords"} <= set(shape) <= {"coords", *_COLUMNS}:
            what = f"is an object of coords, {', '.join(_COLUMNS)}"
        elif sum(kind in shape for kind in _KINDS) != 1:
            what = f"has one of {', '.join(_KINDS)}"
        if what is not None:
            number = next(i for i, entry in enumerate(entries) if tuple(entry) == shape)
            raise BadBodyError(f"{where}[{number}] {what}")
    return shapes


_OPS: Final[Mapping[str, Callable[[str, dict[str, Any]], Edit]]] = {
    "put_node": _read_put_node,
    "delete_node": _read_delete_node,
    "put_chunks": _read_put_chunks,
    "delete_chunks": _read_delete_chunks,
}


def _take(where: str, members: dict[str, Any], *names: str) -> list[Any]:
    if members.keys() != set(names):
        raise BadBodyError(f"{where} has op, {', '.join(names)}, and nothing else")
    return [members[name] for name in names]


def _expect[T](value: object, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise BadBodyError(what)
    return value


def _path(where: str, path: object) -> str:
    if isinstance(path, str) and is_node_path(path) and "\0" not in path:
        return path
    raise BadBodyError(f"{where}: {str(path)[:80]!r} is no path of a node, such as /a/b")


def edit(parent: StoredSnapshot, edits: Sequence[Edit], new_id: NewId) -> ChangeSet:
    """Apply *edits* to *parent*, in order. Raises: `BadBodyError` for an impossible one."""
    editing = _Editing(parent, new_id)
    for each in edits:
        editing.apply(each)
    return editing.finish()


class _EditedNode(NamedTuple):
    node_id: bytes
    document: bytes
    is_array: bool


class _Editing:
    """Nodes of a snapshot while edits are applied."""

    def __init__(self, parent: StoredSnapshot, new_id: NewId) -> None:
        self._new_id = new_id
        self._before = {node.node_id: node.document for node in parent.nodes.values()}
        self._nodes = {
            path: _EditedNode(node.node_id, node.document, node.array is not None)
            for path, node in parent.nodes.items()
        }
        self._paths = SortedPaths(self._nodes)
        self._chunks: defaultdict[bytes, list[SetChunks]] = defaultdict(list)

    def apply(self, each: Edit) -> None:
        match each:
            case PutNode():
                self._put(each)
            case DeleteNode(path):
                self._existing(path)
                self._delete(path)
            case SetChunks(path, coords):
                node = self._existing(path)
                if not node.is_array:
                    raise BadBodyError(f"{path} is no array, and has no chunks")
                if len(coords):
                    self._chunks[node.node_id].append(each)

    def finish(self) -> ChangeSet:
        new, updated, deleted = {}, {}, dict(self._before)
        for path, (node_id, document, _) in self._nodes.items():
            before = deleted.pop(node_id, None)
            if before is None:
                new[node_id] = NodeDocument(path, document)
            elif document != before:
                updated[node_id] = document
        chunks = {node_id: _join_chunks(some) for node_id, some in self._chunks.items()}
        return ChangeSet(new, updated, frozenset(deleted), chunks=chunks)

    def _put(self, each: PutNode) -> None:
        """Replace the metadata of a node; a node of the other kind is deleted first."""
        path, document, is_array = each
        old = self._nodes.get(path)
        if old is not None and old.is_array != is_array:
            self._delete(path)
            old = None
        if old is None:
            self._paths.add(path)
        node_id = self._new_id() if old is None else old.node_id
        self._nodes[path] = _EditedNode(node_id, document, is_array)

    def _delete(self, path: str) -> None:
        for each in self._paths.take(path):
            self._chunks.pop(self._nodes.pop(each).node_id, None)

    def _existing(self, path: str) -> _EditedNode:
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


class SortedPaths:
    """Sorted set of paths, for requests of a hundred thousand edits."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._sorted = sorted(paths)

    def add(self, path: str) -> None:
        insort(self._sorted, path)

    def take(self, path: str) -> list[str]:
        """Remove *path*, which is in the set, and all paths below it; returns them."""
        prefix = path.rstrip("/")
        start = bisect_left(self._sorted, prefix + "/")
        stop = bisect_left(self._sorted, prefix + _AFTER_SLASH)
        below = [each for each in self._sorted[start:stop] if each != path]
        del self._sorted[start:stop]
        if path != "/":
            del self._sorted[bisect_left(self._sorted, path)]
        return [path, *below]


def check_references(
    changes: ChangeSet, config: Config, allowed: Sequence[Allowed]
) -> Mapping[bytes, int]:
    """Check inline chunks and virtual references against *config*, and return the least size of
    each chunk file that *changes* refer to, in bytes. Raises: `NotAllowedError`, `BadBodyError`.
    """
    wanted: dict[bytes, int] = {}
    locations: set[bytes] = set()
    most_nbytes = config.inline_chunk_threshold_bytes
    for changed in changes.chunks.values():
        payloads = changed.payloads
        for data in payloads.values_of(PayloadKind.INLAID):
            if len(data) > most_nbytes:
                raise BadBodyError(
                    f"an inline chunk has {len(data)} bytes, and the repository allows "
                    f"{most_nbytes}: POST it to /chunks"
                )
        locations.update(payloads.values_of(PayloadKind.VIRTUAL))
        rows = payloads.rows[payloads.of_kind(PayloadKind.NATIVE)]
        stops = np.zeros(len(payloads.values), np.int64)
        np.maximum.at(stops, rows["value"], rows["stop"])
        for number in np.flatnonzero(stops).tolist():
            chunk_id = payloads.values[number]
            wanted[chunk_id] = max(wanted.get(chunk_id, 0), int(stops[number]))
    _check_virtual(sorted(map(bytes.decode, locations)), allowed, config.containers)
    return wanted


def _check_virtual(
    locations: Sequence[str], allowed: Sequence[Allowed], containers: Sequence[VirtualContainer]
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


def check_natives(changes: ChangeSet, lengths: Mapping[bytes, int]) -> None:
    """Check that native references lie in chunk files of these *lengths*."""
    for changed in changes.chunks.values():
        for row, payload in zip(changed.coords, changed.payloads, strict=True):
            if not isinstance(payload, Native):
                continue
            chunk_id, byte_range = payload
            if (length := lengths.get(chunk_id)) is None:
                found = "does not exist"
            elif length < byte_range.stop:
                found = f"has {length} bytes"
            else:
                continue
            chunk = f"chunk {row.tolist()} refers to {byte_range} of {encode_id(chunk_id)}"
            raise BadBodyError(f"{chunk}, which {found}")
