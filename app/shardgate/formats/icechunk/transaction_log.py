"""Transaction logs: the nodes and chunks that a commit changed ("Transaction Log Files")."""

from bisect import bisect_left, bisect_right
from collections.abc import Buffer as Bytes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from struct import pack
from typing import Final, NamedTuple

import numpy as np

from shardgate.errors import ConflictError
from shardgate.formats.icechunk.chunk_tables import (
    ARRAY_CHUNKS,
    locate_chunk_tables,
    new_tables,
    words_of,
    write_table_vector,
)
from shardgate.formats.icechunk.coords import Coords, union
from shardgate.formats.icechunk.flatbuffers import (
    FILE_ID,
    NODE_ID,
    POSITION,
    TEXT,
    UINT8,
    FileDecoder,
    FileType,
    FlatBufferReader,
    FlatBufferWriter,
    TableType,
    seal_envelope,
    tables_of,
    values_of,
)

_VTABLE: Final = pack("<3H2x", 6, 8, 4)  # of tables that have the first field only


class MoveOperation(NamedTuple):
    """Another path of a node, whose id stays; an item of ``moved_nodes``."""

    source: str
    """Path in the parent snapshot."""
    target: str
    node_id: bytes
    is_array: bool


@dataclass(frozen=True, slots=True)
class TransactionLog:
    """The changes of one commit, by node id."""

    new_groups: frozenset[bytes]
    new_arrays: frozenset[bytes]
    deleted_groups: frozenset[bytes]
    deleted_arrays: frozenset[bytes]
    updated_arrays: frozenset[bytes]
    updated_groups: frozenset[bytes]
    updated_chunks: Mapping[bytes, tuple[Coords, ...]]
    """Changed chunks of arrays, in batches; the same chunk may come twice."""
    moves: tuple[MoveOperation, ...] = ()
    """Also every node below a moved group."""

    @property
    def nbytes(self) -> int:
        nodes = sum(len(getattr(self, name)) for name in _NODE_FIELDS)
        batches = [batch for batches in self.updated_chunks.values() for batch in batches]
        return (
            128 * (nodes + len(self.updated_chunks) + len(batches))
            + sum(batch.nbytes for batch in batches)
            + 768 * len(self.moves)
        )


_NODE_FIELDS: Final = tuple(each.name for each in fields(TransactionLog)[:6])  # slots from 1 on
_LOG: Final = TableType(
    FILE_ID,
    *(values_of(NODE_ID.code).required(name) for name in _NODE_FIELDS),
    POSITION._replace(write=tables_of(ARRAY_CHUNKS).write).required("updated_chunks"),
    tables_of(
        TableType(
            TEXT.required("path before a move"),
            TEXT.required("path after a move"),
            NODE_ID.required("id of a moved node"),
            UINT8,
        )
    ),
)


class TransactionLogDecoder(FileDecoder):
    """Decodes the log of the snapshot *object_id*."""

    def __call__(self, data: bytes) -> TransactionLog:
        reader, root = self.open(data, FileType.TRANSACTION_LOG, _LOG)
        _, *ids, updated_chunks, moves = root
        named = zip(_NODE_FIELDS, ids, strict=True)
        return TransactionLog(
            **{name: frozenset(found) for name, found in named},
            updated_chunks=_read_updated_chunks(reader, updated_chunks),
            moves=tuple(
                MoveOperation(source, target, node_id, bool(node_type))
                for source, target, node_id, node_type in moves or ()
            ),
        )


def _read_updated_chunks(reader: FlatBufferReader, at: int) -> dict[bytes, tuple[Coords, ...]]:
    """Read tables `ArrayUpdatedChunks`: for each array a batch per number of dimensions."""
    found = locate_chunk_tables(reader, at, "chunks")
    offsets = np.concatenate(([0], np.cumsum(found.ndims, dtype=np.int64)))
    reader.spend(int(offsets[-1]) * 16)  # a copy of each coordinate, beside locating it
    starts = np.repeat(found.indexes - offsets[:-1], found.ndims)
    words = words_of(reader.data).take(starts + np.arange(len(starts)), mode="clip")
    words.flags.writeable = False
    turns: list[int] = (np.flatnonzero(np.diff(found.ndims)) + 1).tolist()

    def batches(start: int, stop: int) -> Iterator[Coords]:
        first = bisect_right(turns, start)
        between = turns[first : bisect_left(turns, stop, first)]
        for begin, end in zip([start, *between], [*between, stop], strict=True):
            if begin < end:
                coords = words[offsets[begin] : offsets[end]]
                yield coords.reshape(end - begin, int(found.ndims[begin]))

    return {node_id: tuple(batches(start, stop)) for node_id, start, stop in found.arrays}


def write_transaction_log(snapshot_id: bytes, log: TransactionLog) -> bytes:
    """Write the whole file of the snapshot *snapshot_id*; ids and coordinates are sorted."""
    chunks: list[tuple[bytes, Sequence[Bytes]]] = []
    for node_id in sorted(log.updated_chunks):
        batches = union(*log.updated_chunks[node_id])
        tables = [(_VTABLE, new_tables(coords)) for coords in batches]
        chunks.append((node_id, write_table_vector(tables)))
    row = (
        snapshot_id,
        *(sorted(getattr(log, name)) for name in _NODE_FIELDS),
        chunks,
        # Segment by segment ("Node path sort order").
        sorted(log.moves, key=lambda move: move.target.encode().split(b"/")),
    )
    return seal_envelope(FileType.TRANSACTION_LOG, FlatBufferWriter().finish(_LOG, row))


def merge_logs(first: TransactionLog, then: TransactionLog) -> TransactionLog:
    """Return the log of a commit that replaces two. Raises: `ConflictError` for moved nodes."""
    gone = then.deleted_groups | then.deleted_arrays
    created = first.new_groups | first.new_arrays | then.new_groups | then.new_arrays
    excluded = gone | created
    # The merged log could not say which nodes were in the places that others moved to.
    if first.moves or then.moves:
        raise ConflictError("a commit that moves nodes amends no other, and is not amended")
    return TransactionLog(
        new_groups=(first.new_groups - gone) | then.new_groups,
        new_arrays=(first.new_arrays - gone) | then.new_arrays,
        deleted_groups=first.deleted_groups | (then.deleted_groups - created),
        deleted_arrays=first.deleted_arrays | (then.deleted_arrays - created),
        updated_arrays=(first.updated_arrays | then.updated_arrays) - excluded,
        updated_groups=(first.updated_groups | then.updated_groups) - excluded,
        updated_chunks={
            node_id: union(
                *first.updated_chunks.get(node_id, ()), *then.updated_chunks.get(node_id, ())
            )
            for node_id in sorted((first.updated_chunks.keys() | then.updated_chunks.keys()) - gone)
        },
    )
