"""Parts e, f and l: memory and time of indexes, and of an idle service."""

import random
import time
from collections.abc import Callable, Iterator
from itertools import batched
from pathlib import Path
from timeit import repeat
from typing import Final
from urllib.request import urlopen

import numpy as np

from shardgate.formats.neuroglancer_precomputed.index import decode_minishard
from tests.support.zipped import zipped

from .client import connected
from .data import MANY_CHUNK, MANY_ENTRIES, many_keys, write_many_shards
from .figures import Figure, Goal, resident_bytes
from .load import CONNECTIONS
from .servers import DATASET, Server, shardgate

_MIB: Final = 1 << 20
_LIMIT: Final = 64 * _MIB
_ENOUGH: Final = 1024 * _MIB
_HELD: Final = 300


def measure_memory(home: Path, root: Path, store: Server) -> list[Figure]:
    """Overflow a small cache, and fill a large one."""
    write_many_shards(root / "many")
    home.mkdir()
    with shardgate(home / "small", store, index_bytes=_LIMIT) as ours:
        growth = [value / _MIB for value in _growth(ours, many_keys())]
    with shardgate(home / "large", store, index_bytes=_ENOUGH) as ours:
        held = _growth(ours, many_keys()[: _HELD + 1])[-1]
    within = Goal("at most", _LIMIT / _MIB * 1.25)
    what = "growth over 1,000 indexes, index_bytes = 64 MiB"
    small = Figure("e", what, "MiB", max(growth), min(growth), max(growth), goal=within)
    entry = [held / _HELD / MANY_ENTRIES]
    return [small, Figure.over("e", "an index entry held", "bytes", entry, Goal("at most", 20))]


def _growth(ours: Server, keys: list[str]) -> list[int]:
    """Read a chunk of each shard, and return the growth of memory after each batch."""
    paths = [f"/{DATASET}/many/{key}" for key in keys]
    growth = []
    with connected(ours.port, CONNECTIONS) as client:
        client.read_all({paths[0]: MANY_CHUNK})
        before = resident_bytes(ours.pid)
        for batch in batched(paths[1:], CONNECTIONS):
            client.read_all(dict.fromkeys(batch, MANY_CHUNK))
            growth.append(resident_bytes(ours.pid) - before)
    return growth


_COUNT: Final = 100_000
_ROUNDS: Final = 15
_LOOKUPS: Final = 10_000
_MOST_NBYTES: Final = 64 * 1024**2


def measure_minishard() -> list[Figure]:
    """Decode an index of 100,000 ids, and look some of them up."""
    rng = np.random.default_rng(0)
    gaps = rng.integers(1, 5000, _COUNT, dtype="<u8")
    sizes = rng.integers(100, 60_000, _COUNT, dtype="<u8")
    raw = np.concatenate([gaps, np.zeros(_COUNT, "<u8"), sizes]).tobytes()
    encoded = zipped(raw)
    index = decode_minishard(raw, "raw", _MOST_NBYTES)
    ids = random.Random(0).sample(list(map(int, np.cumsum(gaps))), _LOOKUPS)

    def look_up() -> None:
        for chunk_id in ids:
            index.lookup(chunk_id)

    per_lookup = [seconds / _LOOKUPS * 1e6 for seconds in repeat(look_up, number=1, repeat=_ROUNDS)]
    return [
        _decoding("100,000 ids decoded", lambda: decode_minishard(raw, "raw", _MOST_NBYTES)),
        _decoding(
            "100,000 ids decoded, gzip", lambda: decode_minishard(encoded, "gzip", _MOST_NBYTES)
        ),
        Figure.over("f", "look-up among them", "µs", per_lookup, Goal("at most", 5.0)),
        Figure.over("f", "an id held", "bytes", [index.nbytes / _COUNT], Goal("at most", 24.0)),
    ]


def _decoding(what: str, call: Callable[[], object]) -> Figure:
    return Figure.over(
        "f",
        what,
        "ms",
        [s * 1e3 for s in repeat(call, number=1, repeat=_ROUNDS)],
        Goal("at most", 5.0),
    )


_STARTS: Final = 5


def measure_start(home: Path, store: Server) -> Iterator[Figure]:
    """Start the service several times, with a dataset in S3."""
    home.mkdir()
    seconds, held = [], []
    for number in range(_STARTS):
        began = time.perf_counter()
        with shardgate(home / str(number), store) as ours:
            urlopen(f"http://127.0.0.1:{ours.port}/healthz").read()
            seconds.append(time.perf_counter() - began)
            held.append(resident_bytes(ours.pid) / _MIB)
    yield Figure.over("l", "start to first answer", "s", seconds, Goal("at most", 1.5))
    yield Figure.over("l", "resident when idle", "MiB", held, Goal("at most", 120))
