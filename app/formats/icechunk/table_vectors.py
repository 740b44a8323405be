"""Vectors of tables with coordinates, written by numpy: those of manifests, and of changed chunks.

The coordinates are the first field of a table, and lie right behind it.
"""

from collections.abc import Buffer, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import ConflictError
from app.formats.icechunk.columns import U32s
from app.formats.icechunk.flatbuffer_writing import Block
from app.formats.icechunk.reference_batches import NUMBERS, Batch, Batches
from app.formats.icechunk.vector_pool import MAX_NBYTES

_ALIGN: Final = 8
_OFFSET: Final = "<u4"


class Tables(NamedTuple):
    """Tables and all that they lead to, which can lie anywhere at a multiple of 8."""

    pieces: Sequence[Buffer]
    places: NDArray[np.int64]
    """Of the tables, from the first of the *pieces*."""
    nbytes: int


class _Run(NamedTuple):
    """Tables of one kind, one after the other behind their vtable."""

    start: int
    """Of the first table."""
    batch: Batch
    vtable: bytes
    dtype: np.dtype[Any]

    @property
    def places(self) -> NDArray[np.int64]:
        """Where the tables lie."""
        return self.start + self.dtype.itemsize * np.arange(len(self.batch.rows))


def write_tables(found: Batches, coords: U32s) -> Tables:
    """Write the references *found*, whose coordinates are the rows of *coords*."""
    runs: list[_Run] = []
    stop = 0
    for batch in found.batches:
        vtable, dtype = _lay_out(tuple(batch.columns), coords.shape[1])
        start = stop + len(vtable)
        runs.append(_Run(start, batch, vtable, dtype))
        stop = start + dtype.itemsize * len(batch.rows)
    _check(stop + found.vectors.nbytes)
    pieces: list[Buffer] = []
    places = np.empty(len(coords), np.int64)
    for run in runs:
        places[run.batch.rows] = run.places
        pieces += run.vtable, _fill(run, coords, stop)
    padding = bytes(-found.vectors.nbytes % _ALIGN)
    pieces += found.vectors, padding
    return Tables(pieces, places, stop + found.vectors.nbytes + len(padding))


def write_vector(count: int, parts: Sequence[tuple[NDArray[np.int64], Tables]]) -> Block:
    """Write a vector of *count* tables; each of *parts* tells which of them its tables are."""
    head = np.zeros(1 + count + (1 + count) % 2, _OFFSET)
    head[0] = count
    stop = head.nbytes
    _check(stop + sum(tables.nbytes for _, tables in parts))
    pieces: list[Buffer] = [head]
    for rows, tables in parts:
        head[1 + rows] = stop + tables.places - 4 * (1 + rows)
        pieces += tables.pieces
        stop += tables.nbytes
    return Block(pieces)


def _lay_out(slots: tuple[int, ...], ndim: int) -> tuple[bytes, np.dtype[Any]]:
    """Place the fields *slots* in a table that begins at a multiple of 8, the widest first."""
    types = {slot: np.dtype(NUMBERS.get(slot, _OFFSET)) for slot in slots}
    fields: dict[str, tuple[str | tuple[str, tuple[int]], int]] = {"vtable": ("<i4", 0)}
    vtable = np.zeros(2 + 1 + max(slots, default=0), "<u2")
    fields["index"], vtable[2], at = (_OFFSET, 4), 4, 8
    for slot in sorted(slots, key=lambda slot: types[slot].itemsize != _ALIGN):
        fields[str(slot)], vtable[2 + slot] = (types[slot].str, at), at
        at += types[slot].itemsize
    vtable[:2] = vtable.nbytes, at
    fields["ndim"], fields["coords"] = (_OFFSET, at), ((_OFFSET, (ndim,)), at + 4)
    at += 4 + 4 * ndim
    names, rest = list(fields), fields.values()
    layout = {
        "names": names,
        "formats": [kind for kind, _ in rest],
        "offsets": [place for _, place in rest],
        "itemsize": at + -at % _ALIGN,
    }
    data = vtable.tobytes()
    return data + bytes(-len(data) % _ALIGN), np.dtype(layout)  # type: ignore[call-overload]


def _fill(run: _Run, coords: U32s, vectors: int) -> NDArray[Any]:
    """Make the tables of *run*; the vectors they lead to begin at *vectors*."""
    dtype = run.dtype
    offsets: Mapping[str, Any] = {name: field[1] for name, field in (dtype.fields or {}).items()}
    tables = np.zeros(len(run.batch.rows), dtype)
    tables["vtable"] = run.places - (run.start - len(run.vtable))
    tables["index"] = offsets["ndim"] - offsets["index"]
    tables["ndim"] = coords.shape[1]
    tables["coords"] = coords[run.batch.rows]
    for slot, column in run.batch.columns.items():
        name = str(slot)
        if slot in NUMBERS:
            tables[name] = column
        else:
            tables[name] = vectors + column - run.places - offsets[name]
    return tables


def _check(nbytes: int) -> None:
    if nbytes > MAX_NBYTES:
        raise ConflictError("a manifest would be larger than can be read: it has to be split")
