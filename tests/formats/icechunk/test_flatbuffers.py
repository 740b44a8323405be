"""`shardgate.formats.icechunk.flatbuffers`: FlatBuffers by descriptions of tables."""

import struct
from collections.abc import Callable
from typing import Any

import flatbuffers.number_types as kinds
import pytest
from flatbuffers.table import Table as PeerTable
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.flatbuffers import (
    DATA,
    INT32,
    OBJECT_ID,
    TABLE,
    TEXT,
    TEXTS,
    UINT8,
    UINT16,
    UINT16S,
    UINT32,
    UINT64,
    Field,
    FlatBufferReader,
    FlatBufferWriter,
    TableType,
    required,
    structs_of,
    tables_of,
    values_of,
)
from shardgate.formats.reading import DecodeError
from tests.support.formats.icechunk.building import Number, Numbers, Struct, Structs, payload
from tests.support.formats.icechunk.building import Table as Fields
from tests.support.records import replaced

_INNER = TableType(replaced(UINT8, absent=9))
_EACH: list[tuple[Field, Any, Any]] = [
    (UINT8, Number("B", 7), 7),
    (UINT16, Number("H", 2**16 - 1), 2**16 - 1),
    (UINT32, Number("I", 2**32 - 1), 2**32 - 1),
    (INT32, Number("i", -1), -1),
    (UINT64, Number("Q", 2**64 - 1), 2**64 - 1),
    (OBJECT_ID, Struct(b"twelve bytes"), b"twelve bytes"),
    (TEXT, "tëxt", "tëxt"),
    (DATA, b"\0\xff", b"\0\xff"),
    (values_of("8s"), Structs([b"8 bytes.", b"8 more.."], 8), [b"8 bytes.", b"8 more.."]),
    (TEXTS, ["one", "", "three"], ["one", "", "three"]),
    (UINT16S, Numbers("H", [1, 2**16 - 1]), [1, 2**16 - 1]),
    (tables_of(_INNER), [{0: Number("B", 2)}, {}, {0: Number("B", 3)}], [[2], [9], [3]]),
]
"""Each kind of field, as it is written by the package `flatbuffers` and as it is read."""
_ROOT = TableType(*(field for field, _, _ in _EACH))
_FIELDS: Fields = {slot: written for slot, (_, written, _) in enumerate(_EACH)}
_VALUES = [value for _, _, value in _EACH]
_OFFSETS = [field for field in _ROOT.fields if field.read is not None]


def _read(data: bytes, kind: TableType = _ROOT, **options: Any) -> list[Any]:
    return FlatBufferReader(data, **options).root(kind)


def test_each_kind_of_field_is_read_and_written() -> None:
    """Each kind of field is read from a buffer of the package `flatbuffers`, and of our own."""
    assert _read(payload(_FIELDS)) == _VALUES
    assert _read(payload({**_FIELDS, 12: Number("B", 1)})) == _VALUES
    assert _read(bytes(FlatBufferWriter().finish(_ROOT, _VALUES))) == _VALUES


def test_fields_of_a_lazy_table_are_positions() -> None:
    """Fields of a lazy table are positions that can be read later, or None."""
    reader = FlatBufferReader(payload({**_FIELDS, 12: Number("B", 1)}))
    row = reader.root(_ROOT.lazy)

    assert row[:6] == _VALUES[:6]
    found = [reader.read(field, at) for field, at in zip(_ROOT.fields[6:], row[6:], strict=True)]
    assert found == _VALUES[6:]
    assert reader.read(TEXT, None) is None


@pytest.mark.parametrize("fields", [{}, {12: Number("B", 1)}])
def test_absent_fields_are_none_or_zero(fields: Fields) -> None:
    """Absent fields are zero or None; a required one raises DecodeError."""
    found = _read(payload(fields))

    assert found == [0] * 5 + [None] * 7
    with pytest.raises(DecodeError, match="it has no id"):
        required(found[5], "id")


def test_truncated_buffer_is_refused_or_read_exactly() -> None:
    """A buffer truncated at any byte raises DecodeError or has the right values."""
    data = payload(_FIELDS)
    for stop in range(len(data)):
        try:
            found = _read(data[:stop])
        except DecodeError:
            continue
        assert found == _VALUES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 3,
        b"\xff" * 8,
        struct.pack("<I", 4),
        *(struct.pack("<Ii8x", 4, at) for at in (12, -12, 2**31 - 1, -(2**31))),
        struct.pack("<IiHHH", 4, -4, 6, 4, 2**16 - 1),
    ],
)
@pytest.mark.parametrize("kind", [_ROOT, _ROOT.lazy])
def test_table_outside_of_the_buffer_is_refused(data: bytes, kind: TableType) -> None:
    """A table, vtable or field outside of the buffer raises DecodeError."""
    with pytest.raises(DecodeError, match="damaged FlatBuffer"):
        _read(data, kind)


@pytest.mark.parametrize("count", [1, 2**16, 2**32 - 1])
@pytest.mark.parametrize("field", _OFFSETS)
def test_vector_past_the_end_of_the_buffer_is_refused(field: Field, count: int) -> None:
    """A vector whose length exceeds the buffer raises DecodeError."""
    table = struct.pack("<IiHHHxx", 4, -4, 6, 4, 10)
    data = table + struct.pack("<II", 4, count)

    with pytest.raises(DecodeError, match="out of it"):
        _read(data, TableType(field))


_READS: list[tuple[Callable[[], object], str]] = [
    (lambda: _read(struct.pack("<IiHHHHI", 4, -4, 8, 8, 4, 6, 0), TableType(UINT32, UINT16)),
     "overlap"),
    (lambda: _read(payload({0: b"\xff"}), TableType(TEXT)), "not UTF-8"),
    (lambda: _read(payload({**_FIELDS, 12: Number("B", 1)}), is_strict=True),
     "only a newer specification knows"),
    (lambda: FlatBufferReader(bytes(100)).table(_INNER, 2**40), "out of it"),
    (lambda: FlatBufferReader(bytes(100)).vector(2**40, 1), "out of it"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "reason"), _READS)
def test_overlapping_or_unknown_fields_are_refused(read: Callable[[], object], reason: str) -> None:
    """Overlapping fields, invalid text, far positions, or strictly unknown fields are refused."""
    with pytest.raises(DecodeError, match=reason):
        read()


@pytest.mark.parametrize(
    ("item", "fields"),
    [({0: "x" * 10**5}, (TEXT,)), ({0: b"x" * 10**5}, (DATA,)), ({}, ())],
    ids=["text", "bytes", "tables"],
)
def test_repeated_reads_of_shared_parts_are_limited(
    item: Fields, fields: tuple[Field, ...]
) -> None:
    """Repeated reads of parts that many tables share raise DecodeError."""
    data = payload({0: [item] * 10**4})
    assert len(data) < 2 * 10**5
    reader = FlatBufferReader(data)

    def walk() -> None:
        for _ in range(1000):
            reader.root(TableType(tables_of(TableType(*fields))))

    with pytest.raises(DecodeError, match="for its size"):
        walk()


_KINDS = {
    UINT8: kinds.Uint8Flags,
    UINT16: kinds.Uint16Flags,
    UINT32: kinds.Uint32Flags,
    UINT64: kinds.Uint64Flags,
}


def _peer(data: bytes | bytearray) -> PeerTable:
    return PeerTable(data, int.from_bytes(data[:4], "little"))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(list(_KINDS)), st.booleans())))
def test_written_numbers_are_aligned(fields: list[tuple[Field, bool]]) -> None:
    """Each written number is found by its vtable slot, aligned to its size."""
    row = [slot % 256 if is_present else None for slot, (_, is_present) in enumerate(fields)]
    root = _peer(FlatBufferWriter().finish(TableType(*(field for field, _ in fields)), row))
    for slot, (field, is_present) in enumerate(fields):
        offset = root.Offset(4 + 2 * slot)
        assert (offset != 0) == is_present
        if is_present:
            at = offset + root.Pos
            assert at % field.nbytes == 0
            assert root.Get(_KINDS[field], at) == slot % 256


def test_written_strings_and_vectors_follow_the_specification() -> None:
    """Written strings end in NUL, vectors begin with their length, and structs are aligned.

    The buffer has the identifier that the library writes.
    """
    row = [["ä", ""], [(b"\1\0",), (b"\2\0",)], (TableType(TEXT), ["x"])]
    data = FlatBufferWriter().finish(TableType(TEXTS, structs_of("2s", 8), TABLE), row)
    root = _peer(data)
    start = root.Vector(root.Offset(4))
    assert data[4:8] == b"Ichk"
    assert root.VectorLen(root.Offset(4)) == 2
    assert [root.String(start), root.String(start + 4)] == ["ä".encode(), b""]
    assert data[root.Indirect(start) + 4 + 2] == 0
    assert root.VectorLen(root.Offset(6)) == 2
    assert root.Vector(root.Offset(6)) % 8 == 0
    inner = PeerTable(data, root.Indirect(root.Offset(8) + root.Pos))
    assert inner.String(inner.Offset(4) + inner.Pos) == b"x"
