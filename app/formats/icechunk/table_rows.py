"""FlatBuffers tables as rows of values, read and written by one description of their fields.

The generic reader looks every field up by itself, which takes 14 µs a table. Here a `Struct` is
compiled for each vtable, and one call unpacks all fields of a table.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct, pack, pack_into
from typing import Any, Final, NamedTuple

from app.formats.icechunk.flatbuffer import I32, U16, U32, Buffer
from app.formats.icechunk.ids import OBJECT_ID_NBYTES
from app.formats.reading import DecodeError

_TABLE_NBYTES: Final = 256
_LAYOUT_NBYTES: Final = 1024
_ITEM_NBYTES: Final = 64
"""Memory of the Python objects made of a table, of a vtable, and of a struct in a vector."""
_IDENTIFIER: Final = b"Ichk"
_ALIGN: Final = 8
_ZERO, _NONE = -2, -1


class Field(NamedTuple):
    """Type of a field: a number or a struct in the table itself, or an offset."""

    code: str
    """Of `struct`."""
    read: "Callable[[RowReader, int], Any] | None" = None
    write: "Callable[[RowWriter, Any], int] | None" = None

    @property
    def nbytes(self) -> int:
        """Size in the table."""
        return struct.calcsize(f"<{self.code}")

    @property
    def align(self) -> int:
        """Number of bytes that the position is a multiple of."""
        return 1 if self.code.endswith("s") else self.nbytes


class TableType:
    """Fields of a table, by slots."""

    def __init__(self, *fields: Field) -> None:
        self.fields = fields


class _RowLayout(NamedTuple):
    """Positions of the fields of tables that share a vtable."""

    struct: Struct
    order: Sequence[int]
    """Reading: for each slot the index of its value. Writing: the slots of values, by position."""
    links: Sequence[tuple[int, int, Callable[..., Any]]]
    """Of offsets: slot, position in the table, `Field.read` or `Field.write`."""
    vtable: int = 0


class RowReader:
    """Decodes tables in *buffer*, from a file that follows *version* of the specification. The
    values of a table are in a list by slots; an absent field is `None`, an absent number 0. If
    *is_strict*, unknown fields, which could not be copied, are refused.
    """

    def __init__(self, buffer: Buffer, version: int, *, is_strict: bool = False) -> None:
        self.buffer = buffer
        self.version = version
        self.is_strict = is_strict
        self._layouts: dict[tuple[TableType, int], _RowLayout] = {}

    def table(self, kind: TableType, at: int) -> list[Any]:
        """Decode the table at *at*. Raises: `DecodeError`."""
        self.buffer.spend(_TABLE_NBYTES)
        return self._row(kind, at)

    def tables(self, kind: TableType, at: int) -> list[list[Any]]:
        """Decode the vector of tables at *at*."""
        start, count = self.buffer.vector(at, U32.size)
        self.buffer.spend(count * _TABLE_NBYTES)
        offsets = struct.unpack_from(f"<{count}I", self.buffer.data, start)
        slots = range(start, start + U32.size * count, U32.size)
        return [self._row(kind, slot + each) for slot, each in zip(slots, offsets, strict=True)]

    def _row(self, kind: TableType, at: int) -> list[Any]:
        data = self.buffer.data
        try:
            vtable = at - I32.unpack_from(data, at)[0]
            layout = self._layouts.get((kind, vtable)) or self._lay_out(kind, vtable)
            values = (*layout.struct.unpack_from(data, at), 0, None)
        except struct.error:
            raise DecodeError("damaged FlatBuffer: a table reaches out of it") from None
        row = [values[index] for index in layout.order]
        for slot, place, read in layout.links:
            row[slot] = read(self, at + place + row[slot])
        return row

    def _lay_out(self, kind: TableType, vtable: int) -> _RowLayout:
        buffer, size = self.buffer, len(kind.fields)
        buffer.spend(_LAYOUT_NBYTES)
        stop = vtable + buffer.number(U16, vtable)
        slots = range(min(size, (stop - vtable - 4) // 2))
        places = [(buffer.number(U16, vtable + 4 + 2 * slot), slot) for slot in slots]
        if self.is_strict and buffer.data[vtable + 4 + 2 * size : stop].strip(b"\0"):
            raise DecodeError("it has fields that only a newer specification knows")
        order = [_NONE if each.read or each.code.endswith("s") else _ZERO for each in kind.fields]
        code, end, links = "<4x", I32.size, []
        for index, (place, slot) in enumerate(sorted(each for each in places if each[0])):
            field = kind.fields[slot]
            if place < end:
                raise DecodeError("damaged FlatBuffer: two fields overlap")
            code += f"{place - end}x{field.code}"
            end, order[slot] = place + field.nbytes, index
            if field.read is not None:
                links.append((slot, place, field.read))
        layout = self._layouts[kind, vtable] = _RowLayout(Struct(code), order, links)
        return layout


class RowWriter:
    """Writes a FlatBuffer front to back: each table before what its offsets lead to."""

    def __init__(self) -> None:
        self.data = bytearray(U32.size) + _IDENTIFIER
        self._layouts: dict[tuple[TableType, tuple[bool, ...]], _RowLayout] = {}

    def finish(self, kind: TableType, row: Sequence[Any]) -> bytearray:
        """Write the root table, and return the whole FlatBuffer."""
        root = self.table(kind, row)
        U32.pack_into(self.data, 0, root)
        return self.data

    def table(self, kind: TableType, row: Sequence[Any]) -> int:
        """Write a table, whose fields that are `None` are absent, and return its position."""
        present = tuple([value is not None for value in row])
        layout = self._layouts.get((kind, present)) or self._lay_out(kind, present)
        at = self._pad(_ALIGN, I32.size)
        self.data += layout.struct.pack(at - layout.vtable, *[row[slot] for slot in layout.order])
        for slot, place, write in layout.links:
            target = write(self, row[slot])
            U32.pack_into(self.data, at + place, target - at - place)
        return at

    def tables(self, kind: TableType, rows: Sequence[Sequence[Any]]) -> int:
        """Write a vector of tables, and return its position."""
        return self.each(rows, lambda row: self.table(kind, row))

    def each[T](self, items: Sequence[T], write: Callable[[T], int]) -> int:
        """Write a vector of offsets to what *write* writes of *items*, and return its position."""
        at = self.vector(len(items), bytes(U32.size * len(items)))
        slots = range(at + U32.size, len(self.data), U32.size)
        offsets = [write(item) - slot for item, slot in zip(items, slots, strict=True)]
        pack_into(f"<{len(items)}I", self.data, at + U32.size, *offsets)
        return at

    def vector(self, count: int, data: bytes) -> int:
        """Write a vector of *count* items, and return its position."""
        at = self._pad(U32.size)
        self.data += U32.pack(count) + data
        return at

    def _pad(self, align: int, before: int = 0) -> int:
        self.data += bytes(-(len(self.data) + before) % align)
        return len(self.data)

    def _lay_out(self, kind: TableType, present: tuple[bool, ...]) -> _RowLayout:
        """Write the vtable of tables that have the fields *present*: the widest lie first."""
        slots = sorted(
            (slot for slot, is_present in enumerate(present) if is_present),
            key=lambda slot: -kind.fields[slot].align,
        )
        code, end, places, links = "<i", I32.size, [0] * len(present), []
        for slot in slots:
            field = kind.fields[slot]
            code += "4x" if field.write else field.code
            if field.write is not None:
                links.append((slot, end, field.write))
            places[slot], end = end, end + field.nbytes
        vtable = self._pad(U16.size)
        self.data += pack(f"<{2 + len(places)}H", 4 + 2 * len(places), end, *places)
        inline = [slot for slot in slots if kind.fields[slot].write is None]
        layout = self._layouts[kind, present] = _RowLayout(Struct(code), inline, links, vtable)
        return layout


def tables_of(kind: TableType) -> Field:
    """Make the type of a field that is a vector of tables."""
    return Field(
        "I", lambda reader, at: reader.tables(kind, at), lambda to, rows: to.tables(kind, rows)
    )


def _read_data(reader: RowReader, at: int) -> bytes:
    start, nbytes = reader.buffer.vector(at, 1)
    return reader.buffer.data[start : start + nbytes]


def _write_text(writer: RowWriter, text: str) -> int:
    data = text.encode()
    return writer.vector(len(data), data + b"\0")


def _read_ids(reader: RowReader, at: int) -> tuple[bytes, ...]:
    start, count = reader.buffer.vector(at, OBJECT_ID_NBYTES)
    reader.buffer.spend(count * _ITEM_NBYTES)
    starts = range(start, start + OBJECT_ID_NBYTES * count, OBJECT_ID_NBYTES)
    return tuple([reader.buffer.data[each : each + OBJECT_ID_NBYTES] for each in starts])


def _read_uint16s(reader: RowReader, at: int) -> list[int]:
    start, count = reader.buffer.vector(at, U16.size)
    reader.buffer.spend(count * _ITEM_NBYTES)
    return list(struct.unpack_from(f"<{count}H", reader.buffer.data, start))


def _read_texts(reader: RowReader, at: int) -> list[str]:
    start, count = reader.buffer.vector(at, U32.size)
    slots = range(start, start + U32.size * count, U32.size)
    return [reader.buffer.text(reader.buffer.follow(slot)) for slot in slots]


UINT8: Final = Field("B")
UINT16: Final = Field("H")
UINT32: Final = Field("I")
UINT64: Final = Field("Q")
INT32: Final = Field("i")
OBJECT_ID: Final = Field(f"{OBJECT_ID_NBYTES}s")
TEXT: Final = Field("I", lambda reader, at: reader.buffer.text(at), _write_text)
TEXTS: Final = Field("I", _read_texts, lambda to, texts: to.each(texts, partial(_write_text, to)))
DATA: Final = Field("I", _read_data, lambda to, data: to.vector(len(data), data))
OBJECT_IDS: Final = Field("I", _read_ids, lambda to, ids: to.vector(len(ids), b"".join(ids)))
UINT16S: Final = Field(
    "I", _read_uint16s, lambda to, each: to.vector(len(each), pack(f"<{len(each)}H", *each))
)
TABLE: Final = Field("I", lambda _, at: at, lambda to, typed: to.table(*typed))
"""A table whose type another field tells: its position, or its type and values to be written."""
