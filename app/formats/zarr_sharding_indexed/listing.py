"""The keys of the inner chunks of an array that may be there."""

import re
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from operator import floordiv
from typing import Final

import numpy as np

from app.formats.grid_keys import Axis, Cell, GridKeys
from app.formats.naming import Candidate, Look, Means, Wanted
from app.formats.steps import Rows
from app.formats.zarr_sharding_indexed.metadata import ArraySpec

_FOLDER: Final = re.compile("(0|[1-9][0-9]{0,18})/", re.ASCII)


@dataclass(frozen=True, slots=True)
class ChunkWalk:
    """Walks the chunks of *array*: those of the shards that are stored."""

    array: ArraySpec

    def __call__(self, wanted: Wanted, means: Means) -> AsyncIterator[Candidate]:
        """Give the wanted keys; see `Walk`."""
        spec = self.array
        inner, shards = spec.inner_chunk_shape, spec.shard_shape
        axes = tuple(
            Axis(-(-size // chunk), shard // chunk)
            for size, chunk, shard in zip(spec.shape, inner, shards, strict=True)
        )
        innermost = self._innermost

        async def stored(shard: Cell) -> Rows:
            return await self._stored(shard, means.look)

        def index(cell: Cell) -> Cell:
            return tuple(map(floordiv, cell, innermost))

        return GridKeys(axes, spec.keys.beginning, stored, index).walk(wanted)

    @property
    def _innermost(self) -> Cell:
        """Tell how many chunks the shards have that hold no others."""
        levels = self.array.unsharded.levels
        shape = levels[-2].inner_chunk_shape if len(levels) > 1 else self.array.shard_shape
        return tuple(map(floordiv, shape, self.array.inner_chunk_shape))

    async def _stored(self, shard: Cell, look: Look) -> Rows:
        """Find by the names what is stored below the first coordinates *shard*."""
        keys, ndim = self.array.keys, len(self.array.shape)
        start = keys.beginning(shard)
        is_last = len(shard) + 1 == ndim or not keys.beginning((*shard, 0)).endswith("/")
        numbers = array("Q")
        async for name in look(start):
            if is_last:
                numbers.extend((keys.parse(name) or ())[len(shard) :])
            elif found := _FOLDER.fullmatch(name, len(start)):
                numbers.append(int(found[1]))
        rows = np.frombuffer(numbers, np.uint64)
        return np.unique(rows.reshape(-1, ndim - len(shard) if is_last else 1), axis=0)
