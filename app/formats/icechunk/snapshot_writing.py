"""Snapshots written as files of version 2, the nodes in the order of the bytes of their paths."""

from collections.abc import Iterator
from typing import Final

from app.formats.icechunk.envelope import FileType, seal_envelope
from app.formats.icechunk.flatbuffer import U8, U32, U64
from app.formats.icechunk.flatbuffer_writing import (
    Inlay,
    Items,
    NewTable,
    Number,
    Text,
    Vector,
    data_vector,
    write_flatbuffer,
)
from app.formats.icechunk.metadata_items import Metadata
from app.formats.icechunk.snapshot_blocks import (
    dimensions_block,
    manifests_block,
    names_block,
)
from app.formats.icechunk.stored_nodes import (
    ManifestFile,
    StoredArray,
    StoredNode,
    StoredSnapshot,
)

_VERSION: Final = 2
_ARRAY: Final = Number(U8, 1)
_GROUP: Final = Number(U8, 2)
_NO_DATA: Final = NewTable(())
_NO_SHAPE_V1: Final = Vector(b"", 0, 8)


def write_snapshot(snapshot: StoredSnapshot) -> bytes:
    """Write a whole file; its metadata have to be of version 2.

    The library looks for nodes by halves, so that any other order than that of bytes loses some.
    """
    if snapshot.metadata.items and snapshot.metadata.version != _VERSION:
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
            Items(list(_metadata(snapshot.metadata))),
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
            _GROUP if node.array is None else _ARRAY,
            _NO_DATA if node.array is None else _array(node.array),
            data_vector(node.extra),
        )
    )


def _array(array: StoredArray) -> NewTable:
    return NewTable(
        (
            _NO_SHAPE_V1,
            None if array.names is None else names_block(array.names),
            manifests_block(array.manifests),
            dimensions_block(array.dimensions),
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


def _metadata(metadata: Metadata) -> Iterator[NewTable]:
    for name, value in sorted(metadata.items):
        yield NewTable((Text(name), Vector(value, len(value))))
