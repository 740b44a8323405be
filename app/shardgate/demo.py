"""Small example datasets of every supported format, written by their own libraries."""

import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardgate.errors import ConfigurationError, install_command

INNER_CHUNK: Final = (32, 32, 32)
SHARD: Final = (128, 128, 128)
SMALL_SHARD: Final = (64, 64, 64)
AXES: Final = ("z", "y", "x")
SHAPE: Final = (160, 256, 256)
"""Neither a multiple of the shard: the last shards reach past the edge."""
MICROMETERS: Final = (2.0, 1.0, 1.0)
"""Size of a voxel of the finest level."""
LEVELS: Final = range(3)
TAG: Final = "positive"
"""The first state of the repository."""
BRIGHT: Final = 100
CELL_SHARDING: Final = {
    "@type": "neuroglancer_uint64_sharded_v1",
    "preshift_bits": 3,
    "hash": "identity",
    "minishard_bits": 1,
    "shard_bits": 2,
    "minishard_index_encoding": "gzip",
    "data_encoding": "gzip",
}
"""Eight neighbours a minishard, two minishards a shard."""


def write(folder: Path) -> dict[str, Path]:
    """Write the examples below *folder*, unless they exist, and return them by name.

    Raises: `ConfigurationError` if the extra is missing, or *folder* cannot be written.
    """
    try:
        paths = [_write_once(folder / name, put) for name, put in EXAMPLES.items()]
    except ImportError as error:
        raise ConfigurationError(
            f"the demo needs {error.name}: {install_command('demo')} in the checkout"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"cannot write {error.filename}: {error.strerror}") from error
    return {path.stem: path for path in paths}


def guide(base: str) -> str:
    """Return instructions for the examples that are served at *base*."""
    chunk = f"{base}/image/s0/c/2/3/4"
    viewer = f"{base}/api/datasets/{{}}/viewer"
    states = {"tagged": f"{base}/history/@tag.{TAG}", "now": f"{base}/history/@branch.main"}
    lines = [
        "Open these in a browser. The first lists the examples, each of the others shows one:",
        f"  {base}/",
        *(f"  {base}/{Path(name).stem}/" for name in EXAMPLES),
        "",
        "One inner chunk of a shard is an object of its own:",
        f"  curl -sSD - -o /dev/null {chunk}",
        "The array, as if it were not sharded:",
        f"  {_show(f'{base}/image/s0', '80, 128, ::32')}",
        "The image in a viewer:",
        f"  {viewer.format('image')}",
        "The cells in it, a precomputed segmentation:",
        f"  {viewer.format('cells')}",
        "",
        "A repository keeps its past: the image as it was tagged, and as it is now:",
        *(f"  {url}/" for url in states.values()),
        *(f"  curl -sSD - -o /dev/null {url}/s1/c/1/2/2" for url in states.values()),
        *(f"  {_show(f'{url}/s1', '40, 64, ::16')}" for url in states.values()),
        *(f"  {viewer.format('history')}?path={url.rpartition('/')[2]}" for url in states.values()),
        "",
        "Ctrl+C stops.",
    ]
    return "\n".join(lines)


def _show(url: str, at: str) -> str:
    """Return a shell command that prints voxels *at* an index of the array at *url*."""
    script = f'import zarr; print(zarr.open_array("{url}", mode="r")[{at}])'
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}"


def _write_once(path: Path, put: Callable[[Path], None]) -> Path:
    """Call *put* on a temporary folder and rename it, so that *path* is always complete."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            put(beside)
            beside.chmod(0o755)
            beside.rename(path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return path


def _put_image(path: Path) -> None:
    """Write an OME-Zarr 0.5 image of three levels, with consolidated metadata."""
    import zarr  # noqa: PLC0415 - an extra

    group = zarr.create_group(str(path), attributes={"ome": _multiscales(LEVELS)})
    for level in LEVELS:
        data = _gyroid(2**level)
        _create(group, f"s{level}", data, chunks=INNER_CHUNK, shards=SHARD)
    with warnings.catch_warnings(action="ignore"):  # consolidation is no part of the format yet
        zarr.consolidate_metadata(str(path))


def _put_nested(path: Path) -> None:
    """Write an array of shards in shards; the index of the outer ones is at their start."""
    import zarr  # noqa: PLC0415 - an extra
    from zarr.codecs import BytesCodec, ShardingCodec, ZstdCodec  # noqa: PLC0415 - an extra

    inner = ShardingCodec(chunk_shape=(16, 16, 16), codecs=[BytesCodec(), ZstdCodec()])
    outer = ShardingCodec(chunk_shape=(32, 32, 32), codecs=[inner], index_location="start")
    layout: dict[str, Any] = {"chunks": SMALL_SHARD, "serializer": outer}
    # A compressor after the sharding codec would hide the inner chunks.
    _create(zarr.create_group(str(path)), "a", _gyroid(2), compressors=None, **layout)


def _put_cells(path: Path) -> None:
    import tensorstore  # noqa: PLC0415 - an extra

    for step in (2, 4):
        values = _cells(step)
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": f"{path.absolute()}/"},
            "multiscale_metadata": {
                "type": "segmentation",
                "data_type": "uint64",
                "num_channels": 1,
            },
            "scale_metadata": {
                "size": values.shape,
                "resolution": [1000 * step * um for um in reversed(MICROMETERS)],
                "chunk_size": INNER_CHUNK,
                "encoding": "compressed_segmentation",
                "compressed_segmentation_block_size": [8, 8, 8],
                "sharding": CELL_SHARDING,
            },
        }
        with tensorstore.Transaction() as transaction:  # writes each shard once
            volume = tensorstore.open(spec, open=True, create=True, transaction=transaction)
            volume.result()[..., 0] = values


def _put_history(path: Path) -> None:
    """Write a repository: an image, one level of it in shards, then tagged, then its negative."""
    import icechunk  # noqa: PLC0415 - an extra
    import zarr  # noqa: PLC0415 - an extra

    icechunk.set_logs_filter("error")  # it warns of concurrent writers to a folder
    storage = icechunk.local_filesystem_storage(str(path.absolute()))
    repository = icechunk.Repository.create(storage)
    layouts = {1: {"chunks": INNER_CHUNK, "shards": SMALL_SHARD}, 2: {"chunks": INNER_CHUNK}}
    ome = _multiscales(layouts)

    session = repository.writable_session("main")
    group = zarr.create_group(session.store, attributes={"ome": ome})
    for level, layout in layouts.items():
        _create(group, f"s{level}", _gyroid(2**level), **layout)
    repository.create_tag(TAG, snapshot_id=session.commit("Draw a gyroid"))

    session = repository.writable_session("main")
    for level in layouts:
        zarr.open_array(session.store, path=f"s{level}")[...] = 255 - _gyroid(2**level)
    session.commit("Turn it into its negative")
    icechunk.set_logs_filter(None)


EXAMPLES: Final[Mapping[str, Callable[[Path], None]]] = {
    "image.zarr": _put_image,
    "nested.zarr": _put_nested,
    "cells.precomputed": _put_cells,
    "history.icechunk": _put_history,
}
"""The datasets, by the names of their folders."""


def _create(group: Any, name: str, data: npt.NDArray[np.uint8], **layout: Any) -> None:
    array = group.create_array(
        name, shape=data.shape, dtype=data.dtype, dimension_names=AXES, **layout
    )
    array[...] = data


def _gyroid(step: int) -> npt.NDArray[np.uint8]:
    """Sample every *step*-th voxel of a smooth, deterministic 3-d pattern inside a ball."""
    z, y, x = (axis.astype(np.float32) / 16 for axis in _open_grid(step))
    wave = np.sin(x) * np.cos(y) + np.sin(y) * np.cos(z) + np.sin(z) * np.cos(x)
    center = [size * um / 32 for size, um in zip(SHAPE, MICROMETERS, strict=True)]
    radius = np.sqrt(sum((axis - c) ** 2 for axis, c in zip((z, y, x), center, strict=True)))
    inside = np.clip(8 - radius, 0, 1)
    return np.asarray((wave / 3 + 0.5).clip(0, 1) * inside * 255, dtype=np.uint8)


def _open_grid(step: int) -> list[npt.NDArray[np.float64]]:
    """Return the positions of every *step*-th voxel in micrometers, an array for each axis."""
    indexes = np.ogrid[tuple(slice(0, size, step) for size in SHAPE)]
    return [axis * um for axis, um in zip(indexes, MICROMETERS, strict=True)]


def _cells(step: int) -> npt.NDArray[np.uint64]:
    """Cut the bright parts of the pattern into cubes of 64 micrometers, along x, y and z."""
    z, y, x = (axis // 64 for axis in _open_grid(step))
    number = 1 + x + 8 * (y + 8 * z)
    return np.where(_gyroid(step) > BRIGHT, number, 0).astype(np.uint64).T


def _multiscales(levels: Iterable[int]) -> dict[str, Any]:
    """Describe *levels*, each half of the one before, as OME-Zarr 0.5 does."""
    return {
        "version": "0.5",
        "multiscales": [
            {
                "name": "gyroid",
                "axes": [{"name": n, "type": "space", "unit": "micrometer"} for n in AXES],
                "datasets": [
                    {
                        "path": f"s{level}",
                        "coordinateTransformations": [
                            {"type": "scale", "scale": [um * 2**level for um in MICROMETERS]}
                        ],
                    }
                    for level in levels
                ],
            }
        ],
    }
