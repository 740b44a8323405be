"""Part u: a camera that writes slices into shards of a session, one after the other."""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import icechunk
import zarr

from tests.support.gateways import Gateway, gateway, of_dataset

from .figures import Figure, Goal

_SLICES: Final = 256
_IN_SHARD: Final = (64, 256)
_SHAPE: Final = (512, 1024)
_NBYTES: Final = _SLICES * 512 * 1024
_ROUNDS: Final = 3
_SESSIONS: Final = "/api/datasets/data/sessions"
_RATE: Final = Goal("at least", 50)
_BEFORE: Final = Goal("at most", 1.3)
_AFTER: Final = Goal("at most", 2.2)


def measure(home: Path) -> Iterator[Figure]:
    """Write 256 slices of 512 KiB into shards of 64 and of 256, and commit them."""
    home.mkdir()
    for in_shard in _IN_SHARD:
        root = home / f"film{in_shard}"
        _create(root, in_shard)
        rates, before, after, commits_s = [], [], [], []
        with (
            gateway(of_dataset(str(root))) as service,
            httpx.Client(base_url=service.url, timeout=60) as client,
        ):
            for _ in range(_ROUNDS):
                session_id = client.post(_SESSIONS).raise_for_status().json()["session_id"]
                written, began = _written_nbytes(service), time.perf_counter()
                _write(client, f"/data/@session.{session_id}/film/c")
                rates.append(_SLICES / (time.perf_counter() - began))
                before.append((_written_nbytes(service) - written) / _NBYTES)
                began = time.perf_counter()
                commit = client.post(f"{_SESSIONS}/{session_id}/commit", json={"message": "film"})
                commit.raise_for_status()
                commits_s.append(time.perf_counter() - began)
                after.append((_written_nbytes(service) - written) / _NBYTES)
        where = f"slices of 512 KiB, {in_shard} a shard"
        yield Figure.over("v", where, "1/s", rates, _RATE)
        yield Figure.over("v", "  written per byte before the commit", "", before, _BEFORE)
        yield Figure.over("v", "  written per byte with the commit", "", after, _AFTER)
        yield Figure.over("v", "  the commit", "s", commits_s)


def _create(root: Path, in_shard: int) -> None:
    root.mkdir()
    storage = icechunk.local_filesystem_storage(str(root))
    session = icechunk.Repository.create(storage).writable_session("main")
    options: Any = {"shape": (_SLICES, *_SHAPE), "dtype": "u1", "compressors": None}
    options |= {"chunks": (1, *_SHAPE), "shards": (in_shard, *_SHAPE)}
    zarr.create_group(session.store).create_array("film", **options)
    session.commit("an empty film")


def _write(client: httpx.Client, keys: str) -> None:
    body = Random(0).randbytes(_NBYTES // _SLICES)
    for number in range(_SLICES):
        client.put(f"{keys}/{number}/0/0", content=body).raise_for_status()


def _written_nbytes(service: Gateway) -> int:
    """Return the bytes that the service has written to files and pipes, not to sockets."""
    lines = Path(f"/proc/{service.pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar:")).split()[1])
