"""Which shard a chunk is in, and which entry of its index ("Binary shard format")."""

import math
from dataclasses import dataclass
from operator import floordiv, lt

from app.formats.zarr_sharding_indexed.index import IndexCodec, IndexLocation


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """A grid of chunks, *chunks_per_shard* of which share a shard."""

    chunk_grid_shape: tuple[int, ...]
    chunks_per_shard: tuple[int, ...]

    @property
    def index(self) -> IndexCodec:
        """The index at the end of each shard: little-endian, without a checksum."""
        entry_count = math.prod(self.chunks_per_shard)
        return IndexCodec(entry_count, IndexLocation.END, big_endian=False, has_checksum=False)

    def holds(self, coords: tuple[int, ...]) -> bool:
        """Tell whether the chunk at *coords* begins inside of the array."""
        return all(map(lt, coords, self.chunk_grid_shape))

    def shard(self, coords: tuple[int, ...]) -> tuple[int, ...]:
        """Find the shard of the chunk at *coords*: "divided and floored per dimension"."""
        return tuple(map(floordiv, coords, self.chunks_per_shard))

    def entry(self, coords: tuple[int, ...]) -> int:
        """Give the number, in its shard's index, of the chunk at *coords*: C order."""
        number = 0
        for at, count in zip(coords, self.chunks_per_shard, strict=True):
            number = number * count + at % count
        return number
