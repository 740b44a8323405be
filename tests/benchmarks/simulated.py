"""Model of replicas behind nginx: what their caches hold, and what they read of the store.

``python -m tests.benchmarks.scaling`` asks it; `replicas.py` compares it with the service itself.
`docs/scaling.md` says what it assumes.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import product
from random import Random
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from shardgate.read.metadata_cache import OVERHEAD_NBYTES, SizedLRUCache

LOOK_UP_NBYTES: Final = 1_150  # the result for a chunk, which is kept beside the indexes
METADATA_NBYTES: Final = 8_600  # of an array, and again of the way to it
CONFIRMED_S: Final = 5.0  # metadata older than a new index by this are read again
ROOT: Final = range(-5, 0)  # the metadata of the root, a group, and four markers that are absent
READS: Final = ("metadata", "index", "span")

type Chunk = tuple[int, int, int, int]
"""Number of an array, and coordinates in it."""
type Page = Sequence[Chunk]
"""Chunks that a viewer requests at once."""


class Ring:
    """Consistent hashing as in nginx: ``hash NAME consistent``, 160 points for each server."""

    def __init__(self, servers: Iterable[str]) -> None:
        points: dict[int, str] = {}
        for server in servers:
            start = crc32(server.replace(":", "\0").encode())
            point = 0
            for _ in range(160):
                point = crc32(point.to_bytes(4, "little"), start)
                points.setdefault(point, server)
        self._points = sorted(points)
        self._servers = [points[point] for point in self._points]

    def server(self, shard: str) -> str:
        """Return the server of *shard*, whose hash is its name in ``/_shard``."""
        return self.server_of(blake2b(shard.encode(), digest_size=8).hexdigest())

    def server_of(self, name: str) -> str:
        """Return the server of what nginx hashes: that of the next point."""
        at = bisect_left(self._points, crc32(name.encode()))
        return self._servers[at % len(self._points)]


class Catalogue(NamedTuple):
    """Arrays of *shards*³ shards of *chunks*³ chunks; none of them is listed anywhere."""

    arrays: int
    shards: int
    chunks: int
    chunk_nbytes: int
    exponent: float
    """Of Zipf's law, for the arrays and for the places of each."""
    name: Callable[[str], str] = "s3://bucket/{}".format
    """Makes the name of a shard of its path."""

    def shards_of(self, page: Page) -> dict[str, list[Chunk]]:
        """Return the chunks of *page* by the name of their shard."""
        found = defaultdict[Chunk, list[Chunk]](list)
        size = self.chunks
        for chunk in page:
            array, x, y, z = chunk
            found[array, x // size, y // size, z // size].append(chunk)
        return {self.name("a{}/c/{}/{}/{}".format(*shard)): found[shard] for shard in found}

    def pages(self, seed: int, pans: int, edges: tuple[int, int] = (8, 16)) -> Iterator[Page]:
        """Draw views without end, which begin at popular places, as many in an array as shards.

        A view is a plane of *edges*² chunks, and *pans* by half of it.
        """
        draw = Random(seed)
        arrays, places = (self._cumulated(count) for count in (self.arrays, self.shards**3))
        size = self.shards * self.chunks
        while True:
            array, rank = (int(each.searchsorted(draw.random())) for each in (arrays, places))
            place = (rank + array) * 2_147_483_647  # a prime: popular places lie apart
            x, y, z = (place // size**axis % size for axis in range(3))
            edge = draw.randint(*edges)
            ends = [x, *(x + edge + pan * edge // 2 for pan in range(pans + 1))]
            for plane in map(range, ends, ends[1:]):
                yield [
                    (array, i % size, j % size, z) for i, j in product(plane, range(y, y + edge))
                ]

    def _cumulated(self, count: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        weights = np.arange(1, count + 1, dtype=float) ** -self.exponent
        return np.cumsum(weights) / weights.sum()


class Replica:
    """The caches of a replica, which drop what was used least recently, and counts of its work."""

    def __init__(
        self, catalogue: Catalogue, index_bytes: int, chunk_bytes: int, ttl_s: float
    ) -> None:
        self._ttl_s = ttl_s
        self._index_nbytes = catalogue.chunks**3 * 16 + OVERHEAD_NBYTES
        self._chunk_nbytes = catalogue.chunk_nbytes + OVERHEAD_NBYTES
        # With the time at which the entry was read, and its weight.
        self.indexes = SizedLRUCache[Hashable, tuple[float, int]](index_bytes, lambda _, e: e[1])
        self.chunks = SizedLRUCache[Chunk, int](chunk_bytes, lambda _, nbytes: nbytes)
        self.counts = Counter[str]()

    def _find(
        self, kind: str, key: Hashable, nbytes: int, now: float, age_s: float = np.inf
    ) -> float:
        """Return when *key* was read: now, unless it is cached and younger than *age_s* and TTL."""
        read_at, _ = self.indexes.get(key) or (-np.inf, 0)
        if read_at + min(age_s, self._ttl_s) > now:
            return read_at
        self.counts[kind] += 1
        self.indexes.put(key, (now, nbytes))
        return now

    def name(self, array: int, now: float) -> float:
        """Find the way to *array*, which tells names of shards; return when it was read."""
        read_at, _ = self.indexes.get(("way", array)) or (-np.inf, 0)
        if read_at + self._ttl_s <= now:
            found = [self._find("metadata", key, OVERHEAD_NBYTES, now) for key in ROOT]
            read_at = min(found[-1], self._find("metadata", array, METADATA_NBYTES, now))
            self.indexes.put(("way", array), (read_at, METADATA_NBYTES))
        return read_at

    def answer(self, chunk: Chunk, shard: str, now: float) -> bool:
        """Answer the request for *chunk*; return whether its bytes are read from the store."""
        self.counts["request"] += 1
        read_at, _ = self.indexes.get(chunk) or (-np.inf, 0)
        if read_at + self._ttl_s <= now:
            array = chunk[0]
            named_at = self.name(array, now)
            index_at = self._find("index", shard, self._index_nbytes, now)
            if index_at == now and named_at < now - CONFIRMED_S:
                self._find("metadata", ROOT[-1], OVERHEAD_NBYTES, now, CONFIRMED_S)
                self._find("metadata", array, METADATA_NBYTES, now, CONFIRMED_S)
                self.indexes.put(("way", array), (-np.inf, METADATA_NBYTES))
            self.indexes.put(chunk, (min(index_at, named_at), LOOK_UP_NBYTES))
        if self.chunks.get(chunk) is not None:
            return False
        self.counts["chunk"] += 1
        self.chunks.put(chunk, self._chunk_nbytes)
        return True


def serve(
    catalogue: Catalogue,
    replicas: Mapping[str, Replica],
    pages: Iterable[tuple[float, Page]],
    per_read: int = 1,
) -> dict[str, Counter[str]]:
    """Let *replicas*, by address, answer *pages*, each at its time; return what each did.

    A read brings *per_read* chunks of a shard that a page lacks. The counts of no address, "", are
    those of pages, of their shards, and of their waits for the store.
    """
    ring = Ring(replicas)
    before = {server: Counter(each.counts) for server, each in replicas.items()}
    counts = Counter[str]()
    for now, page in pages:
        done = [sum(each.counts[kind] for each in replicas.values()) for kind in READS]
        for replica in replicas.values():  # each is asked for the name of some shard
            replica.name(page[0][0], now)
        shards = catalogue.shards_of(page)
        for shard, wanted in shards.items():
            owner = replicas[ring.server(shard)]
            missed = sum([owner.answer(chunk, shard, now) for chunk in wanted])
            owner.counts["span"] += -(-missed // per_read)
        after = [sum(each.counts[kind] for each in replicas.values()) for kind in READS]
        counts["page"] += 1
        counts["shard"] += len(shards)
        counts["wait"] += sum(a > b for a, b in zip(after, done, strict=True))
    return {"": counts} | {
        server: each.counts - before[server] for server, each in replicas.items()
    }
