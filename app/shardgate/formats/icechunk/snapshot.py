"""Snapshots: the nodes of a repository and the manifests of their chunks ("Snapshot Files").

Files of versions 1 and 2 are decoded in three ways: `SnapshotDecoder` for serving keys,
`StoredSnapshotDecoder` for writing the next snapshot, which keeps documents byte for byte, and
`SnapshotHeaderDecoder` for history, which version 1 has nowhere else. Files of version 2 are
written.
"""

import json
from collections.abc import Container, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from itertools import islice
from operator import lt
from typing import Any, Final, NamedTuple

from shardgate.formats.documents import check_levels, is_strict_json, json_memory_nbytes
from shardgate.formats.icechunk.flatbuffers import (
    DATA,
    FILE_ID,
    NODE_ID,
    OBJECT_ID,
    TABLE,
    TEXT,
    UINT8,
    UINT32,
    UINT64,
    FileDecoder,
    FileType,
    FlatBufferReader,
    FlatBufferWriter,
    TableType,
    required,
    seal_envelope,
    structs_of,
    tables_of,
)
from shardgate.formats.icechunk.keys import DOCUMENT
from shardgate.formats.icechunk.metadata_items import METADATA, Metadata, read_metadata
from shardgate.formats.icechunk.repo_info import SnapshotInfo, checked_us
from shardgate.formats.reading import DecodedMetadata, DecodeError
from shardgate.formats.zarr.array_spec import ShardAddress
from shardgate.formats.zarr.codecs import shape_of
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.formats.zarr.metadata import Node as ZarrNode
from shardgate.formats.zarr.metadata import chunk_keys, parse_node

ARRAY: Final = 1
GROUP: Final = 2

_DIMENSION: Final = TableType(UINT64, UINT32)
_NAME: Final = TableType(TEXT)
_MANIFEST_ID: Final = OBJECT_ID.required("manifest id")
_MANIFEST_REF: Final = TableType(_MANIFEST_ID, structs_of("2I").required("extents"))
_ARRAY: Final = TableType(
    structs_of("2Q", 8), tables_of(_NAME), tables_of(_MANIFEST_REF), tables_of(_DIMENSION)
)
_NODE: Final = TableType(
    NODE_ID.required("node id"),
    TEXT.required("path"),
    DATA.required("user_data"),
    UINT8,
    TABLE,
    DATA,
)
_MANIFEST_FILE: Final = TableType(_MANIFEST_ID, UINT64, UINT32, DATA)
_SNAPSHOT: Final = TableType(
    FILE_ID,
    OBJECT_ID,
    tables_of(_NODE),
    UINT64,
    TEXT,
    METADATA,
    structs_of("12s4xQI4x", 8),
    tables_of(_MANIFEST_FILE),
    DATA,
)
_, _PARENT_ID, _NODES, _FLUSHED_AT, _MESSAGE, _METADATA = range(6)
_MANIFEST_FILES_V1, _MANIFEST_FILES, _EXTRA = range(6, 9)
_NO_DATA: Final[tuple[TableType, tuple[Any, ...]]] = (TableType(), ())

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


class StoredSnapshotDecoder(FileDecoder):
    """Decodes the snapshot *object_id*."""

    def __call__(self, data: bytes) -> StoredSnapshot:
        reader, root = self.open(data, FileType.SNAPSHOT, _SNAPSHOT.lazy)
        nodes: dict[str, StoredNode] = {}
        for node in _read_nodes(reader, root):
            nodes.setdefault(node.path, node)
            reader.spend(_weigh_node(node))
        manifest_files = {file.object_id: file for file in _read_manifest_files(reader, root)}
        return StoredSnapshot(
            self.object_id,
            nodes,
            manifest_files,
            flushed_at_us=root[_FLUSHED_AT],
            message=required(reader.read(TEXT, root[_MESSAGE]), "message"),
            metadata=read_metadata(reader, root[_METADATA]),
            extra=reader.read(DATA, root[_EXTRA]),
            nbytes=weigh_stored(nodes, manifest_files),
        )


def _read_nodes(reader: FlatBufferReader, root: list[Any]) -> Iterator[StoredNode]:
    for at in reader.targets(required(root[_NODES], "nodes")):
        node_id, path, document, kind, array, extra = reader.table(_NODE, at)
        if kind not in (ARRAY, GROUP):
            raise DecodeError(f"node {path} is of unknown type {kind}")
        is_array = kind == ARRAY
        found = _read_array(reader, required(array, "node_data")) if is_array else None
        yield StoredNode(node_id, path, document, found, extra)


def _read_array(reader: FlatBufferReader, at: int) -> StoredArray:
    """Read an array; version 1 stores the lengths of array and chunk instead of counts."""
    pairs, names, refs, dimensions = reader.table(_ARRAY, at)
    if dimensions is None:
        dimensions = [
            (length, -(-length // (chunk or 1))) for length, chunk in required(pairs, "shape")
        ]
    return StoredArray(
        tuple(Dimension(*dimension) for dimension in dimensions),
        None if names is None else tuple(name for (name,) in names),
        tuple(ManifestRef(object_id, tuple(extents)) for object_id, extents in refs or ()),
    )


def _read_manifest_files(reader: FlatBufferReader, root: list[Any]) -> Iterator[ManifestFile]:
    """Read the structs of version 1 and the tables of version 2."""
    for slot in (_MANIFEST_FILES_V1, _MANIFEST_FILES):
        for values in reader.read(_SNAPSHOT.fields[slot], root[slot]) or ():
            yield ManifestFile(*values)


def weigh_stored(nodes: Mapping[str, StoredNode], manifest_files: Sized) -> int:
    """Return `StoredSnapshot.nbytes` for these nodes and manifests."""
    return sum(map(_weigh_node, nodes.values())) + _ITEM_NBYTES * len(manifest_files)


def _weigh_node(node: StoredNode) -> int:
    items = 0 if node.array is None else len(node.array.dimensions) + len(node.array.manifests)
    known = len(node.document) + 4 * len(node.path) + len(node.extra or b"")
    return known + _NODE_NBYTES + _ITEM_NBYTES * items


def write_snapshot(snapshot: StoredSnapshot) -> bytes:
    """Write a whole file, with nodes in the order of the bytes of their paths."""
    metadata = snapshot.metadata
    nodes = sorted(snapshot.nodes.values(), key=lambda node: node.path.encode())
    row = (
        snapshot.object_id,
        None,
        list(map(_node_row, nodes)),
        snapshot.flushed_at_us,
        snapshot.message,
        metadata._replace(items=tuple(sorted(metadata.items))),
        (),
        sorted(snapshot.manifest_files.values()),
        snapshot.extra,
    )
    return seal_envelope(FileType.SNAPSHOT, FlatBufferWriter().finish(_SNAPSHOT, row))


def _node_row(node: StoredNode) -> tuple[Any, ...]:
    array = node.array
    if array is None:
        return node.node_id, node.path, node.document, GROUP, _NO_DATA, node.extra
    names = None if array.names is None else [(name,) for name in array.names]
    data = (_ARRAY, ((), names, array.manifests, array.dimensions))
    return node.node_id, node.path, node.document, ARRAY, data, node.extra


class SnapshotHeaderDecoder(FileDecoder):
    """Decodes the header of the snapshot *object_id*."""

    def __call__(self, data: bytes) -> SnapshotInfo:
        reader, root = self.open(data, FileType.SNAPSHOT, _SNAPSHOT.lazy)
        return SnapshotInfo(
            self.object_id,
            root[_PARENT_ID],
            checked_us(root[_FLUSHED_AT]),
            required(reader.read(TEXT, root[_MESSAGE]), "message"),
            read_metadata(reader, root[_METADATA]),
        )


@dataclass(frozen=True, slots=True)
class Chunks:
    """The part of a served node that only arrays have."""

    keys: ChunkKeys
    """Keys of the chunks that are stored: shards, where the array is sharded."""
    grid: tuple[int, ...]
    manifests: tuple[ManifestRef, ...] = ()

    def has(self, coords: tuple[int, ...]) -> bool:
        return len(coords) == len(self.grid) and all(map(lt, coords, self.grid))


@dataclass(frozen=True, slots=True)
class SnapshotNode:
    """An array or a group as it is served."""

    node_id: bytes
    """The same in all snapshots, also after the node moved."""
    document: ZarrNode
    chunks: Chunks | None = None

    def parse(self, key: str) -> ShardAddress | None:
        """Parse the key of a chunk below the node; `None` for any other key. Without shards, a
        chunk is its own shard, and has no index.
        """
        if self.chunks is None or (coords := self.chunks.keys.parse(key)) is None:
            return None
        if (array := self.document.array) is None:
            address = ShardAddress(coords, (), coords)
        elif (origin := array.origin(coords)) is None:
            return None
        else:
            address = array.shard(origin)
        return address if self.chunks.has(address.coords) else None


@dataclass(frozen=True, slots=True)
class Snapshot(DecodedMetadata):
    """A snapshot as it is served."""

    object_id: bytes
    nodes: Mapping[str, SnapshotNode | DecodeError]
    """By path, empty for the root, in the order of bytes; an error for a damaged node."""
    root_document: bytes
    """The ``zarr.json`` of the root with those of all nodes consolidated; empty without a root."""
    faults: tuple[tuple[str, str], ...]
    """Paths of misplaced nodes, and the reasons."""
    orphans: Container[str]
    nbytes: int
    flushed_at_s: int
    """Time of writing by the clock of the writer: seconds since 1970, UTC."""
    is_sharded: bool = False
    """Whether its documents are those that are stored, so that chunks are shards."""

    @property
    def why_sharded(self) -> str:
        """Reasons why arrays are not served unsharded, of the first few."""
        reasons = (
            f"/{path}: {node.document.why_sharded}"
            for path, node in self.nodes.items()
            if isinstance(node, SnapshotNode) and node.document.why_sharded
        )
        return "; ".join(islice(reasons, 3))  # enough to understand the others

    def find(self, path: str) -> tuple[str, str] | None:
        """Return the path of the node at or above *path*, and the rest of *path*; of several nodes
        the one that has a document or a chunk there, or else the nearest.
        """
        folder, _, name = path.rpartition("/")
        if name == DOCUMENT and folder in self.nodes:  # even if a node has that name
            return folder, name
        nearest = self._nearest(path)
        if nearest is None or nearest[0] not in self.orphans:
            return nearest
        # The library can leave nodes in an array, and still reads all chunks of that.
        above = nearest[0]
        while above:
            above = above.rpartition("/")[0]
            node = self.nodes.get(above)
            rest = path.removeprefix(f"{above}/")
            if isinstance(node, SnapshotNode) and node.parse(rest) is not None:
                return above, rest
        return nearest

    def _nearest(self, path: str) -> tuple[str, str] | None:
        node = path
        while node not in self.nodes:
            if not node:
                return None
            node = node.rpartition("/")[0]
        return node, path[len(node) + 1 :] if node else path

    def is_in_array(self, path: str) -> bool:
        """Return `True` if *path* lies below an array, where only chunks are."""
        node, rest = self._nearest(path) or ("", "")
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
class SnapshotDecoder(FileDecoder):
    """Decodes the snapshot *object_id*, with arrays as they are stored if *is_sharded*."""

    is_sharded: bool = False

    def __call__(self, data: bytes) -> Snapshot:
        reader, root = self.open(data, FileType.SNAPSHOT, _SNAPSHOT.lazy)
        nodes: dict[str, SnapshotNode | DecodeError] = {}
        faults: list[tuple[str, str]] = []
        for stored in _read_nodes(reader, root):
            path = stored.path
            if not is_node_path(path):
                faults.append((path, "no path of a node"))
                continue
            if path[1:] in nodes:
                faults.append((path, "another node has the same path"))
                continue
            node = nodes[path[1:]] = _serve_node(reader, stored, is_sharded=self.is_sharded)
            reader.spend(_weigh(node))
        nodes = {path: nodes[path] for path in sorted(nodes, key=str.encode)}
        orphans = _find_orphans(nodes)
        faults += [(f"/{path}", reason) for path, reason in orphans.items()]
        root_document = _consolidate(nodes, orphans)
        return Snapshot(
            self.object_id,
            nodes,
            root_document,
            tuple(faults),
            orphans,
            len(root_document) + sum(map(_weigh, nodes.values())),
            root[_FLUSHED_AT] // 1_000_000,
            self.is_sharded,
        )


def is_node_path(path: str) -> bool:
    """Return `True` for an absolute path in its canonical spelling."""
    return path == "/" or (path.startswith("/") and {"", ".", ".."}.isdisjoint(path[1:].split("/")))


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


def _serve_node(
    reader: FlatBufferReader, stored: StoredNode, *, is_sharded: bool
) -> SnapshotNode | DecodeError:
    """Return the node as it is served, or an error that holds no reference to the payload."""
    reader.spend_document(len(stored.document))
    try:
        reader.check(json_memory_nbytes(stored.document))
        check_levels(stored.document)
        document = json.loads(stored.document.decode())
        return _parse_node(stored, document, is_sharded=is_sharded)
    except DecodeError as error:
        return DecodeError(str(error))
    except ValueError as error:
        return DecodeError(f"its zarr.json is not JSON: {error}")


def _parse_node(stored: StoredNode, document: Any, *, is_sharded: bool) -> SnapshotNode:
    parsed = parse_node(document, stored.document)
    if is_sharded:
        parsed = ZarrNode(parsed.kind, stored.document, is_rewritten=False)
    node = SnapshotNode(stored.node_id, parsed)
    if (node.document.kind == "array") != (stored.array is not None):
        raise DecodeError("snapshot and zarr.json disagree on whether it is an array")
    if stored.array is None:
        return node
    grid = stored.array.grid
    ndim = len(shape_of(document.get("shape"), "shape", least=0))
    if len(grid) != ndim:
        raise DecodeError(f"the snapshot has {len(grid)} dimensions and zarr.json {ndim}")
    try:
        keys = chunk_keys(document.get("chunk_key_encoding"), ndim)
    except DecodeError:  # the library uses one encoding, and ignores the document
        keys = ChunkKeys("c/", "/", ndim)
    return replace(node, chunks=Chunks(keys, grid, stored.array.manifests))


def _consolidate(nodes: Mapping[str, SnapshotNode | DecodeError], orphans: Container[str]) -> bytes:
    """Return the root with consolidated metadata, without nodes in no group. With a damaged node
    the root alone, so that readers of that node see the error; also with NaN or Infinity in any
    document, which would hide all from strict readers.
    """
    root = nodes.get("")
    if not isinstance(root, SnapshotNode):
        return b""
    if root.chunks is not None:
        return root.document.served
    document = json.loads(root.document.served)
    # What a client has consolidated does not follow later commits.
    has_stale = document.pop("consolidated_metadata", None) is not None
    group = json.dumps(document).encode()
    alone = group if has_stale else root.document.served
    if any(isinstance(node, DecodeError) for node in nodes.values()):
        return alone
    members = [
        json.dumps(path).encode() + b": " + node.document.served
        for path, node in nodes.items()
        if path and path not in orphans and isinstance(node, SnapshotNode)
    ]
    head = b'"consolidated_metadata": {"kind": "inline", "must_understand": false, "metadata": {'
    whole = b"%b, %b%b}}}" % (group[:-1], head, b", ".join(members))
    try:
        check_levels(whole)
    except ValueError:  # a node within the limit is nested deeper here
        return alone
    return whole if all(map(is_strict_json, [group, *members])) else alone


def _weigh(node: SnapshotNode | DecodeError) -> int:
    if isinstance(node, DecodeError):
        return _NODE_NBYTES
    document = node.document
    document_nbytes = document.nbytes if document.array else len(document.served)
    count = len(node.chunks.manifests) if node.chunks else 0
    return document_nbytes + _NODE_NBYTES + count * _ITEM_NBYTES
