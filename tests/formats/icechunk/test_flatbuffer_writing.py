"""FlatBuffers that are written are read alike by the library of FlatBuffers."""

import flatbuffers.number_types as kinds
from flatbuffers.table import Table as PeerTable
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.flatbuffer import U8, U16, U32, U64
from app.formats.icechunk.flatbuffer_writing import (
    Block,
    Inlay,
    Items,
    NewTable,
    Number,
    Text,
    Vector,
    write_flatbuffer,
)

_KINDS = {
    U8: kinds.Uint8Flags,
    U16: kinds.Uint16Flags,
    U32: kinds.Uint32Flags,
    U64: kinds.Uint64Flags,
}


def _root(data: bytes | bytearray) -> PeerTable:
    return PeerTable(data, int.from_bytes(data[:4], "little"))


@given(st.lists(st.one_of(st.none(), st.sampled_from(sorted(_KINDS, key=lambda k: k.size)))))
def test_each_number_lies_aligned_where_the_vtable_says(
    fields: list[object],
) -> None:
    """Whatever fields there are, each is found by its slot, at a multiple of its size."""
    numbers = [
        None if kind is None else Number(kind, slot % 256)  # type: ignore[arg-type] # a Struct
        for slot, kind in enumerate(fields)
    ]
    data = write_flatbuffer(NewTable(numbers))
    root = _root(data)
    for slot, field in enumerate(numbers):
        offset = root.Offset(4 + 2 * slot)
        assert (offset == 0) == (field is None)
        if field is not None:
            at = offset + root.Pos
            assert at % field.kind.size == 0
            assert root.Get(_KINDS[field.kind], at) == slot % 256


def test_an_inlay_and_a_block_are_carried_byte_for_byte() -> None:
    """A struct lies in its table, and what was made elsewhere behind an offset."""
    inner = write_flatbuffer(NewTable([Number(U64, 2**63)]))
    block = Block((inner,), int.from_bytes(inner[:4], "little"))
    data = write_flatbuffer(NewTable([Inlay(b"identifier 12"[:12]), block]))
    root = _root(data)
    at = root.Offset(4) + root.Pos
    assert data[at : at + 12] == b"identifier 12"[:12]
    below = PeerTable(data, root.Indirect(root.Offset(6) + root.Pos))
    place = below.Offset(4) + below.Pos
    assert (below.Get(kinds.Uint64Flags, place), place % 8) == (2**63, 0)


def test_strings_end_in_nul_and_vectors_tell_their_length() -> None:
    """Readers in C take a string up to its NUL, which its length leaves out."""
    data = write_flatbuffer(NewTable([Items([Text("ä"), Text("")]), Vector(b"\1\0\2\0", 2, 2)]))
    root = _root(data)
    start = root.Vector(root.Offset(4))
    assert root.VectorLen(root.Offset(4)) == 2
    assert [root.String(start), root.String(start + 4)] == ["ä".encode(), b""]
    assert data[root.Indirect(start) + 4 + 2] == 0
    assert root.VectorLen(root.Offset(6)) == 2


def test_it_has_the_identifier_of_the_files() -> None:
    """Behind the offset of the root stands what the library writes there."""
    assert write_flatbuffer(NewTable([]))[4:8] == b"Ichk"
