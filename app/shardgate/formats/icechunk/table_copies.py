"""Tables copied from one FlatBuffer to another, thousands at a time, by numpy."""

from collections.abc import Buffer as Bytes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardgate.formats.icechunk.chunk_tables import Vectors, distinct_of, gather_numbers
from shardgate.formats.icechunk.coords import Places
from shardgate.formats.icechunk.flatbuffers import (
    ITEM_NBYTES,
    STRING_PER_BYTE,
    TABLE_NBYTES,
    FlatBufferReader,
    FlatBufferWriter,
    TableType,
)
from shardgate.formats.reading import DecodeError

_ALIGN: Final = 8
_WORD: Final = 4
_HALF: Final = 2
_ABSENT: Final = -(2**62)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Tables of one type in a FlatBuffer."""

    data: bytes
    kind: TableType
    tables: Places
    """Position of each table."""
    fields: Places
    """Positions of their fields, negative if absent: of shape ``(count, slots)``."""

    def __len__(self) -> int:
        return len(self.tables)

    def take(self, places: Any) -> "Rows":
        return replace(self, tables=self.tables[places], fields=self.fields[places])

    def column(self, slot: int) -> NDArray[Any]:
        """Read a field of all tables."""
        field, at = self.kind.fields[slot], self.fields[:, slot]
        present, dtype = np.flatnonzero(at > 0), _dtype(field.code)
        found = gather_numbers(self.data, at[present], dtype.str)
        if len(found) == len(at):
            return found
        values = np.zeros(len(at), dtype)
        if field.absent:
            values[:] = field.absent
        values[present] = found
        return values

    def targets(self, slot: int) -> tuple[Places, Places]:
        """Return which tables have a field that is an offset, and where these lead to."""
        present = np.flatnonzero(self.fields[:, slot] > 0)
        at = self.fields[present, slot]
        return present, at + gather_numbers(self.data, at, "<u4")


def read_rows(reader: FlatBufferReader, kind: TableType, tables: Places) -> Rows:
    """Check the *tables* and their vtables as *reader* does, and find their fields."""
    data = reader.data
    reader.spend(len(tables) * TABLE_NBYTES)
    vtables = tables - gather_numbers(data, tables, "<i4")
    distinct, inverse = distinct_of(vtables)
    layouts = [reader.lay_out(kind, vtable) for vtable in distinct.tolist()]
    sizes = np.array([layout.struct.size for layout in layouts], np.int64)
    if (tables + sizes[inverse] > len(data)).any():
        raise DecodeError("damaged FlatBuffer: a table reaches out of it")
    places = np.array([layout.places for layout in layouts], np.int64)
    places = np.where(places, places, _ABSENT).reshape(len(layouts), len(kind.fields))
    return Rows(data, kind, tables, places.take(inverse, axis=0) + tables[:, None])


def read_targets(reader: FlatBufferReader, at: int) -> Places:
    """Return the positions that the offsets in the vector at *at* lead to."""
    start, count = reader.vector(at, _WORD)
    slots = start + _WORD * np.arange(count)
    targets: Places = slots + gather_numbers(reader.data, slots, "<u4")
    return targets


class TableCopier:
    """Copies tables and their targets into one block of another FlatBuffer, at a multiple of 8.

    They are checked, and their memory is counted, as if *reader* had read them.
    """

    def __init__(self, reader: FlatBufferReader) -> None:
        self.reader = reader
        self.pieces: list[Bytes] = []
        self._nbytes = 0

    def rows(self, rows: Rows, changed: Mapping[int, NDArray[Any]] | None = None) -> Places:
        """Copy tables, with *changed* values in some slots; return their positions in the block."""
        changed, kind = changed or {}, rows.kind
        present = rows.fields > 0
        present[:, list(changed)] = True
        forms, inverse = distinct_of(present @ (1 << np.arange(len(kind.fields))))
        row, offsets = _row_type(kind)
        vtables = _vtables(row.itemsize, offsets, forms)
        vtables_at = self._append(vtables.tobytes())
        copies = np.zeros(len(rows), row)
        at = self._append(copies)
        positions: Places = at + row.itemsize * np.arange(len(rows))
        copies["vtable"] = positions - vtables_at - vtables.strides[0] * inverse
        for slot, field in enumerate(kind.fields):
            name = str(slot)
            if slot in changed:
                copies[name] = changed[slot]
            elif field.copy is None:
                copies[name] = rows.column(slot)
            else:
                chosen, targets = rows.targets(slot)
                if len(chosen):
                    became = field.copy(self, targets) - positions[chosen]
                    copies[name][chosen] = became - offsets[slot]
        return positions

    def tables(self, kind: TableType, tables: Places) -> Places:
        """Copy the *tables*, and return their positions in the block."""
        return self.rows(read_rows(self.reader, kind, tables))

    def table_vectors(self, kind: TableType, vectors: Places) -> Places:
        """Copy vectors of tables, and return their positions in the block."""
        counts = self.counts(vectors, _WORD)
        total = int(counts.sum())
        self.reader.check(total * TABLE_NBYTES)
        heads = np.cumsum(counts) - counts + np.arange(len(counts))
        words = np.zeros(len(vectors) + total, "<u4")
        words[heads] = counts
        at = self._append(words)
        places = np.arange(total) + np.repeat(np.arange(len(vectors)), counts) + 1
        slots = np.repeat(vectors - _WORD * heads, counts) + _WORD * places
        became = self.tables(kind, slots + gather_numbers(self.reader.data, slots, "<u4"))
        words[places] = became - at - _WORD * places
        copied: Places = at + _WORD * heads
        return copied

    def texts(self, starts: Places) -> Places:
        """Copy strings, and return their positions in the block."""
        counts = self.counts(starts, STRING_PER_BYTE)
        self.reader.spend(len(counts) * ITEM_NBYTES)
        vectors = Vectors()
        places = vectors.copy(self.reader.data, starts)
        joined = vectors.joined()
        words = np.frombuffer(joined, "<u4").copy()
        words[places // _WORD] = 0
        try:
            words.tobytes().decode()
        except UnicodeDecodeError:
            raise DecodeError("damaged FlatBuffer: a string is not UTF-8") from None
        return self._append(joined) + places

    def vectors(self, starts: Places, item_nbytes: int = 1) -> Places:
        """Copy vectors of numbers or structs, and return their positions in the block."""
        self.counts(starts, item_nbytes)
        vectors = Vectors()
        places = vectors.copy(self.reader.data, starts, item_nbytes)
        return self._append(vectors.joined()) + places

    def counts(self, starts: Places, item_nbytes: int) -> Places:
        """Return how many items vectors have, and count *item_nbytes* of memory for each."""
        counts = gather_numbers(self.reader.data, starts, "<u4").astype(np.int64)
        self.reader.spend(int(counts.sum()) * item_nbytes)
        return counts

    def _append(self, piece: Bytes) -> int:
        self._nbytes += (padding := -self._nbytes % _ALIGN)
        at = self._nbytes
        self.pieces += bytes(padding), piece
        self._nbytes += memoryview(piece).nbytes
        return at


class MixedTables(NamedTuple):
    """Tables of one vector: copies in a block, and new ones."""

    pieces: Sequence[Bytes]
    copies: Places
    """Positions in the block."""
    new: Sequence[Sequence[Any]]
    """Rows of values."""
    order: Places
    """For each place in the vector a copy or, after all copies, a new table."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[Any]]) -> Self:
        """List new tables only."""
        return cls((), np.zeros(0, np.int64), rows, np.arange(len(rows)))


def write_mixed(kind: TableType) -> Callable[[FlatBufferWriter, MixedTables], int]:
    """Return the function that writes a vector of tables of *kind*."""

    def write(writer: FlatBufferWriter, mixed: MixedTables) -> int:
        count = len(mixed.order)
        at = writer.vector(count, bytes(_WORD * count))
        block = writer.block(mixed.pieces)
        new = [writer.table(kind, row) for row in mixed.new]
        positions = np.concatenate((block + mixed.copies, np.array(new, np.int64)))[mixed.order]
        slots = at + _WORD * np.arange(1, count + 1)
        offsets = (positions - slots).astype("<u4").tobytes()
        writer.data[at + _WORD : at + _WORD + len(offsets)] = offsets
        return at

    return write


@cache
def _dtype(code: str) -> "np.dtype[Any]":
    return np.dtype(f"V{code[:-1]}" if code.endswith("s") else f"<{code}")


@cache
def _row_type(kind: TableType) -> "tuple[np.dtype[Any], Sequence[int]]":
    """Lay out a table with all fields of *kind*, which are called by their slots."""
    offsets, end, widest = [0] * len(kind.fields), _WORD, _WORD
    for slot in kind.widest_first:
        field = kind.fields[slot]
        widest = max(widest, field.align)
        end += -end % field.align
        offsets[slot] = end
        end += kind.nbytes[slot]
    order = kind.widest_first
    row = np.dtype(
        {
            "names": ["vtable", *map(str, order)],
            "formats": [np.dtype("<i4"), *(_dtype(kind.fields[slot].code) for slot in order)],
            "offsets": [0, *(offsets[slot] for slot in order)],
            "itemsize": end + -end % widest,
        }
    )
    return row, offsets


def _vtables(nbytes: int, offsets: Sequence[int], forms: Places) -> NDArray[np.uint16]:
    """Write a vtable for each of *forms*: the slots that are present, as bits."""
    size = len(offsets)
    vtables = np.zeros((len(forms), _HALF + size), "<u2")
    vtables[:, 0], vtables[:, 1] = vtables.strides[0], nbytes
    vtables[:, _HALF:] = np.where(forms[:, None] >> np.arange(size) & 1, offsets, 0)
    return vtables
