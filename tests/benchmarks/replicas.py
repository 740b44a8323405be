"""Count what replicas behind nginx read of a store, beside their model (`simulated.py`)."""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from http.client import HTTPSConnection
from itertools import islice
from pathlib import Path
from typing import Final

import zarr

from tests.support.deploy.balancer import Balancer, balancing

from .client import Client, connected
from .data import write_many_shards
from .figures import Figure, Goal
from .servers import BUCKET, DATASET, Server, nginx_files, requests_served, shardgate
from .simulated import READS, Catalogue, Page, Replica, serve

CATALOGUE: Final = Catalogue(
    arrays=20,
    shards=3,
    chunks=8,
    chunk_nbytes=8,
    exponent=1.0,
    name=f"s3+nginx://{BUCKET}/em.zarr/{{}}".format,
)
INDEX_BYTES: Final = 1024**2
CHUNK_BYTES: Final = 1024**2
TTL_S: Final = 30.0
_COUNTS: Final = (1, 2, 4)
_EDGES: Final = (4, 8)
_PANS: Final = 2
_PAGES: Final = 180
"""Of each phase; after the first one the caches are full."""
_CONNECTIONS: Final = 16
_ENVIRON: Final = {
    "SHARDGATE_CACHE__TTL_S": f"{TTL_S}",
    # Else neighbours are read together or apart, as the machine has time.
    "SHARDGATE_LIMITS__COALESCE_GAP_BYTES": "0",
}
_COUNTED: Final = {"index": "reads of indexes", "chunk": "chunks not cached", "": "all reads"}
_GOAL: Final = Goal("at most", 1.2)


def measure(home: Path) -> Iterator[Figure]:
    """Yield how far the counts of one, two and four replicas are from those of the model."""
    root = home / "store" / BUCKET / "em.zarr"
    root.mkdir(parents=True)
    zarr.create_group(root)
    for number in range(CATALOGUE.arrays):
        write_many_shards(root / f"a{number}", (CATALOGUE.shards,) * 3, (CATALOGUE.chunks,) * 3)
    with nginx_files(home / "nginx", home / "store") as store:
        for count in _COUNTS:
            with ExitStack() as stack:
                service = _Service(home / f"{count}", store, count, stack)
                yield from service.compare(f"{count}, empty caches")
                yield from service.compare(f"{count}, full caches")
                if count > 1:
                    service.add()
                    yield from service.compare(f"{count} and one more")
                    service.kill()
                    yield from service.compare(f"{count + 1}, one of them dead")


class _Service:
    """Replicas before *store*, nginx before them, and models of these replicas."""

    def __init__(self, home: Path, store: Server, count: int, stack: ExitStack) -> None:
        self._home = home
        self._store = store
        self._stack = stack
        self._servers: dict[str, Server] = {}
        self._models: dict[str, Replica] = {}
        self._pages = CATALOGUE.pages(count, _PANS, _EDGES)
        home.mkdir()
        for _ in range(count):
            self._start()
        folder = home / "balancer"
        folder.mkdir()
        self._balancer: Balancer = stack.enter_context(balancing(folder, self._urls))

    @property
    def _urls(self) -> Sequence[str]:
        return [f"http://{address}" for address in self._servers]

    def _start(self) -> None:
        home = self._home / f"replica-{len(list(self._home.iterdir()))}"
        running = shardgate(
            home,
            self._store,
            index_bytes=INDEX_BYTES,
            chunk_bytes=CHUNK_BYTES,
            environ=_ENVIRON,
        )
        server = self._stack.enter_context(running)
        address = f"127.0.0.1:{server.port}"
        self._servers[address] = server
        self._models[address] = Replica(CATALOGUE, INDEX_BYTES, CHUNK_BYTES, TTL_S)

    def add(self) -> None:
        """Add an empty replica."""
        self._start()
        self._balancer.send_to(self._urls)

    def kill(self) -> None:
        """Kill the first replica; nginx goes on to ask it."""
        address = next(iter(self._servers))
        os.kill(self._servers.pop(address).pid, signal.SIGKILL)
        del self._models[address]

    def compare(self, phase: str) -> Iterator[Figure]:
        """Send the next pages, and yield the counts of the replicas by those of the models."""
        before = self._count()
        pages = list(self._send(list(islice(self._pages, _PAGES))))
        counted = self._count() - before
        simulated = sum(serve(CATALOGUE, self._models, pages).values(), Counter[str]())
        simulated[""] = sum(simulated[kind] for kind in READS)
        for kind, text in _COUNTED.items():
            here, there = counted[kind], simulated[kind]
            what = f"replicas: {phase}: {here:,} {text}, simulated {there:,}"
            ratio = max(here, there) / min(here, there)
            yield Figure("x", what, "×", ratio, ratio, ratio, goal=_GOAL)

    def _send(self, pages: Sequence[Page]) -> Iterator[tuple[float, Page]]:
        """Request *pages*, one after the other, and yield each with its time."""
        with ExitStack() as stack:
            host = self._balancer.host
            tls = self._balancer.tls()
            connections = [
                stack.enter_context(closing(HTTPSConnection(host, timeout=60, context=tls)))
                for _ in range(_CONNECTIONS)
            ]
            client = Client(connections)
            for page in pages:
                yield time.monotonic(), page
                paths = [f"/{DATASET}/a{array}/c/{x}/{y}/{z}" for array, x, y, z in page]
                statuses = {answer.status for answer in client.ask_all(paths)}
                if statuses != {200}:
                    raise RuntimeError(f"the answers are {statuses}")

    def _count(self) -> Counter[str]:
        with connected(self._store.port) as client:
            counts = Counter({"": requests_served(client)})
        return sum(map(_scrape, self._servers.values()), counts)


_SAMPLES: Final[Mapping[str, str]] = {
    "index": r'^shardgate_upstream_seconds_count\{kind="shard-index",.* (\S+)$',
    "chunk": r'^shardgate_cache_lookups_total\{cache="chunk",result="miss"\} (\S+)$',
}


def _scrape(server: Server) -> Counter[str]:
    with connected(server.port) as client:
        text = client.ask("/metrics").body.decode()
    values = {kind: re.findall(pattern, text, re.MULTILINE) for kind, pattern in _SAMPLES.items()}
    return Counter({kind: int(sum(map(float, found))) for kind, found in values.items()})
