"""The served arrays, written by zarr-python and tensorstore, and their indexes."""

import itertools
import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorstore
import zarr
from crc32c import crc32c
from numpy.typing import NDArray

from tests.support.clients.precomputed import volumes
from tests.support.formats.zarr.building import array_metadata, sharding

INNER: Final = (64, 32, 32)
INNER_BYTES: Final = 64 * 32 * 32
PER_SHARD: Final = (8, 8, 8)
SHARDS: Final = (2, 1, 1)
SHARD_SHAPE: Final = tuple(i * n for i, n in zip(INNER, PER_SHARD, strict=True))
SHAPE: Final = tuple(s * n for s, n in zip(SHARD_SHAPE, SHARDS, strict=True))

VOLUME_SCALE: Final = "1_1_1"
REPOSITORY: Final = "repository"

MANY_ENTRIES: Final = 32**3
MANY_CHUNK: Final = bytes(range(8))
_MANY_PER_SHARD: Final = (32, 32, 32)
_MANY_SHARDS: Final = (10, 10, 10)
_MANY_INNER: Final = (2, 2, 2)

type Coords = tuple[int, ...]


def write_arrays(root: Path) -> None:
    """Write the same random bytes sharded in Morton order, in C order, as a volume, unsharded."""
    data = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    zarr.create_group(root)
    for name, shards in ("morton", SHARD_SHAPE), ("plain", None):
        add_array(root, name, SHAPE, INNER, shards)[...] = data
    _write_with_tensorstore(
        root / "corder", json.loads((root / "morton/zarr.json").read_text()), data
    )
    _write_volume(root / "volume", data)


def write_cube(path: Path, *, edge: int, per_shard: int, inner: Coords = INNER) -> None:
    """Write a cube of *edge*³ random chunks, and the same unsharded as ``PATH-plain``."""
    shape = tuple(edge * size for size in inner)
    data = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    shards = tuple(per_shard * size for size in inner)
    for name, shard_shape in (path.name, shards), (f"{path.name}-plain", None):
        add_array(path.parent, name, shape, inner, shard_shape)[...] = data


def add_array(
    store: Any, name: str, shape: Coords, chunks: Coords, shards: Coords | None = None
) -> Any:
    """Add an array of bytes without chunks."""
    layout: dict[str, Any] = {"shape": shape, "chunks": chunks, "shards": shards}
    return zarr.create_array(
        store, name=name, **layout, dtype="uint8", compressors=None, fill_value=0
    )


def _write_with_tensorstore(path: Path, metadata: object, data: NDArray[np.uint8]) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": metadata,
        "create": True,
    }
    tensorstore.open(spec).result().write(data).result()


def _write_volume(path: Path, data: NDArray[np.uint8]) -> None:
    """Write *data* as a sharded volume whose raw chunks equal those of the array."""
    how = volumes.sharding((6, 3, 1), index="gzip")
    values, (z, y, x) = data.T[..., np.newaxis], INNER
    scale = volumes.Scale(values, how, chunk=(x, y, z), resolution=(1, 1, 1))
    by_tensorstore = volumes.by_tensorstore
    by_tensorstore(volumes.Volume("", by_tensorstore, [scale]), path, sharded=True)


def write_many_shards(
    path: Path, shards: Coords = _MANY_SHARDS, per_shard: Coords = _MANY_PER_SHARD
) -> None:
    """Write an array of full shards, by default 1,000 of 32³ entries, all links to one file."""
    path.mkdir()
    shape = [s * n * i for s, n, i in zip(shards, per_shard, _MANY_INNER, strict=True)]
    shard_shape = [n * i for n, i in zip(per_shard, _MANY_INNER, strict=True)]
    codecs = [sharding(list(_MANY_INNER), [{"name": "bytes"}])]
    (path / "zarr.json").write_text(json.dumps(array_metadata(shape, shard_shape, codecs)))
    original = path / "shard"
    original.write_bytes(_many_shard(int(np.prod(per_shard))))
    for coords in itertools.product(*map(range, shards)):
        name = path / "c" / "/".join(map(str, coords))
        name.parent.mkdir(parents=True, exist_ok=True)
        os.link(original, name)


def _many_shard(entries: int) -> bytes:
    nbytes = len(MANY_CHUNK)
    index = np.empty((entries, 2), "<u8")
    index[:, 0] = np.arange(entries) * nbytes
    index[:, 1] = nbytes
    table = index.tobytes()
    return MANY_CHUNK * entries + table + crc32c(table).to_bytes(4, "little")


def many_keys(shards: Coords = _MANY_SHARDS) -> list[str]:
    """Return the key of the first chunk of each of the shards."""
    firsts = (range(0, s * n, n) for s, n in zip(shards, _MANY_PER_SHARD, strict=True))
    return [chunk_key(coords) for coords in itertools.product(*firsts)]


def chunk_key(coords: Coords) -> str:
    """Return the key of a chunk, or of a shard, in the default encoding."""
    return "/".join(["c", *map(str, coords)])


def volume_name(coords: Coords) -> str:
    """Return the name of the same chunk in the volume: its bounds in x, y and z."""
    begins = [at * size for at, size in zip(coords, INNER, strict=True)]
    bounds = [f"{begin}-{begin + size}" for begin, size in zip(begins, INNER, strict=True)]
    return f"{VOLUME_SCALE}/{'_'.join(reversed(bounds))}"


def inner_chunks() -> list[Coords]:
    """Return the coordinates of every inner chunk of the 64 MiB arrays."""
    return list(itertools.product(*(range(n * s) for n, s in zip(PER_SHARD, SHARDS, strict=True))))


def read_offsets(array: Path) -> dict[Coords, tuple[str, int]]:
    """Return the key of the shard and the offset in it of every inner chunk."""
    found = {}
    for shard in itertools.product(*map(range, SHARDS)):
        offsets = read_index(array / chunk_key(shard), PER_SHARD, INNER_BYTES)
        for inner, offset in offsets.items():
            coords = tuple(s * n + i for s, n, i in zip(shard, PER_SHARD, inner, strict=True))
            found[coords] = (chunk_key(shard), offset)
    return found


def read_index(shard: Path, per_shard: Coords, nbytes: int) -> dict[Coords, int]:
    """Return the offset of each inner chunk of *nbytes*, from the index at the end of *shard*."""
    table = shard.read_bytes()[-4 - 16 * int(np.prod(per_shard)) : -4]
    index = np.frombuffer(table, "<u8").reshape(*per_shard, 2)
    if (index[..., 1] != nbytes).any():
        raise ValueError(f"{shard}: chunks are not of {nbytes} bytes")
    return {at: int(index[*at, 0]) for at in np.ndindex(*per_shard)}
