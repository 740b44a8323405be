"""What of an array's ``zarr.json`` decides which chunks there are, and how their bytes are read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from app.formats.icechunk.stored_nodes import Dimension, StoredArray
from app.formats.icechunk.updated_chunks import Coords
from app.formats.reading import DecodeError
from app.formats.zarr.codecs import codec_name, configuration, shape_of

type Json = Any
type Runs = tuple[tuple[int, int], ...]
"""How long the chunks along a dimension are, in elements, and how many of them in a row are so."""

_MOST_CHUNKS: Final = 2**32 - 1
_FORM: Final = ("data_type", "codecs", "storage_transformers")


@dataclass(frozen=True, slots=True)
class ArrayGrid:
    """The chunks that an array may have: shards, where it is sharded."""

    array: StoredArray
    """Without manifests."""
    chunks: tuple[Runs, ...]
    """Along each dimension."""
    form: tuple[Json, ...]
    """What else decides how the bytes of a chunk are read."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many chunks there are along each dimension."""
        return tuple(dimension.num_chunks for dimension in self.array.dimensions)

    def keeps(self, coords: Coords, before: "ArrayGrid") -> npt.NDArray[np.bool_]:
        """Tell of each chunk that the array had *before* whether it is still the same chunk."""
        if self.form != before.form or len(self.chunks) != coords.shape[1]:
            return np.zeros(len(coords), np.bool_)
        kept = inside(coords, self.counts) & inside(coords, before.counts)
        within = coords[kept]
        alike = np.ones(len(within), np.bool_)
        for at, now, then in zip(within.T, self.chunks, before.chunks, strict=True):
            alike &= _sizes(at, now) == _sizes(at, then)
        kept[kept] = alike
        return kept


def inside(coords: Coords, counts: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Tell of each chunk whether it is in a grid of *counts* chunks along each dimension."""
    if coords.shape[1] != len(counts):
        return np.zeros(len(coords), np.bool_)
    return (coords < np.array(counts, np.uint64)).all(axis=1)


def read_grid(document: bytes) -> ArrayGrid | None:
    """Read what ``zarr.json`` says of an array; `None` for a group.

    Raises: `DecodeError` for what is neither, contradicts itself, or has too many chunks.
    """
    try:
        node = json.loads(document.decode())
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"its zarr.json is no JSON: {error}") from None
    if not isinstance(node, dict) or node.get("zarr_format") != 3:  # noqa: PLR2004
        raise DecodeError("its zarr.json is no Zarr v3 metadata")
    match node.get("node_type"):
        case "group":
            return None
        case "array":
            return _read_array(node)
        case other:
            raise DecodeError(f"node_type is neither array nor group: {str(other)[:80]}")


def _read_array(node: dict[str, Json]) -> ArrayGrid:
    shape = shape_of(node.get("shape"), "shape", least=0)
    chunks = _read_chunks(node.get("chunk_grid"), shape)
    counts = [sum(repeats for _, repeats in runs) for runs in chunks]
    if max(counts, default=0) > _MOST_CHUNKS:
        raise DecodeError(f"it has {max(counts)} chunks along a dimension, more than 2^32-1")
    array = StoredArray(
        tuple(map(Dimension, shape, counts)), _read_names(node.get("dimension_names"), len(shape))
    )
    return ArrayGrid(array, chunks, tuple(node.get(name) for name in _FORM))


def _read_chunks(grid: Json, shape: tuple[int, ...]) -> tuple[Runs, ...]:
    name = codec_name(grid)
    if name == "regular":
        sizes = shape_of(configuration(grid).get("chunk_shape"), "chunk_shape", len(shape), 0)
        return tuple(map(_regular, sizes, shape))
    if name == "rectilinear":
        lists = configuration(grid).get("chunk_shapes")
        if not isinstance(lists, list) or len(lists) != len(shape):
            raise DecodeError(f"chunk_shapes does not have {len(shape)} dimensions")
        return tuple(map(_rectilinear, lists, shape))
    raise DecodeError(f"the chunk grid is {name:.80}, neither regular nor rectilinear")


def _regular(size: int, length: int) -> Runs:
    """Cover *length*; old writers give chunks of no size to dimensions of no length."""
    if not size and length:
        raise DecodeError("chunk_shape is 0 along a dimension that is not")
    return ((size, -(-length // (size or 1))),)


def _rectilinear(sizes: Json, length: int) -> Runs:
    """Read the sizes of chunks: one for all, or each, in a row of like ones with their count."""
    if type(sizes) is int and sizes > 0:
        return _regular(sizes, length)
    if not isinstance(sizes, list):
        raise DecodeError(f"chunk_shapes has no list of sizes: {str(sizes)[:80]}")
    runs = [[run, 1] if type(run) is int else run for run in sizes]
    for run in runs:
        shape_of(run, "a size and its count", 2, least=0)
    return tuple((size, count) for size, count in runs)


def _read_names(names: Json, ndim: int) -> tuple[str | None, ...] | None:
    """Read ``dimension_names``; the library takes an empty one for none."""
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != ndim:
        raise DecodeError(f"dimension_names are not {ndim} names: {str(names)[:80]}")
    if not all(name is None or isinstance(name, str) for name in names):
        raise DecodeError("a name in dimension_names is no text")
    return tuple(name or None for name in names)


def _sizes(at: npt.NDArray[np.uint32], runs: Runs) -> npt.NDArray[np.int64]:
    """Give the size of each chunk along a dimension that has *runs*."""
    if not runs:
        return np.empty(0, np.int64)
    ends = np.cumsum([repeats for _, repeats in runs])
    sizes = np.array([size for size, _ in runs], np.int64)
    found: npt.NDArray[np.int64] = sizes[np.searchsorted(ends, at, side="right")]
    return found
