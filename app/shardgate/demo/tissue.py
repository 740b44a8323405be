"""Invented nerve tissue: branching neurites that fill a block, seen by an electron microscope."""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from shardgate.demo.grids import Field, doubled, following, halved, interleaved, noise, smooth

SHAPE: Final = (160, 256, 256)
"""Voxels along z, y and x; neither a multiple of the shard: the last shards reach past the edge."""
STEPS: Final = (2.0, 1.0, 1.0)
"""Size of a voxel, in units of `NANOMETERS`."""
NANOMETERS: Final = 20
_COARSE_SHAPE: Final = tuple(size // 2 for size in SHAPE)
_COARSE_STEPS: Final = np.array(STEPS, np.float32) * 2
_EXTENT: Final = np.array([320, 256, 256], np.float32)
"""Edges of the block, in units."""
_NEURITES: Final = 84
_TRIES: Final = 16
_THICK: Final = 5
"""Each neurite of this many is a dendrite, the others are axons."""
_PACE: Final = 9.0
"""Distance of neighbouring points of a tree."""
_BRANCHING: Final = 0.08
"""Branches for each point of a tree."""
_MOST_STEPS: Final = 45
_MOST_TIPS: Final = 6
"""Ends of a tree, each of which grows until it leaves the block."""
_REACH: Final = 18.0
"""Distance from its surface up to which a neurite can fill the space between others."""
_FAR: Final = 1e3
_SYNAPSES: Final = 160
_EDGE: Final = 8
"""Voxels at each side of the block without synapses."""
_MEMBRANE: Final = 2.6
"""Thickness of the dark line between two neurites."""
_SLABS: Final = 4
_GREYS: Final = np.uint8(0b1111_1100)
"""Bits of a grey value: noise in the last two would not be seen, and makes the files larger."""


@dataclass(frozen=True, slots=True)
class Neurite:
    """The midline of a neurite; all rows are in units, along z, y and x."""

    points: Field
    """Of shape ``(count, 3)``."""
    parents: npt.NDArray[np.int64]
    """Row of the point before each; -1 for the first one."""
    radii: Field
    is_dendrite: bool


@dataclass(frozen=True, slots=True)
class Synapses:
    """Contacts of two neurites; rows are voxels, along z, y and x."""

    before: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]
    segments: npt.NDArray[np.uint64]
    """Of shape ``(count, 2)``: the sending segment, and the receiving one."""


@dataclass(frozen=True, slots=True)
class Tissue:
    """A block of tissue; segment *n* is that of the tree *n - 1*."""

    trees: list[Neurite]
    coarse_labels: npt.NDArray[np.uint16]
    """Segments on every second voxel along each axis."""
    labels: npt.NDArray[np.uint16]
    synapses: Synapses
    greys: list[npt.NDArray[np.uint8]]
    """The image on every voxel, then half and a quarter as many along each axis."""


@cache
def tissue() -> Tissue:
    """Grow the block, which is the same each time."""
    random = np.random.default_rng(5)
    trees: list[Neurite] = []
    for number in range(_NEURITES):
        trees.append(_grow(random, _find_gap(random, trees), is_dendrite=not number % _THICK))
    coarse_labels, margin = _fill(random, trees)
    labels, margin = _refine(coarse_labels, margin)
    synapses = _find_synapses(random, labels, trees)
    greys = [_look_at(random, margin, _find_mitochondria(random, trees), synapses)]
    for _ in range(2):
        greys.append(halved(greys[-1], range(3)))
    return Tissue(trees, coarse_labels, labels, synapses, greys)


def _find_gap(random: np.random.Generator, trees: list[Neurite]) -> Field:
    """Return the one of a few random points that is the farthest from all trees."""
    candidates: Field = random.uniform(0, _EXTENT, (_TRIES, 3))
    points = np.concatenate([np.zeros((1, 3)), *(tree.points for tree in trees)])
    distances = np.linalg.norm(points - candidates[:, np.newaxis], axis=2).min(axis=1)
    farthest: Field = candidates[distances.argmax()]
    return farthest


def _grow(random: np.random.Generator, start: Field, *, is_dendrite: bool) -> Neurite:
    """Grow a neurite from *start* into two directions, with branches."""
    radius = random.uniform(11, 18) if is_dendrite else random.uniform(4, 7)
    bend = 0.2 if is_dendrite else 0.28
    points = [start]
    parents, radii = [-1], [radius]
    heading = _unit(random.standard_normal(3))
    tips = [(0, heading, radius), (0, -heading, radius)]
    for first, direction, width in tips:  # which branches are added to
        at, heading = first, direction
        for _ in range(_MOST_STEPS):
            heading = _unit(heading + bend * random.standard_normal(3))
            point = points[at] + _PACE * heading
            if (point < -_PACE).any() or (point > _EXTENT + _PACE).any():
                break
            parents.append(at)
            at = len(points)
            points.append(point)
            radii.append(width * (1 + 0.25 * np.sin(at)))
            if random.random() < _BRANCHING and len(tips) < _MOST_TIPS:
                shift = _unit(np.cross(heading, random.standard_normal(3)))
                tips.append((at, 0.5 * heading + shift, 0.75 * width))
    return Neurite(
        np.array(points, np.float32).clip(0, _EXTENT),
        np.array(parents),
        np.array(radii, np.float32),
        is_dendrite,
    )


def _unit(vector: Field) -> Field:
    return vector / float(np.linalg.norm(vector))


def _fill(
    random: np.random.Generator, trees: list[Neurite]
) -> tuple[npt.NDArray[np.uint16], Field]:
    """Assign each coarse voxel to the nearest neurite; return by how much it is the nearest."""
    labels = np.zeros(_COARSE_SHAPE, np.uint16)
    nearest = np.full(_COARSE_SHAPE, _FAR, np.float32)
    second = nearest.copy()
    dents = 4 * noise(random, _COARSE_SHAPE, 3) + 1.5 * noise(random, _COARSE_SHAPE, 2)
    for number, tree in enumerate(trees, 1):
        box, distance = _distances(tree.points, tree.radii)
        # Each tree has other dents: the same noise, from another place.
        distance += np.roll(dents, (7 * number, 13 * number, 29 * number), (0, 1, 2))[box]
        best, next_best = nearest[box], second[box]
        np.minimum(next_best, np.maximum(best, distance), out=next_best)
        labels[box][distance < best] = number
        np.minimum(best, distance, out=best)
    return labels, (second - nearest).clip(max=40)


def _distances(points: Field, radii: Field) -> tuple[tuple[slice, ...], Field]:
    """Return the box around balls, and the distance from the nearest ball in it."""
    reaches = (radii + _REACH)[:, np.newaxis]
    starts = np.ceil((points - reaches) / _COARSE_STEPS).astype(int).clip(0, _COARSE_SHAPE)
    stops = (np.floor((points + reaches) / _COARSE_STEPS).astype(int) + 1).clip(0, _COARSE_SHAPE)
    origin = starts.min(axis=0)
    field = np.full(stops.max(axis=0) - origin, _FAR, np.float32)
    for point, radius, start, stop in zip(points, radii, starts, stops, strict=True):
        squares = (
            (np.arange(first, last, dtype=np.float32) * step - middle) ** 2
            for first, last, step, middle in zip(start, stop, _COARSE_STEPS, point, strict=True)
        )
        z2, y2, x2 = squares
        near = field[tuple(map(slice, start - origin, stop - origin))]
        distance = np.sqrt(z2[:, np.newaxis, np.newaxis] + (y2[:, np.newaxis] + x2)) - radius
        np.minimum(near, distance, out=near)
    return tuple(map(slice, origin, stops.max(axis=0))), field


def _refine(labels: npt.NDArray[np.uint16], margin: Field) -> tuple[npt.NDArray[np.uint16], Field]:
    """Double the number of voxels; a boundary lies where the margins of both sides are equal."""
    for axis in range(labels.ndim):
        next_labels, next_margin = following(labels, axis), following(margin, axis)
        between = np.where(margin >= next_margin, labels, next_labels)
        sign = np.where(labels == next_labels, np.float32(1), np.float32(-1))
        labels = interleaved(labels, between, axis)
        margin = interleaved(margin, abs(margin + sign * next_margin) / 2, axis)
    return labels, margin


def _find_synapses(
    random: np.random.Generator, labels: npt.NDArray[np.uint16], trees: list[Neurite]
) -> Synapses:
    """Choose places where an axon touches a dendrite along x."""
    is_dendrite = np.array([False, *(tree.is_dendrite for tree in trees)])[labels]
    inner = is_dendrite[_EDGE:-_EDGE, _EDGE:-_EDGE, _EDGE:-_EDGE]
    touching = np.argwhere(~inner[..., :-2] & inner[..., 2:])
    before = random.permutation(touching)[:_SYNAPSES] + _EDGE
    after = before + np.array([0, 0, 2])
    segments = np.stack([labels[tuple(rows.T)] for rows in (before, after)], axis=1)
    return Synapses(before, after, segments.astype(np.uint64))


def _find_mitochondria(random: np.random.Generator, trees: list[Neurite]) -> Field:
    """Return how dark mitochondria are on every second voxel: most of all their membranes."""
    distances = np.full(_COARSE_SHAPE, _FAR, np.float32)
    for tree in trees:
        for first in range(int(random.integers(3, 11)), len(tree.points) - 3, 13):
            points, radii = tree.points[first : first + 3], tree.radii[first : first + 3]
            shift = 0.4 * radii[:, np.newaxis] * _unit(random.standard_normal(3))
            box, distance = _distances((points + shift).astype(np.float32), 0.5 * radii)
            np.minimum(distances[box], distance, out=distances[box])
    rims: Field = 40 * np.exp(-((distances / 3) ** 2))
    return rims + 45 / (1 + np.exp(distances.clip(-20, 20)))


def _look_at(
    random: np.random.Generator, margin: Field, mitochondria: Field, synapses: Synapses
) -> npt.NDArray[np.uint8]:
    """Return grey values: membranes and mitochondria are dark, and all is noisy."""
    dark = np.exp(-((margin / _MEMBRANE) ** 2))
    for place in (synapses.before + synapses.after) // 2:  # dense, and thicker than a membrane
        around = tuple(slice(at - 5, at + 6) for at in place)
        z2, y2, x2 = (
            ((rows - at) * step) ** 2
            for rows, at, step in zip(np.ogrid[around], place, STEPS, strict=True)
        )
        density = np.exp(-((margin[around] / 7) ** 2) - ((z2 + y2 + x2) / 30) ** 2)
        np.maximum(dark[around], density, out=dark[around])
    dark *= 115
    dark += doubled(mitochondria, range(3)) * (margin > _MEMBRANE)
    depth, *section = SHAPE
    slab = (depth // _SLABS, *section)  # repeated, which nobody sees in the noise
    light = 174 + 7 * noise(random, slab, 4) + 5 * noise(random, slab, 2)
    light += smooth(random.standard_normal(slab, np.float32)) * 32
    light = np.tile(light, (_SLABS, 1, 1))
    return np.asarray((light - dark).clip(0, 255), np.uint8) & _GREYS
