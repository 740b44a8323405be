"""The keys of the chunks of a sharded volume that may be there."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from app.formats.grid_keys import Axis, Cell, GridKeys
from app.formats.naming import Candidate, Item, Means, Wanted
from app.formats.neuroglancer_precomputed.keys import VoxelBounds
from app.formats.neuroglancer_precomputed.survey import PrecomputedShards
from app.formats.steps import Rows
from app.model import MISSING


@dataclass(frozen=True, slots=True)
class VolumeWalk:
    """Walks the chunks *names* of a volume: those of the shards that are stored.

    Without a hash a shard holds a box of the grid, and only such boxes are walked.
    """

    names: VoxelBounds
    shards: PrecomputedShards

    async def __call__(self, wanted: Wanted, means: Means) -> AsyncIterator[Item | Candidate]:
        """Give the wanted keys; see `Walk`."""
        if not wanted.meets(self.shards.prefix):
            return
        stored = await self.shards.stored(means.look)

        async def boxes(_: Cell) -> Rows:
            return self._boxes(stored)

        names, lead = self.names, self.shards.prefix
        axes = tuple(map(Axis, names.grid.shape, self._box, names.voxel_offset, names.chunk_size))
        grid = GridKeys(axes, lambda cell: lead + names.beginning(cell), boxes, self._address)
        async for candidate in grid.walk(wanted):
            number, _ = cast("tuple[int, int]", candidate.where)
            yield candidate if number in stored else Item(candidate.key, MISSING)

    @property
    def _low_bits(self) -> int | None:
        """Tell how many bits of an id say nothing of the shard, below those that tell all."""
        sharding = self.shards.parts[0].sharding
        below = sharding.preshift_bits + sharding.minishard_bits
        is_enough = below + sharding.shard_bits >= self.names.grid.bit_count
        return below if is_enough and not sharding.is_hashed else None

    @property
    def _box(self) -> Cell:
        """Tell how many chunks of a shard are neighbours along each axis; it may be any."""
        bits, grid = self._low_bits, self.names.grid
        return tuple(max(1, count) for count in grid.shape) if bits is None else grid.box(bits)

    def _boxes(self, stored: frozenset[int]) -> Rows:
        """Count in boxes where those of the shards *stored* are."""
        bits, grid, box = self._low_bits, self.names.grid, self._box
        cells = {grid.decode(number << bits) if bits is not None else (0,) * 3 for number in stored}
        rows = np.array(sorted(cells), np.uint64).reshape(-1, len(box))
        return np.unique(rows // np.array(box, np.uint64), axis=0)

    def _address(self, cell: Cell) -> tuple[int, int]:
        return self.shards.parts[0].sharding.address(self.names.grid.encode(cell))
