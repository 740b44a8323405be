"""Chunk grids of arrays, read from ``zarr.json`` documents that a client or a repository has."""

import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.coords import Coords, Mask, inside
from app.formats.icechunk.snapshot import Dimension, StoredArray
from app.formats.reading import DecodeError
from app.formats.zarr.codecs import codec_name, configuration, shape_of

type Json = Any
type Runs = tuple[tuple[int, int], ...]
"""Sizes of the chunks along a dimension, in elements, each with its number of repeats."""

MAX_CHUNKS: Final = 2**32 - 1
"""Limit along one dimension: coordinates are stored in 4 bytes."""
_FORM: Final = ("data_type", "codecs", "storage_transformers")


@dataclass(frozen=True, slots=True)
class ArrayGrid:
    """Chunks that an array can have: shards, where it is sharded."""

    array: StoredArray
    """Without manifests."""
    chunks: tuple[Runs, ...]
    form: tuple[Json, ...]
    """The other metadata that decide how the bytes of a chunk are read."""

    def keeps(self, coords: Coords, before: "ArrayGrid") -> Mask:
        """Return for each of *coords* `True` if the same chunk had that key *before*."""
        if self.form != before.form or len(self.chunks) != coords.shape[1]:
            return np.zeros(len(coords), np.bool_)
        kept = inside(coords, self.array.grid) & inside(coords, before.array.grid)
        within = coords[kept]
        alike = np.ones(len(within), np.bool_)
        for at, now, then in zip(within.T, self.chunks, before.chunks, strict=True):
            alike &= _sizes(at, now) == _sizes(at, then)
        kept[kept] = alike
        return kept


def read_document(document: bytes) -> dict[str, Json]:
    """Parse the ``zarr.json`` of an array or a group. Raises: `DecodeError`."""
    try:
        node = json.loads(document.decode())
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"zarr.json is not JSON: {error}") from None
    if not isinstance(node, dict) or node.get("zarr_format") != 3:  # noqa: PLR2004
        raise DecodeError("zarr.json is not Zarr v3 metadata: zarr_format is not 3")
    if (kind := node.get("node_type")) not in ("array", "group"):
        raise DecodeError(f"node_type is neither array nor group: {str(kind)[:80]}")
    return node


def read_grid(document: bytes) -> ArrayGrid | None:
    """Return the grid of an array's ``zarr.json``; `None` for a group. Raises: `DecodeError`."""
    node = read_document(document)
    if node["node_type"] == "group":
        return None
    shape = shape_of(node.get("shape"), "shape", least=0)
    chunks = _read_chunks(node.get("chunk_grid"), shape)
    counts = [sum(repeats for _, repeats in runs) for runs in chunks]
    if max(counts, default=0) > MAX_CHUNKS:
        raise DecodeError(f"it has {max(counts)} chunks along a dimension, more than 2^32-1")
    names = _read_names(node.get("dimension_names"), len(shape))
    array = StoredArray(tuple(map(Dimension, shape, counts)), names)
    return ArrayGrid(array, chunks, tuple(node.get(name) for name in _FORM))


def _read_chunks(grid: Json, shape: tuple[int, ...]) -> tuple[Runs, ...]:
    name = codec_name(grid)
    if name == "regular":
        sizes = shape_of(configuration(grid).get("chunk_shape"), "chunk_shape", len(shape), 0)
        return tuple(map(_read_regular, sizes, shape))
    if name == "rectilinear":
        lists = configuration(grid).get("chunk_shapes")
        if not isinstance(lists, list) or len(lists) != len(shape):
            raise DecodeError(f"chunk_shapes does not have {len(shape)} dimensions")
        return tuple(map(_read_rectilinear, lists, shape))
    raise DecodeError(f"the chunk grid is {name:.80}, neither regular nor rectilinear")


def _read_regular(size: int, length: int) -> Runs:
    """Cover *length*; old writers give chunks of size 0 to dimensions of length 0."""
    if not size and length:
        raise DecodeError("chunk_shape is 0 along a dimension that is not")
    return ((size, -(-length // (size or 1))),)


def _read_rectilinear(sizes: Json, length: int) -> Runs:
    """Read one size for all chunks, or a list of sizes and of pairs of size and repeats."""
    if type(sizes) is int and sizes > 0:
        return _read_regular(sizes, length)
    if not isinstance(sizes, list):
        raise DecodeError(f"chunk_shapes has no list of sizes: {str(sizes)[:80]}")
    runs = [[run, 1] if type(run) is int else run for run in sizes]
    for run in runs:
        shape_of(run, "a size and its count", 2, least=0)
    return tuple((size, count) for size, count in runs)


def _read_names(names: Json, ndim: int) -> tuple[str | None, ...] | None:
    """Read ``dimension_names``; the library treats an empty one as absent."""
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != ndim:
        raise DecodeError(f"dimension_names are not {ndim} names: {str(names)[:80]}")
    if not all(name is None or isinstance(name, str) for name in names):
        raise DecodeError("a name in dimension_names is not text")
    return tuple(name or None for name in names)


def _sizes(at: NDArray[np.uint32], runs: Runs) -> NDArray[np.int64]:
    if not runs:
        return np.empty(0, np.int64)
    ends = np.cumsum([repeats for _, repeats in runs])
    sizes = np.array([size for size, _ in runs], np.int64)
    found: NDArray[np.int64] = sizes[np.searchsorted(ends, at, side="right")]
    return found
