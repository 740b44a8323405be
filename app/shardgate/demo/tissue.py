"""Invented nerve tissue: branching neurites that fill a block, seen by an electron microscope."""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from shardgate.demo.grids import Field, doubled, following, halved, interleaved, nearest_two, noise

# Voxels along z, y and x; along z no multiple of the shard: the last shards reach past the edge.
SHAPE: Final = (160, 256, 256)
STEPS: Final = (2.0, 1.0, 1.0)  # size of a voxel, in units of `NANOMETERS`
NANOMETERS: Final = 20
_COARSE_SHAPE: Final = (80, 128, 128)
_COARSE_STEPS: Final = (4.0, 2.0, 2.0)
_EXTENT: Final = np.array([320, 256, 256], np.float32)  # edges of the block, in units
_LATTICE: Final = (5, 4, 4)  # neurites begin in boxes of the same size, one in each
_PACE: Final = 9.0  # distance of neighbouring points of a tree
_BRANCHES: Final = 6  # of a tree, each of which grows until it leaves the block
_ENDS: Final = 2  # branches that lead away from the first point of a tree
_MOST_STEPS: Final = 45
_SYNAPSES: Final = 160
_EDGE: Final = 8  # voxels at each side of the block without synapses
_MEMBRANE: Final = 2.6  # thickness of the dark line between two neurites
_SLABS: Final = 4


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
class Tissue:
    """A block of tissue; segment *n* is that of the tree *n - 1*."""

    trees: list[Neurite]
    labels: npt.NDArray[np.uint16]
    synapses: npt.NDArray[np.int64]
    """Voxels of an axon and of the dendrite that it touches, of shape ``(count, 2, 3)``."""
    greys: list[npt.NDArray[np.uint8]]
    """The image on every voxel, then half and a quarter as many along each axis."""


@cache
def tissue() -> Tissue:
    """Grow the block, which is the same each time."""
    random = np.random.default_rng(5)
    lattice = np.argwhere(np.ones(_LATTICE))
    starts = (lattice + random.random(lattice.shape)) * _EXTENT / _LATTICE
    # One neurite of six is a dendrite, the others are axons.
    trees = [_grow(random, start, is_dendrite=at % 6 == 0) for at, start in enumerate(starts)]
    dents = 4 * noise(random, _COARSE_SHAPE, 5) + 1.5 * noise(random, _COARSE_SHAPE, 2.5)
    bodies = [(tree.points, tree.radii) for tree in trees]
    # Up to this distance from its surface a neurite can fill the space between others.
    reach = 18.0
    labels, nearest, second = nearest_two(bodies, _COARSE_SHAPE, _COARSE_STEPS, reach, dents)
    labels, margin = _refine(labels, (second - nearest).clip(max=40))
    is_dendrite = np.array([False, *(tree.is_dendrite for tree in trees)])[labels]
    synapses = _find_synapses(random, is_dendrite)
    greys = [_look_at(random, margin, synapses)]
    for _ in range(2):
        greys.append(halved(greys[-1], range(3)))
    return Tissue(trees, labels, synapses, greys)


def _grow(random: np.random.Generator, start: Field, *, is_dendrite: bool) -> Neurite:
    """Grow a neurite from *start* into two directions, with branches."""
    radius = random.uniform(9, 15) if is_dendrite else random.uniform(4, 7)
    bend = 0.2 if is_dendrite else 0.28
    points = start[np.newaxis]
    parents = [-1]
    headings = random.standard_normal((_BRANCHES, 3))
    headings[1] = -headings[0]
    for number, heading in enumerate(headings):
        first = 0 if number < _ENDS else int(random.integers(len(points)))
        turns = bend * random.standard_normal((_MOST_STEPS, 3)).cumsum(axis=0)
        steps = heading / np.linalg.norm(heading) + turns
        steps *= _PACE / np.linalg.norm(steps, axis=1, keepdims=True)
        path = points[first] + steps.cumsum(axis=0)
        is_outside = ((path < -_PACE) | (path > _EXTENT + _PACE)).any(axis=1)
        path = path[~np.logical_or.accumulate(is_outside)]
        before = [first, *range(len(points), len(points) + len(path))]
        parents += before[: len(path)]
        points = np.concatenate((points, path))
    return Neurite(
        points.clip(0, _EXTENT).astype(np.float32),
        np.array(parents),
        (radius * (1 + 0.25 * np.sin(np.arange(len(points))))).astype(np.float32),
        is_dendrite,
    )


def _refine(labels: npt.NDArray[np.uint16], margin: Field) -> tuple[npt.NDArray[np.uint16], Field]:
    """Double the number of voxels; a boundary lies where the margins of both sides are equal."""
    for axis in range(labels.ndim):
        next_labels = following(labels, axis)
        next_margin = following(margin, axis)
        between = np.where(margin >= next_margin, labels, next_labels)
        sign = np.where(labels == next_labels, np.float32(1), np.float32(-1))
        labels = interleaved(labels, between, axis)
        margin = interleaved(margin, abs(margin + sign * next_margin) / 2, axis)
    return labels, margin


def _find_synapses(
    random: np.random.Generator, is_dendrite: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Choose places where an axon touches a dendrite along x."""
    inner = is_dendrite[_EDGE:-_EDGE, _EDGE:-_EDGE, _EDGE:-_EDGE]
    touching = np.argwhere(~inner[..., :-2] & inner[..., 2:])
    before = random.permutation(touching)[:_SYNAPSES] + _EDGE
    return np.stack((before, before + np.array([0, 0, 2])), axis=1)


def _look_at(
    random: np.random.Generator, margin: Field, synapses: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Return grey values: membranes, mitochondria and synapses are dark, and all is noisy."""
    dark = 115 * np.exp(-((margin / _MEMBRANE) ** 2))
    for place in synapses.mean(axis=1).astype(int):  # dense, and thicker than a membrane
        around = tuple(
            slice(at - each, at + each + 1) for at, each in zip(place, (1, 3, 3), strict=True)
        )
        dark[around] = np.maximum(dark[around], 115 * np.exp(-((margin[around] / 7) ** 2)))
    mitochondria = noise(random, _COARSE_SHAPE, 3) - 1.9
    inside = 45 / (1 + np.exp(-8 * mitochondria)) + 40 * np.exp(-((mitochondria / 0.3) ** 2))
    dark += doubled(inside, range(3)) * (margin > _MEMBRANE)
    depth, *section = SHAPE
    slab = (depth // _SLABS, *section)  # repeated, which nobody sees in the noise
    light = 174 + 7 * noise(random, slab, 10) + 5 * noise(random, slab, 2.5)
    light += 8 * noise(random, slab, 0.8)
    light = np.tile(light, (_SLABS, 1, 1))
    # Noise in the last two bits would not be seen, and would make the files larger.
    return np.asarray((light - dark).clip(0, 255), np.uint8) & np.uint8(0b1111_1100)
