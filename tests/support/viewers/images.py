"""Small arrays with a ball in the middle, by zarr-python: one of each kind that links show."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import Store

SHAPE: Final = (40, 96, 128)
CHUNK: Final = (20, 32, 32)
SPACE: Final = ("z", "y", "x")
BRIGHT: Final = 3000
COLOURS: Final = {"red": "FF0000", "green": "00FF00", "hidden": "0000FF"}

type Place = Path | Store


def ball(shift: int = 0) -> npt.NDArray[np.bool_]:
    """Return the voxels of an ellipsoid, moved along x."""
    z, y, x = np.indices(SHAPE)
    inside = ((z - 20) / 16) ** 2 + ((y - 48) / 40) ** 2 + ((x - 64 - shift) / 40) ** 2 < 1
    return np.asarray(inside, np.bool_)


def put(place: Place, data: npt.NDArray[Any], names: tuple[str, ...], path: str = "") -> None:
    """Write *data* as a sharded array of one shard."""
    chunks = (1,) * (data.ndim - 3) + CHUNK if data.ndim >= 3 else (32, 32)
    shape = tuple(-(-size // chunk) * chunk for size, chunk in zip(data.shape, chunks, strict=True))
    array = zarr.create_array(
        store=place,
        name=path,
        shape=data.shape,
        dtype=data.dtype,
        chunks=chunks,
        shards=shape,
        dimension_names=names,
    )
    array[...] = data


def put_image(place: Place, path: str = "") -> None:
    """Write an OME-Zarr 0.5 image of five dimensions and two levels, with channels."""
    group = zarr.create_group(store=place, path=path)
    axes = [{"name": "t", "type": "time", "unit": "second"}, {"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in SPACE]
    levels = []
    for level in range(2):
        step = 2**level
        balls = [ball(16 * number - 16)[:, ::step, ::step] for number in range(len(COLOURS))]
        data = np.stack([np.stack(balls)] * 2) * np.uint16(BRIGHT)
        put(place, data, ("t", "c", *SPACE), f"{path}/{level}".lstrip("/"))
        scale = {"type": "scale", "scale": [1, 1, 2, step, step]}
        levels.append({"path": str(level), "coordinateTransformations": [scale]})
    channels = [
        {
            "label": label,
            "color": color,
            "active": label != "hidden",
            "window": {"start": 0, "end": BRIGHT, "min": 0, "max": 65535},
        }
        for label, color in COLOURS.items()
    ]
    multiscales: Any = [{"axes": axes, "datasets": levels}]
    rendering: Any = {"channels": channels}
    group.attrs["ome"] = {"version": "0.5", "multiscales": multiscales, "omero": rendering}


def put_all(place: Place) -> None:
    """Write an array of each kind in a group."""
    zarr.create_group(store=place)
    inside = ball()
    put(place, inside * np.uint8(200), SPACE, "uint8")
    put(place, inside * np.uint16(BRIGHT), SPACE, "uint16")
    floats = np.where(inside, np.float32(0.03), np.float32(0))
    floats[:, :8] = np.nan
    put(place, floats, SPACE, "float32")
    weather = np.stack([280 + 10 * ball()[step] for step in (0, 20)]).astype(np.float32)
    put(place, weather, ("time", "lat", "lon"), "weather")
    put(place, inside + np.uint32(1), SPACE, "labels")
    put_image(place, "image")
