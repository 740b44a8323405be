"""The shards of an array: as the codec ``sharding_indexed`` writes them, with the index at the end.

To that codec an array of the draft is one whose elements are chunks.
"""

from dataclasses import dataclass
from math import prod

from app.formats.zarr_sharding_indexed.metadata import ArraySpec as ShardedArray
from app.formats.zarr_sharding_indexed.survey import ZarrShards
from app.formats.zarr_sharding_indexed.unshard import ShardingLevel, Unsharded
from app.formats.zarr_storage_transformer.index import ShardGrid
from app.formats.zarr_storage_transformer.keys import ChunkIdentifiers, DataKey, split_data_key
from app.formats.zarr_storage_transformer.metadata import ArraySpec
from app.model import ObjectRef


@dataclass(frozen=True, slots=True)
class DataKeys:
    """Names the chunks, or the shards, of the array at *path* in the whole hierarchy."""

    path: str
    identifiers: ChunkIdentifiers

    def parse(self, key: str) -> tuple[int, ...] | None:
        """Read the coordinates in *key*; `None` if it is no key of this array."""
        found = split_data_key(key)
        return self.identifiers.parse(found.identifier) if found and self._has(found) else None

    def format(self, coords: tuple[int, ...]) -> str:
        """Spell the key of the chunk at *coords*."""
        return DataKey(self.path, self.identifiers.format(coords)).format()

    def beginning(self, coords: tuple[int, ...] = ()) -> str:
        """Spell how the keys of all chunks begin whose first coordinates are *coords*."""
        return DataKey(self.path, self.identifiers.beginning(coords)).format()

    def owns(self, key: str) -> bool:
        """Tell whether *key* is spelled like those of chunks."""
        return (found := split_data_key(key)) is not None and self._has(found)

    def _has(self, key: DataKey) -> bool:
        return key.path == self.path


def shards_of(directory: ObjectRef, path: str, array: ArraySpec) -> ZarrShards:
    """Describe the shards of the *array* at *path* in the hierarchy at *directory*."""
    return ZarrShards(directory, sharded(path, array), f"{DataKey(path, '').format()}/")


def sharded(path: str, array: ArraySpec) -> ShardedArray:
    """Describe the *array* at *path* as that codec would see it."""
    grid = array.grid
    return ShardedArray(
        shape=grid.chunk_grid_shape,
        shard_shape=grid.chunks_per_shard,
        keys=DataKeys(path, array.identifiers),
        unsharded=Unsharded((_level(grid),), ("bytes",)),
        chunk=array.chunk,
    )


def _level(grid: ShardGrid) -> ShardingLevel:
    counts = grid.chunks_per_shard
    strides = tuple(prod(counts[axis + 1 :]) for axis in range(len(counts)))
    return ShardingLevel((1,) * len(counts), counts, strides, grid.index)
