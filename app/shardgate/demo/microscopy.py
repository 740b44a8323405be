"""Images in Zarr: the tissue as OME-Zarr, a film of dividing cells, shards in shards."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, BytesCodec, ShardingCodec, ZstdCodec

from shardgate.demo.grids import doubled, halved, nearest_two, noise
from shardgate.demo.tissue import NANOMETERS, STEPS, tissue

_ZYX: Final = ("z", "y", "x")
_TIMES: Final = 10
_FILM_SHAPE: Final = (6, 256, 256)  # voxels along z, y and x at each time
_FILM_AXES: Final = (
    ("t", "minute", 10.0),
    ("c", None, 1.0),
    ("z", "micrometer", 2.0),
    ("y", "micrometer", 0.5),
    ("x", "micrometer", 0.5),
)
_COARSE_SHAPE: Final = (6, 128, 128)
_COARSE_STEPS: Final = (2.0, 1.0, 1.0)  # micrometers, as all lengths of cells
_DIAMETER: Final = 14.0  # from a cell to its neighbours
_DIVIDING: Final = 0.16  # share of cells that divide from one time to the next
_FLAT: Final = (0.1, 1.0, 1.0)  # cells move little along z
# Labels, colours, and values that are drawn in full colour.
_CHANNELS: Final = (("nuclei", "FF40D0", 1500), ("membranes", "40FF80", 1000))
_DARK: Final = 110  # counts of the camera without light

type Axis = tuple[str, str | None, float]
"""Name, unit, and step of the finest level."""


def write_image(path: Path) -> None:
    """Write an OME-Zarr 0.5 image of three levels, with consolidated metadata."""
    axes = [(name, "nanometer", step * NANOMETERS) for name, step in zip(_ZYX, STEPS, strict=True)]
    group = zarr.create_group(str(path))
    layout = {"chunks": (32, 32, 32), "shards": (128, 128, 128)}
    write_levels(group, "tissue", axes, tissue().greys, **layout)
    _consolidate(path)


def write_nested(path: Path) -> None:
    """Write an array of shards in shards; the index of the outer ones is at their start."""
    inner = ShardingCodec(chunk_shape=(16, 16, 16), codecs=[BytesCodec(), ZstdCodec()])
    outer = ShardingCodec(chunk_shape=(32, 32, 32), codecs=[inner], index_location="start")
    group = zarr.create_group(str(path))
    group.create_array(
        "a",
        data=tissue().greys[1],
        chunks=(64, 64, 64),
        serializer=outer,
        compressors=None,  # a compressor after the sharding codec would hide the inner chunks
        dimension_names=_ZYX,
    )


def write_film(path: Path) -> None:
    """Write an OME-Zarr 0.5 film of two channels, in values of 16 bits as cameras give them."""
    channels: list[Any] = [
        {
            "label": label,
            "color": color,
            "active": True,
            "window": {"start": _DARK, "end": end, "min": 0, "max": 4095},
        }
        for label, color, end in _CHANNELS
    ]
    film = _film()
    layout = {
        "chunks": (1, 1, 6, 64, 64),
        "shards": (1, 2, 6, 256, 256),
        # Bits of the same weight stand together, since the upper ones are mostly zero.
        "compressors": BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle", typesize=2),
    }
    group = zarr.create_group(str(path))
    group.attrs["ome"] = {"omero": {"channels": channels}}
    write_levels(group, "colony", _FILM_AXES, [film, halved(film, (3, 4))], **layout)
    _consolidate(path)


def write_levels(
    group: Any, name: str, axes: Sequence[Axis], levels: Sequence[npt.NDArray[Any]], **layout: Any
) -> None:
    """Write *levels*, finest first, into a Zarr group, which OME-Zarr 0.5 describes as an image."""
    names, units, steps = zip(*axes, strict=True)
    datasets = []
    for number, level in enumerate(levels):
        group.create_array(f"s{number}", data=level, dimension_names=names, **layout)
        scale = np.array(steps) * levels[0].shape / level.shape
        # The middle of the first element, which covers several of the finest level.
        translation = (scale - steps) / 2
        transformations = [
            {"type": "scale", "scale": scale.tolist()},
            {"type": "translation", "translation": translation.tolist()},
        ]
        datasets.append({"path": f"s{number}", "coordinateTransformations": transformations})
    types = {"t": "time", "c": "channel"}
    axis_documents = [
        {"name": axis, "type": types.get(axis, "space")} | ({"unit": unit} if unit else {})
        for axis, unit in zip(names, units, strict=True)
    ]
    multiscale = {"name": name, "axes": axis_documents, "datasets": datasets}
    ome = group.attrs.get("ome", {})
    group.attrs["ome"] = {"version": "0.5", "multiscales": [multiscale]} | ome


def _consolidate(path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # consolidation is no part of the format yet
        zarr.consolidate_metadata(str(path))


def _film() -> npt.NDArray[np.uint16]:
    """Return nuclei and membranes of cells that divide and make room for each other."""
    random = np.random.default_rng(11)
    middle = np.array([6.0, 64.0, 64.0])
    grain = noise(random, _COARSE_SHAPE, 3)
    centers = middle + random.normal(0, 8, (12, 3)) * _FLAT
    film = np.empty((_TIMES, len(_CHANNELS), *_FILM_SHAPE), np.uint16)
    for time in range(_TIMES):
        divides = random.random(len(centers)) < _DIVIDING
        daughters = centers[divides] + random.normal(0, 3, (divides.sum(), 3)) * _FLAT
        centers = _move_apart(random, np.concatenate((centers, daughters)))
        centers += 0.1 * (middle - centers.mean(axis=0))
        is_new = np.append(divides, [True] * len(daughters))
        light = doubled(_light(centers, is_new, grain), (2, 3))
        # Of many photons: the deviation is the square root of their number.
        photons = random.standard_normal(light.shape, np.float32) * np.sqrt(light)
        film[time] = light + photons + _DARK
    return film


def _move_apart(
    random: np.random.Generator, centers: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Move each cell a little, and push cells from each other until few overlap."""
    centers = centers + random.normal(0, 0.8, centers.shape) * _FLAT
    for _ in range(12):
        apart = centers[:, np.newaxis] - centers
        distances = np.linalg.norm(apart, axis=2) + 1e-3
        push = (_DIAMETER - distances).clip(0) / distances
        centers = centers + 0.2 * (push[..., np.newaxis] * apart).sum(axis=1) * _FLAT
    return centers


def _light(
    centers: npt.NDArray[np.float64], is_new: npt.NDArray[np.bool_], grain: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the photons of nuclei and of membranes."""
    bodies = [(center[np.newaxis], np.zeros(1)) for center in centers]
    labels, nearest, second = nearest_two(bodies, _COARSE_SHAPE, _COARSE_STEPS, 99, 0.7 * grain)
    is_dense = np.append(False, is_new)[labels]
    radius = np.where(is_dense, 3.2, 4.6)
    brightness = np.where(is_dense, 1.9, 1.0)
    glow = brightness / (1 + np.exp(((nearest - radius) * 2).clip(max=20)))
    haze = np.exp(-nearest / 14)
    nuclei = 900 * glow * (1 + 0.35 * grain).clip(0.2) + 70 * haze
    # Half-way to a neighbour, or at the edge of a cell that has none there.
    margin = np.minimum(second - nearest, _DIAMETER + 4 - 2 * nearest)
    membranes = 700 * np.exp(-((margin / 1.3) ** 2)) * (1 + 0.2 * grain).clip(0.2) + 90 * haze
    return np.stack((nuclei, membranes)).astype(np.float32)
