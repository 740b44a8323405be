"""Part q: chunks read from a store that speaks TLS, compared with nginx and obstore."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from .figures import Figure, Goal
from .load import Contestant, Request, Sample, check, run_rounds
from .servers import DATASET, Server, nginx_files, nginx_proxy, shardgate, uvicorn
from .throughput import range_requests, ratio, read_bodies, speed

_OURS: Final = "shardgate, store over TLS"
_PLAIN: Final = "shardgate, store over HTTP"
_PROXY: Final = "nginx, proxying the range over TLS"
_OBSTORE: Final = "ASGI application that reads by obstore over TLS"


def measure(home: Path, root: Path, store: Server, *, rounds: int, seconds: int) -> list[Figure]:
    """Run all contestants in turn, and compare them."""
    home.mkdir()
    with _contestants(home, root, store) as contestants:
        samples = run_rounds(home, contestants, rounds=rounds, seconds=seconds)
    ours = samples[_OURS]
    return [
        *(speed("q", name, each) for name, each in samples.items()),
        ratio("q", "ratio to proxying nginx, TLS", ours, samples[_PROXY], Goal("at least", 0.65)),
        ratio("q", "ratio to obstore, TLS", ours, samples[_OBSTORE], Goal("at least", 1.0)),
        _cost(ours, samples[_PLAIN]),
    ]


def _cost(ours: Sequence[Sample], plain: Sequence[Sample]) -> Figure:
    times = [o.cpu_us / p.cpu_us for o, p in zip(ours, plain, strict=True)]
    return Figure.over("q", "processor time beside HTTP", "×", times, Goal("at most", 1.2))


@contextmanager
def _contestants(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
    bodies = read_bodies(root / "plain")
    chunks = [Request(f"/{DATASET}/morton/{key}", {}, body) for key, body in bodies.items()]
    ranges = range_requests(root / "morton", bodies)
    with ExitStack() as running:
        start = running.enter_context
        safe = start(nginx_files(home / "store", root.parent.parent, tls=True))
        environ = {"YARDSTICK_STORE": safe.url, "YARDSTICK_AUTHORITY": str(safe.authority)}
        contestants = [
            Contestant(_OURS, "q", start(shardgate(home / "ours", safe)), 200, chunks),
            Contestant(_PLAIN, "q", start(shardgate(home / "plain", store)), 200, chunks),
            Contestant(_PROXY, "q", start(nginx_proxy(home / "proxy", safe)), 206, ranges),
            Contestant(
                _OBSTORE,
                "q",
                start(uvicorn(home / "obstore", "tests.benchmarks.yardstick:obstore", **environ)),
                206,
                ranges,
            ),
        ]
        for contestant in contestants:
            check(contestant)
        yield contestants
