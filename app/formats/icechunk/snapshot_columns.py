"""The list of snapshots in ``repo`` as columns: ten thousand are read and written in some ms."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.flatbuffer import U32, Table, required
from app.formats.icechunk.ids import OBJECT_ID_NBYTES
from app.formats.icechunk.ragged import (
    Bytes,
    Places,
    Spans,
    Tables,
    each_of,
)
from app.formats.icechunk.repo_changes import NewSnapshot
from app.formats.reading import DecodeError

_SNAPSHOTS: Final = 4
_SLOTS: Final = 6
_ITEM_SLOTS: Final = 2
_NO_PARENT: Final = -1


@dataclass(frozen=True, slots=True)
class SnapshotColumns:
    """Snapshots; all spans are of *source*."""

    source: Bytes
    ids: Bytes
    """A row for each."""
    parents: Places
    """Rows of this list; -1 for none."""
    flushed: NDArray[np.uint64]
    messages: Spans
    item_counts: Places
    """How many metadata items each has; -1 where there is no such list."""
    names: Spans
    """Of the items of all snapshots, one after the other."""
    values: Spans
    pruned: Spans

    @classmethod
    def read(cls, root: Table) -> Self:
        """Read those of the file whose table is *root*.

        Raises: `DecodeError`, also where something would be lost.
        """
        source = np.frombuffer(root.buffer.data, np.uint8)
        start, count = required(root.vector(_SNAPSHOTS, U32.size), "snapshots")
        tables = Tables(root.buffer, start + 4 * np.arange(count))
        tables.demand_known(_SLOTS)
        parents = tables.numbers(1, "<i4").astype(np.int64)
        if count and (parents.min() < _NO_PARENT or parents.max() >= count):
            raise DecodeError("the parent of a snapshot is not listed")
        lists = tables.vectors(4, U32.size)
        counts = lists.nbytes // U32.size
        items = Tables(root.buffer, each_of(lists.starts, counts, U32.size))
        items.demand_known(_ITEM_SLOTS)
        return cls(
            source,
            tables.structs(0, OBJECT_ID_NBYTES),
            parents,
            tables.numbers(2, "<u8"),
            tables.vectors(3, 1, is_required=True),
            np.where(tables.fields(4) > 0, counts, -1),
            items.vectors(0, 1, is_required=True),
            items.vectors(1, 1, is_required=True),
            tables.vectors(5, OBJECT_ID_NBYTES),
        )

    def rows(self) -> Mapping[bytes, int]:
        """Tell where each is, by its id; of those with one id the first counts."""
        ids = self.ids.tobytes()
        starts = range(0, len(ids), OBJECT_ID_NBYTES)
        every = (ids[at : at + OBJECT_ID_NBYTES] for at in starts)
        return {each: row for row, each in reversed(list(enumerate(every)))}

    def with_new(self, new: NewSnapshot) -> Self:
        """Add a snapshot at the end."""
        rows = self.rows()
        if new.object_id in rows:
            raise ValueError("a snapshot of that id is listed already")
        parent = _NO_PARENT if new.parent_id is None else rows[new.parent_id]
        texts = [new.message.encode(), b"".join(new.pruned_ancestor_tx_logs)]
        texts += [name.encode() for name, _ in new.items] + [value for _, value in new.items]
        message, pruned, *items = _spans(len(self.source), texts)
        names, values = items[: len(new.items)], items[len(new.items) :]
        return replace(
            self,
            source=np.concatenate((self.source, _bytes(b"".join(texts)))),
            ids=np.concatenate((self.ids, _bytes(new.object_id)[None])),
            parents=np.append(self.parents, parent),
            flushed=np.append(self.flushed, np.uint64(new.flushed_at_us)),
            messages=_extended(self.messages, [message]),
            item_counts=np.append(self.item_counts, len(new.items)),
            names=_extended(self.names, names),
            values=_extended(self.values, values),
            pruned=_extended(self.pruned, [pruned]),
        )

    def sorted(self) -> Self:
        """Put them in the order of their ids."""
        high = self.ids[:, :8].copy().view(">u8")[:, 0]
        low = self.ids[:, 8:].copy().view(">u4")[:, 0]
        return self._ordered(np.lexsort((low, high)))

    def _ordered(self, rows: Places) -> Self:
        """Put all *rows* in this order."""
        new_rows = np.full(len(self.ids) + 1, _NO_PARENT)
        new_rows[rows] = np.arange(len(rows))
        parents = new_rows[self.parents[rows]]
        counts = np.maximum(self.item_counts, 0)
        items = each_of((np.cumsum(counts) - counts)[rows], counts[rows])
        return replace(
            self,
            ids=self.ids[rows],
            parents=parents,
            flushed=self.flushed[rows],
            messages=self.messages.take(rows),
            item_counts=self.item_counts[rows],
            names=self.names.take(items),
            values=self.values.take(items),
            pruned=self.pruned.take(rows),
        )


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _spans(start: int, texts: Iterable[bytes]) -> list[tuple[int, int]]:
    """Tell where *texts* lie that follow one another."""
    spans = []
    for text in texts:
        spans.append((start, len(text)))
        start += len(text)
    return spans


def _extended(spans: Spans, more: list[tuple[int, int]]) -> Spans:
    added = np.array(more, np.int64).reshape(-1, 2)
    return Spans(
        np.concatenate((spans.starts, added[:, 0])), np.concatenate((spans.nbytes, added[:, 1]))
    )


_NONE: Final = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))
NO_SNAPSHOTS: Final = SnapshotColumns(
    source=_bytes(b""),
    ids=np.zeros((0, OBJECT_ID_NBYTES), np.uint8),
    parents=_NONE.starts,
    flushed=np.zeros(0, np.uint64),
    messages=_NONE,
    item_counts=_NONE.starts,
    names=_NONE,
    values=_NONE,
    pruned=_NONE,
)
"""The list of a repository that is about to be made."""
