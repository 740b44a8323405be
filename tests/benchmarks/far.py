"""Part m: reads and waits of requests with a store that is 30 ms away."""

import itertools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Final

from .client import connected
from .data import Coords, chunk_key, write_cube
from .delays import Proxy, proxying
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


def measure(home: Path, root: Path, store: Server) -> list[Figure]:
    """Request a chunk of a new service, one of another shard, and a plane."""
    home.mkdir()
    write_cube(root / _ARRAY, edge=_EDGE, per_shard=_PER_SHARD)
    rounds = [_measure_once(home / str(at), root, store) for at in range(_ROUNDS)]
    return [
        Figure.over("m", what, unit, [each[at] for each in rounds], goal)
        for at, (what, unit, goal) in enumerate(_FIGURES)
    ]


_FIGURES: Final = (
    ("store 30 ms away: first chunk of a dataset", "waits", Goal("at most", 4)),
    ("  the same, of a known format", "waits", Goal("at most", 3)),
    ("  a chunk of another shard", "waits", Goal("at most", 2)),
    ("  a plane of 64 chunks over 4 Morton shards", "reads", Goal("at most", 12)),
    ("  the same", "ms", None),
)


def _measure_once(home: Path, root: Path, store: Server) -> list[float]:
    with proxying(store.port, _LATENCY_S) as proxy:
        with _service(home, proxy) as ours:
            _get(root, ours, proxy, [_FIRST])
            first = proxy.waits
            _get(root, ours, proxy, [_OTHER_SHARD])
            other = proxy.waits
        with _service(home.with_suffix(".known"), proxy, _KNOWN_FORMAT) as ours:
            _get(root, ours, proxy, [_FIRST])
            known = proxy.waits
        with _service(home.with_suffix(".plane"), proxy) as ours:
            _get(root, ours, proxy, [(_EDGE - 1, 0, 0)])
            plane = [(1, y, z) for y, z in itertools.product(range(_EDGE), repeat=2)]
            took_s = _get(root, ours, proxy, plane)
        return [first, known, other, len(proxy.arrivals), took_s * 1000]


@contextmanager
def _service(home: Path, proxy: Proxy, more: str = "") -> Generator[Server]:
    with shardgate(home, Server(0, proxy.port), more=more) as ours:
        with connected(ours.port) as client:  # botocore's client takes a while to load
            client.ask("/readyz")
        yield ours


def _get(root: Path, ours: Server, proxy: Proxy, chunks: Sequence[Coords]) -> float:
    """Get *chunks* concurrently, compare them, and return the seconds that this took."""
    plain = root / f"{_ARRAY}-plain"
    keys = [chunk_key(coords) for coords in chunks]
    bodies = {f"/{DATASET}/{_ARRAY}/{key}": (plain / key).read_bytes() for key in keys}
    with connected(ours.port, len(chunks)) as client:
        proxy.arrivals.clear()
        began_at = perf_counter()
        client.read_all(bodies)
        return perf_counter() - began_at
