"""Part i: commits over HTTP, compared with the icechunk library on equal repositories."""

import asyncio
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from pathlib import Path
from typing import Any, Final

import aiohttp
import icechunk
import numpy as np
from zarr.core.buffer import default_buffer_prototype

from tests.support.gateways import gateway, of_dataset

from .blocking import Ask
from .data import add_array
from .figures import Figure, Goal
from .manifest import run
from .repositories import ARRAY, CHUNK_NBYTES, create_repository, write_history, write_native

_ROUNDS: Final = 5
_IN_LINE: Final = 5_000
_REFERENCES: Final = 100_000
_PUTS: Final = 2_000
_PUT_NBYTES: Final = 64 * 1024
_IN_FLIGHT: Final = 64
_ENTRY_NBYTES: Final = 200
_WRITERS: Final = 8
_API: Final = "/api/datasets/data"

_ONE: Final = Goal("at most", 1.5)
_MANY: Final = Goal("at most", 2)
_RATE: Final = Goal("at least", 500)
_WRITES: Final = Goal("at most", 2)
_SNAPSHOTS: Final = 10_000
_STANDSTILL: Final = Goal("at most", 20)
_HISTORY: Final = """
[datasets.data]
url = "{root}"
writable = true
"""
_INLINE: Final = [{"coords": [1], "inline": "AA=="}]
_SESSION: Final = (
    Ask("POST", f"{_API}/sessions", json.dumps({"branch": "main"})),
    Ask("PUT", f"/data/@session.{{session_id}}/{ARRAY}/c/0", "0"),
    Ask("GET", f"/data/@session.{{session_id}}/{ARRAY}/c/0"),
    Ask("POST", f"{_API}/sessions/{{session_id}}/commit", json.dumps({"message": "Put a chunk"})),
)
_REQUEST: Final = {
    "message": "Put a chunk",
    "changes": [{"op": "put_chunks", "path": f"/{ARRAY}", "chunks": _INLINE}],
}


def measure(home: Path) -> Iterator[Figure]:
    """Commit one chunk beside a million, then many references, and put chunks."""
    home.mkdir()
    os.sync()  # or what other parts wrote is on its way to the disk meanwhile
    yield from _commit_one(home / "one")
    yield from _commit_many(home / "many")
    yield from asyncio.run(_put_all(home / "puts"))
    yield from _watch(home / "history")


def _commit_one(home: Path) -> Iterator[Figure]:
    """Time commits of one chunk into an array of a million references, in turn."""
    write_native(home)
    ours_root = home / "ours"
    shutil.copytree(home / "repository", ours_root)
    theirs = _open(home / "repository")
    with gateway(of_dataset(str(ours_root))) as service:
        asyncio.run(_over_http(service.url, 0))
        _by_library(theirs, 0)
        ours_s, theirs_s = [], []
        for number in range(1, 1 + _ROUNDS):
            ours_s.append(asyncio.run(_over_http(service.url, number)))
            theirs_s.append(_by_library(theirs, number))
    ratios = [mine / other for mine, other in zip(ours_s, theirs_s, strict=True)]
    yield Figure.over("i", "commit of 1 chunk beside 1,000,000", "s", ours_s)
    yield Figure.over("i", "  the library", "s", theirs_s)
    yield Figure.over("i", "  ours to the library", "x", ratios, _ONE)


async def _over_http(url: str, number: int) -> float:
    """Put a chunk into a session, and time its commit."""
    key = f"{ARRAY}/c/{number}/{number}"
    async with aiohttp.ClientSession(url, raise_for_status=True) as client:
        sessions = f"{_API}/sessions"
        async with client.post(sessions, json={"branch": "main"}) as answer:
            session_id = (await answer.json())["session_id"]
        await client.put(f"/data/@session.{session_id}/{key}", data=_chunk(number))
        began = time.perf_counter()
        message = {"message": f"Put {key}"}
        async with client.post(f"{sessions}/{session_id}/commit", json=message) as answer:
            await answer.read()
        return time.perf_counter() - began


def _by_library(repository: icechunk.Repository, number: int) -> float:
    session = repository.writable_session("main")
    buffer = default_buffer_prototype().buffer.from_bytes(_chunk(number))
    asyncio.run(session.store.set(f"{ARRAY}/c/{number}/{number}", buffer))
    began = time.perf_counter()
    session.commit(f"Put {number}")
    return time.perf_counter() - began


def _commit_many(home: Path) -> Iterator[Figure]:
    """Time commits of virtual references, all of new chunks, by one request and by the library."""
    home.mkdir()
    prefix = f"{(home / 'files').as_uri()}/"
    for name in "ours", "theirs":
        _create_long_arrays(home, name, prefix)
    theirs = _open(home / "theirs")
    locations = [f"{prefix}file-{number // 1000:04d}.bin" for number in range(_REFERENCES)]
    offsets = np.arange(_REFERENCES, dtype=np.uint64) % 1000 * CHUNK_NBYTES
    environ = of_dataset(str(home / "ours")) | {
        "SHARDGATE_DATASETS__DATA__VIRTUAL_CHUNK_PREFIXES": json.dumps([prefix])
    }
    ours_s, theirs_s = [], []
    with gateway(environ) as service:
        for number in range(_ROUNDS):
            body = _request(f"/a{number}", locations, offsets)
            ours_s.append(asyncio.run(_request_commit(service.url, body)))
            began = time.perf_counter()
            session = theirs.writable_session("main")
            lengths = np.full(_REFERENCES, CHUNK_NBYTES, np.uint64)
            session.store.set_virtual_refs_arr(
                f"a{number}", (_REFERENCES,), locations, offsets, lengths
            )
            session.commit("Refer to all chunks")
            theirs_s.append(time.perf_counter() - began)
    ratios = [mine / other for mine, other in zip(ours_s, theirs_s, strict=True)]
    yield Figure.over("i", "commit of 100,000 references, one request", "s", ours_s)
    yield Figure.over("i", "  the library", "s", theirs_s)
    yield Figure.over("i", "  ours to the library", "x", ratios, _MANY)


def _create_long_arrays(home: Path, name: str, prefix: str) -> None:
    """Create an array without chunks for each round."""
    (home / "files").mkdir(exist_ok=True)
    config = icechunk.RepositoryConfig()
    store = icechunk.local_filesystem_store(str(home / "files"))
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(prefix, store))
    session = create_repository(home / name, config)
    for number in range(_ROUNDS):
        shape = (_REFERENCES * CHUNK_NBYTES,)
        add_array(session.store, f"a{number}", shape, (CHUNK_NBYTES,))
    session.commit("Create arrays")


def _request(path: str, locations: list[str], offsets: "np.ndarray[Any, Any]") -> bytes:
    """Return the changes that refer to all chunks of the array *path*, each after a newline."""
    chunks = [
        {"coords": [at], "location": location, "offset": offset, "length": CHUNK_NBYTES}
        for at, (location, offset) in enumerate(zip(locations, offsets.tolist(), strict=True))
    ]
    changes = (
        {"op": "put_chunks", "path": path, "chunks": some} for some in batched(chunks, _IN_LINE)
    )
    return b"".join(b"\n" + json.dumps(each).encode() for each in changes)


async def _request_commit(url: str, body: bytes) -> float:
    """Commit by one request on top of the current branch."""
    async with aiohttp.ClientSession(url, raise_for_status=True) as client:
        async with client.get(f"{_API}/branches") as answer:
            (branch,) = (await answer.json())["branches"]
        options = {"message": "Refer to all chunks", "parent_id": branch["snapshot_id"]}
        named = json.dumps(options).encode() + body
        headers = {"Content-Type": "application/x-ndjson"}
        began = time.perf_counter()
        async with client.post(f"{_API}/commits", data=named, headers=headers) as answer:
            await answer.read()
        return time.perf_counter() - began


async def _put_all(root: Path) -> list[Figure]:
    """Put chunks into a session of a local repository, and count the written files."""
    session = create_repository(root)
    add_array(session.store, ARRAY, (_PUTS * _PUT_NBYTES,), (_PUT_NBYTES,))
    session.commit("Create an array")
    body = random.Random(0).randbytes(_PUT_NBYTES)
    rates, bare, writes = [], [], []
    connector = aiohttp.TCPConnector(limit=_IN_FLIGHT)
    with gateway(of_dataset(str(root))) as service:
        async with aiohttp.ClientSession(
            service.url, connector=connector, raise_for_status=True
        ) as client:
            for number in range(3):
                bare.append(await asyncio.to_thread(_write_bare, root / f"bare{number}", body))
                async with client.post(f"{_API}/sessions", json={"branch": "main"}) as answer:
                    session_id = (await answer.json())["session_id"]
                before, began = _count_files(root), time.perf_counter()
                async with asyncio.TaskGroup() as group:
                    for at in range(_PUTS):
                        key = f"/data/@session.{session_id}/{ARRAY}/c/{at}"
                        group.create_task(_put(client, key, body))
                rates.append(_PUTS / (time.perf_counter() - began))
                writes.append((_count_files(root) - before) / _PUTS)
    return [
        Figure.over("i", "PUT of 64 KiB into a session, folder", "1/s", rates, _RATE),
        Figure.over("i", "  a program that only writes such files", "1/s", bare),
        Figure.over("i", "  files written per PUT", "", writes, _WRITES),
    ]


def _write_bare(folder: Path, body: bytes) -> float:
    """Return how many times a second two files like those of a PUT are synced."""
    folder.mkdir()

    def write(number: int) -> None:
        for name, data in (f"c{number}", body), (f"j{number}", body[:_ENTRY_NBYTES]):
            path = folder / name
            with path.open("wb", buffering=0) as file:
                file.write(data)
                os.fsync(file)
            above = os.open(folder, os.O_RDONLY)
            os.fsync(above)
            os.close(above)

    began = time.perf_counter()
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(_PUTS)))
    return _PUTS / (time.perf_counter() - began)


def _watch(home: Path) -> Iterator[Figure]:
    """Measure the event loop's longest delay with a repository of many snapshots, at best."""
    home.mkdir()
    write_history(home / "repository", _SNAPSHOTS)
    config = home / "config.toml"
    config.write_text(_HISTORY.format(root=home / "repository"))
    asks = [*_SESSION, Ask("POST", f"{_API}/commits", json.dumps(_REQUEST))]
    rounds = [
        [1e3 * s for s in each] for each in run("blocking", config, _ROUNDS, json.dumps(asks))
    ]
    sessions = [max(each[: len(_SESSION)]) for each in rounds]
    *_, commits, idle = zip(*rounds, strict=True)
    yield Figure.least(
        "i", "standstill, a session of 10,000 snapshots", "ms", sessions, _STANDSTILL
    )
    yield Figure.least("i", "  the same, a commit by one request", "ms", commits, _STANDSTILL)
    yield Figure.least("i", "  the same, idle", "ms", idle)


async def _put(client: aiohttp.ClientSession, key: str, body: bytes) -> None:
    async with client.put(key, data=body) as answer:
        await answer.read()


def _count_files(root: Path) -> int:
    return sum(path.is_file() for path in root.rglob("*"))


def _chunk(number: int) -> bytes:
    return random.Random(number).randbytes(CHUNK_NBYTES)


def _open(path: Path) -> icechunk.Repository:
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(path)))
