"""Part s: commits of several clients to one branch, and those of the icechunk library."""

import asyncio
import base64
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import icechunk
import numpy as np
import zarr

from shardgate import open_session
from tests.support.gateways import gateway, of_dataset
from tests.support.seaweedfs import SeaweedFS, running

from .data import add_array
from .delays import proxying
from .figures import Figure, Goal
from .repositories import ARRAY

_DELAYS_S: Final = (0.0, 0.03)
_CLIENTS: Final = (1, 4, 16)
_EACH: Final = 4
"""Commits of each client."""
_CHUNKS: Final = 4096
_GAIN: Final = Goal("at least", 8)
_COMMITS: Final = "/api/datasets/data/commits"

type Commits = Callable[[str, str, int], float]
"""Commit to a repository, at an endpoint, once and then by a number of clients at once; return the
seconds that these took.
"""


class _Cost(NamedTuple):
    rate: float
    swaps: float
    rebases: float
    nbytes: float


def measure(home: Path) -> Iterator[Figure]:
    """Commit disjoint chunks of one array by several clients at once."""
    home.mkdir()
    names = count()
    with running(Path(sys.executable).parent / "weed", home) as seaweedfs:
        for delay_s in _DELAYS_S:
            with proxying(int(seaweedfs.endpoint_url.rpartition(":")[2]), delay_s) as proxy:
                endpoint = f"http://127.0.0.1:{proxy.port}"
                alone = 1.0
                rates: dict[str, float] = {}
                for clients in _CLIENTS:
                    where = f"store {1000 * delay_s:.0f} ms away, {clients} clients"
                    for who, commits in (
                        ("", _ours(seaweedfs)),
                        ("  the library, ", _by_library(seaweedfs)),
                        ("  open_session, ", _by_sessions(seaweedfs)),
                    ):
                        name = f"repository{next(names)}"
                        cost = _measure_one(seaweedfs, name, endpoint, clients, commits)
                        yield from _figures(f"{who}{where}", cost)
                        rates[who] = cost.rate
                        if not who and clients == 1:
                            alone = cost.rate
                        elif not who and delay_s:
                            goal = _GAIN if clients == max(_CLIENTS) else None
                            gain = [cost.rate / alone]
                            yield Figure.over("s", "  ours to one client", "x", gain, goal)
                    if delay_s:
                        ratio = [rates["  open_session, "] / rates["  the library, "]]
                        goal = _GAIN if clients == max(_CLIENTS) else None
                        yield Figure.over("s", "  open_session to the library", "x", ratio, goal)


def _figures(who: str, cost: _Cost) -> Iterator[Figure]:
    yield Figure.over("s", f"{who}: commits", "1/s", [cost.rate])
    yield Figure.over("s", "  swaps per commit", "", [cost.swaps])
    yield Figure.over("s", "  rebases per commit", "", [cost.rebases])
    yield Figure.over("s", "  written per commit", "kB", [cost.nbytes / 1000])


def _measure_one(
    seaweedfs: SeaweedFS, name: str, endpoint: str, clients: int, commits: Commits
) -> _Cost:
    repo = icechunk.Repository.create(_storage(seaweedfs, name, seaweedfs.endpoint_url))
    session = repo.writable_session("main")
    add_array(session.store, ARRAY, (_CHUNKS,), (1,))
    session.commit("Create an array")
    before = _objects(seaweedfs, name)
    total_s = commits(name, endpoint, clients)
    after, made = _objects(seaweedfs, name), 1 + clients * _EACH
    swaps = sum(key.startswith(f"{name}/overwritten/") for key in after.keys() - before.keys())
    new_nbytes = sum(after[key] for key in after.keys() - before.keys())
    new_nbytes += swaps * after[f"{name}/repo"]
    history: list[Any] = list(repo.ancestry(branch="main"))[:made]
    assert all(each.message.startswith("Put ") for each in history)
    rebases = sum(each.metadata.get("__icechunk", {}).get("rebase_attempts", 0) for each in history)
    return _Cost((made - 1) / total_s, swaps / made, rebases / made, new_nbytes / made)


def _ours(seaweedfs: SeaweedFS) -> Commits:
    def commits(name: str, endpoint: str, clients: int) -> float:
        environ = of_dataset(f"s3://{seaweedfs.bucket}/{name}", seaweedfs, endpoint_url=endpoint)
        with gateway(environ) as service:
            return asyncio.run(_send_all(service.url, clients))

    return commits


async def _send_all(url: str, clients: int) -> float:
    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(url, connector=connector, raise_for_status=True) as client:
        await _send(client, _CHUNKS - 1, 1)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for first in range(0, clients * _EACH, _EACH):
                group.create_task(_send(client, first, _EACH))
        return time.perf_counter() - began


async def _send(client: aiohttp.ClientSession, first: int, each: int) -> None:
    inline = base64.b64encode(b"\1").decode()
    for chunk in range(first, first + each):
        chunks = [{"coords": [chunk], "inline": inline}]
        change = {"op": "put_chunks", "path": f"/{ARRAY}", "chunks": chunks}
        body = {"message": f"Put {chunk}", "changes": [change]}
        async with client.post(_COMMITS, json=body) as answer:
            await answer.read()


def _by_sessions(seaweedfs: SeaweedFS) -> Commits:
    """Commit by processes, each of which begins a session for each commit."""

    def commits(name: str, endpoint: str, clients: int) -> float:
        environ = of_dataset(f"s3://{seaweedfs.bucket}/{name}", seaweedfs, endpoint_url=endpoint)
        context = get_context("spawn")
        with gateway(environ) as service:
            _commit_by_sessions(service.url, _CHUNKS - 1, 1, context.Barrier(1))
            gate = context.Barrier(clients + 1)
            processes = [
                context.Process(target=_commit_by_sessions, args=(service.url, first, _EACH, gate))
                for first in range(0, clients * _EACH, _EACH)
            ]
            for each in processes:
                each.start()
            gate.wait()
            began = time.perf_counter()
            gate.wait()  # their ends take seconds, and the library's threads have none
            total_s = time.perf_counter() - began
            for each in processes:
                each.join()
            return total_s

    return commits


def _commit_by_sessions(url: str, first: int, each: int, gate: Barrier) -> None:
    # The first session of a process imports, and the library's has one before as well.
    with open_session(f"{url}/data") as session:
        zarr.open_array(session.store, path=ARRAY)
    gate.wait()
    for chunk in range(first, first + each):
        with open_session(f"{url}/data") as session:
            zarr.open_array(session.store, path=ARRAY)[chunk] = np.uint8(1)
            session.commit(f"Put {chunk}")
    gate.wait()


def _by_library(seaweedfs: SeaweedFS) -> Commits:
    def commits(name: str, endpoint: str, clients: int) -> float:
        repo = icechunk.Repository.open(_storage(seaweedfs, name, endpoint))
        _commit(repo, _CHUNKS - 1, 1)
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            starts = range(0, clients * _EACH, _EACH)
            list(pool.map(partial(_commit, repo, each=_EACH), starts))
        return time.perf_counter() - began

    return commits


def _commit(repo: icechunk.Repository, first: int, each: int) -> None:
    for chunk in range(first, first + each):
        session = repo.writable_session("main")
        zarr.open_array(session.store, path=ARRAY)[chunk] = np.uint8(1)
        session.commit(f"Put {chunk}", rebase_with=icechunk.ConflictDetector())


def _storage(seaweedfs: SeaweedFS, name: str, endpoint: str) -> icechunk.Storage:
    return icechunk.s3_storage(
        bucket=seaweedfs.bucket,
        prefix=name,
        region=seaweedfs.region,
        endpoint_url=endpoint,
        allow_http=True,
        force_path_style=True,
        access_key_id=seaweedfs.access_key_id,
        secret_access_key=seaweedfs.secret_access_key,
    )


def _objects(seaweedfs: SeaweedFS, name: str) -> dict[str, int]:
    """Return the sizes of all objects of a repository."""
    pages = seaweedfs.client.get_paginator("list_objects_v2").paginate(
        Bucket=seaweedfs.bucket, Prefix=f"{name}/"
    )
    return {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", ())}
