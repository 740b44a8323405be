"""Snapshots: the nodes of a repository and the manifests of their chunks ("Snapshot Files").

Files of versions 1 and 2 are decoded in three ways: `SnapshotDecoder` for serving keys,
`StoredSnapshotDecoder` for writing the next snapshot, which keeps documents byte for byte, and
`SnapshotHeaderDecoder` for history, which version 1 has nowhere else.
"""

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from app.formats.documents import json_memory_nbytes
from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.flatbuffer import U8, U32, U64, Buffer, Table, check_object_id, required
from app.formats.icechunk.ids import NODE_ID_NBYTES, OBJECT_ID_NBYTES, decode_id, encode_id
from app.formats.icechunk.metadata_items import Metadata, read_metadata
from app.formats.icechunk.repo_info import SnapshotInfo, checked_us
from app.formats.reading import DecodeError
from app.formats.zarr.codecs import UnshardableError, shape_of
from app.formats.zarr.keys import ChunkKeys
from app.formats.zarr.metadata import Node as ZarrNode
from app.formats.zarr.metadata import chunk_keys, parse_node

# Slots of `Snapshot`, of `NodeSnapshot`, which begins with an id as well, and of `ArrayNodeData`.
_ID, _PARENT_ID, _NODES, _FLUSHED_AT, _MESSAGE, _METADATA = range(6)
_MANIFEST_FILES_V1, _MANIFEST_FILES, _EXTRA = range(6, 9)
_PATH, _USER_DATA, _NODE_TYPE, _NODE_DATA, _NODE_EXTRA = range(1, 6)
_SHAPE_V1, _DIMENSION_NAMES, _MANIFESTS, _SHAPE = range(4)

ARRAY: Final = 1
GROUP: Final = 2
_PAIR_OF_U32: Final = 2 * U32.size
_PAIR_OF_U64: Final = 2 * U64.size
_MANIFEST_FILE_V1_NBYTES: Final = 32
_SIZE_AT: Final = 16
_COUNT_AT: Final = 24

_NODE_NBYTES: Final = 1024
_ITEM_NBYTES: Final = 256


class ManifestRef(NamedTuple):
    """A manifest of an array, and the chunks that may be in it."""

    object_id: bytes
    extents: tuple[tuple[int, int], ...]
    """Half-open range of chunk coordinates along each dimension."""

    def covers(self, coords: tuple[int, ...]) -> bool:
        """Return whether it may have chunk *coords*; early writers gave scalars a dimension."""
        if len(coords) != len(self.extents):
            return not coords and self.extents == ((0, 1),)
        return all(
            start <= at < stop for at, (start, stop) in zip(coords, self.extents, strict=True)
        )


class ManifestFile(NamedTuple):
    """An entry of the list of manifests in a snapshot."""

    object_id: bytes
    size_bytes: int
    num_chunk_refs: int
    extra: bytes | None = None


class Dimension(NamedTuple):
    """One dimension of an array."""

    length: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The part of a stored node that only arrays have."""

    dimensions: tuple[Dimension, ...]
    names: tuple[str | None, ...] | None
    manifests: tuple[ManifestRef, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return tuple(dimension.num_chunks for dimension in self.dimensions)


@dataclass(frozen=True, slots=True)
class StoredNode:
    """An array or a group as it is stored."""

    node_id: bytes
    path: str
    """Absolute path: ``/a/b``, or ``/``."""
    document: bytes
    """Its ``zarr.json``, byte for byte."""
    array: StoredArray | None = None
    extra: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot as it is stored."""

    object_id: bytes
    nodes: Mapping[str, StoredNode]
    """By absolute path; of two nodes at one path the first."""
    manifest_files: Mapping[bytes, ManifestFile]
    flushed_at_us: int
    message: str
    metadata: Metadata
    extra: bytes | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StoredSnapshotDecoder:
    """Decodes the snapshot *object_id*, of at most *limit_nbytes* decompressed."""

    object_id: bytes
    limit_nbytes: int

    def __call__(self, data: bytes) -> StoredSnapshot:
        """Decode *data*."""
        root, version = _open_snapshot(data, encode_id(self.object_id), self.limit_nbytes)
        nodes: dict[str, StoredNode] = {}
        nbytes = 0
        required(root.vector(_NODES, 4), "nodes")
        for table in root.tables(_NODES):
            node = _read_stored_node(table)
            nodes.setdefault(node.path, node)
            weight = _weigh_stored(node)
            root.buffer.spend(weight)
            nbytes += weight
        manifest_files = {file.object_id: file for file in _read_manifest_files(root)}
        return StoredSnapshot(
            self.object_id,
            nodes,
            manifest_files,
            flushed_at_us=root.number(_FLUSHED_AT, U64),
            message=required(root.text(_MESSAGE), "message"),
            metadata=read_metadata(root, _METADATA, version),
            extra=root.data(_EXTRA),
            nbytes=nbytes + _ITEM_NBYTES * len(manifest_files),
        )


def _open_snapshot(data: bytes, object_id: str, limit_nbytes: int) -> tuple[Table, int]:
    version, payload = open_envelope(data, FileType.SNAPSHOT, limit_nbytes)
    root = Buffer(payload, limit_nbytes).root
    check_object_id(root, "snapshot", object_id)
    return root, version


def _read_stored_node(table: Table) -> StoredNode:
    path = required(table.text(_PATH), "path")
    kind = table.number(_NODE_TYPE, U8)
    if kind not in (ARRAY, GROUP):
        raise DecodeError(f"node {path} is of unknown type {kind}")
    return StoredNode(
        required(table.struct(_ID, NODE_ID_NBYTES), "node id"),
        path,
        required(table.data(_USER_DATA), "user_data"),
        _read_array(required(table.table(_NODE_DATA), "node_data")) if kind == ARRAY else None,
        table.data(_NODE_EXTRA),
    )


def _read_array(table: Table) -> StoredArray:
    names = None
    if table.at(_DIMENSION_NAMES) is not None:
        names = tuple(item.text(0) for item in table.tables(_DIMENSION_NAMES))
    return StoredArray(_read_dimensions(table), names, _read_manifest_refs(table))


def _read_dimensions(table: Table) -> tuple[Dimension, ...]:
    """Read the dimensions; version 1 stores the lengths of array and chunk instead of counts."""
    if table.at(_SHAPE) is not None:
        return tuple(
            Dimension(item.number(0, U64), item.number(1, U32)) for item in table.tables(_SHAPE)
        )
    pairs = map(_read_pair, required(table.structs(_SHAPE_V1, _PAIR_OF_U64), "shape"))
    return tuple(Dimension(length, -(-length // (chunk or 1))) for length, chunk in pairs)


def _read_manifest_refs(table: Table) -> tuple[ManifestRef, ...]:
    refs = []
    for each in table.tables(_MANIFESTS):
        object_id = required(each.struct(0, OBJECT_ID_NBYTES), "manifest id")
        extents = required(each.structs(1, _PAIR_OF_U32), "extents")
        refs.append(ManifestRef(object_id, tuple(map(_read_pair, extents))))
    return tuple(refs)


def _read_manifest_files(root: Table) -> Iterator[ManifestFile]:
    """Read the structs of version 1 and the tables of version 2."""
    for struct in root.structs(_MANIFEST_FILES_V1, _MANIFEST_FILE_V1_NBYTES) or ():
        yield ManifestFile(
            struct[:OBJECT_ID_NBYTES],
            U64.unpack_from(struct, _SIZE_AT)[0],
            U32.unpack_from(struct, _COUNT_AT)[0],
        )
    for table in root.tables(_MANIFEST_FILES):
        object_id = required(table.struct(0, OBJECT_ID_NBYTES), "manifest id")
        yield ManifestFile(object_id, table.number(1, U64), table.number(2, U32), table.data(3))


def _read_pair(struct: bytes) -> tuple[int, int]:
    half = len(struct) // 2
    return int.from_bytes(struct[:half], "little"), int.from_bytes(struct[half:], "little")


def _weigh_stored(node: StoredNode) -> int:
    items = 0 if node.array is None else len(node.array.dimensions) + len(node.array.manifests)
    known = len(node.document) + 4 * len(node.path) + len(node.extra or b"")
    return known + _NODE_NBYTES + _ITEM_NBYTES * items


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The parent, message and metadata of a snapshot."""

    info: SnapshotInfo

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        items = self.info.metadata.items
        texts = 4 * len(self.info.message) + sum(4 * len(name) + len(data) for name, data in items)
        return _NODE_NBYTES * (1 + len(items)) + texts


@dataclass(frozen=True, slots=True)
class SnapshotHeaderDecoder:
    """Decodes the header of the snapshot *object_id*, of at most *limit_nbytes* decompressed."""

    object_id: str
    limit_nbytes: int

    def __call__(self, data: bytes) -> SnapshotHeader:
        """Decode *data*."""
        root, version = _open_snapshot(data, self.object_id, self.limit_nbytes)
        info = SnapshotInfo(
            required(decode_id(self.object_id), "id"),
            root.struct(_PARENT_ID, OBJECT_ID_NBYTES),
            checked_us(root.number(_FLUSHED_AT, U64)),
            required(root.text(_MESSAGE), "message"),
            read_metadata(root, _METADATA, version),
        )
        return SnapshotHeader(info)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The part of a served node that only arrays have."""

    keys: ChunkKeys
    """Keys of the chunks that are stored: shards, where the array is sharded."""
    grid: tuple[int, ...]
    manifests: tuple[ManifestRef, ...]


@dataclass(frozen=True, slots=True)
class SnapshotNode:
    """An array or a group as it is served."""

    node_id: bytes
    """The same in all snapshots, also after the node moved."""
    document: ZarrNode
    chunks: Chunks | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot as it is served."""

    object_id: bytes
    nodes: Mapping[str, SnapshotNode | DecodeError]
    """By path, empty for the root, in the order of bytes; an error for a damaged node."""
    root_document: bytes
    """The ``zarr.json`` of the root with those of all nodes consolidated; empty without a root."""
    manifests: frozenset[bytes]
    faults: tuple[tuple[str, str], ...]
    """Paths of misplaced nodes, and the reasons."""
    orphans: Container[str]
    nbytes: int
    flushed_at_s: int
    """Time of writing by the clock of the writer: seconds since 1970, UTC."""

    def find(self, path: str) -> tuple[str, str] | None:
        """Return the path of the node at or above *path*, and the rest of *path*."""
        node = path
        while node not in self.nodes:
            if not node:
                return None
            node = node.rpartition("/")[0]
        return node, path[len(node) + 1 :] if node else path

    def is_in_array(self, path: str) -> bool:
        """Return `True` if *path* lies below an array, where only chunks are."""
        node, rest = self.find(path) or ("", "")
        found = self.nodes.get(node)
        return rest != "" and isinstance(found, SnapshotNode) and found.chunks is not None

    def below(self, path: str) -> Iterator[str]:
        """Iterate over the distinct first segments of the paths of nodes below *path*, sorted."""
        prefix = f"{path}/" if path else ""
        names = {
            node.removeprefix(prefix).partition("/")[0]
            for node in self.nodes
            if node.startswith(prefix) and node != path
        }
        return iter(sorted(names))


@dataclass(frozen=True, slots=True)
class SnapshotDecoder:
    """Decodes the snapshot *object_id*, of at most *limit_nbytes* decompressed."""

    object_id: bytes
    limit_nbytes: int

    def __call__(self, data: bytes) -> Snapshot:
        """Decode *data*."""
        root, _ = _open_snapshot(data, encode_id(self.object_id), self.limit_nbytes)
        nodes: dict[str, SnapshotNode | DecodeError] = {}
        faults: list[tuple[str, str]] = []
        for table in root.tables(_NODES):
            path = required(table.text(_PATH), "path")
            if (reason := _misplaced(path, nodes)) is not None:
                faults.append((path, reason))
                continue
            node = nodes[path[1:]] = _read_node(table)
            root.buffer.spend(_weigh(node))
        nodes = {path: nodes[path] for path in sorted(nodes, key=str.encode)}
        orphans = _find_orphans(nodes)
        faults += [(f"/{path}", reason) for path, reason in orphans.items()]
        root_document = _consolidate(nodes, orphans)
        return Snapshot(
            self.object_id,
            nodes,
            root_document,
            frozenset(file.object_id for file in _read_manifest_files(root)),
            tuple(faults),
            orphans,
            len(root_document) + sum(map(_weigh, nodes.values())),
            root.number(_FLUSHED_AT, U64) // 1_000_000,
        )


def is_node_path(path: str) -> bool:
    """Return `True` for an absolute path in its canonical spelling."""
    return path == "/" or (path.startswith("/") and {"", ".", ".."}.isdisjoint(path[1:].split("/")))


def _misplaced(path: str, nodes: Mapping[str, object]) -> str | None:
    if not is_node_path(path):
        return "no path of a node"
    return "another node has the same path" if path[1:] in nodes else None


def _find_orphans(nodes: Mapping[str, SnapshotNode | DecodeError]) -> Mapping[str, str]:
    """Return why nodes, listed parents first, are in no group; the library can commit such."""
    found: dict[str, str] = {}
    for path in filter(None, nodes):
        above = path.rpartition("/")[0]
        parent = nodes.get(above)
        if parent is None:
            found[path] = "the group it is in does not exist"
        elif isinstance(parent, SnapshotNode) and parent.chunks is not None:
            found[path] = "the node it is in is an array"
        elif above in found:
            found[path] = "the group it is in is in none itself"
    return found


def _read_node(table: Table) -> SnapshotNode | DecodeError:
    """Decode a node, or return an error that holds no reference to the payload."""
    try:
        return _parse_node(table)
    except DecodeError as error:
        return DecodeError(str(error))
    except (ValueError, RecursionError) as error:
        return DecodeError(f"its zarr.json is not JSON: {error}")


def _parse_node(table: Table) -> SnapshotNode:
    node_id = required(table.struct(_ID, NODE_ID_NBYTES), "node id")
    data = required(table.data(_USER_DATA), "user_data")
    table.buffer.check(json_memory_nbytes(data))
    document = json.loads(data.decode())
    node = SnapshotNode(node_id, parse_node(document, data))
    if (node.document.kind == "array") != (table.number(_NODE_TYPE, U8) == ARRAY):
        raise DecodeError("snapshot and zarr.json disagree on whether it is an array")
    if node.document.kind == "group":
        return node
    array = required(table.table(_NODE_DATA), "node_data")
    grid = tuple(dimension.num_chunks for dimension in _read_dimensions(array))
    ndim = len(shape_of(document.get("shape"), "shape", least=0))
    if len(grid) != ndim:
        raise DecodeError(f"the snapshot has {len(grid)} dimensions and zarr.json {ndim}")
    try:
        keys = chunk_keys(document.get("chunk_key_encoding"), ndim)
    except UnshardableError:  # the library uses one encoding, and ignores the document
        keys = ChunkKeys("c", "/", ndim)
    return SnapshotNode(node_id, node.document, Chunks(keys, grid, _read_manifest_refs(array)))


def _consolidate(nodes: Mapping[str, SnapshotNode | DecodeError], orphans: Container[str]) -> bytes:
    """Return the root with consolidated metadata, without nodes in no group; with a damaged node
    the root alone, so that readers of that node see the error.
    """
    root = nodes.get("")
    if not isinstance(root, SnapshotNode):
        return b""
    if root.chunks is not None or any(isinstance(node, DecodeError) for node in nodes.values()):
        return root.document.served
    document = json.loads(root.document.served)
    document.pop("consolidated_metadata", None)
    members = b", ".join(
        json.dumps(path).encode() + b": " + node.document.served
        for path, node in nodes.items()
        if path and path not in orphans and isinstance(node, SnapshotNode)
    )
    head = b'"consolidated_metadata": {"kind": "inline", "must_understand": false, "metadata": {'
    return b"%b, %b%b}}}" % (json.dumps(document).encode()[:-1], head, members)


def _weigh(node: SnapshotNode | DecodeError) -> int:
    if isinstance(node, DecodeError):
        return _NODE_NBYTES
    document = node.document
    document_nbytes = document.nbytes if document.array else len(document.served)
    count = len(node.chunks.manifests) if node.chunks else 0
    return document_nbytes + _NODE_NBYTES + count * _ITEM_NBYTES
