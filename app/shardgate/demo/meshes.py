"""Surfaces of segments in levels of detail, compressed by Draco."""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import DracoPy
import numpy as np
import numpy.typing as npt

from shardgate.demo.grids import Field

BITS: Final = 16  # bits of a coordinate
_SKIN: Final = 0.4  # value on the surface; with 0.5 the thinnest axons would break
_PADDING: Final = 2


class Mesh(NamedTuple):
    """A closed surface."""

    points: npt.NDArray[np.float64]
    """Of shape ``(count, 3)``, along x, y and z."""
    triangles: npt.NDArray[np.int64]
    """Rows of three points, anticlockwise from outside."""


def surface(mask: npt.NDArray[np.bool_]) -> Mesh:
    """Return the smoothed surface of *mask*, between indexes along x, y and z.

    These are surface nets: each cell of eight voxels that the surface passes has one point, and
    each pair of neighbouring voxels on both sides of it a square of the four cells around.
    """
    values: Field = np.pad(mask, _PADDING).astype(np.float32)
    for axis in range(3):
        values = (np.roll(values, 1, axis) + 2 * values + np.roll(values, -1, axis)) / 4
    values -= _SKIN
    cells = []
    crossings = []
    for axis, unit in enumerate(np.eye(3, dtype=np.int64)):
        steps = np.argwhere(np.diff(values > 0, axis=axis))
        first = values[tuple(steps.T)]
        second = values[tuple((steps + unit).T)]
        crossings.append(steps + (first / (first - second))[:, np.newaxis] * unit)
        across = np.roll(unit, 1)
        along = np.roll(unit, 2)
        around = steps[:, np.newaxis] - np.stack((0 * unit, across, across + along, along))
        leaves = first < 0
        around[leaves] = around[leaves, ::-1]
        cells.append(around.reshape(-1, 3))
    numbers = np.ravel_multi_index(tuple(np.concatenate(cells).T), values.shape)
    _, rows = np.unique(numbers, return_inverse=True)
    of_cells = np.concatenate(crossings).repeat(4, axis=0)
    sums = [np.bincount(rows, column) for column in of_cells.T]
    points = np.stack(sums, axis=1) / np.bincount(rows)[:, np.newaxis]
    squares = rows.reshape(-1, 4)
    triangles = np.concatenate((squares[:, [0, 1, 2]], squares[:, [0, 2, 3]]))
    return Mesh(points - _PADDING, triangles)


def encode(levels: Sequence[Mesh], edges: npt.NDArray[np.float64]) -> tuple[bytes, bytes]:
    """Return the fragments of a mesh, and its manifest, which follows them in a shard.

    *levels* begin with the finest. Each is one fragment, since the objects are small; it begins at
    the origin and has *edges*, or twice those of the level before.
    """
    fragments = [
        _compress(Mesh(mesh.points / (edges * 2**level), mesh.triangles))
        for level, mesh in enumerate(levels)
    ]
    count = len(levels)
    manifest = struct.pack("<6fI", *edges, 0, 0, 0, count)
    manifest += struct.pack(f"<{count}f", *(2.0**level for level in range(count)))
    manifest += bytes(12 * count)  # offsets of vertices
    manifest += struct.pack(f"<{count}I", *[1] * count)
    for each in fragments:
        manifest += struct.pack("<4I", 0, 0, 0, len(each))  # its position and its size
    return b"".join(fragments), manifest


def _compress(mesh: Mesh) -> bytes:
    """Compress *mesh*, whose coordinates are from 0 to 1."""
    if not len(mesh.triangles):
        return b""
    most = 2**BITS - 1
    return bytes(
        DracoPy.encode(
            (mesh.points.clip(0, 1) * most).round(),
            mesh.triangles,
            quantization_bits=BITS,
            quantization_range=most,
            quantization_origin=(0.0, 0.0, 0.0),
            compression_level=7,
        )
    )
