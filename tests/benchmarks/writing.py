"""Part h: inner chunks put into shards, compared with a client that rewrites whole shards."""

import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
import obstore
from obstore.store import S3Store
from prometheus_client.parser import text_string_to_metric_families

from shardgate.concurrency import bounded_gather
from tests.support.formats.zarr.building import LITTLE, array_metadata, sharding
from tests.support.gateways import gateway, of_dataset
from tests.support.seaweedfs import SeaweedFS, running

from .figures import Figure, Goal

_SHARDS: Final = 4
_PER_SHARD: Final = 512
_INNER_BYTES: Final = 64 * 1024
_PUTS: Final = 1000
_IN_FLIGHT: Final = 64
_REWRITES: Final = 96
"""Number of rewrites by the client, whose rate does not depend on it."""
_ROUNDS: Final = 3
_BIG_INNER_BYTES: Final = 1024**2
_BIG_PER_SHARD: Final = 1024
_MIB: Final = 1024**2

_FASTER: Final = Goal("at least", 10)
_REWRITES_PER_PUT: Final = Goal("at most", 0.1)
_MOVED_MIB: Final = Goal("at most", 20)

type Metrics = Mapping[str, float]


def measure(home: Path) -> list[Figure]:
    """Write to SeaweedFS through one gateway, and directly."""
    home.mkdir()
    with running(Path(sys.executable).parent / "weed", home) as seaweedfs:
        environ = of_dataset(f"s3://{seaweedfs.bucket}/bench", seaweedfs)
        with gateway(environ) as ours:
            return [
                *asyncio.run(_many(seaweedfs, ours.url)),
                *asyncio.run(_one_of_many(seaweedfs, ours.url)),
            ]


async def _many(seaweedfs: SeaweedFS, url: str) -> list[Figure]:
    """Put chunks into shards that begin empty, and rewrite shards as full on average."""
    rates, ratios, rewrites, written = [], [], [], []
    for number in range(_ROUNDS):
        name = f"many{number}"
        _put_metadata(seaweedfs, name, _INNER_BYTES, _SHARDS, _PER_SHARD)
        before = await _metrics(url)
        rate = await _put_all(f"{url}/data/{name}")
        after = await _metrics(url)
        rates.append(rate)
        ratios.append(rate / await _rewrite_all(seaweedfs, f"rewritten{number}"))
        made = _difference(before, after, "shardgate_rewrite_changes_count")
        rewrites.append(made / _PUTS)
        nbytes = _difference(before, after, "shardgate_written_bytes_total")
        written.append(nbytes / (_PUTS * _INNER_BYTES))
    return [
        Figure.over("h", "PUT of 64 KiB, 64 in flight, 4 shards", "1/s", rates),
        Figure.over("h", "  beside a client that rewrites shards", "x", ratios, _FASTER),
        Figure.over("h", "  rewrites per PUT", "", rewrites, _REWRITES_PER_PUT),
        Figure.over("h", "  bytes written upstream per byte", "", written),
    ]


async def _one_of_many(seaweedfs: SeaweedFS, url: str) -> list[Figure]:
    """Replace one chunk of a shard of 1 GiB."""
    _put_metadata(seaweedfs, "big", _BIG_INNER_BYTES, 1, _BIG_PER_SHARD)
    await _write_big(seaweedfs.store(""), "bench/big/c/0")
    moved, seconds = [], []
    async with aiohttp.ClientSession() as session:
        for number in range(_ROUNDS):
            body = random.Random(number).randbytes(_BIG_INNER_BYTES)
            before, began = await _metrics(url), time.perf_counter()
            target = f"{url}/data/big/c/{number * 300 + 17}"
            async with session.put(target, data=body) as answer:
                answer.raise_for_status()
            seconds.append(time.perf_counter() - began)
            after = await _metrics(url)
            nbytes = sum(
                _difference(before, after, f"shardgate_{way}_bytes_total")
                for way in ("written", "fetched")
            )
            moved.append(nbytes / _MIB)
    return [
        Figure.over("h", "one chunk of a 1 GiB shard: moved through us", "MiB", moved, _MOVED_MIB),
        Figure.over("h", "  time", "s", seconds),
    ]


async def _put_all(array: str) -> float:
    """Put chunks of all shards in random order, and return the rate."""
    order = random.Random(0).sample(range(_SHARDS * _PER_SHARD), _PUTS)
    body = random.Random(1).randbytes(_INNER_BYTES)
    connector = aiohttp.TCPConnector(limit=_IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def put(chunk: int) -> None:
            async with session.put(f"{array}/c/{chunk}", data=body) as answer:
                answer.raise_for_status()

        return await _rate(put, order)


async def _rewrite_all(seaweedfs: SeaweedFS, name: str) -> float:
    """Rewrite shards like a client that reads one, changes it in memory and puts it back.

    One writer at a time rewrites a shard, or chunks would be lost.
    """
    store = seaweedfs.store("")
    half = np.zeros(_PUTS // _SHARDS // 2 * _INNER_BYTES, "u1").tobytes()
    locks = [asyncio.Lock() for _ in range(_SHARDS)]
    keys = [f"bench/{name}/c/{shard}" for shard in range(_SHARDS)]
    for key in keys:
        await obstore.put_async(store, key, half, use_multipart=False)
    body = random.Random(1).randbytes(_INNER_BYTES)

    async def rewrite(number: int) -> None:
        shard = number % _SHARDS
        async with locks[shard]:
            old = bytes(await (await obstore.get_async(store, keys[shard])).bytes_async())
            new = body + old[_INNER_BYTES:]
            await obstore.put_async(store, keys[shard], new, use_multipart=False)

    return await _rate(rewrite, range(_REWRITES))


async def _rate(call: Callable[[int], Awaitable[None]], numbers: Sequence[int]) -> float:
    began = time.perf_counter()
    await bounded_gather(call, numbers, limit=_IN_FLIGHT)
    return len(numbers) / (time.perf_counter() - began)


async def _write_big(store: S3Store, key: str) -> None:
    """Write a shard with every chunk."""
    offsets = np.arange(_BIG_PER_SHARD, dtype="<u8") * _BIG_INNER_BYTES
    index = np.stack([offsets, np.full_like(offsets, _BIG_INNER_BYTES)], axis=1).tobytes()
    chunk = random.Random(2).randbytes(_BIG_INNER_BYTES)

    pieces = iter([chunk] * _BIG_PER_SHARD + [index])
    await obstore.put_async(store, key, pieces, chunk_size=32 * _MIB)


def _put_metadata(
    seaweedfs: SeaweedFS, name: str, inner_bytes: int, shards: int, per_shard: int
) -> None:
    """Write the metadata of an array of bytes whose index has no checksum."""
    shard_bytes = inner_bytes * per_shard
    codec = sharding([inner_bytes], [{"name": "bytes"}], index_codecs=[LITTLE])
    document = array_metadata([shard_bytes * shards], [shard_bytes], [codec])
    seaweedfs.put(f"bench/{name}/zarr.json", json.dumps(document).encode())


async def _metrics(url: str) -> Metrics:
    """Return the service's counters."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    totals = defaultdict[str, float](float)
    for sample in (sample for family in families for sample in family.samples):
        totals[sample.name] += sample.value  # whatever the labels are
    return totals


def _difference(before: Metrics, after: Metrics, name: str) -> float:
    return after[name] - before[name]
