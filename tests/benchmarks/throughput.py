"""Parts a, b and c: requests per second compared with nginx, a bare application and FastAPI."""

import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final

from .data import INNER_BYTES, REPOSITORY, chunk_key, inner_chunks, read_offsets, volume_name
from .figures import Figure, Goal
from .load import Contestant, Request, Sample, check, run_rounds
from .servers import BUCKET, DATASET, Server, nginx_files, nginx_proxy, shardgate, uvicorn

_YARDSTICK: Final = "tests.benchmarks.yardstick"
_OBJECTS: Final = f"/{BUCKET}/em.zarr"

_WARM: Final = "shardgate, chunk in the cache"
_STATIC: Final = "nginx, the chunk as a static file"
_BARE: Final = "bare ASGI application"
_COLD: Final = "shardgate, index in the cache"
_PROXY: Final = "nginx, proxying the range"
_ROOMY: Final = "nginx, proxying with roomy buffers"
_ROUTE: Final = "FastAPI route, get_object"
_WARM_VOLUME: Final = "shardgate, chunk of a volume in the cache"
_COLD_VOLUME: Final = "shardgate, its minishard index in the cache"
_WARM_REPOSITORY: Final = "shardgate, chunk of a repository in the cache"
_COLD_REPOSITORY: Final = "shardgate, its manifest in the cache"
_COLD_SHARD: Final = "shardgate, a shard in the repository"
_NOT_MODIFIED: Final = "shardgate, 304"

_RATIOS: Final = (
    ("a", _WARM, _STATIC, "static file", Goal("at least", 0.8)),
    ("a", _WARM, _BARE, "bare ASGI application", None),
    ("b", _COLD, _PROXY, "proxying nginx", Goal("at least", 0.5)),
    ("b", _COLD, _ROOMY, "proxying nginx, roomy", None),
    ("b", _COLD, _ROUTE, "FastAPI route", Goal("at least", 5.0)),
    ("a", _WARM_VOLUME, _WARM, "chunk of an array", Goal("at least", 0.9)),
    ("b", _COLD_VOLUME, _COLD, "chunk of an array", Goal("at least", 0.9)),
    ("a", _WARM_REPOSITORY, _WARM, "chunk of an array, repository", Goal("at least", 0.9)),
    ("b", _COLD_REPOSITORY, _COLD, "chunk of an array, repository", Goal("at least", 0.9)),
    ("b", _COLD_SHARD, _COLD, "chunk of an array, shard in one", Goal("at least", 0.9)),
    ("c", _NOT_MODIFIED, _WARM, "chunk in the cache", Goal("at least", 1.0)),
)


def measure(
    home: Path, root: Path, store: Server, parts: str, *, rounds: int, seconds: int
) -> list[Figure]:
    """Run the contestants that *parts* need, and compare them."""
    home.mkdir()
    with _contestants(home, root, store) as everybody:
        contestants = [c for c in everybody if set(c.parts) & set(parts)]
        samples = run_rounds(home, contestants, rounds=rounds, seconds=seconds)
    speeds = [speed(c.parts[0], c.name, samples[c.name]) for c in contestants]
    ratios = [
        ratio(part, f"ratio to {label}", samples[ours], samples[theirs], goal)
        for part, ours, theirs, label, goal in _RATIOS
        if part in parts
    ]
    return sorted(speeds + ratios, key=lambda figure: figure.part)


@contextmanager
def _contestants(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
    """Start all contestants, and assert that each returns the right bytes."""
    bodies = read_bodies(root / "plain")
    ours = [Request(f"/{DATASET}/morton/{key}", {}, body) for key, body in bodies.items()]
    files = [Request(f"{_OBJECTS}/plain/{key}", {}, body) for key, body in bodies.items()]
    volume = [
        Request(f"/{DATASET}/volume/{volume_name(coords)}", {}, bodies[chunk_key(coords)])
        for coords in inner_chunks()
    ]
    random.Random(1).shuffle(volume)
    plain, shards = (
        [Request(f"/{DATASET}/{REPOSITORY}/{name}/{key}", {}, body) for key, body in bodies.items()]
        for name in ("plain", "morton")
    )
    ranges = range_requests(root / "morton", bodies)
    constant = [Request("/", {}, bytes(INNER_BYTES))]
    endpoint = f"http://127.0.0.1:{store.port}"
    with ExitStack() as running:
        start = running.enter_context
        warm = start(shardgate(home / "warm", store, chunk_bytes=256 << 20))
        cold = start(shardgate(home / "cold", store))
        static = start(nginx_files(home / "static", root.parent.parent))
        proxy = start(nginx_proxy(home / "proxy", store))
        roomy = start(nginx_proxy(home / "roomy", store, roomy=True))
        bare = start(uvicorn(home / "bare", f"{_YARDSTICK}:bare"))
        fastapi = start(uvicorn(home / "fastapi", f"{_YARDSTICK}:app", YARDSTICK_STORE=endpoint))
        contestants = [
            Contestant(_WARM, "ac", warm, 200, ours),
            Contestant(_WARM_VOLUME, "a", warm, 200, volume),
            Contestant(_WARM_REPOSITORY, "a", warm, 200, plain),
            Contestant(_STATIC, "a", static, 200, files),
            Contestant(_BARE, "a", bare, 200, constant),
            Contestant(_COLD, "b", cold, 200, ours),
            Contestant(_COLD_VOLUME, "b", cold, 200, volume),
            Contestant(_COLD_REPOSITORY, "b", cold, 200, plain),
            Contestant(_COLD_SHARD, "b", cold, 200, shards),
            Contestant(_PROXY, "b", proxy, 206, ranges),
            Contestant(_ROOMY, "b", roomy, 206, ranges),
            Contestant(_ROUTE, "b", fastapi, 206, ranges),
        ]
        headers = [check(contestant) for contestant in contestants]
        unmodified = [
            Request(request.path, {"If-None-Match": header["etag"]}, b"")
            for request, header in zip(ours, headers[0], strict=True)
        ]
        contestants.append(Contestant(_NOT_MODIFIED, "c", warm, 304, unmodified))
        check(contestants[-1])
        yield contestants


def read_bodies(plain: Path) -> dict[str, bytes]:
    """Return the unsharded chunks, in an order without neighbours."""
    keys = [chunk_key(coords) for coords in inner_chunks()]
    random.Random(0).shuffle(keys)
    return {key: (plain / key).read_bytes() for key in keys}


def range_requests(array: Path, bodies: Mapping[str, bytes]) -> list[Request]:
    """Return requests for the same chunks as ranges of the shards."""
    offsets = {chunk_key(coords): where for coords, where in read_offsets(array).items()}
    requests = []
    for key, body in bodies.items():
        shard, offset = offsets[key]
        header = {"Range": f"bytes={offset}-{offset + len(body) - 1}"}
        requests.append(Request(f"{_OBJECTS}/{array.name}/{shard}", header, body))
    return requests


def speed(part: str, name: str, samples: Sequence[Sample]) -> Figure:
    """Return the figure of a contestant's speed."""
    speeds = [sample.per_second for sample in samples]
    return Figure(
        part,
        name,
        "/s",
        median(speeds),
        min(speeds),
        max(speeds),
        p50_ms=median(sample.p50_ms for sample in samples),
        p99_ms=median(sample.p99_ms for sample in samples),
        cpu_us=median(sample.cpu_us for sample in samples),
    )


def ratio(
    part: str, what: str, ours: Sequence[Sample], theirs: Sequence[Sample], goal: Goal | None
) -> Figure:
    """Compare round by round, as a disturbance of a round affects both."""
    ratios = [o.per_second / t.per_second for o, t in zip(ours, theirs, strict=True)]
    return Figure.over(part, what, "×", ratios, goal)
