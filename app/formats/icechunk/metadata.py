"""Snapshots: which nodes there are, and in which manifests their chunks are looked for."""

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from app.formats.documents import json_memory_nbytes
from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.fields import check_object_id
from app.formats.icechunk.flatbuffer import U8, U32, U64, Buffer, Table, required
from app.formats.icechunk.ids import NODE_ID_NBYTES, OBJECT_ID_NBYTES, encode_id
from app.formats.reading import DecodeError
from app.formats.zarr.codecs import UnshardableError, shape_of
from app.formats.zarr.keys import ChunkKeys
from app.formats.zarr.metadata import Node as Document
from app.formats.zarr.metadata import chunk_keys, parse_node

# The slots of fields: of the snapshot, of nodes, of the data of arrays, of what they refer to.
_ID: Final = 0
_NODES: Final = 2
_FLUSHED_AT: Final = 3
_MANIFEST_FILES: Final = 6
_MANIFEST_FILES_V2: Final = 7
_PATH: Final = 1
_USER_DATA: Final = 2
_NODE_TYPE: Final = 3
_NODE_DATA: Final = 4
_SHAPE: Final = 0
_MANIFESTS: Final = 2
_SHAPE_V2: Final = 3
_NUM_CHUNKS: Final = 1
_EXTENTS: Final = 1

_ARRAY: Final = 1
_RANGE: Final = U32.size * 2
_DIMENSION_V1: Final = U64.size * 2
_MANIFEST_FILE_V1: Final = 32
_NODE_OVERHEAD: Final = 1024
_MANIFEST_OVERHEAD: Final = 256


class ManifestRef(NamedTuple):
    """A manifest, and the chunks of the array that may be in it."""

    object_id: bytes
    extents: tuple[tuple[int, int], ...]
    """From and to along each dimension."""

    def covers(self, coords: tuple[int, ...]) -> bool:
        """Tell whether the chunk at *coords* may be in the manifest.

        Early writers gave a dimension to arrays that have none.
        """
        if len(coords) != len(self.extents):
            return not coords and self.extents == ((0, 1),)
        return all(
            start <= at < stop for at, (start, stop) in zip(coords, self.extents, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Chunks:
    """What only arrays have."""

    keys: ChunkKeys
    """Of the chunks that are stored: shards, where the array is sharded."""
    grid: tuple[int, ...]
    """How many of those there are along each dimension."""
    manifests: tuple[ManifestRef, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """An array or group."""

    node_id: bytes
    """Stays the same from snapshot to snapshot, wherever the node moves."""
    document: Document
    """Its ``zarr.json``."""
    chunks: Chunks | None = None
    """Set for arrays."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state of a repository."""

    object_id: bytes
    nodes: Mapping[str, Node | DecodeError]
    """By path, which is empty for the root; damaged ones tell what is wrong. Ordered by bytes."""
    root_document: bytes
    """The ``zarr.json`` of the root, with that of every node below in it; empty without a root."""
    manifests: frozenset[bytes]
    """The ids of all manifests that the snapshot lists."""
    faults: tuple[tuple[str, str], ...]
    """Paths of nodes that should not be there, and why."""
    orphans: Container[str]
    """Paths of nodes that are in no group."""
    nbytes: int
    flushed_at_s: int
    """When it was written, by the clock of its writer: seconds since 1970 in UTC."""

    def find(self, path: str) -> tuple[str, str] | None:
        """Find the node that *path* leads to or into: its path, and the rest of *path*."""
        node = path
        while node not in self.nodes:
            if not node:
                return None
            node = node.rpartition("/")[0]
        return node, path[len(node) + 1 :] if node else path

    def is_in_array(self, path: str) -> bool:
        """Tell whether *path* leads into an array, where there are but chunks."""
        node, rest = self.find(path) or ("", "")
        found = self.nodes.get(node)
        return rest != "" and isinstance(found, Node) and found.chunks is not None

    def below(self, path: str) -> Iterator[str]:
        """Name the nodes right below *path*, and those further down by their first step."""
        prefix = f"{path}/" if path else ""
        names = {
            node.removeprefix(prefix).partition("/")[0]
            for node in self.nodes
            if node.startswith(prefix) and node != path
        }
        return iter(sorted(names))


@dataclass(frozen=True, slots=True)
class SnapshotDecoder:
    """Decodes the snapshot *object_id*, whose FlatBuffer may have *limit_nbytes*."""

    object_id: bytes
    limit_nbytes: int

    def __call__(self, data: bytes) -> Snapshot:
        """Decode a file.

        Raises: `DecodeError`; a damaged node is told in its place instead.
        """
        payload = open_envelope(data, FileType.SNAPSHOT, self.limit_nbytes).payload
        root = Buffer(payload, self.limit_nbytes).root
        check_object_id(root, "snapshot", encode_id(self.object_id))
        nodes: dict[str, Node | DecodeError] = {}
        faults: list[tuple[str, str]] = []
        for table in root.tables(_NODES):
            path = required(table.text(_PATH), "path")
            if (reason := _misplaced(path, nodes)) is not None:
                faults.append((path, reason))
                continue
            node = nodes[path[1:]] = _decode_node(table)
            root.buffer.spend(_weigh(node))
        nodes = {path: nodes[path] for path in sorted(nodes, key=str.encode)}
        orphans = _orphans(nodes)
        faults += [(f"/{path}", reason) for path, reason in orphans.items()]
        root_document = _consolidate(nodes, orphans)
        nbytes = len(root_document) + sum(map(_weigh, nodes.values()))
        manifests = _listed(root)
        return Snapshot(
            self.object_id,
            nodes,
            root_document,
            manifests,
            tuple(faults),
            orphans,
            nbytes,
            root.number(_FLUSHED_AT, U64) // 1_000_000,
        )


def _misplaced(path: str, nodes: Mapping[str, object]) -> str | None:
    """Tell why no node can be at *path*, beside *nodes*."""
    if not path.startswith("/") or (path != "/" and not _are_segments(path[1:].split("/"))):
        return "no path of a node"
    return "another node has the same path" if path[1:] in nodes else None


def _are_segments(segments: list[str]) -> bool:
    return {"", ".", ".."}.isdisjoint(segments)


def _orphans(nodes: Mapping[str, Node | DecodeError]) -> Mapping[str, str]:
    """Tell which nodes are in no group, and why; the library can commit such a snapshot.

    *nodes* has parents before what is in them.
    """
    found: dict[str, str] = {}
    for path in filter(None, nodes):
        above = path.rpartition("/")[0]
        parent = nodes.get(above)
        if parent is None:
            found[path] = "the group it is in does not exist"
        elif isinstance(parent, Node) and parent.chunks is not None:
            found[path] = "the node it is in is an array"
        elif above in found:
            found[path] = "the group it is in is in none itself"
    return found


def _decode_node(table: Table) -> Node | DecodeError:
    """Decode a node, or tell what is wrong with it by an error that holds on to no bytes."""
    try:
        return _parse_node(table)
    except DecodeError as error:
        return DecodeError(str(error))
    except (ValueError, RecursionError) as error:
        return DecodeError(f"its zarr.json is no JSON: {error}")


def _parse_node(table: Table) -> Node:
    node_id = required(table.struct(_ID, NODE_ID_NBYTES), "node id")
    data = required(table.data(_USER_DATA), "user_data")
    table.buffer.check(json_memory_nbytes(data))
    document = json.loads(data.decode())
    node = Node(node_id, parse_node(document, data))
    if (node.document.kind == "array") != (table.number(_NODE_TYPE, U8) == _ARRAY):
        raise DecodeError("snapshot and zarr.json disagree on whether it is an array")
    if node.document.kind == "group":
        return node
    return Node(node_id, node.document, _decode_chunks(table, document))


def _decode_chunks(table: Table, document: dict[str, object]) -> Chunks:
    array = required(table.table(_NODE_DATA), "node_data")
    grid = _grid(array)
    ndim = len(shape_of(document.get("shape"), "shape", least=0))
    if len(grid) != ndim:
        raise DecodeError(f"the snapshot has {len(grid)} dimensions and zarr.json {ndim}")
    try:
        keys = chunk_keys(document.get("chunk_key_encoding"), ndim)
    except UnshardableError:  # the library knows one encoding only, whatever the array says
        keys = ChunkKeys("c", "/", ndim)
    return Chunks(keys, grid, tuple(map(_manifest_ref, array.tables(_MANIFESTS))))


def _grid(array: Table) -> tuple[int, ...]:
    if array.at(_SHAPE_V2) is not None:
        return tuple(dimension.number(_NUM_CHUNKS, U32) for dimension in array.tables(_SHAPE_V2))
    dimensions = required(array.structs(_SHAPE, _DIMENSION_V1), "shape")
    return tuple(-(-length // (chunk or 1)) for length, chunk in map(_numbers, dimensions))


def _numbers(struct: bytes) -> tuple[int, int]:
    half = len(struct) // 2
    return int.from_bytes(struct[:half], "little"), int.from_bytes(struct[half:], "little")


def _manifest_ref(table: Table) -> ManifestRef:
    object_id = required(table.struct(_ID, OBJECT_ID_NBYTES), "manifest id")
    return ManifestRef(
        object_id, tuple(map(_numbers, required(table.structs(_EXTENTS, _RANGE), "extents")))
    )


def _listed(root: Table) -> frozenset[bytes]:
    """Read the ids of manifests: those of version 2 in tables, those of version 1 in structs."""
    v1 = (
        struct[:OBJECT_ID_NBYTES]
        for struct in root.structs(_MANIFEST_FILES, _MANIFEST_FILE_V1) or ()
    )
    v2 = (table.struct(_ID, OBJECT_ID_NBYTES) for table in root.tables(_MANIFEST_FILES_V2))
    return frozenset(object_id for object_id in (*v1, *v2) if object_id is not None)


def _consolidate(nodes: Mapping[str, Node | DecodeError], orphans: Container[str]) -> bytes:
    """Put what is served of all nodes into the document of the root.

    Nodes in no group are left out, for readers of the whole would fail over them; where a node is
    damaged nothing is put in, so that whoever comes upon it hears of that.
    """
    root = nodes.get("")
    if not isinstance(root, Node):
        return b""
    if root.chunks is not None or any(isinstance(node, DecodeError) for node in nodes.values()):
        return root.document.served
    document = json.loads(root.document.served)
    document.pop("consolidated_metadata", None)
    members = b", ".join(
        json.dumps(path).encode() + b": " + node.document.served
        for path, node in nodes.items()
        if path and path not in orphans and isinstance(node, Node)
    )
    head = b'"consolidated_metadata": {"kind": "inline", "must_understand": false, "metadata": {'
    return b"%b, %b%b}}}" % (json.dumps(document).encode()[:-1], head, members)


def _weigh(node: Node | DecodeError) -> int:
    if isinstance(node, DecodeError):
        return _NODE_OVERHEAD
    document = node.document
    document_nbytes = document.nbytes if document.array else len(document.served)
    count = len(node.chunks.manifests) if node.chunks else 0
    return document_nbytes + _NODE_OVERHEAD + count * _MANIFEST_OVERHEAD
