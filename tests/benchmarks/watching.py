"""Part j: costs of metrics and of the access log for a cached chunk."""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

from .figures import Figure, Goal
from .load import Contestant, Request, check, run_processes
from .servers import DATASET, Server, shardgate
from .throughput import ratio, read_bodies, speed

_BARE: Final = "shardgate, no metrics"
_COUNTED: Final = "shardgate, metrics"
_JSON: Final = "shardgate, metrics and log, JSON"
_TEXT: Final = "shardgate, metrics and log, text"

_ENVIRON: Final[Mapping[str, Mapping[str, str]]] = {
    _COUNTED: {},
    _JSON: {"SHARDGATE_SERVER__LOG_FORMAT": "json"},
    _TEXT: {"SHARDGATE_SERVER__LOG_FORMAT": "text"},
}
_LINES: Final = {"SHARDGATE_SERVER__ACCESS_LOG": "true", "SHARDGATE_SERVER__LOG_LEVEL": "info"}
_UNWATCHED: Final = "from tests.benchmarks.unwatched import serve; serve()"


def measure(home: Path, root: Path, store: Server, *, rounds: int, seconds: int) -> list[Figure]:
    """Compare the service with itself, round by round."""

    def start(home: Path) -> AbstractContextManager[Sequence[Contestant]]:
        return _contestants(home, root, store)

    samples = run_processes(home, start, rounds=rounds, seconds=seconds)
    return [
        *(speed("j", name, each) for name, each in samples.items()),
        ratio("j", "ratio with metrics", samples[_COUNTED], samples[_BARE], Goal("at least", 0.9)),
        ratio("j", "ratio with log, text", samples[_TEXT], samples[_BARE], Goal("at least", 0.8)),
        ratio("j", "ratio with log, JSON", samples[_JSON], samples[_BARE], Goal("at least", 0.8)),
    ]


@contextmanager
def _contestants(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
    bodies = read_bodies(root / "plain")
    requests = [Request(f"/{DATASET}/morton/{key}", {}, body) for key, body in bodies.items()]
    with ExitStack() as running:
        bare = shardgate(home / "bare", store, chunk_bytes=256 << 20, command=_UNWATCHED)
        servers = {_BARE: running.enter_context(bare)}
        for number, (name, environ) in enumerate(_ENVIRON.items()):
            more = {**environ, **_LINES} if environ else {}
            server = shardgate(home / str(number), store, chunk_bytes=256 << 20, environ=more)
            servers[name] = running.enter_context(server)
        contestants = [Contestant(name, "j", each, 200, requests) for name, each in servers.items()]
        for contestant in contestants:
            asyncio.run(check(contestant))
        yield contestants
