"""Arrays of chunk coordinates: sorted, deduplicated and compared a million rows at a time."""

from math import prod
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

type U32s = NDArray[np.uint32]
type Coords = U32s
"""Chunk coordinates of shape ``(count, ndim)``; of shards, where the array is sharded."""
type Mask = NDArray[np.bool_]
type Places = NDArray[np.int64]


class BoxAxis(NamedTuple):
    """The extent of a box along one dimension."""

    low: int
    extent: int
    stride: int
    """Cells between neighbours along this dimension."""


class Box(tuple[BoxAxis, ...]):
    """Bounding box of chunk coordinates; its cells are numbered in C order."""

    __slots__ = ()

    @classmethod
    def around(cls, columns: U32s) -> Self | None:
        """Return the box of *columns*, of shape ``(ndim, count)``; `None` for over 2^63 cells."""
        lows: list[int] = columns.min(axis=1).tolist()
        highs: list[int] = columns.max(axis=1).tolist()
        axes: list[BoxAxis] = []
        cells = 1
        for low, high in zip(reversed(lows), reversed(highs), strict=True):
            axes.append(BoxAxis(low, high - low + 1, cells))
            cells *= high - low + 1
            if cells > 2**63:
                return None
        return cls(reversed(axes))

    @property
    def nbytes(self) -> int:
        """Memory of the box itself, in bytes."""
        return 700 + len(self) * 108  # memory of the Python objects, as measured

    @property
    def cells(self) -> int:
        return prod(axis.extent for axis in self)

    def key(self, coords: tuple[int, ...]) -> int:
        """Return the number of the cell *coords*; -1 outside of the box."""
        key = 0
        for at, (low, extent, stride) in zip(coords, self):  # noqa: B905  the faster call
            if not 0 <= at - low < extent:
                return -1
            key += (at - low) * stride
        return key

    def keys(self, columns: U32s) -> NDArray[np.unsignedinteger]:
        """Return the cell numbers of *columns* ``(ndim, count)``, as uint32 if they fit."""
        dtype: type[np.uint32 | np.uint64] = np.uint32 if self.cells < 2**32 else np.uint64
        keys: NDArray[np.unsignedinteger] = np.zeros(columns.shape[1], dtype)
        for row, axis in zip(columns, self, strict=True):
            if axis.extent == 1:
                continue
            # In the type of the keys: the product may exceed the 4 bytes of a coordinate.
            steps = np.multiply(row - np.uint32(axis.low), dtype(axis.stride), dtype=dtype)
            np.add(keys, steps, out=keys)
        return keys

    def coords(self, keys: NDArray[np.unsignedinteger]) -> Coords:
        coords = np.empty((len(keys), len(self)), np.uint32)
        number = keys.dtype.type
        for at, (low, extent, stride) in enumerate(self):
            coords[:, at] = keys // number(stride) % number(extent)
            coords[:, at] += np.uint32(low)
        return coords


class SortedRows(NamedTuple):
    """The order of rows; equal rows keep their order."""

    rows: Places
    first: Mask
    """For each of *rows*, `True` if it differs from the one before."""


def sort_columns(columns: U32s) -> SortedRows:
    """Sort rows given as *columns*, of shape ``(ndim, count)``; the first column decides first."""
    width, count = columns.shape
    first = np.ones(count, np.bool_)
    if not width or not count:
        first[1:] = False
        return SortedRows(np.arange(count), first)
    if (box := Box.around(columns)) is None:
        # Slower than one number for each row, but this box has too many cells for that.
        order = np.lexsort(columns[::-1])
        ordered = columns[:, order]
        first[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
        return SortedRows(order, first)
    keys = box.keys(columns)
    if (keys[1:] > keys[:-1]).all():
        return SortedRows(np.arange(count), first)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first[1:] = keys[1:] != keys[:-1]
    return SortedRows(order, first)


def distinct_rows(coords: Coords) -> Coords:
    """Return *coords* in C order, each once."""
    if coords.shape[1] and increases(coords).all():
        return coords
    order, first = sort_columns(np.ascontiguousarray(coords.T))
    distinct: Coords = coords[order[first]]
    return distinct


def last_of_each(coords: Coords) -> Places:
    """Return the row numbers of *coords* in C order; of equal rows only that of the last."""
    order, first = sort_columns(np.ascontiguousarray(coords.T))
    is_last = np.ones(len(first), np.bool_)
    is_last[:-1] = first[1:]
    return order[is_last]


def union(*batches: Coords) -> tuple[Coords, ...]:
    """Return the coordinates in *batches*, each once and in C order, a batch for each ndim."""
    by_ndim: dict[int, list[Coords]] = {}
    for coords in batches:
        if len(coords):
            by_ndim.setdefault(coords.shape[1], []).append(coords)
    return tuple(
        distinct_rows(some[0] if len(some) == 1 else np.concatenate(some))
        for _, some in sorted(by_ndim.items())
    )


def rows_in(coords: Coords, others: Coords) -> Mask:
    """Return for each of the distinct *coords* `True` if it is in *others* too."""
    found = np.zeros(len(coords), np.bool_)
    if coords.shape[1] != others.shape[1] or not len(others):
        return found
    both = np.concatenate((coords, others))
    order, first = sort_columns(np.ascontiguousarray(both.T))
    # The sort is stable: of equal rows that of *coords* comes first, and the next is no first one.
    ours = order[:-1][~first[1:]]
    found[ours[ours < len(coords)]] = True
    return found


def increases(coords: Coords) -> Mask:
    """Return for each row but the first `True` if it comes after the row before it in C order."""
    after = np.zeros(max(0, len(coords) - 1), np.bool_)
    equal = ~after
    for column in coords.T:
        after |= equal & (column[1:] > column[:-1])
        equal &= column[1:] == column[:-1]
    return after


def inside(coords: Coords, stop: tuple[int, ...], start: tuple[int, ...] = ()) -> Mask:
    """Return for each row `True` if it lies in the half-open box from *start*, or 0, to *stop*."""
    if coords.shape[1] != len(stop):
        return np.zeros(len(coords), np.bool_)
    mask = np.ones(len(coords), np.bool_)
    for axis, high in enumerate(stop):
        mask &= coords[:, axis] < high
        if start and start[axis]:
            mask &= coords[:, axis] >= start[axis]
    return mask
