"""FlatBuffers written front to back: a table, then the objects to which its fields refer.

All offsets are relative, so that a `Block` made elsewhere, by numpy, can be placed anywhere.
"""

from collections.abc import Buffer, Sequence
from struct import Struct, pack, pack_into
from typing import Final, NamedTuple

from app.formats.icechunk.flatbuffer import I32, U16, U32

_IDENTIFIER: Final = b"Ichk"
_WIDEST: Final = 8


class Number(NamedTuple):
    """A number, stored in its table."""

    kind: Struct
    value: int


class Inlay(NamedTuple):
    """A struct, stored in its table, such as an id."""

    data: bytes
    align: int = 1


class Text(NamedTuple):
    """A string."""

    text: str


class Vector(NamedTuple):
    """Numbers or structs, *length* of them in *data*."""

    data: bytes
    length: int
    align: int = 1


class Items(NamedTuple):
    """A vector of tables or strings."""

    values: "Sequence[NewTable | Text]"


class Block(NamedTuple):
    """An encoded object with all objects it refers to: *at* in *pieces*, aligned to *align*."""

    pieces: Sequence[Buffer]
    at: int = 0
    align: int = _WIDEST


class NewTable(NamedTuple):
    """The fields of a table by slot; `None` for absent ones."""

    fields: "Sequence[Number | Inlay | Linked | None]"


type Linked = Text | Vector | Items | Block | NewTable


class _Shape(NamedTuple):
    """Layout of tables whose fields have the same sizes."""

    vtable: bytes
    places: tuple[int, ...]
    nbytes: int


def data_vector(data: bytes | None) -> Vector | None:
    """Return a vector of bytes; `None` stays absent."""
    return None if data is None else Vector(data, len(data))


def write_flatbuffer(root: NewTable) -> bytearray:
    """Write *root* and all objects it refers to, with the identifier of Icechunk's files."""
    return _FlatBufferWriter(root).data


class _FlatBufferWriter:
    def __init__(self, root: NewTable) -> None:
        self.data = bytearray(4) + _IDENTIFIER
        self._vtables: dict[bytes, int] = {}
        self._shapes: dict[tuple[tuple[int, int], ...], _Shape] = {}
        self._waiting: list[tuple[int, Linked]] = [(0, root)]
        while self._waiting:
            at, value = self._waiting.pop()
            place = self._place(value)
            pack_into("<I", self.data, at, place - at)

    def _place(self, value: Linked) -> int:
        match value:
            case NewTable(fields):
                return self._place_table(fields)
            case Text(text):
                data = text.encode()
                return self._place_vector(data + b"\0", len(data), 1)
            case Vector(data, length, align):
                return self._place_vector(data, length, align)
            case Items(values):
                place = self._place_vector(bytes(4 * len(values)), len(values), 4)
                slots = range(place + 4, place + 4 + 4 * len(values), 4)
                self._waiting += reversed(list(zip(slots, values, strict=True)))
                return place
            case Block(pieces, at, align):
                self._pad(align, 0)
                place = len(self.data) + at
                for piece in pieces:
                    self.data += memoryview(piece)
                return place

    def _place_vector(self, data: bytes, count: int, align: int) -> int:
        self._pad(max(4, align), 4)
        place = len(self.data)
        self.data += U32.pack(count)
        self.data += data
        return place

    def _place_table(self, fields: "Sequence[Number | Inlay | Linked | None]") -> int:
        sizes = tuple(map(_size, fields))
        shape = self._shapes.get(sizes)
        if shape is None:
            shape = self._shapes[sizes] = _shape(sizes)
        vtable = self._vtables.get(shape.vtable)
        if vtable is None:
            self._pad(2, 0)
            vtable = self._vtables[shape.vtable] = len(self.data)
            self.data += shape.vtable
        self._pad(_WIDEST, 4)
        place = len(self.data)
        self.data += bytes(shape.nbytes)
        I32.pack_into(self.data, place, place - vtable)
        linked: list[tuple[int, Linked]] = []
        for field, at in zip(fields, shape.places, strict=True):
            match field:
                case None:
                    pass
                case Number(kind, value):
                    kind.pack_into(self.data, place + at, value)
                case Inlay(data, _):
                    self.data[place + at : place + at + len(data)] = data
                case _:
                    linked.append((place + at, field))
        self._waiting += reversed(linked)
        return place

    def _pad(self, align: int, before: int) -> None:
        self.data += bytes(-(len(self.data) + before) % align)


def _size(field: "Number | Inlay | Linked | None") -> tuple[int, int]:
    match field:
        case None:
            return 0, 1
        case Number(kind, _):
            return kind.size, kind.size
        case Inlay(data, align):
            return len(data), align
        case _:
            return 4, 4


def _shape(sizes: Sequence[tuple[int, int]]) -> _Shape:
    """Lay fields out, the widest first; a table begins 4 bytes before a multiple of 8."""
    places = [0] * len(sizes)
    at = 4
    for slot in sorted(range(len(sizes)), key=lambda slot: -sizes[slot][1]):
        nbytes, align = sizes[slot]
        if nbytes:
            at += -(at + 4) % align
            places[slot] = at
            at += nbytes
    vtable = U16.pack(4 + 2 * len(sizes)) + U16.pack(at) + pack(f"<{len(places)}H", *places)
    return _Shape(vtable, tuple(places), at)
