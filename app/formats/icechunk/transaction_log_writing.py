"""What a commit changed, written down for those that commit at the same time."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from app.formats.icechunk.envelope import FileType, seal_envelope
from app.formats.icechunk.flatbuffer_writing import (
    Block,
    Inlay,
    Items,
    NewTable,
    Vector,
    assemble_flatbuffer,
)
from app.formats.icechunk.reference_batches import Batch, Batches
from app.formats.icechunk.row_numbers import distinct_rows
from app.formats.icechunk.table_vectors import write_tables, write_vector
from app.formats.icechunk.transaction_log import TransactionLog
from app.formats.icechunk.updated_chunks import Coords

_NO_VECTORS = np.empty(0, np.uint32)


def write_transaction_log(snapshot_id: bytes, log: TransactionLog) -> bytes:
    """Write the whole file that belongs to the snapshot *snapshot_id*.

    Ids are sorted, for readers search; coords too, and each is there once.
    """
    root: list[Inlay | Vector | Items] = [
        Inlay(snapshot_id),
        _nodes(log.new_groups),
        _nodes(log.new_arrays),
        _nodes(log.deleted_groups),
        _nodes(log.deleted_arrays),
        _nodes(log.updated_arrays),
        _nodes(log.updated_groups),
        _updated_chunks(log.updated_chunks),
        Items([]),  # moved_nodes
    ]
    return seal_envelope(FileType.TRANSACTION_LOG, assemble_flatbuffer(NewTable(root)))


def _nodes(node_ids: Iterable[bytes]) -> Vector:
    found = sorted(node_ids)
    return Vector(b"".join(found), len(found))


def _updated_chunks(changed: Mapping[bytes, Sequence[Coords]]) -> Items:
    return Items(
        [NewTable([Inlay(node_id), _chunks(changed[node_id])]) for node_id in sorted(changed)]
    )


def _chunks(batches: Sequence[Coords]) -> Block:
    """Write a vector of tables `ChunkIndices`; coords of fewer dimensions come first."""
    by_ndim: dict[int, list[Coords]] = {}
    for batch in batches:
        by_ndim.setdefault(batch.shape[1], []).append(batch)
    parts, count = [], 0
    for _, found in sorted(by_ndim.items()):
        coords = distinct_rows(np.concatenate(found))
        rows = np.arange(len(coords))
        parts.append((count + rows, write_tables(Batches([Batch(rows, {})], _NO_VECTORS), coords)))
        count += len(coords)
    return write_vector(count, parts)
