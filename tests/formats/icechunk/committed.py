"""What the real library committed, as change sets of ours."""

from pathlib import Path

import numpy as np

from app.formats.icechunk.array_grids import inside
from app.formats.icechunk.change_set import ChangeSet, ChunkChanges, NodeDocument
from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.payloads import Inlaid, Payloads
from app.formats.icechunk.snapshot_reading import StoredSnapshotDecoder
from app.formats.icechunk.stored_nodes import StoredSnapshot
from app.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder

LIMIT = 2**24


def stored(folder: Path, snapshot_id: str) -> StoredSnapshot:
    """Read a snapshot."""
    object_id = decode_id(snapshot_id)
    assert object_id is not None
    data = (folder / "snapshots" / snapshot_id).read_bytes()
    return StoredSnapshotDecoder(object_id, LIMIT)(data)


def logged(folder: Path, snapshot_id: str) -> TransactionLog:
    """Read the transaction log of a snapshot."""
    data = (folder / "transactions" / snapshot_id).read_bytes()
    return TransactionLogDecoder(snapshot_id, LIMIT)(data)


def change_set(before: StoredSnapshot, after: StoredSnapshot, log: TransactionLog) -> ChangeSet:
    """Make the change set that leads from one snapshot to the other; chunks hold one byte."""
    nodes = {node.node_id: node for node in after.nodes.values()}
    chunks: dict[bytes, ChunkChanges] = {}
    for node_id, batches in log.updated_chunks.items():
        array = nodes[node_id].array
        if batches and array is not None:
            counts = [dimension.num_chunks for dimension in array.dimensions]
            coords = np.concatenate(batches)
            coords = coords[inside(coords, counts)]
            if len(coords):
                chunks[node_id] = ChunkChanges(coords, Payloads.of([Inlaid(b"\1")] * len(coords)))
    return ChangeSet(
        new={
            node_id: NodeDocument(nodes[node_id].path, nodes[node_id].document)
            for node_id in log.new_groups | log.new_arrays
        },
        updated={
            node_id: nodes[node_id].document for node_id in log.updated_groups | log.updated_arrays
        },
        deleted=log.deleted_groups | log.deleted_arrays,
        chunks=chunks,
    )
