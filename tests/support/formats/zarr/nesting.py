"""Random nestings of shards and transposes, and their chunks by numpy."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.formats.zarr.building import (
    BIG,
    CRC,
    LITTLE,
    array_metadata,
    checksum,
    encode_index_by,
    encode_shard,
    rectilinear,
    sharding,
)
from tests.support.formats.zarr.building import regular as regular_grid

type Numbers = NDArray[np.int64]
type Coords = tuple[int, ...]

_MAX_ELEMENTS = 4096
_GZIP = {"name": "gzip", "configuration": {"level": 1}}


@dataclass(frozen=True)
class Nesting:
    """An array of nested shards with a few thousand elements at most."""

    shape: tuple[int, ...]
    edges: tuple[tuple[int, ...], ...]
    """Lengths of the shards along each dimension."""
    inner_chunk_shape: tuple[int, ...]
    document: dict[str, Any]

    @property
    def codecs(self) -> list[Any]:
        """Codec chain of the array."""
        codecs: list[Any] = self.document["codecs"]
        return codecs

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the first shard, and of all others on a regular grid."""
        return tuple(lengths[0] for lengths in self.edges)

    def coords(self) -> Iterator[tuple[int, ...]]:
        """Return the coordinates of every inner chunk in the array, in C order."""
        sizes = zip(self.shape, self.inner_chunk_shape, strict=True)
        return itertools.product(*(range(-(-n // chunk)) for n, chunk in sizes))

    def _shards(self) -> Iterator[tuple[Coords, Numbers]]:
        """Return the coordinates of every shard, and for each element the number of its chunk."""
        numbers = np.arange(math.prod(self._chunk_counts), dtype=np.int64)
        numbers = numbers.reshape(self._chunk_counts)
        for axis, inner in enumerate(self.inner_chunk_shape):
            numbers = np.repeat(numbers, inner, axis=axis)
        for coords in itertools.product(*(range(len(lengths)) for lengths in self.edges)):
            places = zip(self.edges, coords, strict=True)
            starts = ((sum(lengths[:at]), lengths[at]) for lengths, at in places)
            yield coords, numbers[tuple(slice(start, start + n) for start, n in starts)]

    @property
    def _chunk_counts(self) -> Coords:
        """Number of inner chunks along each dimension, up to the end of the last shards."""
        axes = zip(self.edges, self.inner_chunk_shape, strict=True)
        return tuple(sum(lengths) // inner for lengths, inner in axes)

    def build(self, chunks: Mapping[Coords, bytes], gap: bytes = b"gap") -> dict[str, bytes]:
        """Return the objects of the array with only these inner chunks, each followed by *gap*."""
        objects = {"zarr.json": json.dumps(self.document).encode()}
        by_number = {}
        for coords, body in chunks.items():
            number = np.ravel_multi_index(coords, self._chunk_counts) if coords else 0
            by_number[int(number)] = body
        for coords, numbers in self._shards():
            data = _encode(numbers, self.codecs, by_number, gap)
            if data is not None:
                objects["/".join(["c", *map(str, coords)])] = data
        return objects


def _box(coords: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(coords, chunk_shape, strict=True))


def _split(numbers: Numbers, codecs: list[Any]) -> tuple[list[Numbers], Coords] | None:
    """Apply *codecs* up to a sharding codec and split by it; return the parts, and their number
    along each axis, or `None` if there is no sharding codec.
    """
    for codec in codecs:
        if codec["name"] == "transpose":
            order = codec["configuration"]["order"]
            axes = {"C": range(numbers.ndim), "F": range(numbers.ndim)[::-1]}.get(str(order), order)
            numbers = np.transpose(numbers, list(axes))
        if codec["name"] == "sharding_indexed":
            shape = tuple(codec["configuration"]["chunk_shape"])
            counts = tuple(n // c for n, c in zip(numbers.shape, shape, strict=True))
            corners = itertools.product(*map(range, counts))
            return [numbers[_box(corner, shape)] for corner in corners], counts
    return None


def _only(numbers: Numbers) -> int:
    """Return the number that is common to all elements."""
    (number,) = {int(n) for n in numbers.flat}
    return number


def _encode(
    numbers: Numbers, codecs: list[Any], chunks: Mapping[int, bytes], gap: bytes
) -> bytes | None:
    split = _split(numbers, codecs)
    if split is None:
        return chunks.get(_only(numbers))
    parts, counts = split
    names = [codec["name"] for codec in codecs]
    at = names.index("sharding_indexed")
    configuration = codecs[at]["configuration"]
    inner = [_encode(part, configuration["codecs"], chunks, gap) for part in parts]
    if all(data is None for data in inner):
        return None
    data = encode_shard(
        inner,
        location=configuration["index_location"],
        gap=gap,
        encode=partial(encode_index_by, configuration["index_codecs"], counts=counts),
    )
    for _ in names[at + 1 :]:
        data += checksum(data)
    return data


@st.composite
def nestings(draw: st.DrawFn, *, letters: bool = True, regular: bool = False) -> Nesting:
    """Draw an array of up to three dimensions and three levels of shards, which may differ in
    size unless the grid shall be *regular*.
    """
    ndim, depth = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    small = st.integers(1, 2 if ndim == 3 else 3)
    sizes = st.tuples(*[small] * ndim)
    inner = chunk_shape = draw(sizes)
    shapes = []
    for _ in range(depth):
        shapes.append(chunk_shape)
        limit = _MAX_ELEMENTS // math.prod(chunk_shape)
        counts = draw(sizes)
        if math.prod(counts) > limit:
            counts = (1,) * ndim
        chunk_shape = tuple(n * c for n, c in zip(chunk_shape, counts, strict=True))
    codecs = draw(_chains(tuple(reversed(shapes)), tuple(range(ndim)), letters=letters))
    if not regular and draw(st.booleans()):
        lengths = (
            st.lists(st.integers(1, n // size).map(size.__mul__), min_size=1, max_size=3)
            for n, size in zip(chunk_shape, shapes[-1], strict=True)
        )
        edges = draw(st.tuples(*lengths).map(lambda each: tuple(map(tuple, each))))
        shape = tuple(draw(st.integers(1, sum(lengths))) for lengths in edges)
        grid = rectilinear(*(draw(_spellings(lengths)) for lengths in edges))
    else:
        shape = tuple(draw(st.integers(1, 2 * n)) for n in chunk_shape)
        edges = tuple((n,) * -(-size // n) for size, n in zip(shape, chunk_shape, strict=True))
        grid = regular_grid(*chunk_shape)
    document = array_metadata(list(shape), list(chunk_shape), codecs, chunk_grid=grid)
    return Nesting(shape, edges, inner, document)


@st.composite
def _spellings(draw: st.DrawFn, lengths: tuple[int, ...]) -> Any:
    """Draw a spelling of *lengths* in a rectilinear grid."""
    runs = [[length, len(list(same))] for length, same in itertools.groupby(lengths)]
    paired = [run if run[1] > 1 or draw(st.booleans()) else run[0] for run in runs]
    return draw(st.sampled_from([list(lengths), paired, *([lengths[0]] if len(runs) == 1 else [])]))


@st.composite
def _chains(
    draw: st.DrawFn, shapes: tuple[tuple[int, ...], ...], axes: tuple[int, ...], *, letters: bool
) -> list[Any]:
    """Draw the codecs that shard down to *shapes*; *axes* are those of the array."""
    if not shapes:
        return [LITTLE, *draw(st.sampled_from([[], [_GZIP]]))]
    codecs = []
    for _ in range(draw(st.integers(0, 2))):
        order = draw(st.permutations(range(len(axes))))
        axes = tuple(axes[i] for i in order)
        spellings: list[Any] = [list(order)]
        if letters:
            spellings += ["C"] * (order == sorted(order)) + ["F"] * (order == sorted(order)[::-1])
        spelled = draw(st.sampled_from(spellings))
        codecs.append({"name": "transpose", "configuration": {"order": spelled}})
    codec = sharding(
        [shapes[0][axis] for axis in axes],
        draw(_chains(shapes[1:], axes, letters=letters)),
        index_location=draw(st.sampled_from(["start", "end"])),
        index_codecs=draw(_index_codecs(len(axes) + 1)),
    )
    return [*codecs, codec, *draw(st.sampled_from([[], [CRC]]))]


@st.composite
def _index_codecs(draw: st.DrawFn, ndim: int) -> list[Any]:
    """Draw the codecs of an index of *ndim* axes."""
    orders = draw(st.lists(st.permutations(range(ndim)), max_size=2))
    transposes = [{"name": "transpose", "configuration": {"order": each}} for each in orders]
    return [*transposes, draw(st.sampled_from([LITTLE, BIG])), *[CRC] * draw(st.integers(0, 2))]
