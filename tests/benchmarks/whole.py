"""Part u: an array of 256 MiB read by zarr-python from SeaweedFS, and by the service's `@sharded`.

Run as a program, it is the reader.
"""

import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np
import zarr
from zarr.storage import ObjectStore

from tests.support.clients.filling import open_obstore
from tests.support.gateways import gateway, of_dataset
from tests.support.seaweedfs import SeaweedFS, running

from .data import add_array, write_cube
from .delays import proxying
from .figures import Figure, Goal

_ROUNDS: Final = 5
_WHOLE: Final = "whole"
_PLANE: Final = "plane"
_INNER: Final = (64, 32, 32)
"""Shape of a chunk of 64 KiB."""
_SHARD: Final = tuple(8 * size for size in _INNER)
_SHAPE: Final = tuple(16 * size for size in _INNER)
_EDGE: Final = 8
_PER_SHARD: Final = 4
"""Chunks along each axis of the other array, and of a shard of it: a plane lies in four shards."""

_SLOWER: Final = Goal("at most", 1.1)
_REQUESTS: Final = Goal("at most", 10)


def measure(home: Path) -> list[Figure]:
    """Read in processes of their own; before each one the service starts anew."""
    (home / "store").mkdir(parents=True)
    data = np.random.default_rng(3).integers(0, 256, _SHAPE, dtype=np.uint8)
    add_array(home / "arrays", _WHOLE, _SHAPE, _INNER, _SHARD)[...] = data
    write_cube(home / "arrays" / _PLANE, edge=_EDGE, per_shard=_PER_SHARD, inner=_INNER)
    with running(Path(sys.executable).parent / "weed", home / "store") as seaweedfs:
        seaweedfs.upload_folder(home / "arrays", "bench")
        _read_directly(seaweedfs)  # fills the cache of files
        direct, served = zip(*(_read_both(seaweedfs) for _ in range(_ROUNDS)), strict=True)
        requests = _count_requests(seaweedfs)
    ratios = [ours / theirs for theirs, ours in zip(direct, served, strict=True)]
    return [
        Figure.over("u", "zarr-python, 256 MiB, straight from the bucket", "s", direct),
        Figure.over("u", "  below @sharded", "s", served),
        Figure.over("u", "  ratio", "x", ratios, _SLOWER),
        Figure.over(
            "u", "  requests for a plane of 64 chunks in 4 shards", "", [requests], _REQUESTS
        ),
    ]


def _read_both(seaweedfs: SeaweedFS) -> tuple[float, float]:
    return _read_directly(seaweedfs), _read_served(seaweedfs)


def _read_directly(seaweedfs: SeaweedFS) -> float:
    keys = seaweedfs.access_key_id, seaweedfs.secret_access_key
    return _read(seaweedfs.endpoint_url, seaweedfs.bucket, f"bench/{_WHOLE}", *keys)


def _read_served(seaweedfs: SeaweedFS) -> float:
    with gateway(of_dataset(f"s3://{seaweedfs.bucket}/bench", seaweedfs)) as ours:
        return _read(ours.url, "data", f"@sharded/{_WHOLE}")


def _count_requests(seaweedfs: SeaweedFS) -> int:
    environ = of_dataset(f"s3://{seaweedfs.bucket}/bench", seaweedfs)
    with gateway(environ) as ours, proxying(int(ours.url.rpartition(":")[2]), 0) as proxy:
        _read(f"http://127.0.0.1:{proxy.port}", "data", f"@sharded/{_PLANE}")
        return len(proxy.arrivals)


def _read(*arguments: str) -> float:
    """Run the reader, and return the seconds that it took to open and read the array."""
    command = [sys.executable, "-m", "tests.benchmarks.whole", *arguments]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def _main(*place: str) -> None:
    """Read the array at *place*, the arguments of `open_obstore`, or a plane of the smaller one.

    Print the seconds.
    """
    store = ObjectStore(open_obstore(*place), read_only=True)
    began = perf_counter()
    array = zarr.open_array(store, mode="r", zarr_format=3)
    found = np.asarray(array[...] if array.shape == _SHAPE else array[_INNER[0]])
    print(perf_counter() - began)
    if not found.any():
        raise RuntimeError("the array is empty")


if __name__ == "__main__":
    _main(*sys.argv[1:])
