"""The keys of a grid of chunks that may be there, as far as it is known which shards are stored."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from operator import floordiv
from typing import Final

import numpy as np

from app.formats.naming import Candidate, Wanted
from app.formats.steps import Rows, Steps

type Cell = tuple[int, ...]

_KEPT: Final = 64
"""Levels that are remembered: in the order of texts, neighbours go through a few by turns."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a grid."""

    count: int
    """How many cells there are."""
    size: int
    """How many of them a shard has."""
    first: int = 0
    """The number that stands in keys for cell 0."""
    step: int = 1


@dataclass(frozen=True, slots=True)
class GridKeys:
    """Walks the cells of all shards that are stored, in the order of their keys."""

    axes: tuple[Axis, ...]
    spell: Callable[[Cell], str]
    """Writes how the keys begin of all cells whose first coordinates are given."""
    shards: Callable[[Cell], Awaitable[Rows]]
    """Gives the next coordinates, one or more, of the shards whose first ones are given.

    They are rows in C order; each is there once.
    """
    where: Callable[[Cell], Hashable]
    """Tells which cells share an index."""
    _levels: OrderedDict[Cell, Rows] = field(default_factory=OrderedDict)

    async def walk(self, wanted: Wanted) -> AsyncIterator[Candidate]:
        """Give the cells that there may be."""
        rows = await self._below(()) if self.axes else np.empty((1, 0), np.uint64)
        async for cell in self._walk(wanted, (), rows):
            yield Candidate(self.spell(cell), self.where(cell))

    async def _walk(self, wanted: Wanted, cell: Cell, rows: Rows) -> AsyncIterator[Cell]:
        start, dim = self.spell(cell), len(cell)
        if not wanted.meets(start):
            return
        if dim == len(self.axes):
            yield cell
            return
        if not rows.shape[1]:
            sizes = (axis.size for axis in self.axes)
            rows = await self._below(tuple(map(floordiv, cell, sizes)))
        axis, column = self.axes[dim], rows[:, 0]
        steps = Steps(np.unique(column), axis.size, axis.count, axis.first, axis.step)
        for at in steps.walk(wanted.rest(start)):
            shard = np.uint64(at // axis.size)
            low, high = np.searchsorted(column, [shard, shard + np.uint64(1)])
            async for each in self._walk(wanted, (*cell, at), rows[low:high, 1:]):
                yield each
            if wanted.is_past(self.spell((*cell, at))) or not wanted.meets(start):
                return

    async def _below(self, shard: Cell) -> Rows:
        """Give what `shards` does, and remember it a while."""
        if shard in self._levels:
            self._levels.move_to_end(shard)
            return self._levels[shard]
        rows = self._levels[shard] = await self.shards(shard)
        if len(self._levels) > _KEPT:
            self._levels.popitem(last=False)
        return rows
