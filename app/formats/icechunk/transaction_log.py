"""What a commit changed, to find out whether another is in its way ("Transaction Log Files")."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.fields import check_object_id
from app.formats.icechunk.flatbuffer import Buffer, Table, required
from app.formats.icechunk.ids import NODE_ID_NBYTES
from app.formats.icechunk.updated_chunks import Coords, read_updated_chunks

_NODE_NBYTES: Final = 128
_PATH_NBYTES: Final = 256


@dataclass(frozen=True, slots=True)
class TransactionLog:
    """What one commit changed, by the ids of nodes."""

    new_groups: frozenset[bytes]
    new_arrays: frozenset[bytes]
    deleted_groups: frozenset[bytes]
    deleted_arrays: frozenset[bytes]
    updated_arrays: frozenset[bytes]
    """Arrays whose metadata changed."""
    updated_groups: frozenset[bytes]
    updated_chunks: Mapping[bytes, tuple[Coords, ...]]
    """The coords of the changed chunks of an array: no batch, one, or one after the other."""
    moved_paths: tuple[str, ...]
    """Paths before the commit of nodes that the library moved; commits made here move none."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        nodes = [self.new_groups, self.new_arrays, self.deleted_groups, self.deleted_arrays]
        nodes += [self.updated_arrays, self.updated_groups]
        batches = [batch for batches in self.updated_chunks.values() for batch in batches]
        return (
            _NODE_NBYTES * (sum(map(len, nodes)) + len(self.updated_chunks) + len(batches))
            + sum(batch.nbytes for batch in batches)
            + _PATH_NBYTES * len(self.moved_paths)
        )


@dataclass(frozen=True, slots=True)
class TransactionLogDecoder:
    """Reads the transaction log of a snapshot, whose payload has at most *limit_nbytes*."""

    object_id: str
    """The id of the snapshot, and the name of the file."""
    limit_nbytes: int

    def __call__(self, data: bytes) -> TransactionLog:
        """Decode a whole file.

        Raises: `DecodeError`, also for the log of another snapshot.
        """
        payload = open_envelope(data, FileType.TRANSACTION_LOG, self.limit_nbytes).payload
        root = Buffer(payload, self.limit_nbytes).root
        check_object_id(root, "transaction log", self.object_id)
        required(root.at(7), "updated_chunks")
        return TransactionLog(
            new_groups=_nodes(root, 1, "new_groups"),
            new_arrays=_nodes(root, 2, "new_arrays"),
            deleted_groups=_nodes(root, 3, "deleted_groups"),
            deleted_arrays=_nodes(root, 4, "deleted_arrays"),
            updated_arrays=_nodes(root, 5, "updated_arrays"),
            updated_groups=_nodes(root, 6, "updated_groups"),
            updated_chunks=read_updated_chunks(root.tables(7)),
            moved_paths=tuple(
                required(each.text(0), "path before a move") for each in root.tables(8)
            ),
        )


def _nodes(root: Table, slot: int, name: str) -> frozenset[bytes]:
    return frozenset(required(root.structs(slot, NODE_ID_NBYTES), name))
