"""The snapshots that `repo` lists, each with what people ask of it first."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from app.formats.icechunk.fields import read_moment
from app.formats.icechunk.flatbuffer import I32, U32, Table, required
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, encode_id
from app.formats.icechunk.metadata_items import Metadata, read_metadata
from app.formats.reading import DecodeError

_SNAPSHOTS: Final = 4
_NO_PARENT: Final = -1


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What `repo` tells of a snapshot."""

    snapshot_id: str
    parent_id: str | None
    flushed_at: datetime
    message: str
    metadata: Metadata
    pruned_ancestor_tx_logs: tuple[str, ...]
    """Of ancestors that expired, oldest first, all after the parent."""


class SnapshotList:
    """The snapshots where they lie, by their ids; parents are told by places in this list."""

    def __init__(self, root: Table, version: int) -> None:
        self._root = root
        self._version = version
        self._start, self._count = required(root.vector(_SNAPSHOTS, U32.size), "snapshots")

    def id_at(self, index: int) -> bytes:
        """Read the id of the snapshot at *index*.

        Raises: `DecodeError` where the list is not as long.
        """
        return _id(self._table(index))

    def info(self, index: int) -> SnapshotInfo:
        """Read all that is told of the snapshot at *index*."""
        table = self._table(index)
        parent = _parent(table)
        return SnapshotInfo(
            encode_id(_id(table)),
            None if parent == _NO_PARENT else encode_id(self.id_at(parent)),
            flushed_at=read_moment(table, 2),
            message=required(table.text(3), "message"),
            metadata=read_metadata(table, 4, self._version),
            pruned_ancestor_tx_logs=tuple(
                encode_id(data) for data in table.structs(5, OBJECT_ID_NBYTES) or ()
            ),
        )

    def every(self) -> Iterator[SnapshotInfo]:
        """Give all snapshots."""
        return map(self.info, range(self._count))

    def ancestry(self, index: int) -> Iterator[SnapshotInfo]:
        """Give the snapshot at *index*, its parent and so on.

        Raises: `DecodeError` where a parent is no snapshot, or its own ancestor.
        """
        for _ in range(self._count):
            yield self.info(index)
            if (index := _parent(self._table(index))) == _NO_PARENT:
                return
        raise DecodeError("a snapshot is its own ancestor")

    def find(self, snapshot_id: bytes) -> int | None:
        """Find a snapshot; only where the list is out of order, one after the other is looked at.

        Ids lie in it as they are: one that is nowhere in the file is not in the list either.
        """
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self.id_at(middle) < snapshot_id:
                low = middle + 1
            else:
                high = middle
        if low < self._count and self.id_at(low) == snapshot_id:
            return low
        if snapshot_id not in self._root.buffer.data:
            return None
        return next((i for i in range(self._count) if self.id_at(i) == snapshot_id), None)

    def _table(self, index: int) -> Table:
        if not 0 <= index < self._count:
            raise DecodeError(f"there is no snapshot {index}, only {self._count} are listed")
        buffer = self._root.buffer
        return type(self._root)(buffer, buffer.follow(self._start + U32.size * index))


def _id(table: Table) -> bytes:
    return required(table.struct(0, OBJECT_ID_NBYTES), "id")


def _parent(table: Table) -> int:
    """Read the index of the parent; where the field is absent that is 0, not none."""
    return table.number(1, I32)
