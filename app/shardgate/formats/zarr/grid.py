"""``chunk_grid`` of Zarr v3: ``regular``, or the extension ``rectilinear``."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardgate.formats.documents import Json
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.codecs import codec_name, configuration, shape_of

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

    def edge_lengths(self, axis: int, at: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the lengths along *axis* of the chunks at the positions *at* in the grid."""
        lengths, repeats = np.array(self.edges[axis], np.int64).reshape(-1, 2).T
        found: NDArray[np.int64] = lengths[np.searchsorted(np.cumsum(repeats), at, side="right")]
        return found


def read_chunk_shape(chunk_grid: Json, ndim: int | None = None) -> tuple[int, ...] | None:
    """Return the ``chunk_shape`` of a regular grid; `None` for another. Raises: `DecodeError`."""
    if codec_name(chunk_grid) != "regular":
        return None
    return shape_of(configuration(chunk_grid).get("chunk_shape"), "chunk_shape", ndim, least=0)


def parse_grid(chunk_grid: Json, shape: tuple[int, ...]) -> ChunkGrid:
    """Read the grid of an array of *shape*. Raises: `DecodeError`."""
    if (sizes := read_chunk_shape(chunk_grid, len(shape))) is not None:
        return ChunkGrid(tuple(map(_repeat, sizes, shape)))
    if (name := codec_name(chunk_grid)) != "rectilinear":
        raise DecodeError(f"the chunk grid is {name:.80}, neither regular nor rectilinear")
    lists = configuration(chunk_grid).get("chunk_shapes")
    if not isinstance(lists, list) or len(lists) != len(shape):
        raise DecodeError(f"chunk_shapes does not have {len(shape)} dimensions")
    return ChunkGrid(tuple(map(_read_edges, lists, shape)))


def _repeat(size: int, length: int) -> EdgeLengths:
    """Cover *length*; old writers give chunks of size 0 to dimensions of length 0."""
    if not size and length:
        raise DecodeError("chunk_shape is 0 along a dimension that is not")
    return ((size, -(-length // (size or 1))),)


def _read_edges(sizes: Json, length: int) -> EdgeLengths:
    """Read one size for all chunks, or a list of sizes and of pairs of size and repeats."""
    if type(sizes) is int and sizes > 0:
        return _repeat(sizes, length)
    if not isinstance(sizes, list):
        raise DecodeError(f"chunk_shapes has no list of sizes: {str(sizes)[:80]}")
    runs = [[run, 1] if type(run) is int else run for run in sizes]
    pairs = (shape_of(run, "a size and its count", 2, least=0) for run in runs)
    return tuple((size, count) for size, count in pairs)
