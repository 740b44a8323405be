"""Part m: reads and waits where the store is 30 ms away."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Final

from .client import at_once, connected
from .data import Coords, chunk_key, write_morton
from .figures import Figure, Goal
from .servers import DATASET, Server, shardgate

_LATENCY_S: Final = 0.03
_ROUNDS: Final = 3
_ARRAY: Final = "far"
_PER_SHARD: Final = 4
"""Inner chunks of a shard along each axis."""
_EDGE: Final = 8
"""Inner chunks of the array along each axis: a plane of 64 of them lies in four shards."""
_FIRST: Final = (0, 0, 0)
_OTHER_SHARD: Final = (_PER_SHARD, 0, 0)
_KNOWN_FORMAT: Final = '\nformat = "zarr"\n'


class _Proxy:
    """Passes bytes to a store, each part of a request after 30 ms, and counts the requests."""

    def __init__(self, store: Server) -> None:
        self._store = store
        self.port = 0
        self.requests: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        upstream, to_store = await asyncio.open_connection("127.0.0.1", self._store.port)
        answers = asyncio.create_task(_copy(upstream, writer))
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.requests += [
                    line for line in data.decode("latin-1").split("\r\n") if " HTTP/1.1" in line
                ]
                loop.call_later(_LATENCY_S, to_store.write, data)
        answers.cancel()
        to_store.close()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 20):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def _far(store: Server) -> AsyncGenerator[_Proxy]:
    proxy = _Proxy(store)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.port = server.sockets[0].getsockname()[1]
        yield proxy


def measure(home: Path, root: Path, store: Server) -> list[Figure]:
    """Ask a service that has just started for a chunk, one in another shard, and a plane."""
    home.mkdir()
    write_morton(root / _ARRAY, edge=_EDGE, per_shard=_PER_SHARD)
    rounds = [asyncio.run(_measure_once(home / str(at), root, store)) for at in range(_ROUNDS)]
    return [
        Figure.over("m", what, unit, [each[at] for each in rounds], goal)
        for at, (what, unit, goal) in enumerate(_FIGURES)
    ]


_FIGURES: Final = (
    ("store 30 ms away: first chunk of a dataset", "waits", Goal("at most", 4.4)),
    ("  the same, of a known format", "waits", Goal("at most", 3.3)),
    ("  a chunk of another shard", "waits", Goal("at most", 2.2)),
    ("  a plane of 64 chunks over 4 Morton shards", "reads", Goal("at most", 12)),
    ("  the same", "waits", None),
)


async def _measure_once(home: Path, root: Path, store: Server) -> list[float]:
    async with _far(store) as proxy:
        known = await _first_chunk(home.with_suffix(".known"), root, proxy, _KNOWN_FORMAT)
        first, other, reads, plane = await _plane(home, root, proxy)
    return [first, known, other, reads, plane]


async def _first_chunk(home: Path, root: Path, proxy: _Proxy, more: str) -> float:
    async with _service(home, proxy, more) as ours:
        return await _waits(root, ours, [_FIRST])


async def _plane(home: Path, root: Path, proxy: _Proxy) -> tuple[float, float, float, float]:
    async with _service(home, proxy) as ours:
        first = await _waits(root, ours, [_FIRST])
        other = await _waits(root, ours, [_OTHER_SHARD])
    async with _service(home.with_suffix(".plane"), proxy) as ours:
        await _waits(root, ours, [(_EDGE - 1, 0, 0)])
        proxy.requests.clear()
        plane = [(1, y, z) for y, z in itertools.product(range(_EDGE), repeat=2)]
        waits = await _waits(root, ours, plane)
        return first, other, len(proxy.requests), waits


@asynccontextmanager
async def _service(home: Path, proxy: _Proxy, more: str = "") -> AsyncGenerator[Server]:
    started = shardgate(home, Server(0, proxy.port), more=more)
    ours = await asyncio.to_thread(started.__enter__)
    async with connected(ours.port, 1) as connections:  # botocore's client takes a while to load
        await at_once(connections, ["/readyz"])
    try:
        yield ours
    finally:
        await asyncio.to_thread(started.__exit__, None, None, None)


async def _waits(root: Path, ours: Server, chunks: Sequence[Coords]) -> float:
    """Get *chunks* at once, compare them, and return the time in latencies of the store."""
    keys = [chunk_key(coords) for coords in chunks]
    async with connected(ours.port, len(chunks)) as connections:
        began_at = perf_counter()
        answers = await at_once(connections, [f"/{DATASET}/{_ARRAY}/{key}" for key in keys])
        took_s = perf_counter() - began_at
    for key, answer in zip(keys, answers, strict=True):
        if answer.status != 200 or answer.body != (root / f"{_ARRAY}-plain" / key).read_bytes():
            raise RuntimeError(f"{key}: {answer.status}, {len(answer.body)} bytes")
    return took_s / _LATENCY_S
