"""Sharded arrays, and the arrays of inner chunks that are served for them."""

from dataclasses import dataclass
from operator import floordiv, lt, mul, sub
from typing import NamedTuple

from shardgate.formats.documents import Json
from shardgate.formats.listing import GridAxis
from shardgate.formats.zarr.codecs import ChunkForm
from shardgate.formats.zarr.grid import RectilinearAxis, ShardEdges
from shardgate.formats.zarr.index import IndexCodec, ShardingLevel
from shardgate.formats.zarr.keys import ChunkKeys


class ShardAddress(NamedTuple):
    """The shard that holds an inner chunk."""

    coords: tuple[int, ...]
    levels: tuple[ShardingLevel, ...]
    """Its sharding codecs, outermost first."""
    element: tuple[int, ...]
    """The first array element of the inner chunk, by which *levels* find their entries."""

    @property
    def entry(self) -> tuple[int, ...]:
        """The index entry of the inner chunk at each level."""
        return tuple(level.entry(self.element) for level in self.levels)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A sharded array and the array of inner chunks served for it; shapes are in array elements."""

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    keys: ChunkKeys
    """Of the inner chunks, and of the shards."""
    levels: tuple[ShardingLevel, ...]
    """The sharding codecs, at least one, outermost first."""
    codecs: tuple[Json, ...]
    """Of the innermost chunks, which are served."""
    chunk: ChunkForm

    @property
    def inner_chunk_shape(self) -> tuple[int, ...]:
        """Shape of the chunks that are served."""
        return self.levels[-1].inner_chunk_shape

    @property
    def indexes(self) -> tuple[IndexCodec, ...]:
        return tuple(level.index for level in self.levels)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, but for what every array takes."""
        return 0

    @property
    def axes(self) -> tuple[GridAxis, ...]:
        """The grid of the inner chunks."""
        shapes = zip(self.shape, self.inner_chunk_shape, self.shard_shape, strict=True)
        return tuple(GridAxis(-(-size // inner), shard // inner) for size, inner, shard in shapes)

    def origin(self, coords: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the first array element of the inner chunk at *coords*; `None` off the array."""
        origin = tuple(map(mul, coords, self.levels[-1].inner_chunk_shape))
        return origin if all(map(lt, origin, self.shape)) else None

    def explain_absence(self, key: str, name: str) -> str:
        """Return the grid of the array *name* if *key* is like that of a chunk, and not on it."""
        coords = self.keys.parse(key)
        if not self.keys.owns(key) or (coords is not None and self.origin(coords) is not None):
            return ""
        return f"{name or 'the array'} has {self.keys.describe([axis.count for axis in self.axes])}"

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """Number of shards along each dimension that hold elements of the array."""
        sizes = zip(self.shape, self.shard_shape, strict=True)
        return tuple(-(-size // shard) for size, shard in sizes)

    def shard(self, origin: tuple[int, ...]) -> ShardAddress:
        """Return the shard that holds the array element *origin*."""
        coords = tuple(map(floordiv, origin, self.shard_shape))
        return ShardAddress(coords, self.levels, origin)

    def shard_origin(self, coords: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first array element of the shard at *coords*."""
        return tuple(map(mul, coords, self.shard_shape))


@dataclass(frozen=True, slots=True)
class RectilinearArraySpec(ArraySpec):
    """An array whose shards differ in size; *shard_shape* and *levels* are those of the largest."""

    edges: tuple[ShardEdges, ...]

    @property
    def nbytes(self) -> int:
        return sum(edges.nbytes for edges in self.edges)

    @property
    def axes(self) -> tuple[GridAxis, ...]:
        each = zip(self.shape, self.inner_chunk_shape, self.edges, strict=True)
        return tuple(
            RectilinearAxis(-(-size // inner), edges=edges, chunk_length=inner)
            for size, inner, edges in each
        )

    @property
    def shard_counts(self) -> tuple[int, ...]:
        axes = zip(self.shape, self.edges, strict=True)
        # The edges may reach past the array.
        return tuple(size and edges.shard_of(size - 1) + 1 for size, edges in axes)

    def shard(self, origin: tuple[int, ...]) -> ShardAddress:
        axes = zip(self.edges, origin, strict=True)
        coords = tuple(edges.shard_of(at) for edges, at in axes)
        starts, shape = zip(*map(ShardEdges.extent, self.edges, coords), strict=True)
        outermost = self.levels[0].resized(shape)
        return ShardAddress(coords, (outermost, *self.levels[1:]), tuple(map(sub, origin, starts)))

    def shard_origin(self, coords: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(edges.extent(at)[0] for edges, at in zip(self.edges, coords, strict=True))
