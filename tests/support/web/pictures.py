"""Arrays of which pictures are made, as real writers write them, and others without a picture."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import icechunk
import numpy as np
import tensorstore
import zarr
import zstandard
from numpy.typing import NDArray

from tests.support.files import write_files
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.formats.zarr.building import LITTLE, array_metadata, rectilinear
from tests.support.viewers.images import put_image
from tests.support.web.images import image

BOMB_MIB: Final = 1024
RNG: Final = np.random.default_rng(7)
SHARDING: Final = {
    "@type": "neuroglancer_uint64_sharded_v1",
    "preshift_bits": 1,
    "hash": "identity",
    "minishard_bits": 1,
    "shard_bits": 1,
    "minishard_index_encoding": "gzip",
    "data_encoding": "gzip",
}
BYTES: Final = RNG.integers(0, 200, (40, 24), dtype=np.uint8)
WIDE: Final = RNG.integers(1000, 60000, (6, 30, 20), dtype=np.uint16)
DIAGONAL: Final = np.eye(32, dtype=bool)
HOLED: Final = np.where(RNG.random((32, 32)) < 0.2, np.nan, RNG.normal(size=(32, 32)))
FILL: Final = 9.96e36
COLOURS: Final = RNG.integers(0, 256, (16, 24, 3), dtype=np.uint8)
IDS: Final = np.repeat(np.repeat(np.arange(16, dtype=np.uint32).reshape(4, 4), 8, 0), 8, 1)
LEVEL: Final = RNG.integers(0, 4000, (2, 3, 5, 260, 130), dtype=np.uint16)
VOLUME: Final = RNG.integers(0, 200, (48, 32, 9), dtype=np.uint8)
ZSTD: Final = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
PLAIN: Final = array_metadata([8, 8], [8, 8], [LITTLE])
UNDRAWABLE: Final[dict[str, Any]] = {
    "codec/zarr.json": PLAIN | {"codecs": [LITTLE, {"name": "unheard-of"}]},
    "huge/zarr.json": array_metadata([2**20] * 2, [2**20] * 2, [LITTLE, ZSTD]),
    "bomb/zarr.json": PLAIN | {"codecs": [LITTLE, ZSTD]},
    "uneven/zarr.json": PLAIN | {"chunk_grid": rectilinear([3, 5], [8])},
    "flat/zarr.json": image(),
    "flat/s0/zarr.json": array_metadata([8], [8], [LITTLE]),
    "list/zarr.json": image(),
    "list/s0/zarr.json": [],
    "volume/info": volume_info(RAW_SHARDING) | {"num_channels": "many"},
}


def write_all(root: Path) -> None:
    """Write folders of arrays of several formats."""
    write_zarr(root / "data")
    write_sparse(root / "sparse")
    (root / "zipped").mkdir()
    shutil.make_archive(str(root / "zipped/sparse"), "zip", root / "sparse")
    put_image(root / "image")
    write_repository(root / "repo")
    write_undrawable(root / "undrawable")
    shutil.copytree(root / "sparse/sharded", root / "undrawable/cut")
    (root / "undrawable/cut/c/0/0/0").write_bytes(bytes(30))
    write_volume(root / "volumes/em", VOLUME, "image", encoding="raw")
    ids = {"encoding": "compressed_segmentation", "compressed_segmentation_block_size": [8, 8, 8]}
    segments = np.repeat(IDS.astype(np.uint64).T[..., np.newaxis], 3, 2)
    write_volume(root / "volumes/cells", segments, "segmentation", **ids)


def write_sparse(folder: Path) -> None:
    """Write arrays of which a corner is stored in the first plane, and nothing in the second."""
    data = np.zeros((2, 60, 100), np.uint8)
    data[0, :40, :60] = 7
    for name, shards in {"sharded": (2, 40, 40), "plain": None}.items():
        path = str(folder / name)
        zarr.create_array(path, data=data, chunks=(1, 20, 20), shards=shards, fill_value=0)


def write_zarr(folder: Path) -> None:
    """Write sharded arrays of several types, and a multiscale with labels."""
    group = zarr.create_group(str(folder))

    def put(name: str, data: NDArray[Any], chunk: int = 8, **options: Any) -> None:
        chunks = tuple(min(chunk, size) for size in data.shape)
        shards = tuple(2 * size for size in chunks)
        group.create_array(name, data=data, chunks=chunks, shards=shards, **options)

    put("bytes", BYTES)
    put("wide", WIDE, attributes={"low": float("nan"), "high": float("inf")})
    put("weather", WIDE, dimension_names=("time", "lat", "lon"))
    put("masked", np.where(DIAGONAL, FILL, HOLED).astype(np.float32), fill_value=FILL)
    put("colours", COLOURS)
    put("constant", np.full((9, 9), 7, np.int16))
    put("line", np.arange(40))
    put("namesakes", BYTES, dimension_names=("x", "x"))
    for name, factor in {"0": 2, "1": 1}.items():
        put(f"image/{name}", np.repeat(np.repeat(LEVEL, factor, 3), factor, 4), 64)
    put("image/2", LEVEL[..., ::2, ::2], 64)
    put("image/labels/cells/0", IDS[np.newaxis, np.newaxis])
    axes = [{"name": n, "type": {"t": "time", "c": "channel"}.get(n, "space")} for n in "tczyx"]
    levels = [{"path": name} for name in "012"]
    pyramid: dict[str, Any] = {
        "version": "0.5",
        "multiscales": [{"axes": axes, "datasets": levels}],
    }
    group["image"].attrs["ome"] = pyramid
    cells = {"axes": [axes[0], *axes[2:]], "datasets": levels[:1]}
    labels: dict[str, Any] = {"version": "0.5", "multiscales": [cells], "image-label": {}}
    group["image/labels/cells"].attrs["ome"] = labels


def write_undrawable(folder: Path) -> None:
    """Write documents without a picture, a damaged chunk, and a bomb of zeros."""
    write_files({key: json.dumps(each).encode() for key, each in UNDRAWABLE.items()}, folder)
    zarr.create_array(str(folder / "damaged"), data=BYTES, chunks=(8, 8), shards=(16, 16))
    damaged = folder / "damaged/c/0/0"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:4] + bytes(36) + data[40:])
    (folder / "bomb/c/0").mkdir(parents=True)
    pieces = zstandard.ZstdCompressor(level=1).compressobj()
    with (folder / "bomb/c/0/0").open("wb") as file:
        file.writelines(pieces.compress(bytes(2**20)) for _ in range(BOMB_MIB))
        file.write(pieces.flush())


def write_volume(path: Path, data: NDArray[Any], kind: str, **scale: Any) -> None:
    """Write a sharded precomputed volume; the axes of *data* are x, y, z."""
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"type": kind, "data_type": str(data.dtype), "num_channels": 1},
        "scale_metadata": {
            "size": data.shape,
            "resolution": [4, 4, 40],
            "voxel_offset": [100, -20, 7],
            "chunk_size": [16, 16, 4],
            "sharding": SHARDING,
            **scale,
        },
    }
    with tensorstore.Transaction() as transaction:
        opened = tensorstore.open(spec, open=True, create=True, transaction=transaction)
        opened.result()[..., 0] = data


def write_repository(path: Path) -> None:
    """Write a repository whose array is inverted after the tag ``v1``."""
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", data=BYTES, chunks=(8, 8), shards=(16, 16))
    repository.create_tag("v1", session.commit("Write"))
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a")[...] = 255 - BYTES
    session.commit("Invert")
