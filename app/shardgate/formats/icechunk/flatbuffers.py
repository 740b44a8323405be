"""Metadata files: a header, then a zstd frame ("Binary File Format") of a FlatBuffer.

Tables are rows of values, read and written by one description of their fields. A `Struct` is
compiled for each vtable, and one call unpacks all fields of a table. Offsets are relative, and
checked before they are followed; all numbers are little-endian.
"""

import struct
from collections.abc import Buffer, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache, partial
from itertools import starmap
from operator import add
from struct import Struct, pack, pack_into
from typing import Any, Final, NamedTuple

import zstandard

from shardgate.formats.compression import decompress_zstd, zstd_capacity
from shardgate.formats.icechunk.ids import NODE_ID_NBYTES, OBJECT_ID_NBYTES, encode_id
from shardgate.formats.reading import DecodeError, StepBudget

HEADER_NBYTES: Final = 39
MAGIC: Final = "ICE🧊CHUNK".encode()
_VERSION_AT: Final = 36
_COMPRESSION_AT: Final = 38
_VERSIONS: Final = (1, 2)

U16: Final = Struct("<H")
U32: Final = Struct("<I")
I32: Final = Struct("<i")
U64: Final = Struct("<Q")

TABLE_NBYTES: Final = 256
"""Memory of the Python objects for a table."""
ITEM_NBYTES: Final = 128
"""Memory of the Python objects for a string or a struct."""
STRING_PER_BYTE: Final = 4
TABLE_STEPS: Final = 4  # of about 0.5 µs, for a table; one more for a text or an offset
_TOO_MUCH: Final = "damaged FlatBuffer: too many tables and vectors for its size"
_WIDEST: Final = 8
_KEPT_LAYOUTS: Final = 1024


def decoded_nbytes(payload_nbytes: int, limit_nbytes: int) -> int:
    """Return the limit of the memory of objects decoded from a payload, in bytes."""
    # Dense JSON takes 27 times its length, and small tables less.
    by_length = 32 * payload_nbytes + 256 * 1024
    # Limits below a MiB bound the size of files, but not the memory to decode them.
    by_limit = 4 * max(limit_nbytes, 1024**2)
    return min(by_length, by_limit)


class Field(NamedTuple):
    """Type of a field: a number or a struct in the table itself, or an offset."""

    code: str
    """Of `struct`."""
    read: "Callable[[FlatBufferReader, int], Any] | None" = None
    write: "Callable[[FlatBufferWriter, Any], int] | None" = None
    absent: Any = None
    """Value of a field that a table lacks."""
    name: str = ""
    """Name of a field that no table lacks."""

    def required(self, name: str) -> "Field":
        """Return the type of a field that every table has; *name* is for errors."""
        return self._replace(name=name)

    @property
    def nbytes(self) -> int:
        return struct.calcsize(f"<{self.code}")

    @property
    def align(self) -> int:
        """Number of bytes that the position is a multiple of."""
        return 1 if self.code.endswith("s") else self.nbytes


class TableType:
    """Fields of a table, by slots."""

    def __init__(self, *fields: Field) -> None:
        self.fields = fields
        self.absent = tuple(field.absent for field in fields)
        self.nbytes = tuple(field.nbytes for field in fields)
        self.widest_first = sorted(range(len(fields)), key=lambda slot: -fields[slot].align)

    @cached_property
    def lazy(self) -> "TableType":
        """The same table with the positions that offsets lead to instead of the values there."""
        fields = self.fields
        return TableType(*(POSITION.required(each.name) if each.read else each for each in fields))


class TableLayout(NamedTuple):
    """Positions of the fields of tables that share a vtable."""

    struct: Struct
    order: Sequence[int]
    """Reading: for each slot the index of its value. Writing: the slots of values, by position."""
    links: Sequence[tuple[int, int, Callable[..., Any]]]
    """Of offsets: slot, position in the table, `Field.read` or `Field.write`."""
    places: Sequence[int]
    """For each slot the position in the table, 0 for an absent field."""


class FlatBufferReader:
    """Decodes the FlatBuffer *data*, from a file that follows *version* of the specification. The
    values of a table are in a list by slots. If *is_strict*, unknown fields, which could not be
    copied, are refused.

    Tables and strings may be shared, so that a small buffer can describe endlessly many: the memory
    of objects decoded from it is limited, and so are the steps, for a file of *stored_nbytes*. All
    methods raise `DecodeError`.
    """

    def __init__(
        self,
        data: bytes,
        limit_nbytes: int = 2**29,
        version: int = 2,
        *,
        stored_nbytes: int | None = None,
        is_strict: bool = False,
    ) -> None:
        self.data = data
        self.version = version
        self.is_strict = is_strict
        self._left_nbytes = decoded_nbytes(len(data), limit_nbytes)
        self._layouts: dict[tuple[TableType, int], TableLayout] = {}
        stored_nbytes = len(data) if stored_nbytes is None else stored_nbytes
        # Any file may take 2^22 steps: 30,000 nodes compress well. Each snapshot in ``repo`` takes
        # half a step a stored byte, since its id does not compress; a node of an array takes two.
        self.steps = StepBudget(2**22 + 4 * stored_nbytes + len(data) // 32)
        self._documents = StepBudget(len(data))

    def spend(self, nbytes: int) -> None:
        """Count *nbytes* of memory, up to the limit of `decoded_nbytes`."""
        if nbytes > self._left_nbytes:
            raise DecodeError(_TOO_MUCH)
        self._left_nbytes -= nbytes

    def check(self, nbytes: int) -> None:
        """Check that *nbytes* of memory are left, for temporary use."""
        if nbytes > self._left_nbytes:
            raise DecodeError(_TOO_MUCH)

    def spend_document(self, nbytes: int) -> None:
        """Count a document of *nbytes*. No writer shares any, so that all fit into the payload."""
        self.steps.spend(64)  # beside those for its bytes
        self._documents.spend(nbytes)

    def root(self, kind: TableType) -> list[Any]:
        return self.table(kind, self._number(U32, 0))

    def table(self, kind: TableType, at: int) -> list[Any]:
        self.spend(TABLE_NBYTES)
        self.steps.spend(TABLE_STEPS)
        return self._row(kind, at)

    def tables(self, kind: TableType, at: int) -> list[list[Any]]:
        """Decode the vector of tables at *at*."""
        targets = self.targets(at)
        self.spend(len(targets) * TABLE_NBYTES)
        self.steps.spend(len(targets) * TABLE_STEPS)
        return [self._row(kind, target) for target in targets]

    def targets(self, at: int) -> list[int]:
        """Return the positions that the offsets in the vector at *at* lead to."""
        start, count = self.vector(at, U32.size)
        self.check(count * 64)  # two Python integers, and their places in lists
        self.steps.spend(count)
        # One call for all offsets: a vector may have a million.
        offsets = struct.unpack_from(f"<{count}I", self.data, start)
        return list(map(add, range(start, start + U32.size * count, U32.size), offsets))

    def vector(self, at: int, item_nbytes: int) -> tuple[int, int]:
        """Return the position of the first item of the vector at *at*, and the number of items."""
        count = self._number(U32, at)
        start = at + U32.size
        if start + count * item_nbytes > len(self.data):
            raise DecodeError("damaged FlatBuffer: a vector reaches out of it")
        self.spend(count * item_nbytes)
        return start, count

    def structs(self, at: int, kind: Struct) -> list[tuple[Any, ...]]:
        """Read the vector of structs at *at*."""
        start, count = self.vector(at, kind.size)
        self.spend(count * ITEM_NBYTES)
        return list(kind.iter_unpack(self.data[start : start + kind.size * count]))

    def text(self, at: int) -> str:
        start, count = self.vector(at, 1)
        self.steps.spend(1)
        self.spend(ITEM_NBYTES + count * (STRING_PER_BYTE - 1))
        try:
            return self.data[start : start + count].decode()
        except UnicodeDecodeError:
            raise DecodeError("damaged FlatBuffer: a string is not UTF-8") from None

    def read(self, field: Field, at: int | None) -> Any:
        """Read the target of an offset, of a `lazy` table; `None` stays absent."""
        return None if at is None or field.read is None else field.read(self, at)

    def _number(self, kind: Struct, at: int) -> int:
        if not 0 <= at <= len(self.data) - kind.size:
            raise DecodeError("damaged FlatBuffer: an offset leads out of it")
        value: int = kind.unpack_from(self.data, at)[0]
        return value

    def _row(self, kind: TableType, at: int) -> list[Any]:
        data = self.data
        try:
            vtable = at - I32.unpack_from(data, at)[0]
            layout = self._layouts.get((kind, vtable)) or self.lay_out(kind, vtable)
            # An absent field has a negative index in `order`: of its default, behind the values.
            values = (*layout.struct.unpack_from(data, at), *kind.absent)
        except struct.error:
            raise DecodeError("damaged FlatBuffer: a table reaches out of it") from None
        row = [values[index] for index in layout.order]
        for slot, place, read in layout.links:
            row[slot] = read(self, at + place + row[slot])
        return row

    def lay_out(self, kind: TableType, vtable: int) -> TableLayout:
        """Check the vtable at *vtable*, and return where it places the fields of *kind*."""
        self.spend(1024)  # memory of a `TableLayout`, as measured
        self.steps.spend(32)
        stop = vtable + self._number(U16, vtable)
        size = 2 * len(kind.fields)
        slots = self.data[vtable + 4 : max(vtable + 4, min(vtable + 4 + size, stop))]
        if vtable + 4 + len(slots) > len(self.data) or stop > len(self.data):
            raise DecodeError("damaged FlatBuffer: a table reaches out of it")
        # An unknown field that is absent is 0 in the vtable, and loses nothing.
        if self.is_strict and self.data[vtable + 4 + size : stop].strip(b"\0"):
            raise DecodeError("it has fields that only a newer specification knows")
        layout = self._layouts[kind, vtable] = _lay_out(kind, slots)
        return layout


@lru_cache(_KEPT_LAYOUTS)
def _lay_out(kind: TableType, vtable: bytes) -> TableLayout:
    """Lay out tables of *kind* for reading; *vtable* has the positions of the first fields."""
    size = len(kind.fields)
    count = len(vtable) // 2
    places = [*struct.unpack_from(f"<{count}H", vtable), *[0] * (size - count)]
    # Absent fields: from the end, where the defaults are.
    order = list(range(-size, 0))
    code = "<4x"
    end = I32.size
    links = []
    present = sorted([(place, slot) for slot, place in enumerate(places) if place])
    for index, (place, slot) in enumerate(present):
        field = kind.fields[slot]
        if place < end:
            raise DecodeError("damaged FlatBuffer: two fields overlap")
        code += f"{place - end}x{field.code}"
        end = place + kind.nbytes[slot]
        order[slot] = index
        if field.read is not None:
            links.append((slot, place, field.read))
    for field, index in zip(kind.fields, order, strict=True):
        if field.name and index < 0:
            raise DecodeError(f"it has no {field.name}")
    return TableLayout(Struct(code), order, links, places)


class FlatBufferWriter:
    """Writes a FlatBuffer front to back: each table before what its offsets lead to."""

    def __init__(self) -> None:
        self.data = bytearray(U32.size) + b"Ichk"  # the identifier of the schema
        self._layouts: dict[tuple[TableType, tuple[bool, ...]], tuple[TableLayout, int]] = {}

    def finish(self, kind: TableType, row: Sequence[Any]) -> bytearray:
        """Write the root table, and return the whole FlatBuffer."""
        root = self.table(kind, row)
        self.pad(U32.size)
        # The first number of a FlatBuffer leads to its root.
        U32.pack_into(self.data, 0, root)
        return self.data

    def table(self, kind: TableType, row: Sequence[Any]) -> int:
        """Write a table, whose fields that are `None` are absent, and return its position."""
        present = tuple([value is not None for value in row])
        layout, vtable = self._layouts.get((kind, present)) or self.lay_out(kind, present)
        # The fields lie behind the offset of the vtable, the widest first.
        at = self.pad(_WIDEST, I32.size)
        self.data += layout.struct.pack(at - vtable, *[row[slot] for slot in layout.order])
        for slot, place, write in layout.links:
            target = write(self, row[slot])
            U32.pack_into(self.data, at + place, target - at - place)
        return at

    def tables(self, kind: TableType, rows: Sequence[Sequence[Any]]) -> int:
        """Write a vector of tables, and return its position."""
        return self.each(rows, partial(self.table, kind))

    def each[T](self, items: Sequence[T], write: Callable[[T], int]) -> int:
        """Write a vector of offsets to what *write* writes of *items*, and return its position."""
        at = self.vector(len(items), bytes(U32.size * len(items)))
        # Each target lies behind its offset, as offsets have no sign.
        slots = range(at + U32.size, len(self.data), U32.size)
        offsets = [write(item) - slot for item, slot in zip(items, slots, strict=True)]
        pack_into(f"<{len(items)}I", self.data, at + U32.size, *offsets)
        return at

    def vector(self, count: int, data: bytes, align: int = U32.size) -> int:
        """Write a vector of *count* items, aligned to *align*, and return its position."""
        at = self.pad(align, U32.size)
        self.data += U32.pack(count)
        self.data += data
        return at

    def block(self, pieces: Sequence[Buffer]) -> int:
        """Write an encoded object with all that it leads to, and return its position."""
        at = self.pad(_WIDEST)
        for piece in pieces:
            self.data += memoryview(piece)
        return at

    def pad(self, align: int = _WIDEST, before: int = 0) -> int:
        self.data += bytes(-(len(self.data) + before) % align)
        return len(self.data)

    def lay_out(self, kind: TableType, present: tuple[bool, ...]) -> tuple[TableLayout, int]:
        """Write the vtable of tables that have the fields *present*; return its position too."""
        layout = _plan(kind, present)
        vtable = self.pad(U16.size)
        numbers = (4 + 2 * len(present), layout.struct.size, *layout.places)
        self.data += pack(f"<{len(numbers)}H", *numbers)
        self._layouts[kind, present] = layout, vtable
        return layout, vtable


@lru_cache(_KEPT_LAYOUTS)
def _plan(kind: TableType, present: tuple[bool, ...]) -> TableLayout:
    """Lay out tables of *kind* that have the fields *present* for writing: the widest lie first."""
    slots = [slot for slot in kind.widest_first if present[slot]]
    code = "<i"
    end = I32.size
    places = [0] * len(present)
    links = []
    for slot in slots:
        field = kind.fields[slot]
        code += "4x" if field.write else field.code
        if field.write is not None:
            links.append((slot, end, field.write))
        places[slot] = end
        end += kind.nbytes[slot]
    inline = [slot for slot in slots if kind.fields[slot].write is None]
    return TableLayout(Struct(code), inline, links, places)


def tables_of(kind: TableType) -> Field:
    """Make the type of a field that is a vector of tables."""
    return Field(
        "I", lambda reader, at: reader.tables(kind, at), lambda to, rows: to.tables(kind, rows)
    )


def structs_of(code: str, align: int = U32.size) -> Field:
    """Make the type of a field that is a vector of structs, each a tuple of values."""
    kind = Struct(f"<{code}")
    return Field(
        "I",
        lambda reader, at: reader.structs(at, kind),
        lambda to, items: to.vector(len(items), b"".join(starmap(kind.pack, items)), align),
    )


def values_of(code: str) -> Field:
    """Make the type of a field that is a vector of numbers, or of structs of one value."""
    kind = Struct(f"<{code}")
    return Field(
        "I",
        lambda reader, at: [value for (value,) in reader.structs(at, kind)],
        lambda to, items: to.vector(len(items), b"".join(map(kind.pack, items))),
    )


def _read_data(reader: FlatBufferReader, at: int) -> bytes:
    start, nbytes = reader.vector(at, 1)
    return reader.data[start : start + nbytes]


def _write_text(writer: FlatBufferWriter, text: str) -> int:
    data = text.encode()
    return writer.vector(len(data), data + b"\0")


UINT8: Final = Field("B", absent=0)
UINT16: Final = Field("H", absent=0)
UINT32: Final = Field("I", absent=0)
UINT64: Final = Field("Q", absent=0)
INT32: Final = Field("i", absent=0)
OBJECT_ID: Final = Field(f"{OBJECT_ID_NBYTES}s")
FILE_ID: Final = OBJECT_ID.required("id")
NODE_ID: Final = Field(f"{NODE_ID_NBYTES}s")
TEXT: Final = Field("I", FlatBufferReader.text, _write_text)
TEXTS: Final = Field(
    "I",
    lambda reader, at: list(map(reader.text, reader.targets(at))),
    lambda to, texts: to.each(texts, partial(_write_text, to)),
)
DATA: Final = Field("I", _read_data, lambda to, data: to.vector(len(data), data))
OBJECT_IDS: Final = values_of(OBJECT_ID.code)
UINT16S: Final = values_of("H")
POSITION: Final = Field("I", lambda _, at: at, FlatBufferWriter.block)
"""What an offset leads to, in another form: its position, or its pieces to be written."""
TABLE: Final = POSITION._replace(write=lambda to, typed: to.table(*typed))
"""A table whose type another field tells: its position, or its type and values to be written."""


def required[T](value: T | None, name: str) -> T:
    """Return *value*, the field *name*. Raises: `DecodeError` where it is absent."""
    if value is None:
        raise DecodeError(f"it has no {name}")
    return value


class FileType(IntEnum):
    """Type of a metadata file."""

    SNAPSHOT = 1
    MANIFEST = 2
    TRANSACTION_LOG = 4
    REPO_INFO = 6

    @property
    def spelled(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class FileDecoder:
    """Decodes the file *object_id*, of at most *limit_nbytes* decompressed."""

    object_id: bytes
    limit_nbytes: int

    def open(
        self, data: bytes, file_type: FileType, root: TableType, most_nbytes: int = 2**63
    ) -> tuple[FlatBufferReader, list[Any]]:
        """Open a file, and read its *root*, a table whose first field is a `FILE_ID`."""
        limit_nbytes = min(self.limit_nbytes, most_nbytes)
        version, payload = open_envelope(data, file_type, limit_nbytes)
        reader = FlatBufferReader(payload, limit_nbytes, version, stored_nbytes=len(data))
        row = reader.root(root)
        if (found := row[0]) != self.object_id:
            wanted = encode_id(self.object_id)
            raise DecodeError(f"it is the {file_type.spelled} {encode_id(found)}, not {wanted}")
        return reader, row


class Envelope(NamedTuple):
    """Content of a file."""

    version: int
    """Version of the specification: 1, or 2 (also for 2.1)."""
    payload: bytes


def open_envelope(data: bytes, file_type: FileType, limit_nbytes: int) -> Envelope:
    """Open a file of *file_type* whose payload, compressed or not, has at most *limit_nbytes*."""
    if len(data) < HEADER_NBYTES or not data.startswith(MAGIC):
        raise DecodeError("not a file of Icechunk: the first bytes are not its magic number")
    version, found, compression = data[_VERSION_AT:HEADER_NBYTES]
    if version not in _VERSIONS:
        raise DecodeError(f"the file follows version {version} of the specification, not 1 or 2")
    if found != file_type:
        raise DecodeError(f"the file is of type {found}, not a {file_type.spelled}")
    if compression > 1:
        raise DecodeError(f"the file is compressed by unknown algorithm {compression}")
    body = memoryview(data)[HEADER_NBYTES:]
    if compression:
        return Envelope(version, decompress_zstd(body, limit_nbytes))
    if len(body) > limit_nbytes:
        raise DecodeError(f"the file holds more than {limit_nbytes} bytes")
    return Envelope(version, bytes(body))


def seal_envelope(file_type: FileType, payload: bytes | bytearray, level: int = 3) -> bytes:
    """Return a file of *payload*, a FlatBuffer, compressed as the library requires."""
    # Name of the writer, version of the specification, type, and 1 for zstd.
    head = MAGIC + b"shardgate".ljust(_VERSION_AT - len(MAGIC)) + bytes((2, file_type, 1))
    # For smaller payloads threads only add processor time.
    threads = 2 if len(payload) > 8 * 1024**2 else 0
    return head + zstandard.ZstdCompressor(level, threads=threads).compress(payload)


def memory_nbytes(data: bytes | None, limit_nbytes: int) -> int:
    """Return the bytes of memory that decoding *data* takes at most, or any file if `None`."""
    payload_nbytes = limit_nbytes if data is None else len(data)
    if data is not None and data[_COMPRESSION_AT:HEADER_NBYTES] == b"\1":
        payload_nbytes = zstd_capacity(memoryview(data)[HEADER_NBYTES:], limit_nbytes)
    return payload_nbytes + decoded_nbytes(payload_nbytes, limit_nbytes)


def fits(data: bytes, limit_nbytes: int) -> bool:
    """Return `True` if a file that was just sealed can be opened with *limit_nbytes*."""
    held = zstandard.frame_content_size(memoryview(data)[HEADER_NBYTES:])
    return max(len(data), held) <= limit_nbytes
