"""Snapshots with all that they store, of versions 1 and 2, to be written again ("Snapshot Files").

Unlike what is read to serve a snapshot, nothing here is understood that need not be: a damaged
``zarr.json`` stays as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.fields import check_object_id
from app.formats.icechunk.flatbuffer import U8, U32, U64, Buffer, Table, required
from app.formats.icechunk.ids import NODE_ID_NBYTES, OBJECT_ID_NBYTES, encode_id
from app.formats.icechunk.metadata import ManifestRef
from app.formats.icechunk.metadata_items import read_metadata
from app.formats.icechunk.stored_nodes import (
    Dimension,
    ManifestFile,
    StoredArray,
    StoredNode,
    StoredSnapshot,
)
from app.formats.reading import DecodeError

_PAIR_OF_U32: Final = 2 * U32.size
_PAIR_OF_U64: Final = 2 * U64.size
_MANIFEST_FILE_V1: Final = 32
_SIZE_AT: Final = 16
_COUNT_AT: Final = 24
_ARRAY: Final = 1
_GROUP: Final = 2

_NODE_NBYTES: Final = 1024
_ITEM_NBYTES: Final = 256


@dataclass(frozen=True, slots=True)
class StoredSnapshotDecoder:
    """Reads the snapshot *object_id*, whose payload has at most *limit_nbytes*."""

    object_id: bytes
    limit_nbytes: int

    def __call__(self, data: bytes) -> StoredSnapshot:
        """Decode a whole file.

        Raises: `DecodeError`, also for another snapshot and for one that has a damaged node.
        """
        version, payload = open_envelope(data, FileType.SNAPSHOT, self.limit_nbytes)
        root = Buffer(payload, self.limit_nbytes).root
        check_object_id(root, "snapshot", encode_id(self.object_id))
        nodes, nbytes = self._read_nodes(root)
        manifest_files = {file.object_id: file for file in _manifest_files(root)}
        return StoredSnapshot(
            self.object_id,
            nodes,
            manifest_files,
            flushed_at_us=root.number(3, U64),
            message=required(root.text(4), "message"),
            metadata=read_metadata(root, 5, version),
            extra=root.data(8),
            nbytes=nbytes + _ITEM_NBYTES * len(manifest_files),
        )

    def _read_nodes(self, root: Table) -> tuple[Mapping[str, StoredNode], int]:
        nodes: dict[str, StoredNode] = {}
        nbytes = 0
        required(root.vector(2, 4), "nodes")
        for table in root.tables(2):
            node = _read_node(table)
            nodes.setdefault(node.path, node)
            weight = _weigh(node)
            root.buffer.spend(weight)
            nbytes += weight
        return nodes, nbytes


def _read_node(table: Table) -> StoredNode:
    path = required(table.text(1), "path")
    kind = table.number(3, U8)
    if kind not in (_ARRAY, _GROUP):
        raise DecodeError(f"node {path} is of unknown type {kind}")
    return StoredNode(
        required(table.struct(0, NODE_ID_NBYTES), "node id"),
        path,
        required(table.data(2), "user_data"),
        _read_array(required(table.table(4), "node_data")) if kind == _ARRAY else None,
        table.data(5),
    )


def _read_array(table: Table) -> StoredArray:
    dimensions = _dimensions_v1(table) if table.at(3) is None else _dimensions(table)
    names = None if table.at(1) is None else tuple(item.text(0) for item in table.tables(1))
    return StoredArray(dimensions, names, tuple(map(_manifest_ref, table.tables(2))))


def _dimensions(table: Table) -> tuple[Dimension, ...]:
    return tuple(Dimension(item.number(0, U64), item.number(1, U32)) for item in table.tables(3))


def _dimensions_v1(table: Table) -> tuple[Dimension, ...]:
    """Read the lengths of the array and of its chunks, which count the chunks."""
    pairs = map(_numbers, required(table.structs(0, _PAIR_OF_U64), "shape"))
    return tuple(Dimension(length, -(-length // (chunk or 1))) for length, chunk in pairs)


def _manifest_ref(table: Table) -> ManifestRef:
    extents = required(table.structs(1, _PAIR_OF_U32), "extents")
    object_id = required(table.struct(0, OBJECT_ID_NBYTES), "manifest id")
    return ManifestRef(object_id, tuple(map(_numbers, extents)))


def _manifest_files(root: Table) -> Iterator[ManifestFile]:
    """Give those of version 1, in structs, and those of version 2, in tables."""
    for struct in root.structs(6, _MANIFEST_FILE_V1) or ():
        yield ManifestFile(
            struct[:OBJECT_ID_NBYTES],
            U64.unpack_from(struct, _SIZE_AT)[0],
            U32.unpack_from(struct, _COUNT_AT)[0],
        )
    for table in root.tables(7):
        object_id = required(table.struct(0, OBJECT_ID_NBYTES), "manifest id")
        yield ManifestFile(object_id, table.number(1, U64), table.number(2, U32), table.data(3))


def _numbers(struct: bytes) -> tuple[int, int]:
    half = len(struct) // 2
    return int.from_bytes(struct[:half], "little"), int.from_bytes(struct[half:], "little")


def _weigh(node: StoredNode) -> int:
    items = 0 if node.array is None else len(node.array.dimensions) + len(node.array.manifests)
    known = len(node.document) + 4 * len(node.path) + len(node.extra or b"")
    return known + _NODE_NBYTES + _ITEM_NBYTES * items
