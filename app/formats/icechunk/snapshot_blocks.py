"""The shape, the names and the manifests of arrays, as blocks of a FlatBuffer that is written.

Thousands of arrays have them, many the same ones: table by table they would take most of the time.
"""

from collections.abc import Sequence
from functools import lru_cache
from struct import pack
from typing import Final

from app.formats.icechunk.flatbuffer import U32, U64
from app.formats.icechunk.flatbuffer_writing import (
    Block,
    Items,
    NewTable,
    Number,
    Text,
    write_flatbuffer,
)
from app.formats.icechunk.metadata import ManifestRef
from app.formats.icechunk.stored_nodes import Dimension

_VTABLE: Final = pack("<4H", 8, 20, 4, 16)
"""Of a table of 20 bytes: a step back to here, the id, a step to the extents."""
_TO_EXTENTS: Final = 4
_MAX_KNOWN: Final = 1024


@lru_cache(_MAX_KNOWN)
def dimensions_block(dimensions: tuple[Dimension, ...]) -> Block:
    """Write a vector of tables `DimensionShapeV2`."""
    tables = [NewTable((Number(U64, length), Number(U32, count))) for length, count in dimensions]
    return _block(Items(tables))


@lru_cache(_MAX_KNOWN)
def names_block(names: tuple[str | None, ...]) -> Block:
    """Write a vector of tables `DimensionName`."""
    return _block(Items([NewTable((None if name is None else Text(name),)) for name in names]))


def manifests_block(refs: Sequence[ManifestRef]) -> Block:
    """Write a vector of tables `ManifestRef`, each with its extents right behind it."""
    vtable_at = 4 + 4 * len(refs)
    at = vtable_at + len(_VTABLE)
    steps: list[int] = []
    tables: list[bytes] = []
    for slot, (object_id, extents) in enumerate(refs):
        flat = [bound for extent in extents for bound in extent]
        head = (at - vtable_at, object_id, _TO_EXTENTS, len(extents))
        table = pack(f"<i12sII{len(flat)}I", *head, *flat)
        steps.append(at - 4 - 4 * slot)
        tables.append(table)
        at += len(table)
    vector = pack(f"<{len(refs) + 1}I", len(refs), *steps)
    return Block((vector, _VTABLE, *tables), align=4)


def _block(items: Items) -> Block:
    """Write *items* by themselves; what they begin at is what the only field leads to."""
    data = write_flatbuffer(NewTable((items,)))
    table = U32.unpack_from(data)[0]
    field = table + 4
    return Block((data,), field + U32.unpack_from(data, field)[0])
