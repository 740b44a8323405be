"""Part g: a manifest of 1,000,000 references, compared with the icechunk library."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from timeit import repeat
from typing import Any, Final

from shardgate.formats.icechunk.ids import decode_id
from shardgate.formats.icechunk.manifest import Manifest, ManifestDecoder

from .blocking import Ask
from .client import connected
from .data import REPOSITORY, chunk_key
from .figures import Figure, Goal, resident_bytes
from .repositories import ARRAY, COUNT, GRID, PLACE, write_native, write_virtual
from .servers import BUCKET, Server, requests_served, shardgate

_ROUNDS: Final = 5
_LOOKUPS: Final = 1024
_LIMIT_NBYTES: Final = 1 << 30
_DATASET: Final = "repository"
_KEY: Final = f"{ARRAY}/{chunk_key(PLACE)}"
_READS: Final = 4
"""Reads of `repo`, snapshot, manifest and chunk."""

_LOCAL: Final = """
[datasets.repository]
url = "{root}/repository"
format = "icechunk"
virtual_chunk_prefixes = ["file://{root}/files/"]
"""
_REMOTE: Final = """
[datasets.repository]
url = "s3://{bucket}/em.zarr/{repository}"
store = "nginx"
format = "icechunk"
"""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A repository in *root* with references of one kind, and the chunk at `PLACE`."""

    name: str
    root: Path
    chunk: bytes
    held: Goal
    """Bytes a reference."""

    @property
    def more(self) -> str:
        """The dataset's part of the configuration."""
        return _LOCAL.format(root=self.root)


def measure(home: Path, store: Server) -> Iterator[Figure]:
    """Measure first reads, delays of the event loop, look-ups, and reads of the store."""
    home.mkdir()
    for name, write, bound in ("native", write_native, 75), ("virtual", write_virtual, 100):
        root = home / name
        kind = _Kind(name, root, write(root), Goal("at most", bound))
        yield from _compare(kind, home, store)
        yield from _watch(kind, home)
        yield from _look_up(kind)
    yield _count_reads(home / "reads", store)


def _compare(kind: _Kind, home: Path, store: Server) -> Iterator[Figure]:
    """Time the first read of a chunk in new processes, the service's over HTTP.

    Both have imported all they need, and know nothing of the repository: the library opens it and a
    session in that time. Sockets are connected before.
    """
    ours, theirs, growth = [], [], []
    for number in range(_ROUNDS):
        with shardgate(home / f"{kind.name}-{number}", store, more=kind.more) as server:
            before = resident_bytes(server.pid)
            ours.append(_time(server, kind) * 1e3)
            growth.append((resident_bytes(server.pid) - before) / COUNT)
        theirs.append(_time_library(kind) * 1e3)
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    yield Figure.over("g", f"first chunk, 1,000,000 {kind.name} references", "ms", ours)
    yield Figure.over("g", "  the library, in its process", "ms", theirs)
    yield Figure.over("g", "  ratio to it", "×", ratios, Goal("at most", 2))
    yield Figure.over("g", "  resident memory a reference", "bytes", growth, kind.held)


def _time(server: Server, kind: _Kind) -> float:
    with connected(server.port) as client:
        began = perf_counter()
        answer = client.ask(f"/{_DATASET}/{_KEY}")
        seconds = perf_counter() - began
    if answer.status != 200 or answer.body != kind.chunk:
        raise RuntimeError(f"{kind.name}: {answer.status}: {answer.body[:300]!r}")
    return seconds


def _time_library(kind: _Kind) -> float:
    found = run("first_read", kind.root, _KEY)
    if found["body"] != kind.chunk.hex():
        raise RuntimeError(f"{kind.name}: the library reads another chunk")
    return float(found["seconds"])


def _watch(kind: _Kind, home: Path) -> Iterator[Figure]:
    """Measure the longest delay of the event loop, in the best round."""
    config = home / f"{kind.name}-0" / "config.toml"
    asks = [Ask("GET", f"/{_DATASET}/{key}") for key in (f"{ARRAY}/zarr.json", _KEY)]
    rounds = run("blocking", config, _ROUNDS, json.dumps(asks))
    opening, decoding, idle = ([s * 1e3 for s in each] for each in zip(*rounds, strict=True))
    goal = Goal("at most", 20)
    yield Figure.least("g", "  event loop at a standstill, decoding", "ms", decoding, goal)
    yield Figure.least("g", "  the same, opening the ref", "ms", opening, goal)
    yield Figure.least("g", "  the same, idle", "ms", idle)


def _look_up(kind: _Kind) -> Iterator[Figure]:
    manifest = _decode(kind)
    ((node_id, _),) = manifest.arrays
    rng = random.Random(0)
    places = [tuple(map(rng.randrange, GRID)) for _ in range(_LOOKUPS)]
    taken = repeat(
        lambda: [manifest.lookup(node_id, place) for place in places], number=1, repeat=_ROUNDS
    )
    times = [seconds / _LOOKUPS * 1e6 for seconds in taken]
    yield Figure.least("g", "  look-up", "µs", times, Goal("at most", 5))
    yield Figure.over("g", "  held a reference", "bytes", [manifest.nbytes / COUNT], kind.held)


def _decode(kind: _Kind) -> Manifest:
    (file,) = (kind.root / "repository/manifests").iterdir()
    object_id = decode_id(file.name)
    if object_id is None:
        raise RuntimeError(f"{file.name} is no id")
    return ManifestDecoder(object_id, _LIMIT_NBYTES)(file.read_bytes())


def _count_reads(home: Path, store: Server) -> Figure:
    """Count the reads of the store for the first chunk of a ref."""
    more = _REMOTE.format(bucket=BUCKET, repository=REPOSITORY)
    with shardgate(home, store, more=more) as server:
        reads = _reads(server, store)
    return Figure.over("g", "first chunk of a ref", "reads", [reads], Goal("at most", _READS))


def _reads(server: Server, store: Server) -> int:
    path = f"/{_DATASET}/plain/{chunk_key((0, 0, 0))}"
    with connected(store.port) as counter, connected(server.port) as client:
        before = requests_served(counter)
        answer = client.ask(path)
        reads = requests_served(counter) - before - 1
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status}: {answer.body[:300]!r}")
    return reads


def run(module: str, *arguments: str | int | Path) -> Any:
    """Run a module of this package in a process of its own, and return what it prints."""
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"{module}: {answer.stderr[-2000:]}")
    return json.loads(answer.stdout)
