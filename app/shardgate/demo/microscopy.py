"""Images in Zarr: the tissue as OME-Zarr, a film of dividing cells, shards in shards."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, BytesCodec, ShardingCodec, ZstdCodec

from shardgate.demo.grids import Field, doubled, halved, noise
from shardgate.demo.tissue import NANOMETERS, STEPS, tissue

INNER_CHUNK: Final = (32, 32, 32)
SHARD: Final = (128, 128, 128)
SMALL_SHARD: Final = (64, 64, 64)
_AXES: Final = ("z", "y", "x")

_TIMES: Final = 10
_FILM_SHAPE: Final = (6, 256, 256)
"""Voxels along z, y and x at each time."""
_FILM_CHUNK: Final = (1, 1, 6, 64, 64)
_FILM_SHARD: Final = (1, 2, 6, 256, 256)
_FILM_STEPS: Final = (2.0, 0.5, 0.5)
"""Micrometers."""
_MINUTES: Final = 10.0
_DIAMETER: Final = 14.0
"""Micrometers from a cell to its neighbours."""
_DIVIDING: Final = 0.16
"""Share of cells that divide from one time to the next."""
_FLAT: Final = (0.1, 1.0, 1.0)
"""Cells move little along z."""
_CHANNELS: Final = (("nuclei", "FF40D0", 1500), ("membranes", "40FF80", 1000))
"""Labels, colours, and values that are drawn in full colour."""
_DARK: Final = 110
"""Counts of the camera without light."""


def write_image(path: Path) -> None:
    """Write an OME-Zarr 0.5 image of three levels, with consolidated metadata."""
    steps = [step * NANOMETERS for step in STEPS]
    levels = tissue().greys
    axes = [(name, "space", "nanometer") for name in _AXES]
    ome = multiscales("tissue", axes, steps, len(levels))
    _write_levels(path, ome, levels, chunks=INNER_CHUNK, shards=SHARD)


def write_nested(path: Path) -> None:
    """Write an array of shards in shards; the index of the outer ones is at their start."""
    inner = ShardingCodec(chunk_shape=(16, 16, 16), codecs=[BytesCodec(), ZstdCodec()])
    outer = ShardingCodec(chunk_shape=(32, 32, 32), codecs=[inner], index_location="start")
    layout: dict[str, Any] = {"chunks": SMALL_SHARD, "serializer": outer}
    # A compressor after the sharding codec would hide the inner chunks.
    group = zarr.create_group(str(path))
    create(group, "a", tissue().greys[1], dimension_names=_AXES, compressors=None, **layout)


def write_film(path: Path) -> None:
    """Write an OME-Zarr 0.5 film of two channels, in values of 16 bits as cameras give them."""
    axes = [("t", "time", "minute"), ("c", "channel", "")]
    axes += [(name, "space", "micrometer") for name in _AXES]
    ome = multiscales("colony", axes, (_MINUTES, 1, *_FILM_STEPS), 2, halved_axes=(3, 4))
    ome["omero"] = {
        "channels": [
            {
                "label": label,
                "color": color,
                "active": True,
                "window": {"start": _DARK, "end": end, "min": 0, "max": 4095},
            }
            for label, color, end in _CHANNELS
        ]
    }
    film = _film()
    # Bits of the same weight stand together, since the upper ones are mostly zero.
    codec = BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle", typesize=2)
    levels = [film, halved(film, (3, 4))]
    _write_levels(path, ome, levels, chunks=_FILM_CHUNK, shards=_FILM_SHARD, compressors=codec)


def _write_levels(
    path: Path, ome: dict[str, Any], levels: Sequence[npt.NDArray[Any]], **layout: Any
) -> None:
    group = zarr.create_group(str(path), attributes={"ome": ome})
    names = [axis["name"] for axis in ome["multiscales"][0]["axes"]]
    for level, values in enumerate(levels):
        create(group, f"s{level}", values, dimension_names=names, **layout)
    with warnings.catch_warnings(action="ignore"):  # consolidation is no part of the format yet
        zarr.consolidate_metadata(str(path))


def create(group: Any, name: str, values: npt.NDArray[Any], **layout: Any) -> None:
    """Create an array of *values* in a Zarr group."""
    array = group.create_array(name, shape=values.shape, dtype=values.dtype, **layout)
    array[...] = values


def multiscales(
    name: str,
    axes: Sequence[tuple[str, str, str]],
    steps: Sequence[float],
    levels: int,
    halved_axes: Sequence[int] = (0, 1, 2),
) -> dict[str, Any]:
    """Describe *levels* as OME-Zarr 0.5 does; each is half of the one before along some axes."""
    datasets = [
        {
            "path": f"s{level}",
            "coordinateTransformations": [
                {
                    "type": "scale",
                    "scale": [
                        step * 2 ** (level * (axis in halved_axes))
                        for axis, step in enumerate(steps)
                    ],
                }
            ],
        }
        for level in range(levels)
    ]
    keys = ("name", "type", "unit")
    listed = [{key: value for key, value in zip(keys, axis, strict=True) if value} for axis in axes]
    multiscale = {"name": name, "axes": listed, "datasets": datasets}
    return {"version": "0.5", "multiscales": [multiscale]}


def _film() -> npt.NDArray[np.uint16]:
    """Return nuclei and membranes of cells that divide and make room for each other."""
    random = np.random.default_rng(11)
    depth, height, width = _FILM_SHAPE
    shape = (depth, height // 2, width // 2)
    axes = [
        (np.arange(size, dtype=np.float32) + 0.5) * step
        for size, step in zip(shape, (2.0, 1.0, 1.0), strict=True)
    ]
    middle = np.array([6.0, 64.0, 64.0])
    grain = noise(random, shape, 2)
    centers = middle + random.normal(0, 8, (12, 3)) * _FLAT
    film = np.empty((_TIMES, len(_CHANNELS), *_FILM_SHAPE), np.uint16)
    for time in range(_TIMES):
        divides = random.random(len(centers)) < _DIVIDING
        daughters = centers[divides] + random.normal(0, 3, (divides.sum(), 3)) * _FLAT
        centers = _move_apart(np.concatenate((centers, daughters)), random)
        centers += 0.1 * (middle - centers.mean(axis=0))
        is_new = np.arange(len(centers)) >= len(divides)
        is_new[: len(divides)] |= divides
        for channel, light in enumerate(_light(axes, centers, is_new, grain)):
            exact = doubled(light, (1, 2))
            # Of many photons: the deviation is the square root of their number.
            photons = random.standard_normal(exact.shape, np.float32) * np.sqrt(exact)
            film[time, channel] = exact + photons + _DARK
    return film


def _move_apart(
    centers: npt.NDArray[np.float64], random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Push cells from each other until few overlap, and let each wander a little."""
    centers = centers + random.normal(0, 0.8, centers.shape) * _FLAT
    for _ in range(12):
        apart = centers[:, np.newaxis] - centers
        distances = np.linalg.norm(apart, axis=2) + 1e-3
        push = (_DIAMETER - distances).clip(0) / distances
        centers = centers + 0.2 * (push[..., np.newaxis] * apart).sum(axis=1) * _FLAT
    return centers


def _light(
    axes: Sequence[Field],
    centers: npt.NDArray[np.float64],
    is_new: npt.NDArray[np.bool_],
    grain: Field,
) -> tuple[Field, Field]:
    """Return the photons of nuclei and of membranes; *axes* and *centers* are in micrometers."""
    nearest = np.full(grain.shape, 99, np.float32)
    second = nearest.copy()
    glow = np.zeros(grain.shape, np.float32)
    for number, (center, fresh) in enumerate(zip(centers, is_new, strict=True)):
        z, y, x = ((axis - np.float32(at)) ** 2 for axis, at in zip(axes, center, strict=True))
        distance = np.sqrt(z[:, np.newaxis, np.newaxis] + y[:, np.newaxis] + x)
        distance += 0.7 * np.roll(grain, (11 * number, 17 * number), (1, 2))  # a shape of its own
        np.minimum(second, np.maximum(nearest, distance), out=second)
        np.minimum(nearest, distance, out=nearest)
        radius, brightness = (3.2, 1.9) if fresh else (4.6, 1.0)  # chromatin is dense then
        np.maximum(
            glow, brightness / (1 + np.exp(((distance - radius) * 2).clip(max=20))), out=glow
        )
    haze = np.exp(-nearest / 14)
    nuclei = 900 * glow * (1 + 0.35 * grain).clip(0.2) + 70 * haze
    # Half-way to a neighbour, or at the edge of a cell that has none there.
    margin = np.minimum(second - nearest, _DIAMETER + 4 - 2 * nearest)
    membranes = 700 * np.exp(-((margin / 1.3) ** 2)) * (1 + 0.2 * grain).clip(0.2) + 90 * haze
    return nuclei, membranes
