"""Part k: what it costs to know who asks for a cached chunk."""

import asyncio
import hashlib
import json
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx

from .figures import Figure, Goal
from .load import Contestant, Request, check, run_processes
from .servers import DATASET, Server, shardgate
from .throughput import ratio, read_bodies, speed

_TOKEN: Final = "a-token-as-long-as-those-that-people-make"
_PUBLIC: Final = "shardgate, chunk that everybody may read"
_BEARER: Final = "shardgate, chunk of who has a bearer token"
_UNSEEN: Final = "shardgate, chunk for all, signed token unseen"
"""What the header costs by itself, which may be longer than all else that is asked."""
_JWT: Final = "shardgate, chunk of who has a signed token"
_PATH: Final = "shardgate, chunk of who has a token in the path"
_DIGEST: Final = hashlib.sha256(_TOKEN.encode()).hexdigest()
_ENVIRON: Final = {
    "SHARDGATE_CALLERS__ANA__TOKEN_SHA256": json.dumps([_DIGEST]),
    f"SHARDGATE_DATASETS__{DATASET.upper()}__READ": json.dumps(["ana"]),
}


def measure(home: Path, root: Path, store: Server, *, rounds: int, seconds: int) -> list[Figure]:
    """Compare the service with itself, round by round."""

    def start(home: Path) -> AbstractContextManager[Sequence[Contestant]]:
        return _contestants(home, root, store)

    samples = run_processes(home, start, rounds=rounds, seconds=seconds)
    goal = Goal("at least", 0.95)
    return [
        *(speed("k", name, each) for name, each in samples.items()),
        ratio("k", "ratio of a bearer token", samples[_BEARER], samples[_PUBLIC], goal),
        ratio("k", "ratio of a signed token", samples[_JWT], samples[_PUBLIC], goal),
        ratio("k", "  to the same header, unseen", samples[_JWT], samples[_UNSEEN], goal),
        ratio("k", "ratio of a token in the path", samples[_PATH], samples[_PUBLIC], goal),
    ]


@contextmanager
def _contestants(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
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
            for name, environ in (("public", {}), ("private", _ENVIRON))
        )
        bearer, jwt = f"Bearer {_TOKEN}", f"Bearer {_mint(private)}"
        contestants = [
            Contestant(_PUBLIC, "k", open_one, 200, requests()),
            Contestant(_BEARER, "k", private, 200, requests(Authorization=bearer)),
            Contestant(_UNSEEN, "k", open_one, 200, requests(Authorization=jwt)),
            Contestant(_JWT, "k", private, 200, requests(Authorization=jwt)),
            Contestant(_PATH, "k", private, 200, requests(f"/~{_TOKEN}")),
        ]
        for contestant in contestants:
            asyncio.run(check(contestant))
        yield contestants


def _mint(server: Server) -> str:
    """Get a token that the service has signed."""
    answer = httpx.post(
        f"http://127.0.0.1:{server.port}/api/tokens",
        json={"dataset": DATASET},
        headers={"Authorization": f"Bearer {_TOKEN}"},
    ).raise_for_status()
    token: str = answer.json()["token"]
    return token
