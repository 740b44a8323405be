"""Invented weather: a field in NetCDF behind a reference set, and a repository of pictures."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import h5py
import icechunk
import numpy as np
import numpy.typing as npt
import zarr

from shardgate.demo.grids import Field, halved, noise
from shardgate.demo.microscopy import write_levels

_LAYOUT: Final = {"compression": "gzip", "shuffle": True}
_SIZE: Final = 512
# Rows and columns of the eye of the storm, six hours from one to the next.
_TRACK: Final = ((400, 90), (372, 160), (336, 225), (290, 280), (232, 318), (164, 340))
_LANDFALL: Final = 3
_EXPECTED: Final = ((262, 350), (232, 424))


def write_field(path: Path) -> None:
    """Write a field of time, latitude and longitude to the NetCDF file *path*, as HDF5."""
    axes = {
        "time": (np.arange(0, 240, 6.0), "time", "hours since 2026-01-01 00:00:00"),
        "lat": (np.arange(89, -90, -2, dtype=np.float32), "latitude", "degrees_north"),
        "lon": (np.arange(1, 360, 2, dtype=np.float32), "longitude", "degrees_east"),
    }
    with h5py.File(path, "w") as file:
        file.attrs["Conventions"] = "CF-1.11"
        file.attrs["title"] = "Invented weather"
        for name, (values, standard_name, units) in axes.items():
            scale = file.create_dataset(name, data=values, chunks=values.shape, **_LAYOUT)
            scale.attrs.update(standard_name=standard_name, units=units)
            scale.make_scale(name)
        kelvins = _temperatures(*(values for values, *_ in axes.values()))
        field = file.create_dataset("t2m", data=kelvins, chunks=(8, 45, 90), **_LAYOUT)
        field.attrs.update(standard_name="air_temperature", units="K")
        for dimension, name in zip(field.dims, axes, strict=True):
            dimension.attach_scale(file[name])


def _temperatures(times: Field, latitudes: Field, longitudes: Field) -> Field:
    """Return kelvins: warm at the equator and by day, more so on land, in waves that travel."""
    random = np.random.default_rng(3)
    hour, lat, lon = np.ix_(times, np.radians(latitudes), np.radians(longitudes))
    height = noise(random, (len(latitudes), len(longitudes)), 7) - 0.4
    height += 0.3 * noise(random, height.shape, 2)
    bend = 2 * np.sin(lat * 3)
    waves = 5 * np.sin(5 * lon + 0.3 - hour * 0.035 + bend)
    waves += 3 * np.sin(8 * lon + 2 - hour * 0.07 + bend)
    noon = np.cos(lon + 2 * np.pi * (hour / 24 - 0.5)) * np.cos(lat)
    mean = 300 - 48 * np.sin(lat) ** 2 - 12 * np.sin(lat)  # winter in the north
    on_land = -14 * np.sin(lat) - 7 * height + 5 * noon
    kelvins: Field = mean + np.sin(2 * lat) ** 2 * waves + np.where(height > 0, on_land, 0.7 * noon)
    return kelvins.astype(np.float32)


def write_set(path: Path, field: Path, url: str) -> None:
    """Write a reference set of kerchunk in JSON to *path*: the keys of the file *field* in Zarr.

    The references lead to *url*. Only HDF5's table of chunks is needed, so that the demo does
    without kerchunk.
    """
    refs: dict[str, Any] = {".zgroup": json.dumps({"zarr_format": 2})}
    with h5py.File(field) as file:
        refs[".zattrs"] = json.dumps(dict(file.attrs))
        for name, array in file.items():
            # Those of HDF5 itself are bytes and references.
            attributes = {key: text for key, text in array.attrs.items() if isinstance(text, str)}
            names = [dimension[0].name[1:] for dimension in array.dims if dimension] or [name]
            refs[f"{name}/.zattrs"] = json.dumps(attributes | {"_ARRAY_DIMENSIONS": names})
            shuffle = {"id": "shuffle", "elementsize": array.dtype.itemsize}
            metadata = {
                "zarr_format": 2,
                "shape": array.shape,
                "chunks": array.chunks,
                "dtype": array.dtype.str,
                "fill_value": None,
                "order": "C",
                "filters": [shuffle],
                "compressor": {"id": "zlib", "level": array.compression_opts},
            }
            refs[f"{name}/.zarray"] = json.dumps(metadata)
            for number in range(array.id.get_num_chunks()):
                chunk = array.id.get_chunk_info(number)
                at = ".".join(map(str, np.floor_divide(chunk.chunk_offset, array.chunks)))
                refs[f"{name}/{at}"] = [url, chunk.byte_offset, chunk.size]
    path.write_text(json.dumps({"version": 1, "refs": refs}))


def write_history(path: Path, tag: str, forecast: str) -> None:
    """Write a repository in which a storm moves: each commit is the newest picture of it.

    The storm at the coast has a *tag*; the branch *forecast* begins there.
    """
    icechunk.set_logs_filter("error")  # it warns of concurrent writers to a folder
    storage = icechunk.local_filesystem_storage(str(path.absolute()))
    repository = icechunk.Repository.create(storage)
    for number, picture in enumerate(_pictures(_TRACK)):
        snapshot_id = _commit(repository, "main", picture, f"Picture at {6 * number:02}:00")
        if number == _LANDFALL:
            repository.create_tag(tag, snapshot_id=snapshot_id)
            repository.create_branch(forecast, snapshot_id=snapshot_id)
    for number, picture in enumerate(_pictures(_EXPECTED), _LANDFALL + 1):
        _commit(repository, forecast, picture, f"Expected at {6 * number:02}:00")
    icechunk.set_logs_filter(None)


def _commit(repository: Any, branch: str, picture: npt.NDArray[np.uint8], message: str) -> str:
    """Replace the picture on *branch*, and return the id of the snapshot."""
    session = repository.writable_session(branch)
    group: Any = zarr.open_group(session.store, mode="a")
    levels = [picture, halved(picture, (0, 1))]
    if "s0" in group:
        for number, level in enumerate(levels):
            group[f"s{number}"][...] = level
    else:
        axes = [("y", "kilometer", 4.0), ("x", "kilometer", 4.0)]
        write_levels(group, "storm", axes, levels, chunks=(64, 64), shards=(256, 256))
    return str(session.commit(message))


def _pictures(track: Sequence[tuple[int, int]]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the brightness of clouds, land and sea for each place of the eye."""
    random = np.random.default_rng(7)
    rows, columns = np.ogrid[:_SIZE, :_SIZE]
    hills, patches, grain = (_rough(random, bump) for bump in (40, 20, 5))
    height = 45 * hills + 0.5 * columns - 0.7 * rows + 60  # land up right, sea down left
    ground = np.where(height > 0, 78 + 12 * hills.clip(-2, 2), 30)
    ground += 60 * np.exp(-((height / 3) ** 2))  # the coast is drawn
    for row, column in track:
        down = rows - row
        right = columns - column
        radius = np.hypot(down, right * 0.92) + 0.1
        angle = np.arctan2(down, right) + 2.4 * np.log(radius)
        arms = 0.5 + 0.5 * np.cos(2 * angle + 0.5 * patches)
        shield = (0.55 + 0.45 * arms) * np.exp(-((radius / 120) ** 2))
        shield += 0.6 * arms**2 * np.exp(-((radius / 190) ** 2))
        drifting = np.roll(patches, (row // 3, column // 3), (0, 1))
        cover = shield + 0.22 * drifting.clip(0) + 0.06 * grain * (0.4 + shield)
        cover -= 1.4 * np.exp(-((radius / 8) ** 2))  # the eye is clear
        cover = cover.clip(0, 1)
        yield (ground * (1 - cover) + 246 * cover).clip(0, 255).astype(np.uint8)


def _rough(random: np.random.Generator, bump: float) -> Field:
    """Return noise with bumps of several sizes, the largest of which is *bump*."""
    field: Field = np.zeros((_SIZE, _SIZE), np.float32)
    for weight, part in ((1, 1), (0.6, 2), (0.36, 4), (0.2, 8)):
        field += weight * noise(random, field.shape, bump / part)
    return field
