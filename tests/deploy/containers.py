"""What the replicas serve: a container of each format, in shards."""

import itertools
from pathlib import Path
from typing import Any, Final

import icechunk
import numpy as np
import tensorstore
import zarr

from tests.benchmarks.data import chunk_key, many_keys, write_many_shards

SHAPE: Final = (64, 64)
SHARD: Final = 16
CHUNK: Final = 4
MANY: Final = (4, 4, 4)
"""Shards of the array ``many``, whose indexes have 512 KiB each."""


def write_containers(root: Path) -> None:
    """Write ``array``, ``many``, ``volume``, and ``array`` in ``repository``."""
    values = np.random.default_rng(7).integers(1, 256, SHAPE, dtype="u1")
    array = zarr.create_array(root / "array", **_options())
    array[...] = values
    write_many_shards(root / "many", MANY)
    _write_volume(root / "volume")
    _write_repository(root / "repository", values)


def _options() -> dict[str, Any]:
    return {
        "shape": SHAPE,
        "shards": (SHARD, SHARD),
        "chunks": (CHUNK, CHUNK),
        "dtype": "u1",
        "compressors": None,
    }


def _write_volume(path: Path) -> None:
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 1},
        "scale_metadata": {
            "key": "1_1_1",
            "size": [32, 32, 32],
            "chunk_size": [8, 8, 8],
            "resolution": [1, 1, 1],
            "encoding": "raw",
            "sharding": {
                "@type": "neuroglancer_uint64_sharded_v1",
                "hash": "identity",
                "preshift_bits": 2,
                "minishard_bits": 1,
                "shard_bits": 3,
                "minishard_index_encoding": "gzip",
                "data_encoding": "gzip",
            },
        },
        "create": True,
    }
    data = np.random.default_rng(8).integers(0, 256, (32, 32, 32, 1), dtype="u1")
    tensorstore.open(spec).result().write(data).result()


def _write_repository(path: Path, values: Any) -> None:
    storage = icechunk.local_filesystem_storage(str(path))
    session = icechunk.Repository.create(storage).writable_session("main")
    array = zarr.create_array(session.store, name="array", **_options())
    array[...] = values
    session.commit("written")


def by_shard(lead: str) -> dict[Any, list[str]]:
    """Give the keys of the inner chunks of each shard of the array below *lead*."""
    per_shard = SHARD // CHUNK
    keys: dict[Any, list[str]] = {}
    for coords in itertools.product(*(range(size // CHUNK) for size in SHAPE)):
        shard = tuple(at // per_shard for at in coords)
        keys.setdefault(shard, []).append(f"{lead}/{chunk_key(coords)}")
    return keys


def by_shard_of_volume() -> dict[Any, list[str]]:
    """Give the names of the chunks of each shard: eight neighbours, by their Morton codes."""
    keys: dict[Any, list[str]] = {}
    for x, y, z in itertools.product(range(4), repeat=3):
        bits = (at >> bit & 1 for bit in range(2) for at in (x, y, z))
        code = sum(value << shift for shift, value in enumerate(bits))
        bounds = (f"{8 * at}-{8 * at + 8}" for at in (x, y, z))
        keys.setdefault(code >> 3, []).append(f"volume/1_1_1/{'_'.join(bounds)}")
    return keys


def keys_of_many() -> list[str]:
    """Name a chunk of each shard of ``many``."""
    return [f"many/{key}" for key in many_keys(MANY)]
