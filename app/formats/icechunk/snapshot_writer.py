"""Snapshot files of version 2."""

from functools import lru_cache
from struct import pack
from typing import Final

from app.formats.icechunk.envelope import FileType, seal_envelope
from app.formats.icechunk.flatbuffer import U8, U32, U64
from app.formats.icechunk.flatbuffer_writing import (
    Block,
    Inlay,
    Items,
    NewTable,
    Number,
    Text,
    Vector,
    data_vector,
    write_flatbuffer,
)
from app.formats.icechunk.snapshot import (
    ARRAY,
    GROUP,
    Dimension,
    ManifestFile,
    ManifestRef,
    StoredArray,
    StoredNode,
    StoredSnapshot,
)

_VERSION: Final = 2
_NO_DATA: Final = NewTable(())
_NO_SHAPE_V1: Final = Vector(b"", 0, 8)
_MAX_KEPT: Final = 1024


def write_snapshot(snapshot: StoredSnapshot) -> bytes:
    """Write a whole file, with nodes in the order of the bytes of their paths."""
    metadata = snapshot.metadata
    if metadata.items and metadata.version != _VERSION:
        raise ValueError("metadata of version 1 cannot be in a file of version 2")
    nodes = sorted(snapshot.nodes.values(), key=lambda node: node.path.encode())
    files = sorted(snapshot.manifest_files.values())
    root = NewTable(
        (
            Inlay(snapshot.object_id),
            None,
            Items([_node(node) for node in nodes]),
            Number(U64, snapshot.flushed_at_us),
            Text(snapshot.message),
            Items(
                [
                    NewTable((Text(name), Vector(value, len(value))))
                    for name, value in sorted(metadata.items)
                ]
            ),
            _NO_SHAPE_V1,
            Items([_manifest_file(file) for file in files]),
            data_vector(snapshot.extra),
        )
    )
    return seal_envelope(FileType.SNAPSHOT, write_flatbuffer(root))


def _node(node: StoredNode) -> NewTable:
    return NewTable(
        (
            Inlay(node.node_id),
            Text(node.path),
            Vector(node.document, len(node.document)),
            Number(U8, GROUP if node.array is None else ARRAY),
            _NO_DATA if node.array is None else _array(node.array),
            data_vector(node.extra),
        )
    )


def _array(array: StoredArray) -> NewTable:
    return NewTable(
        (
            _NO_SHAPE_V1,
            None if array.names is None else _names_block(array.names),
            Items(list(map(_manifest_ref, array.manifests))),
            _dimensions_block(array.dimensions),
        )
    )


def _manifest_file(file: ManifestFile) -> NewTable:
    return NewTable(
        (
            Inlay(file.object_id),
            Number(U64, file.size_bytes),
            Number(U32, file.num_chunk_refs),
            data_vector(file.extra),
        )
    )


@lru_cache(_MAX_KEPT)
def _dimensions_block(dimensions: tuple[Dimension, ...]) -> Block:
    """Write a vector of tables `DimensionShapeV2`; thousands of arrays share the same one."""
    tables = [NewTable((Number(U64, length), Number(U32, count))) for length, count in dimensions]
    return _items_block(Items(tables))


@lru_cache(_MAX_KEPT)
def _names_block(names: tuple[str | None, ...]) -> Block:
    return _items_block(
        Items([NewTable((None if name is None else Text(name),)) for name in names])
    )


def _items_block(items: Items) -> Block:
    """Write *items* as the only field of a root table, and refer to them in it."""
    data = write_flatbuffer(NewTable((items,)))
    field = U32.unpack_from(data)[0] + 4
    return Block((data,), field + U32.unpack_from(data, field)[0])


def _manifest_ref(ref: ManifestRef) -> NewTable:
    bounds = [bound for extent in ref.extents for bound in extent]
    extents = Vector(pack(f"<{len(bounds)}I", *bounds), len(ref.extents), 4)
    return NewTable((Inlay(ref.object_id), extents))
