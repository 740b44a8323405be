"""Surfaces of segments, cut into fragments of several levels of detail and compressed by Draco."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import DracoPy
import numpy as np
import numpy.typing as npt

from shardgate.demo.grids import Field, smooth

BITS: Final = 16
"""Bits of a coordinate within its fragment."""
_PADDING: Final = 2
_SKIN: Final = 0.4
"""Value on the surface; with 0.5 the thinnest axons would break."""
_AXES: Final = 3
_EMPTY: Final = b""

type Rows = npt.NDArray[np.int64]
type Cell = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """A closed surface, or a part of one."""

    points: npt.NDArray[np.float64]
    """Of shape ``(count, 3)``, along x, y and z."""
    triangles: Rows
    """Rows of three points, anticlockwise from outside."""


def surface(mask: npt.NDArray[np.bool_]) -> Mesh:
    """Return the smoothed surface of *mask*, between indexes along x, y and z.

    These are surface nets: each cell of eight voxels that the surface passes has one point, and
    each pair of neighbouring voxels on both sides of it a square of the four cells around.
    """
    values = smooth(np.pad(mask, _PADDING).astype(np.float32)) - _SKIN
    found = [_crossings(values, axis) for axis in range(_AXES)]
    corners, crossings = (np.concatenate(each) for each in zip(*found, strict=True))
    keys = np.ravel_multi_index(tuple(corners.reshape(-1, _AXES).T), values.shape)
    cells, squares = _renumber(keys)
    repeated = crossings.repeat(4, axis=0)
    sums = [np.bincount(squares, weights, len(cells)) for weights in repeated.T]
    points = np.stack(sums, axis=1) / np.bincount(squares)[:, np.newaxis]
    a, b, c, d = squares.reshape(-1, 4).T
    triangles = np.concatenate([np.stack((a, b, c), axis=1), np.stack((a, c, d), axis=1)])
    return Mesh(points - _PADDING, triangles)


def _renumber(numbers: Rows) -> tuple[Rows, Rows]:
    """Return the *numbers* in use, in ascending order, and the place of each of all in these."""
    places = np.zeros(numbers.max(initial=0) + 1, np.int64)
    places[numbers] = 1
    (used,) = places.nonzero()
    places[used] = np.arange(len(used))
    return used, places[numbers]


def _crossings(values: Field, axis: int) -> tuple[Rows, npt.NDArray[np.float64]]:
    """Return the four cells around each step of *values* through zero along *axis*, and where it
    is.
    """
    is_inside = values > 0
    steps = np.argwhere(np.diff(is_inside, axis=axis))
    unit = np.eye(_AXES, dtype=np.int64)
    first, second = values[tuple(steps.T)], values[tuple((steps + unit[axis]).T)]
    crossings = steps.astype(np.float64)
    crossings[:, axis] += first / (first - second)
    across, along = unit[(axis + 1) % _AXES], unit[(axis + 2) % _AXES]
    corners = steps[:, np.newaxis] - np.array([0 * unit[axis], across, across + along, along])
    leaves = first < 0
    corners[leaves] = corners[leaves, ::-1]
    return corners, crossings


def encode(levels: Sequence[Mesh], edges: Sequence[float]) -> tuple[bytes, bytes]:
    """Return the fragments of a mesh, and its manifest, which follows them in a shard.

    *levels* begin with the finest. Their fragments have *edges*, and twice those of the level
    before.
    """
    tables: list[dict[Cell, bytes]] = []
    for level, mesh in enumerate(levels):
        fragments = _fragments(_cut(mesh, edges), np.array(edges) * 2**level)
        # Each fragment has a parent, which is empty where a coarser level has nothing.
        parents = {tuple(at // 2 for at in cell): _EMPTY for cell in (tables[-1] if tables else ())}
        tables.append(parents | fragments)
    counts = map(len, tables)
    scales = (2.0**level for level in range(len(levels)))
    parts = [
        struct.pack(f"<6fI{len(levels)}f", *edges, 0, 0, 0, len(levels), *scales),
        np.zeros((len(levels), _AXES), "<f4").tobytes(),
        np.array([*counts], "<u4").tobytes(),
    ]
    ordered = [sorted(table.items(), key=lambda item: _z_order(item[0])) for table in tables]
    for table in ordered:
        parts.append(np.array([cell for cell, _ in table], "<u4").T.tobytes())
        parts.append(np.array([len(data) for _, data in table], "<u4").tobytes())
    return b"".join(data for table in ordered for _, data in table), b"".join(parts)


def _cut(mesh: Mesh, edges: Iterable[float]) -> Mesh:
    """Cut triangles at all planes between fragments of the finest level."""
    for axis, edge in enumerate(edges):
        for plane in np.arange(edge, mesh.points[:, axis].max(initial=0), edge):
            mesh = _cut_at(mesh, axis, plane)
    return mesh


def _cut_at(mesh: Mesh, axis: int, plane: float) -> Mesh:
    """Cut each triangle that crosses a *plane* into three: a tip, and two of the rest."""
    is_above = (mesh.points[:, axis] > plane)[mesh.triangles]
    count = is_above.sum(axis=1)
    crosses = (count > 0) & (count < _AXES)
    is_tip = is_above[crosses] == (count[crosses] == 1)[:, np.newaxis]
    rows = (is_tip.argmax(axis=1)[:, np.newaxis] + range(_AXES)) % _AXES
    tip, left, right = np.take_along_axis(mesh.triangles[crosses], rows, axis=1).T
    points, total = [mesh.points], len(mesh.points)
    middles = []
    for end in (left, right):
        start, stop = mesh.points[tip], mesh.points[end]
        share = (plane - start[:, axis]) / (stop[:, axis] - start[:, axis])
        points.append(start + (stop - start) * share[:, np.newaxis])
        middles.append(np.arange(total, total + len(tip)))
        total += len(tip)
    first, second = middles
    pieces = [(tip, first, second), (first, left, right), (first, right, second)]
    triangles = [mesh.triangles[~crosses], *(np.stack(each, axis=1) for each in pieces)]
    return Mesh(np.concatenate(points), np.concatenate(triangles))


def _fragments(mesh: Mesh, edges: npt.NDArray[np.float64]) -> dict[Cell, bytes]:
    """Compress the triangles in each cell with *edges*; coordinates are integers within it."""
    cells = (mesh.points[mesh.triangles].mean(axis=1) // edges).astype(np.int64)
    shape = cells.max(axis=0, initial=0) + 1
    used_cells, numbers = _renumber(np.ravel_multi_index(tuple(cells.T), shape))
    fragments = {}
    most = 2**BITS - 1
    for number, cell in enumerate(np.stack(np.unravel_index(used_cells, shape), axis=1)):
        used, triangles = _renumber(mesh.triangles[numbers == number])
        inside = (mesh.points[used] / edges - cell).clip(0, 1) * most
        fragments[tuple(cell.tolist())] = DracoPy.encode(
            inside.round(),
            triangles,
            quantization_bits=BITS,
            quantization_range=most,
            quantization_origin=(0.0, 0.0, 0.0),
            compression_level=7,
        )
    return fragments


def _z_order(cell: Cell) -> int:
    """Return the place of *cell* on a curve that visits eight neighbours in turn, x first."""
    bits = product(range(10), enumerate(cell))
    return sum((at >> bit & 1) << (_AXES * bit + axis) for bit, (axis, at) in bits)
