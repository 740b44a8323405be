"""Part r: the cache of nginx in `deploy/nginx`, compared with static files and without it."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.support.records import replaced

from .figures import Figure, Goal
from .load import Contestant, Request, check, run_rounds
from .servers import BUCKET, DATASET, Server, nginx_deployed, nginx_files, shardgate
from .throughput import ratio, read_bodies, speed

_KEPT: Final = "nginx, chunk in its cache"
_STATIC: Final = "nginx, the chunk as a static file beside it"
_BALANCED: Final = "shardgate behind nginx, chunk in the cache"
_PASSED: Final = "shardgate behind nginx and its cache, not kept"


def measure(home: Path, root: Path, store: Server, *, rounds: int, seconds: int) -> list[Figure]:
    """Run all contestants in turn, and compare them."""
    home.mkdir()
    with _contestants(home, root, store) as contestants:
        samples = run_rounds(home, contestants, rounds=rounds, seconds=seconds)
    kept, static, balanced = samples[_KEPT], samples[_STATIC], samples[_BALANCED]
    return [
        *(speed("r", name, each) for name, each in samples.items()),
        ratio("r", "ratio to static file, nginx's cache", kept, static, Goal("at least", 0.5)),
        ratio("r", "ratio to gateway behind nginx", kept, balanced, Goal("at least", 1.2)),
        ratio("r", "ratio of what is not kept", samples[_PASSED], balanced, None),
    ]


@contextmanager
def _contestants(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
    bodies = read_bodies(root / "plain")
    chunks = [Request(f"/{DATASET}/morton/{key}", {}, body) for key, body in bodies.items()]
    files = [Request(f"/{BUCKET}/em.zarr/plain/{key}", {}, body) for key, body in bodies.items()]
    signed = [replaced(each, headers={"Authorization": "AWS4-"}) for each in chunks]
    with ExitStack() as running:
        start = running.enter_context
        gateway = start(shardgate(home / "gateway", store, chunk_bytes=256 << 20))
        kept = start(nginx_deployed(home / "kept", gateway, cached=True))
        static = start(nginx_files(home / "static", root.parent.parent))
        balanced = start(nginx_deployed(home / "balanced", gateway))
        contestants = [
            Contestant(_KEPT, "r", kept, 200, chunks),
            Contestant(_STATIC, "r", static, 200, files),
            Contestant(_BALANCED, "r", balanced, 200, chunks),
            Contestant(_PASSED, "r", kept, 200, signed),
        ]
        for contestant in contestants:
            check(contestant)
        yield contestants
