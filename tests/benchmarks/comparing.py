"""Parts j and k: cost of metrics, access log and authentication for a cached chunk."""

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx

from .figures import Figure, Goal
from .load import Contestant, Request, run_processes
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


@contextmanager
def _watched(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
    bodies = read_bodies(root / "plain")
    requests = [Request(f"/{DATASET}/morton/{key}", {}, body) for key, body in bodies.items()]
    with ExitStack() as running:
        bare = shardgate(home / "bare", store, chunk_bytes=256 << 20, command=_UNWATCHED)
        servers = {_BARE: running.enter_context(bare)}
        for number, (name, environ) in enumerate(_ENVIRON.items()):
            more = {**environ, **_LINES} if environ else {}
            server = shardgate(home / str(number), store, chunk_bytes=256 << 20, environ=more)
            servers[name] = running.enter_context(server)
        yield [Contestant(name, "j", each, 200, requests) for name, each in servers.items()]


_TOKEN: Final = "a-token-as-long-as-those-that-people-make"
_PUBLIC: Final = "shardgate, chunk that everybody may read"
_BEARER: Final = "shardgate, chunk of who has a bearer token"
_UNSEEN: Final = "shardgate, chunk for all, signed token unseen"
"""Cost of the header by itself, which may be longer than the rest of the request."""
_JWT: Final = "shardgate, chunk of who has a signed token"
_PATH: Final = "shardgate, chunk of who has a token in the path"
_DIGEST: Final = hashlib.sha256(_TOKEN.encode()).hexdigest()
_PRIVATE: Final = {
    "SHARDGATE_CALLERS__ANA__TOKEN_SHA256": json.dumps([_DIGEST]),
    f"SHARDGATE_DATASETS__{DATASET.upper()}__READ": json.dumps(["ana"]),
}


_RATIOS: Final = {
    "j": [
        ("ratio with metrics", _COUNTED, _BARE, 0.9),
        ("ratio with log, text", _TEXT, _BARE, 0.8),
        ("ratio with log, JSON", _JSON, _BARE, 0.8),
    ],
    "k": [
        ("ratio of a bearer token", _BEARER, _PUBLIC, 0.95),
        ("ratio of a signed token", _JWT, _PUBLIC, 0.95),
        ("  to the same header, unseen", _JWT, _UNSEEN, 0.95),
        ("ratio of a token in the path", _PATH, _PUBLIC, 0.95),
    ],
}


def measure(
    part: str, home: Path, root: Path, store: Server, *, rounds: int, seconds: int
) -> list[Figure]:
    """Compare variants of the service, round by round."""
    begin = {"j": _watched, "k": _private}[part]
    samples = run_processes(
        home, lambda each: begin(each, root, store), rounds=rounds, seconds=seconds
    )
    ratios = (
        ratio(part, what, samples[ours], samples[theirs], Goal("at least", bound))
        for what, ours, theirs, bound in _RATIOS[part]
    )
    return [*(speed(part, name, each) for name, each in samples.items()), *ratios]


@contextmanager
def _private(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
    bodies = read_bodies(root / "plain")

    def requests(before: str = "", **headers: str) -> list[Request]:
        return [
            Request(f"{before}/{DATASET}/morton/{key}", headers, body)
            for key, body in bodies.items()
        ]

    with ExitStack() as running:
        open_one, private = (
            running.enter_context(
                shardgate(home / name, store, chunk_bytes=256 << 20, environ=environ)
            )
            for name, environ in (("public", {}), ("private", _PRIVATE))
        )
        bearer, jwt = f"Bearer {_TOKEN}", f"Bearer {_mint(private)}"
        yield [
            Contestant(_PUBLIC, "k", open_one, 200, requests()),
            Contestant(_BEARER, "k", private, 200, requests(Authorization=bearer)),
            Contestant(_UNSEEN, "k", open_one, 200, requests(Authorization=jwt)),
            Contestant(_JWT, "k", private, 200, requests(Authorization=jwt)),
            Contestant(_PATH, "k", private, 200, requests(f"/~{_TOKEN}")),
        ]


def _mint(server: Server) -> str:
    """Request a token that the service signs."""
    answer = httpx.post(
        f"http://127.0.0.1:{server.port}/api/tokens",
        json={"dataset": DATASET},
        headers={"Authorization": f"Bearer {_TOKEN}"},
    ).raise_for_status()
    token: str = answer.json()["token"]
    return token
