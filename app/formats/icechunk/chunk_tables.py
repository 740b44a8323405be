"""FlatBuffer tables of chunks read and written in bulk, by numpy.

`ChunkRef` of manifests and `ChunkIndices` of transaction logs both begin with a vector of
coordinates, and both are listed in tables of arrays: node id, then a vector of such tables.
"""

from collections.abc import Buffer as Bytes
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import ConflictError
from app.formats.icechunk.coords import Coords, Places, U32s
from app.formats.icechunk.flatbuffers import (
    DATA,
    NODE_ID,
    POSITION,
    FlatBufferReader,
    TableType,
    required,
)
from app.formats.reading import DecodeError

BLOCK: Final = 2**14
"""Tables read at a time: few enough that malloc reuses the memory of temporary arrays."""
MAX_NBYTES: Final = 2**31 - 1
"""Limit of a FlatBuffer that the library reads."""
ARRAY_CHUNKS: Final = TableType(NODE_ID, POSITION, DATA)
"""Table of an array: its chunks, and in manifests what other writers add."""
NUMBER_FIELDS: Final[Mapping[int, str]] = {2: "<u8", 3: "<u8", 4: "V12", 7: "<u4"}
"""Fields of `ChunkRef` stored in the table itself: offset, length, chunk id, last modified."""

_VTABLE_NBYTES: Final = 6
"""Size of the least vtable that has the first field."""
_MEMORY_PER_TABLE: Final = 64
_MEMORY_PER_COORDINATE: Final = 16
_ALIGN: Final = 8
_OFFSET: Final = "<u4"


class ChunkTables(NamedTuple):
    """Positions of tables, array after array."""

    arrays: Sequence[tuple[bytes, int, int]]
    """Node id of each array, and the half-open range of its tables."""
    tables: U32s
    """Position of each table, in bytes."""
    indexes: U32s
    """Position of its first coordinate, in words of 4 bytes."""
    ndims: U32s


def locate_chunk_tables(reader: FlatBufferReader, at: int, vector: str) -> ChunkTables:
    """Locate the tables in the *vector* of each array in the vector at *at*; an array may come
    twice. Their memory is counted before it is allocated.
    """
    parts: dict[bytes, list[tuple[int, int]]] = {}
    for array_id, chunks, _ in reader.tables(ARRAY_CHUNKS.lazy, at):
        node_id = required(array_id, "node_id")
        start, count = reader.vector(required(chunks, vector), 4)
        if start % 4:
            raise DecodeError("damaged FlatBuffer: an offset is not aligned")
        reader.spend(count * _MEMORY_PER_TABLE)
        parts.setdefault(node_id, []).append((start // 4, count))
    found: list[tuple[bytes, int, int]] = []
    stop = 0
    for node_id, vectors in parts.items():
        start, stop = stop, stop + sum(count for _, count in vectors)
        found.append((node_id, start, stop))
    spans = [span for vectors in parts.values() for span in vectors]
    runs = (np.arange(first, first + count, dtype=np.uint32) for first, count in spans)
    slots = np.concatenate([np.empty(0, np.uint32), *runs])
    return ChunkTables(found, *_follow_slots(reader, slots))


def _follow_slots(reader: FlatBufferReader, slots: U32s) -> U32s:
    located = np.empty((3, len(slots)), np.uint32)
    walk = _Walk(reader.data)
    for start in range(0, len(slots), BLOCK):
        block = slice(start, start + BLOCK)
        table = walk.follow(slots[block].astype(np.int64) << 2)
        index = walk.follow(walk.first_field(table))
        located[0, block], located[1, block] = table, (index >> 2) + 1
        located[2, block] = walk.count(index)
    reader.spend(int(located[2].sum(dtype=np.uint64)) * _MEMORY_PER_COORDINATE)
    return located


class _Walk:
    """Reads numbers at many positions of a payload; positions are int64, so that none wraps."""

    def __init__(self, data: bytes) -> None:
        self._nbytes = len(data)
        self._words = words_of(data)
        self._halves = np.frombuffer(data, "<u2", len(data) // 2)

    def follow(self, at: Places) -> Places:
        found = at + self._words.take(at >> 2, mode="clip")
        return self._check(found, 4, 4)

    def first_field(self, table: Places) -> Places:
        offset = self._words.view("<i4").take(table >> 2, mode="clip")
        vtable = self._check(table - offset, 4, 2)
        nbytes = self._halves.take(vtable >> 1, mode="clip").astype(np.int64)
        self._check(vtable + nbytes, 0, 1)
        field = self._halves.take((vtable >> 1) + 2, mode="clip").astype(np.int64)
        if nbytes.min() < _VTABLE_NBYTES or not field.all():
            raise DecodeError("a chunk has no coordinates")
        return self._check(table + field, 4, 4)

    def count(self, vector: Places) -> U32s:
        count = self._words.take(vector >> 2, mode="clip")
        self._check(vector + 4 + (count.astype(np.int64) << 2), 0, 1)
        return count

    def _check(self, at: Places, nbytes: int, align: int) -> Places:
        if at.min() < 0 or at.max() > self._nbytes - nbytes:
            raise DecodeError("damaged FlatBuffer: an offset leads out of it")
        if np.bitwise_or.reduce(at) & (align - 1):
            raise DecodeError("damaged FlatBuffer: an offset is not aligned")
        return at


def words_of(data: bytes) -> U32s:
    """Return *data* as numbers of 4 bytes, without the bytes after the last whole one."""
    return np.frombuffer(data, "<u4", len(data) // 4)


def read_columns(data: bytes, indexes: U32s, ndim: int) -> U32s:
    """Read *ndim* coordinates at each of *indexes*, block by block; returns ``(ndim, count)``."""
    words = words_of(data)
    columns = np.empty((ndim, len(indexes)), np.uint32)
    axes = np.arange(ndim)[:, None]
    step = max(1, BLOCK // max(1, ndim))
    for start in range(0, len(indexes), step):
        block = slice(start, start + step)
        columns[:, block] = words.take(indexes[block] + axes, mode="clip")
    return columns


def gather_numbers(data: bytes, places: Places, dtype: str) -> NDArray[Any]:
    """Read a number of type *dtype* at each of *places*, which need not be aligned."""
    nbytes = np.dtype(dtype).itemsize
    if not places.size:
        return np.empty(0, dtype)
    if places.min() < 0 or places.max() > len(data) - nbytes:
        raise DecodeError("damaged FlatBuffer: an offset leads out of it")
    return np.ndarray((len(data) - nbytes + 1,), dtype, data, strides=(1,))[places]


class TableBatch(NamedTuple):
    """Tables to write that have the same fields."""

    rows: Places
    """Their numbers among all tables that are written together."""
    columns: Mapping[int, NDArray[Any]]
    """By field: the numbers, or the positions of vectors among those written behind."""


class WrittenTables(NamedTuple):
    """Bytes of tables and of all that they lead to; valid at any multiple of 8."""

    pieces: Sequence[Bytes]
    places: Places
    """Position of each table, counted from the first of *pieces*."""
    nbytes: int


class _TableRun(NamedTuple):
    start: int
    batch: TableBatch
    vtable: bytes
    dtype: np.dtype[Any]

    @property
    def places(self) -> Places:
        return self.start + self.dtype.itemsize * np.arange(len(self.batch.rows))


def write_tables(batches: Sequence[TableBatch], vectors: U32s, coords: Coords) -> WrittenTables:
    """Write tables with the *coords* of their rows, and *vectors* behind them."""
    runs: list[_TableRun] = []
    stop = 0
    for batch in batches:
        vtable, dtype = _lay_out(tuple(batch.columns), coords.shape[1])
        start = stop + len(vtable)
        runs.append(_TableRun(start, batch, vtable, dtype))
        stop = start + dtype.itemsize * len(batch.rows)
    check_nbytes(stop + vectors.nbytes)
    pieces: list[Bytes] = []
    places = np.empty(len(coords), np.int64)
    for run in runs:
        places[run.batch.rows] = run.places
        pieces += run.vtable, _fill(run, coords, stop)
    padding = bytes(-vectors.nbytes % _ALIGN)
    pieces += vectors, padding
    return WrittenTables(pieces, places, stop + vectors.nbytes + len(padding))


def write_table_vector(
    count: int, parts: Sequence[tuple[Places, WrittenTables]]
) -> Sequence[Bytes]:
    """Write a vector of *count* tables, each of *parts* with the numbers of its tables in it."""
    head = np.zeros(1 + count + (1 + count) % 2, _OFFSET)
    head[0] = count
    stop = head.nbytes
    check_nbytes(stop + sum(tables.nbytes for _, tables in parts))
    pieces: list[Bytes] = [head]
    for rows, tables in parts:
        head[1 + rows] = stop + tables.places - 4 * (1 + rows)
        pieces += tables.pieces
        stop += tables.nbytes
    return pieces


def check_nbytes(nbytes: int) -> None:
    """Raise `ConflictError` where a manifest of *nbytes* could not be read."""
    if nbytes > MAX_NBYTES:
        raise ConflictError(
            f"a manifest would exceed {MAX_NBYTES} bytes, the limit of the library: split manifests"
        )


def _lay_out(slots: tuple[int, ...], ndim: int) -> tuple[bytes, np.dtype[Any]]:
    """Return the padded vtable and the layout of a table with the fields *slots*, widest first."""
    types = {slot: np.dtype(NUMBER_FIELDS.get(slot, _OFFSET)) for slot in slots}
    fields: dict[str, tuple[str | tuple[str, tuple[int]], int]] = {"vtable": ("<i4", 0)}
    vtable = np.zeros(2 + 1 + max(slots, default=0), "<u2")
    fields["index"], vtable[2], at = (_OFFSET, 4), 4, 8
    for slot in sorted(slots, key=lambda slot: types[slot].itemsize != _ALIGN):
        fields[str(slot)], vtable[2 + slot] = (types[slot].str, at), at
        at += types[slot].itemsize
    vtable[:2] = vtable.nbytes, at
    fields["ndim"], fields["coords"] = (_OFFSET, at), ((_OFFSET, (ndim,)), at + 4)
    at += 4 + 4 * ndim
    layout = {
        "names": list(fields),
        "formats": [kind for kind, _ in fields.values()],
        "offsets": [place for _, place in fields.values()],
        "itemsize": at + -at % _ALIGN,
    }
    data = vtable.tobytes()
    return data + bytes(-len(data) % _ALIGN), np.dtype(layout)  # type: ignore[call-overload]


def _fill(run: _TableRun, coords: Coords, vectors_at: int) -> NDArray[Any]:
    dtype = run.dtype
    offsets: Mapping[str, Any] = {name: field[1] for name, field in (dtype.fields or {}).items()}
    tables = np.zeros(len(run.batch.rows), dtype)
    tables["vtable"] = run.places - (run.start - len(run.vtable))
    tables["index"] = offsets["ndim"] - offsets["index"]
    tables["ndim"] = coords.shape[1]
    tables["coords"] = coords[run.batch.rows]
    for slot, column in run.batch.columns.items():
        name = str(slot)
        if slot in NUMBER_FIELDS:
            tables[name] = column
        else:
            tables[name] = vectors_at + column - run.places - offsets[name]
    return tables
