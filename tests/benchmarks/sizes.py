"""Part n: chunks of 4 KiB, 1 MiB and 8 MiB compared with nginx, cached and from the store."""

import itertools
import math
import random
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from .data import Coords, chunk_key, read_index, write_cube
from .figures import Figure, Goal
from .load import Contestant, Request, check, run_rounds
from .servers import BUCKET, DATASET, Server, nginx_files, nginx_proxy, shardgate
from .throughput import ratio, speed


class _Size(NamedTuple):
    label: str
    inner: Coords
    edge: int
    cached: Goal | None
    """Goal of a cached chunk's rate in proportion to a static file's."""
    slowest: Goal | None = None
    """Goal of the 99th percentile in proportion to the median."""

    @property
    def array(self) -> str:
        return self.label.replace(" ", "")


_SIZES: Final = (
    _Size("4 KiB", (16, 16, 16), 16, None),
    _Size("1 MiB", (64, 128, 128), 4, Goal("at least", 0.8)),
    _Size("8 MiB", (128, 256, 256), 2, Goal("at least", 0.8), Goal("at most", 3)),
)
_CACHE_BYTES: Final = 384 << 20


def measure(home: Path, root: Path, store: Server, *, rounds: int, seconds: int) -> list[Figure]:
    """Compare the sizes one after the other."""
    figures = []
    for size in _SIZES:
        write_cube(root / size.array, edge=size.edge, per_shard=size.edge, inner=size.inner)
        with _contestants(home / size.array, root, store, size) as contestants:
            samples = run_rounds(home / size.array, contestants, rounds=rounds, seconds=seconds)
        warm, static, cold, proxy = (samples[each.name] for each in contestants)
        figures += [speed("n", each.name, samples[each.name]) for each in contestants]
        figures += [
            ratio("n", f"{size.label}: ratio to static file", warm, static, size.cached),
            ratio("n", f"{size.label}: ratio to proxying nginx", cold, proxy, None),
            Figure.over(
                "n",
                f"{size.label}, cached: p99 to p50",
                "×",
                [each.p99_ms / each.p50_ms for each in warm],
                size.slowest,
            ),
        ]
    return figures


@contextmanager
def _contestants(home: Path, root: Path, store: Server, size: _Size) -> Generator[list[Contestant]]:
    home.mkdir(parents=True)
    objects = f"/{BUCKET}/em.zarr/{size.array}"
    offsets = read_index(
        root / size.array / chunk_key((0, 0, 0)), (size.edge,) * 3, math.prod(size.inner)
    )
    coords = list(itertools.product(range(size.edge), repeat=3))
    random.Random(0).shuffle(coords)
    ours, files, ranges = [], [], []
    for each in coords:
        key = chunk_key(each)
        body = (root / f"{size.array}-plain" / key).read_bytes()
        ours.append(Request(f"/{DATASET}/{size.array}/{key}", {}, body))
        files.append(Request(f"{objects}-plain/{key}", {}, body))
        begin = offsets[each]
        header = {"Range": f"bytes={begin}-{begin + len(body) - 1}"}
        ranges.append(Request(f"{objects}/{chunk_key((0, 0, 0))}", header, body))
    with ExitStack() as running:
        start = running.enter_context
        warm = start(shardgate(home / "warm", store, chunk_bytes=_CACHE_BYTES))
        static = start(nginx_files(home / "static", root.parent.parent))
        cold = start(shardgate(home / "cold", store))
        proxy = start(nginx_proxy(home / "proxy", store))
        contestants = [
            Contestant(f"{size.label}, in the cache", "n", warm, 200, ours),
            Contestant(f"{size.label}, nginx, static file", "n", static, 200, files),
            Contestant(f"{size.label}, read from the store", "n", cold, 200, ours),
            Contestant(f"{size.label}, nginx, proxying the range", "n", proxy, 206, ranges),
        ]
        for contestant in contestants:
            check(contestant)
        yield contestants
