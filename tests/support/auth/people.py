"""Callers, and services whose datasets only some of them may read."""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from pydantic import SecretStr

from shardgate.server.asgi import AsgiApp
from shardgate.server.request import Request, Response
from shardgate.settings import CallerSettings, DatasetSettings, Settings
from tests.support.files import write_files
from tests.support.serving import serving

TOKENS: Final = {"ana": "token-of-ana", "bob": "token/of+bob=", "eve": "token-of-eve"}
"""Tokens of callers: Ana may read the private dataset, Bob may write to it, Eve may do neither.

Bob and Eve may write to the open dataset.
"""
TEXT: Final = b"what Ana may read"


class People(NamedTuple):
    """A running service, its folder, and requests to it as one of the callers."""

    url: str
    folder: Path

    def ask(
        self, method: str, path: str, name: str | None = None, **options: Any
    ) -> httpx.Response:
        """Send a request as *name*, or without credentials."""
        if name is not None:
            bearer = {"authorization": f"Bearer {TOKENS[name]}"}
            options["headers"] = options.get("headers", {}) | bearer
        return httpx.request(method, self.url + path, **options)


def caller(token: str) -> CallerSettings:
    """Return the settings of a caller with *token*."""
    return CallerSettings(token_sha256=(hashlib.sha256(token.encode()).hexdigest(),))


def settings(folder: Path, **more: Any) -> Settings:
    """Return settings of a public and a private folder below *folder*."""
    write_files({f"{name}/text.txt": TEXT for name in ("open", "private")}, folder)
    return Settings(
        callers={name: caller(token) for name, token in TOKENS.items()},
        datasets={
            "open": DatasetSettings(url=str(folder / "open"), writable=True, write=("bob", "eve")),
            "private": DatasetSettings(
                url=str(folder / "private"), writable=True, read=("ana",), write=("bob",)
            ),
        },
        **more,
    )


KEY_ID: Final = "AN-ACCESS-KEY-ID"
SECRET: Final = "a secret+of/some=length"
_CALLERS: Final = {"ann": CallerSettings(access_key_id=KEY_ID, secret_access_key=SecretStr(SECRET))}


class Served(NamedTuple):
    """The URL of the service, and the payload hashes that requests declared."""

    url: str
    payloads: list[bytes]


def _listen(app: AsgiApp, payloads: list[bytes]) -> AsgiApp:
    """Note what is signed of bodies."""
    cached = app.cached

    def listen(request: Request) -> Response | None:
        if (payload := request.headers.get(b"x-amz-content-sha256")) is not None:
            payloads.append(payload)
        return cached(request)

    app.cached = listen
    return app


@contextmanager
def signing_service(folder: Path) -> Generator[Served]:
    """Serve two empty folders below *folder*, ``lab`` and ``repo``, to the holder of the key."""
    datasets = {}
    for name in ("lab", "repo"):
        (folder / name).mkdir()
        url = (folder / name).as_uri()
        datasets[name] = DatasetSettings(url=url, writable=True, read=("ann",), write=("ann",))
    payloads: list[bytes] = []
    settings = Settings(callers=_CALLERS, datasets=datasets)
    with serving(settings, around=lambda app: _listen(app, payloads)) as url:
        yield Served(url, payloads)
