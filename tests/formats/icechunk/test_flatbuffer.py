"""FlatBuffers read in place."""

import struct
from collections.abc import Callable

import pytest

from app.formats.icechunk.flatbuffer import I32, U8, U16, U32, U64, Buffer, Table, required
from app.formats.reading import DecodeError
from tests.formats.icechunk.building import Number, Struct, Structs, payload
from tests.formats.icechunk.building import Table as Fields

_ROOT: Fields = {
    0: Number("B", 7),
    1: Number("H", 2**16 - 1),
    2: Number("I", 2**32 - 1),
    3: Number("i", -1),
    4: Number("Q", 2**64 - 1),
    5: Struct(b"twelve bytes"),
    6: "tëxt",
    7: b"\0\xff",
    8: Structs([b"8 bytes.", b"8 more.."], 8),
    9: ["one", "", "three"],
    10: {0: Number("B", 1)},
    11: [{0: Number("B", 2)}, {}, {0: Number("B", 3)}],
}
_EVERYTHING = payload(_ROOT)


def _read_all(data: bytes) -> list[object]:
    root = Buffer(data).root
    inner = root.table(10)
    return [
        root.number(0, U8),
        root.number(1, U16),
        root.number(2, U32),
        root.number(3, I32),
        root.number(4, U64),
        root.struct(5, 12),
        root.text(6),
        root.data(7),
        root.structs(8, 8),
        inner and inner.number(0, U8),
        [table.number(0, U8, 9) for table in root.tables(11)],
    ]


def test_every_kind_of_field_is_read() -> None:
    """As the package `flatbuffers` wrote it."""
    assert _read_all(_EVERYTHING) == [
        7,
        2**16 - 1,
        2**32 - 1,
        -1,
        2**64 - 1,
        b"twelve bytes",
        "tëxt",
        b"\0\xff",
        [b"8 bytes.", b"8 more.."],
        1,
        [2, 9, 3],
    ]


def test_absent_fields_are_none_or_their_default() -> None:
    """Whether the vtable is too short for them or has no place for them."""
    for data in (payload({}), payload({12: Number("B", 1)})):
        root = Buffer(data).root
        assert root.number(0, U8) == 0
        assert root.number(0, U8, 5) == 5
        found = [root.struct(1, 8), root.text(1), root.data(1), root.structs(1, 8), root.table(1)]
        assert found == [None] * 5
        assert [*root.tables(1)] == []
        with pytest.raises(DecodeError, match="it has no id"):
            required(root.struct(1, 8), "id")


def test_a_truncated_buffer_is_damaged_or_read_right() -> None:
    """Wherever it ends: nothing comes from the other end of it."""
    for stop in range(len(_EVERYTHING)):
        try:
            found = _read_all(_EVERYTHING[:stop])
        except DecodeError:
            continue
        assert found == _read_all(_EVERYTHING)


@pytest.mark.parametrize("data", [b"", b"\0" * 3, b"\xff" * 8, struct.pack("<I", 4)])
def test_the_root_has_to_lie_in_the_buffer(data: bytes) -> None:
    """And its vtable too."""
    with pytest.raises(DecodeError, match="damaged FlatBuffer"):
        Buffer(data).root.text(0)


@pytest.mark.parametrize("vtable", [-8, -(2**31), 16, 2**31 - 1])
def test_a_vtable_has_to_lie_in_the_buffer(vtable: int) -> None:
    """Neither before its beginning nor behind its end."""
    offset = struct.pack("<i", max(-(2**31), min(2**31 - 1, 4 - vtable)))
    with pytest.raises(DecodeError, match="leads out"):
        Buffer(struct.pack("<I", 4) + offset + bytes(8)).root.text(0)


_FAR = struct.pack("<I", 4) + struct.pack("<i", -4) + struct.pack("<HHH", 6, 4, 2**16 - 1)
"""A table whose only field lies far behind it."""


@pytest.mark.parametrize(
    "read",
    [lambda root: root.number(0, U8), lambda root: root.struct(0, 12), lambda root: root.text(0),
     lambda root: root.data(0), lambda root: root.structs(0, 12),
     lambda root: list(root.tables(0)),
     lambda root: root.table(0)],
)  # fmt: skip
def test_a_field_has_to_lie_in_the_buffer(read: Callable[[Table], object]) -> None:
    """Whatever it holds."""
    with pytest.raises(DecodeError, match="out of it"):
        read(Buffer(_FAR).root)


@pytest.mark.parametrize("count", [1, 2**16, 2**32 - 1])
def test_a_vector_has_to_end_in_the_buffer(count: int) -> None:
    """A count is not believed before memory is taken for it."""
    table = struct.pack("<IiHHHxx", 4, -4, 6, 4, 10)
    data = table + struct.pack("<II", 4, count)
    root = Buffer(data).root
    for read in (root.text, root.data, lambda slot: root.structs(slot, 8)):
        with pytest.raises(DecodeError, match="out of it"):
            read(0)


def test_text_is_utf_8() -> None:
    """Anything else is damage."""
    with pytest.raises(DecodeError, match="not UTF-8"):
        Buffer(payload({0: b"\xff"})).root.text(0)


@pytest.mark.parametrize(
    ("item", "read"),
    [
        ({0: "x" * 10**5}, lambda root: sum(len(item.text(0)) for item in root.tables(0))),
        ({0: b"x" * 10**5}, lambda root: sum(len(item.data(0)) for item in root.tables(0))),
        ({}, lambda root: [list(root.tables(0)) for _ in range(1000)]),
    ],
    ids=["text", "bytes", "tables"],
)
def test_shared_parts_do_not_make_a_walk_endless(
    item: Fields, read: Callable[[Table], object]
) -> None:
    """What is looked at again and again costs as if it were there as often."""
    root = payload({0: [item] * 10**4})
    assert len(root) < 2 * 10**5
    with pytest.raises(DecodeError, match="for its size"):
        read(Buffer(root).root)
