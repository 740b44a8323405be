"""Simulate replicas before a bucket: how many, with how much memory, and what do they cost?

The model is `simulated.py`; `docs/scaling.md` has tables of the answers, and what they assume.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Final

from pydantic import ByteSize, TypeAdapter

from .simulated import READS, Catalogue, Replica, Ring, serve

_FIXED_NBYTES: Final = 512 * 1024**2
"""Memory of a replica that reads, apart from its caches."""
_CONNECTIONS: Final = 64
"""`limits.connections`."""
_NAMES: Final = 20_000
"""Shards whose replicas are compared before and after a change."""

_OPTIONS: Final[Mapping[str, tuple[str | float, str]]] = {
    "replicas": (2, "number of replicas"),
    "memory": ("4GiB", "of each replica"),
    "indexes": (0.5, "part of its caches that cache.index_bytes has"),
    "arrays": (100_000, "number of arrays"),
    "shards": (22, "along each of three axes of an array"),
    "chunks": (16, "along each axis of a shard"),
    "chunk": ("64KiB", "stored bytes of a chunk"),
    "exponent": (1.0, "of Zipf's law for the arrays, and for the shards of each"),
    "fill": (50_000, "views at most, until all caches are full"),
    "views": (500, "in each phase then: a page of 64 to 256 chunks each, and pans"),
    "pans": (4, "of a view, by half a page each"),
    "merged": (4, "missing chunks of a page and shard that one read brings"),
    "rate": (5.0, "views a second"),
    "ttl": (60.0, "cache.ttl_s"),
    "latency": (30.0, "milliseconds until the store answers"),
    "limit": (5_500, "reads a second that the store allows: S3 for each prefix"),
    "price": (0.4, "of a million reads"),
    "request": (41.0, "microseconds of processor time of a request, with the name of its shard"),
    "read": (97.0, "microseconds of processor time of a read of the store"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each phase, and the bounds while the caches are full."""
    parser = argparse.ArgumentParser("python -m tests.benchmarks.scaling", description=__doc__)
    for name, (default, text) in _OPTIONS.items():
        kind = type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} ({default})")
    given = parser.parse_args(arguments)
    if _bytes(given.memory) <= _FIXED_NBYTES:
        parser.error(f"--memory {given.memory}: 512 MiB are taken without caches")
    print(*report(given), sep="\n")


def report(given: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table for the values of `_OPTIONS`."""
    chunk_nbytes = _bytes(given.chunk)
    catalogue = Catalogue(given.arrays, given.shards, given.chunks, chunk_nbytes, given.exponent)
    # The cache of chunks has a sixteenth more, for bytes around chunks.
    caches = (_bytes(given.memory) - _FIXED_NBYTES) * 16 // 17
    index_bytes = int(caches * given.indexes)
    names = [f"replica-{number}:8000" for number in range(given.replicas + 1)]
    replicas = {
        name: Replica(catalogue, index_bytes, caches - index_bytes, given.ttl) for name in names
    }
    pages = catalogue.pages(0, given.pans)
    per_view = given.pans + 1
    times = (number / per_view / given.rate for number in count())
    timed = zip(times, pages, strict=False)

    def run(servers: Sequence[str], views: int) -> dict[str, Counter[str]]:
        some = {name: replicas[name] for name in servers}
        return serve(catalogue, some, islice(timed, views * per_view), given.merged)

    *used, _ = names
    filled = 0
    while filled < given.fill and not all(_is_full(replicas[name]) for name in used):
        run(used, 100)
        filled += 100
    shards = catalogue.arrays * catalogue.shards**3
    sizes = f"{index_bytes >> 20:,} MiB for indexes, {caches - index_bytes >> 20:,} for chunks"
    yield f"{shards:,} shards; caches of {sizes}, after {filled:,} views"
    yield f"{'':12}{'indexes':>9}{'chunks':>9}{'reads a':>9}{'a million views':>22}{'a page':>9}"
    yield f"{'':12}{'cached':>9}{'cached':>9}{'request':>9}{'reads':>14}{'price':>8}{'waits ms':>9}"
    full = run(used, given.views)
    yield _line("all", full, given)
    if given.replicas > 1:
        yield _line("one dead", run(used[:-1], given.views), given)
        yield f"  moves {_moved(used, used[:-1]):.0%} of the shards"
    yield _line("one more", run(names, given.views), given)
    yield f"  moves {_moved(used, names):.0%} of the shards"
    yield from _bounds(full, given)


def _is_full(replica: Replica) -> bool:
    return replica.indexes.evictions > 0 and replica.chunks.evictions > 0


def _line(phase: str, counts: Mapping[str, Counter[str]], given: argparse.Namespace) -> str:
    total = sum(counts.values(), Counter[str]())
    reads = sum(total[kind] for kind in READS)
    millions = reads / given.views
    requests = total["request"]
    indexes = 1 - total["index"] / total["shard"]
    chunks = 1 - total["chunk"] / requests
    waits = total["wait"] / total["page"] * given.latency
    costs = f"{millions * 1e6:14,.0f}{millions * given.price:8,.2f}"
    return f"{phase:12}{indexes:9.1%}{chunks:9.1%}{reads / requests:9.3f}{costs}{waits:9.1f}"


def _bounds(counts: Mapping[str, Counter[str]], given: argparse.Namespace) -> Iterator[str]:
    """Yield how many views a second the store and the busiest replica allow, the least first."""
    each = [counter for name, counter in counts.items() if name]
    reads = [sum(counter[kind] for kind in READS) for counter in each]
    asked = zip(each, reads, strict=True)
    busy_us = max(c["request"] * given.request + n * given.read for c, n in asked)
    bounds = {
        "reads that the store allows": given.limit / sum(reads),
        "processor of the busiest replica": 1e6 / busy_us,
        f"its {_CONNECTIONS} reads at once": _CONNECTIONS / (given.latency / 1000) / max(reads),
    }
    for name, part in sorted(bounds.items(), key=lambda bound: bound[1]):
        yield f"  {name}: {part * given.views:,.0f} views a second"


def _moved(before: Sequence[str], after: Sequence[str]) -> float:
    """Return the part of the shards that another replica has *after*."""
    rings = Ring(before), Ring(after)
    names = [f"shard {number}" for number in range(_NAMES)]
    return sum(rings[0].server(name) != rings[1].server(name) for name in names) / _NAMES


def _bytes(text: str) -> int:
    return TypeAdapter(ByteSize).validate_python(text)


if __name__ == "__main__":
    main()
