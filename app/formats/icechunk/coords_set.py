"""Sets of the coords of chunks, a million of them without a million steps of Python."""

from heapq import merge
from itertools import islice
from typing import Final

import numpy as np

from app.formats.icechunk.updated_chunks import Coords

_LEAST_ROWS: Final = 64 * 1024


class CoordsSet:
    """Coords that were added, each once; sorted, those of each number of dimensions apart."""

    def __init__(self) -> None:
        self._by_ndim: dict[int, list[Coords]] = {}
        self._rows: dict[int, int] = {}
        """How many were added since the set was tidied up, by their number of dimensions."""

    def add(self, coords: Coords) -> None:
        """Add *coords*, of shape (count, ndim); tidies up whenever the set might have doubled."""
        ndim = coords.shape[1]
        parts = self._by_ndim.setdefault(ndim, [])
        parts.append(coords)
        self._rows[ndim] = self._rows.get(ndim, 0) + len(coords)
        if self._rows[ndim] > len(parts[0]) + _LEAST_ROWS:
            self._tidy(ndim)

    def count(self) -> int:
        """Count the coords."""
        return sum(len(self._tidy(ndim)) for ndim in self._by_ndim)

    def first(self, limit: int) -> list[list[int]]:
        """Give up to *limit* of the coords, in the order of lists."""
        parts = [self._tidy(ndim)[:limit].tolist() for ndim in self._by_ndim]
        return list(islice(merge(*parts), limit))

    def distinct(self) -> tuple[Coords, ...]:
        """Give all coords, each once and sorted, those of each number of dimensions apart."""
        return tuple(filter(len, map(self._tidy, sorted(self._by_ndim))))

    def _tidy(self, ndim: int) -> Coords:
        parts = self._by_ndim[ndim]
        distinct = _distinct(parts[0] if len(parts) == 1 else np.concatenate(parts))
        self._by_ndim[ndim] = [distinct]
        self._rows[ndim] = 0
        return distinct


def _distinct(coords: Coords) -> Coords:
    """Sort the rows of *coords*, and give each once; what a writer sorted costs one look."""
    if not coords.shape[1]:
        return coords[:1]
    if increases(coords).all():
        return coords
    coords = coords[np.lexsort(coords.T[::-1])]
    return coords[np.concatenate(([True], increases(coords)))]


def rows_in(coords: Coords, others: Coords) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Tell of each row of *coords*, where none is twice, whether it is among *others* too."""
    found = np.zeros(len(coords), np.bool_)
    if coords.shape[1] != others.shape[1] or not len(coords) or not len(others):
        return found
    if not coords.shape[1]:
        return ~found
    both = np.concatenate((coords, others))
    order = np.lexsort(both.T[::-1])  # stable: a row of ours comes before its equals
    follows = ~increases(both[order])
    ours = order[:-1][follows]
    found[ours[ours < len(coords)]] = True
    return found


def increases(coords: Coords) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Tell of every row but the first whether it comes after the one before it."""
    after = np.zeros(max(0, len(coords) - 1), np.bool_)
    equal = ~after
    for column in coords.T:
        after |= equal & (column[1:] > column[:-1])
        equal &= column[1:] == column[:-1]
    return after
