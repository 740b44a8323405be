"""FlatBuffer tables read and written in bulk, by numpy: all of one type, or those of chunks.

`ChunkRef` of manifests and `ChunkIndices` of transaction logs both begin with a vector of
coordinates, and both are listed in tables of arrays: node id, then a vector of such tables.
"""

from collections.abc import Buffer as Bytes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardgate.errors import ConflictError
from shardgate.formats.icechunk.coords import Coords, Places, U32s
from shardgate.formats.icechunk.flatbuffers import (
    NODE_ID,
    POSITION,
    TABLE_NBYTES,
    U32,
    FlatBufferReader,
    TableType,
    required,
)
from shardgate.formats.reading import DecodeError

BLOCK: Final = 2**14
"""Tables read at a time: few enough that malloc reuses the memory of temporary arrays."""
MAX_NBYTES: Final = 2**31 - 1
"""Limit of a FlatBuffer that the library reads."""
ARRAY_CHUNKS: Final = TableType(NODE_ID.required("node_id"), POSITION)
"""Table of an array and its chunks."""

_PER_STEP: Final = 8  # tables, or coordinates, that numpy reads in a step
_ALIGN: Final = 8
_WORD: Final = U32.size
_END_MASKS: Final = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
"""Bytes of the last word of a vector that belong to it, by its length modulo 4."""


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
    for node_id, chunks in reader.tables(ARRAY_CHUNKS.lazy, at):
        start, count = reader.vector(required(chunks, vector), 4)
        if start % 4:
            raise DecodeError("damaged FlatBuffer: an offset is not aligned")
        reader.spend(count * 64)  # three columns, and arrays for a while
        reader.steps.spend(8 + count // _PER_STEP)  # beside those of its table
        parts.setdefault(node_id, []).append((start // 4, count))
    found: list[tuple[bytes, int, int]] = []
    stop = 0
    for node_id, vectors in parts.items():
        start = stop
        stop += sum(count for _, count in vectors)
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
        # Positions fit into 4 bytes, as `MAX_NBYTES` is below 2^31.
        located[0, block] = table
        located[1, block] = (index >> 2) + 1
        located[2, block] = walk.count(index)
    coordinate_count = int(located[2].sum(dtype=np.uint64))
    reader.spend(coordinate_count * 16)  # for columns, cell numbers and their order
    reader.steps.spend(coordinate_count // _PER_STEP)
    return located


class _Walk:
    """Reads numbers at many positions of a payload; positions are int64, so that none wraps."""

    def __init__(self, data: bytes) -> None:
        self._nbytes = len(data)
        self._words = words_of(data)
        # Views without a copy; bytes after the last whole number belong to no aligned table.
        self._halves = np.frombuffer(data, "<u2", len(data) // 2)

    def follow(self, at: Places) -> Places:
        # Clipped in place of checked: what is out of the payload fails in `_check`.
        found = at + self._words.take(at >> 2, mode="clip")
        return self._check(found, 4, 4)

    def first_field(self, table: Places) -> Places:
        offset = self._words.view("<i4").take(table >> 2, mode="clip")
        vtable = self._check(table - offset, 4, 2)
        nbytes = self._halves.take(vtable >> 1, mode="clip").astype(np.int64)
        self._check(vtable + nbytes, 0, 1)
        field = self._halves.take((vtable >> 1) + 2, mode="clip").astype(np.int64)
        if nbytes.min() < 6 or not field.all():  # noqa: PLR2004  no room for the first field
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

    def column(self, slot: int) -> NDArray[Any]:
        """Read a field of all tables, a number or an id; an absent number is 0."""
        at = self.fields[:, slot]
        present = np.flatnonzero(at > 0)
        code = self.kind.fields[slot].code
        dtype = np.dtype(f"V{code[:-1]}" if code.endswith("s") else f"<{code}")
        found = gather_numbers(self.data, at[present], dtype.str)
        if len(found) == len(at):
            return found
        values = np.zeros(len(at), dtype)
        values[present] = found
        return values


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
    # So that the position of an absent field is negative.
    places = np.where(places, places, -(2**62)).reshape(len(layouts), len(kind.fields))
    return Rows(data, kind, tables, places.take(inverse, axis=0) + tables[:, None])


def read_targets(reader: FlatBufferReader, at: int) -> Places:
    """Return the positions that the offsets in the vector at *at* lead to."""
    start, count = reader.vector(at, _WORD)
    slots = start + _WORD * np.arange(count)
    targets: Places = slots + gather_numbers(reader.data, slots, "<u4")
    return targets


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
    kind = np.dtype(dtype)
    nbytes = kind.itemsize
    if not places.size:
        return np.empty(0, dtype)
    if places.min() < 0 or places.max() > len(data) - nbytes:
        raise DecodeError("damaged FlatBuffer: an offset leads out of it")
    if kind.kind in "iu" and not np.bitwise_or.reduce(places) % nbytes:  # takes half the time
        return np.frombuffer(data, dtype, len(data) // nbytes).take(places // nbytes)
    return np.ndarray((len(data) - nbytes + 1,), dtype, data, strides=(1,))[places]


def distinct_of(values: Places) -> tuple[Places, Places]:
    """Return the sorted distinct *values*, and the place of each value among them; sorted ones,
    the usual case, are not sorted again.
    """
    if (values[1:] < values[:-1]).any():
        distinct, inverse = np.unique(values, return_inverse=True)
        return distinct, inverse
    first = np.ones(len(values), np.bool_)
    first[1:] = values[1:] != values[:-1]
    return values[first], np.cumsum(first) - 1


class Vectors:
    """Texts and inline chunks, to be written as vectors behind the tables that lead to them. At
    least one 0 follows each of them, which ends a text.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._pieces = [bytes(_WORD)]
        self._nbytes = _WORD

    def add(self, data: bytes) -> int:
        """Write *data* once, and return its position, which is never 0."""
        if (place := self._places.get(data)) is None:
            # From one to four: at least one NUL, which ends a text.
            padding = bytes(_WORD - len(data) % _WORD)
            place = self._places[data] = self._append(U32.pack(len(data)) + data + padding)
        return place

    def copy(self, data: bytes, starts: Places) -> Places:
        """Write the vectors at *starts* of *data*, each once, and return their positions."""
        distinct, inverse = distinct_of(starts)
        counts = gather_numbers(data, distinct, "<u4").astype(np.int64)
        if (distinct % _WORD).any() or (distinct + counts + _WORD > len(data)).any():
            raise DecodeError("damaged FlatBuffer: a vector reaches out of it, or is not aligned")
        lengths = counts // _WORD + 2
        stops = np.cumsum(lengths)
        check_nbytes(self._nbytes + _WORD * int(lengths.sum()))
        words = _copy_words(data, distinct // _WORD, lengths, stops)
        words[stops - 1] &= _END_MASKS[counts % _WORD]
        places: Places = self._append(words.tobytes()) + _WORD * (stops - lengths)[inverse]
        return places

    def joined(self) -> bytes:
        return b"".join(self._pieces)

    def _append(self, data: bytes) -> int:
        place = self._nbytes
        self._nbytes += len(data)
        check_nbytes(self._nbytes)
        self._pieces.append(data)
        return place


def _copy_words(data: bytes, starts: Places, lengths: Places, stops: Places) -> U32s:
    """Copy *lengths* words from *starts* to where *stops* end: adjacent vectors at once, if most
    are, or else a block of vectors at a time.
    """
    # Padded, as the last vector may end within a word.
    words = np.frombuffer(data + bytes(-len(data) % _WORD), "<u4")
    copied = np.empty(int(lengths.sum()), np.uint32)
    runs = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    # Slices are faster only for runs of 64 vectors and more.
    if len(runs) < len(starts) // 64:
        for first, last in pairwise([0, *runs.tolist(), len(starts)]):
            begin = int(stops[first] - lengths[first])
            start = int(starts[first])
            piece = words[start : start + int(stops[last - 1]) - begin]
            copied[begin : begin + len(piece)] = piece
        return copied
    # 2^18 words at a time, so that the indexes take little memory.
    turns = np.searchsorted(stops, np.arange(2**18, len(copied), 2**18))
    edges = np.unique([0, *turns.tolist(), len(stops)])
    for first, last in pairwise(edges.tolist()):
        begin = int(stops[first] - lengths[first])
        end = int(stops[last - 1])
        shifts = starts[first:last] - (stops[first:last] - lengths[first:last])
        at = np.repeat(shifts, lengths[first:last]) + np.arange(begin, end)
        copied[begin:end] = words.take(at, mode="clip")
    return copied


def vector_at(data: bytes, at: int) -> bytes:
    """Return the bytes of the vector at *at* in *data*."""
    if 0 <= at <= len(data) - _WORD:
        start = at + _WORD
        stop = start + U32.unpack_from(data, at)[0]
        if stop <= len(data):
            return data[start:stop]
    raise DecodeError("damaged FlatBuffer: a vector reaches out of it")


def new_tables(coords: Coords, fields: Sequence[tuple[str, str]] = ()) -> NDArray[Any]:
    """Allocate tables with *coords* behind each, and more *fields*, which are 0."""
    ndim = coords.shape[1]
    table = [("vtable", "<i4"), ("index", "<u4"), *fields]
    end = [("ndim", "<u4"), ("coords", "<u4", (ndim,))]
    unpadded = np.dtype([*table, *end]).itemsize
    tables = np.zeros(len(coords), [*table, *end, ("padding", f"V{-unpadded % _ALIGN}")])
    tables["index"] = np.dtype(table).itemsize - _WORD
    tables["ndim"] = ndim
    tables["coords"] = coords
    return tables


def write_table_vector(
    batches: Sequence[tuple[bytes, NDArray[Any]]], vectors: bytes = b""
) -> list[Bytes]:
    """Write a vector of tables, and *vectors* behind them. Each of *batches* has vtables, and
    tables that have the position of their vtable among these.
    """
    count = sum(len(tables) for _, tables in batches)
    # An even number of words, so that the tables begin at a multiple of 8.
    head = np.zeros(1 + count + (1 + count) % 2, "<u4")
    head[0] = count
    pieces: list[Bytes] = [head]
    row = 1
    at = head.nbytes
    for vtables, tables in batches:
        places = at + len(vtables) + tables.itemsize * np.arange(len(tables))
        rows = np.arange(row, row + len(tables))
        # So far the position of the vtable in *vtables*, from now on the distance back to it.
        tables["vtable"] = places - at - tables["vtable"]
        head[rows] = places - _WORD * rows
        pieces += vtables, tables
        row += len(tables)
        at += len(vtables) + tables.nbytes
    check_nbytes(at + len(vectors))
    return [*pieces, vectors]


def check_nbytes(nbytes: int) -> None:
    """Raise `ConflictError` where a manifest of *nbytes* could not be read."""
    if nbytes > MAX_NBYTES:
        raise ConflictError(
            f"a manifest would exceed {MAX_NBYTES} bytes, the limit of the library: split manifests"
        )
