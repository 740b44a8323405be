"""Where the references of one array lie in a manifest, by their coordinates.

Every kind of column finds a position, or 0, where no reference can be.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import prod
from struct import Struct
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

type U32s = NDArray[np.uint32]

BLOCK: Final = 2**14
"""So many references at a time need less memory than what malloc maps anew each time."""
_CELLS_PER_REFERENCE: Final = 3
"""Up to so many, a table of all cells is no larger than one of keys, and faster."""
_MAX_CELLS: Final = 2**63
_OBJECTS_NBYTES: Final = 800
_AXIS_NBYTES: Final = 108
"""What a column takes besides its tables, and for each dimension."""


class Axis(NamedTuple):
    """What a box is along one dimension."""

    low: int
    extent: int
    stride: int
    """How many cells there are to the next along this axis."""


class Box(tuple[Axis, ...]):
    """The part of a chunk grid that holds all references, its cells numbered in C order."""

    __slots__ = ()

    @classmethod
    def around(cls, coords: U32s) -> Self | None:
        """Span the box of *coords*, a row for each dimension; `None` if it has too many cells."""
        lows: list[int] = coords.min(axis=1).tolist()
        highs: list[int] = coords.max(axis=1).tolist()
        axes: list[Axis] = []
        cells = 1
        for low, high in zip(reversed(lows), reversed(highs), strict=True):
            axes.append(Axis(low, high - low + 1, cells))
            cells *= high - low + 1
            if cells > _MAX_CELLS:
                return None
        return cls(reversed(axes))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a column of this box holds besides its tables."""
        return _OBJECTS_NBYTES + len(self) * _AXIS_NBYTES

    @property
    def cells(self) -> int:
        """How many cells the box has."""
        return prod(axis.extent for axis in self)

    def key(self, coords: tuple[int, ...]) -> int:
        """Give the number of the cell *coords*, one for each dimension; -1 outside of the box."""
        key = 0
        for at, (low, extent, stride) in zip(coords, self):  # noqa: B905  the faster call
            if not 0 <= at - low < extent:
                return -1
            key += (at - low) * stride
        return key

    def keys(self, coords: U32s) -> NDArray[np.unsignedinteger]:
        """Give the numbers of the cells *coords*, in as few bytes as go."""
        dtype: type[np.uint32 | np.uint64] = np.uint32 if self.cells < 2**32 else np.uint64
        keys: NDArray[np.unsignedinteger] = np.zeros(coords.shape[1], dtype)
        for row, axis in zip(coords, self, strict=True):
            if axis.extent == 1:
                continue
            steps = np.multiply(row - np.uint32(axis.low), dtype(axis.stride), dtype=dtype)
            np.add(keys, steps, out=keys)
        return keys

    def coords(self, keys: NDArray[np.unsignedinteger]) -> U32s:
        """List the coordinates of the cells *keys*, a row each."""
        coords = np.empty((len(keys), len(self)), np.uint32)
        number = keys.dtype.type
        for at, (low, extent, stride) in enumerate(self):
            coords[:, at] = keys // number(stride) % number(extent)
            coords[:, at] += np.uint32(low)
        return coords


@dataclass(frozen=True, slots=True)
class Dense:
    """A position for every cell of the box."""

    box: Box
    tables: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the column holds."""
        return self.tables.nbytes + self.box.nbytes

    def find(self, coords: tuple[int, ...]) -> int:
        """Find the reference of *coords*."""
        key = self.box.key(coords)
        return 0 if key < 0 else self.tables[key]

    def coords(self) -> U32s:
        """List the coordinates of all references, in C order."""
        return self.box.coords(np.flatnonzero(np.asarray(self.tables)).astype(np.uint64))

    def positions(self) -> U32s:
        """List where the references of `coords` lie."""
        tables: U32s = np.asarray(self.tables)
        found: U32s = tables[tables != 0]
        return found


@dataclass(frozen=True, slots=True)
class Sparse:
    """The cells of the box that have a reference, in order, and a position for each."""

    box: Box
    keys: memoryview
    tables: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the column holds."""
        return self.keys.nbytes + self.tables.nbytes + self.box.nbytes

    def find(self, coords: tuple[int, ...]) -> int:
        """Find the first reference of *coords*."""
        key = self.box.key(coords)
        at = bisect_left(self.keys, key)
        return self.tables[at] if at < len(self.keys) and self.keys[at] == key else 0

    def coords(self) -> U32s:
        """List the coordinates of all references, in C order."""
        return self.box.coords(np.unique(np.asarray(self.keys)))

    def positions(self) -> U32s:
        """List where the references of `coords` lie."""
        keys = np.asarray(self.keys)
        first = np.concatenate(([True], keys[1:] != keys[:-1]))
        return np.asarray(self.tables)[first]


@dataclass(frozen=True, slots=True)
class Wide:
    """References in order whose box has too many cells to number them."""

    data: bytes
    """The payload."""
    ndim: int
    indexes: memoryview
    """Where in the payload the coordinates of each lie, in words of 4 bytes."""
    tables: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the column holds."""
        return self.indexes.nbytes + self.tables.nbytes + _OBJECTS_NBYTES

    def find(self, coords: tuple[int, ...]) -> int:
        """Find the first reference of *coords*."""
        index = Struct(f"<{self.ndim}I")

        def read(word: int) -> tuple[int, ...]:
            return index.unpack_from(self.data, 4 * word)

        at = bisect_left(self.indexes, coords, key=read)
        return self.tables[at] if at < len(self.tables) and read(self.indexes[at]) == coords else 0

    def coords(self) -> U32s:
        """List the coordinates of all references, in C order."""
        coords = gather(words_of(self.data), np.asarray(self.indexes), self.ndim)
        return np.ascontiguousarray(coords[:, _mark_first(coords)].T)

    def positions(self) -> U32s:
        """List where the references of `coords` lie."""
        coords = gather(words_of(self.data), np.asarray(self.indexes), self.ndim)
        return np.asarray(self.tables)[_mark_first(coords)]


type Column = Dense | Sparse | Wide


def words_of(data: bytes) -> U32s:
    """See *data* as numbers of 4 bytes; what is left over does not count."""
    return np.frombuffer(data, "<u4", len(data) // 4)


def gather(words: U32s, indexes: U32s, ndim: int) -> U32s:
    """Read the coordinates that lie at *indexes*: a row for each dimension.

    Block after block, so that what is read of a line of memory is all read at once.
    """
    coords = np.empty((ndim, len(indexes)), np.uint32)
    axes = np.arange(ndim)[:, None]
    step = max(1, BLOCK // max(1, ndim))
    for start in range(0, len(indexes), step):
        block = slice(start, start + step)
        coords[:, block] = words.take(indexes[block] + axes, mode="clip")
    return coords


def make_column(data: bytes, tables: U32s, indexes: U32s, ndim: int) -> Column:
    """Make the column of references at *tables*, whose coordinates lie at *indexes* in *data*."""
    coords = gather(words_of(data), indexes, ndim)
    box = Box.around(coords)
    if box is None:
        return _make_wide(data, tables, indexes, coords)
    keys = box.keys(coords)
    rises = bool((keys[1:] > keys[:-1]).all())
    if box.cells <= len(keys) * _CELLS_PER_REFERENCE:
        return _make_dense(box, keys, tables, rises=rises)
    if not rises and (keys[1:] < keys[:-1]).any():
        order = np.argsort(keys, kind="stable")
        keys, tables = keys[order], tables[order]
    return Sparse(box, keys.data, tables.copy().data)


def _make_dense(
    box: Box, keys: NDArray[np.unsignedinteger], tables: U32s, *, rises: bool
) -> Column:
    if rises and box.cells == len(keys):
        return Dense(box, tables.copy().data)
    cells = np.zeros(box.cells, np.uint32)
    cells[keys[::-1]] = tables[::-1]
    return Dense(box, cells.data)


def _make_wide(data: bytes, tables: U32s, indexes: U32s, coords: U32s) -> Column:
    order = np.lexsort(coords[::-1])
    return Wide(data, len(coords), indexes[order].data, tables[order].data)


def _mark_first(coords: U32s) -> NDArray[np.bool_]:
    """Mark the columns of *coords* that differ from the one before."""
    first = np.ones(coords.shape[1], np.bool_)
    first[1:] = (coords[:, 1:] != coords[:, :-1]).any(axis=0)
    return first
