"""``chunk_grid`` of Zarr v3: ``regular``, or the extension ``rectilinear``."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardgate.formats.documents import Json
from shardgate.formats.listing import GridAxis
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.codecs import MAX_SIZE, codec_name, configuration, shape_of

type EdgeLengths = tuple[tuple[int, int], ...]
"""Lengths of the chunks along a dimension, in elements, each with its number of repeats."""


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """The chunks that an array can have: shards, where it is sharded."""

    edges: tuple[EdgeLengths, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return tuple(sum(repeats for _, repeats in edges) for edges in self.edges)

    def extents(self, axis: int, at: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the first array elements along *axis*, and the lengths, of the chunks at the
        positions *at* in the grid; of shape ``(2, count)``, modulo 2^64.
        """
        lengths, repeats = np.array(self.edges[axis], np.int64).reshape(-1, 2).T
        stops = np.cumsum(lengths * repeats)
        numbers = np.cumsum(repeats)
        run = np.searchsorted(numbers, at, side="right")
        found: NDArray[np.int64] = np.stack(
            [stops[run] - (numbers[run] - at) * lengths[run], lengths[run]]
        )
        return found


@dataclass(frozen=True, slots=True)
class ShardEdges:
    """The shards along a dimension, in runs of shards of one length."""

    lengths: Sequence[int]
    """In array elements."""
    starts: Sequence[int]
    """The first array element of each run."""
    numbers: Sequence[int]
    """The position in the grid of the first shard of each run."""

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]], size: int) -> Self:
        """Check and index the shards of a dimension of *size* elements. Raises: `DecodeError`."""
        lengths, starts, numbers = array("q"), array("q"), array("q")
        start = number = 0
        for length, repeats in runs:
            if not length or start > MAX_SIZE:
                raise DecodeError("chunk_shapes has a size of 0, or a sum above 2^63-1")
            if not lengths or length != lengths[-1]:
                lengths.append(length)
                starts.append(start)
                numbers.append(number)
            start += length * repeats
            number += repeats
        if not lengths:
            raise DecodeError("chunk_shapes has no shards, whose chunks could be served")
        if start < size:
            raise DecodeError(f"chunk_shapes covers {start} elements of {size}")
        return cls(lengths, starts, numbers)

    @property
    def nbytes(self) -> int:
        return 3 * 8 * len(self.starts)

    def shard_of(self, element: int) -> int:
        """Return the position in the grid of the shard that holds the array element *element*."""
        run = bisect_right(self.starts, element) - 1
        return self.numbers[run] + (element - self.starts[run]) // self.lengths[run]

    def extent(self, shard: int) -> tuple[int, int]:
        """Return the first array element of a shard, and its length."""
        run = bisect_right(self.numbers, shard) - 1
        length = self.lengths[run]
        return self.starts[run] + (shard - self.numbers[run]) * length, length


@dataclass(frozen=True, slots=True, kw_only=True)
class RectilinearAxis(GridAxis):
    """One dimension of a grid of chunks in shards of different lengths."""

    edges: ShardEdges
    chunk_length: int
    """In array elements."""

    def shard_of(self, cell: int) -> int:
        return self.edges.shard_of(cell * self.chunk_length)

    def first_cell(self, shard: int) -> int:
        return self.edges.extent(shard)[0] // self.chunk_length


def read_chunk_shape(chunk_grid: Json, ndim: int | None = None) -> tuple[int, ...] | None:
    """Return the ``chunk_shape`` of a regular grid; `None` for another. Raises: `DecodeError`."""
    if codec_name(chunk_grid) != "regular":
        return None
    return shape_of(configuration(chunk_grid).get("chunk_shape"), "chunk_shape", ndim, least=0)


def parse_grid(chunk_grid: Json, shape: tuple[int, ...]) -> ChunkGrid:
    """Read the grid of an array of *shape*. Raises: `DecodeError`."""
    return ChunkGrid(tuple(map(tuple, _read_axes(chunk_grid, shape))))


def read_shard_edges(chunk_grid: Json, shape: tuple[int, ...]) -> tuple[ShardEdges, ...]:
    """Read the ``rectilinear`` grid of a sharded array of *shape*. Raises: `DecodeError`."""
    axes = _read_axes(chunk_grid, shape)
    if (kind := configuration(chunk_grid).get("kind")) != "inline":
        raise DecodeError(f"the kind of the chunk grid is not inline: {str(kind)[:80]}")
    return tuple(map(ShardEdges.of, axes, shape))


def _read_axes(chunk_grid: Json, shape: tuple[int, ...]) -> list[Iterable[tuple[int, int]]]:
    """Return the `EdgeLengths` of each dimension; long lists are read as they are iterated over."""
    if (sizes := read_chunk_shape(chunk_grid, len(shape))) is not None:
        return list(map(_repeat, sizes, shape))
    if (name := codec_name(chunk_grid)) != "rectilinear":
        raise DecodeError(f"the chunk grid is {name:.80}, neither regular nor rectilinear")
    lists = configuration(chunk_grid).get("chunk_shapes")
    if not isinstance(lists, list) or len(lists) != len(shape):
        raise DecodeError(f"chunk_shapes does not have {len(shape)} dimensions")
    return list(map(_read_edges, lists, shape))


def _repeat(size: int, length: int) -> EdgeLengths:
    """Cover *length*; old writers give chunks of size 0 to dimensions of length 0."""
    if not size and length:
        raise DecodeError("chunk_shape is 0 along a dimension that is not")
    return ((size, -(-length // (size or 1))),)


def _read_edges(sizes: Json, length: int) -> Iterable[tuple[int, int]]:
    """Read one size for all chunks, or a list of sizes and of pairs of size and repeats."""
    if isinstance(sizes, list):
        return map(_read_run, sizes)
    (size,) = shape_of([sizes], "chunk_shapes")
    return _repeat(size, length)


def _read_run(run: Json) -> tuple[int, int]:
    if type(run) is int and 0 <= run <= MAX_SIZE:  # many lists have a size for each chunk
        return run, 1
    pair = run if isinstance(run, list) else [run, 1]
    size, count = shape_of(pair, "a size and its count", 2, 0)
    return size, count
