"""Callers, and services whose datasets not all of them may see."""

import hashlib
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from pydantic import SecretStr

from shardgate.http.asgi import AsgiApp
from shardgate.http.request import Answer, Request
from shardgate.settings import CallerSettings, DatasetSettings, Settings
from tests.support.serving import serving

TOKENS: Final = {"ana": "token-of-ana", "bob": "token/of+bob=", "eve": "token-of-eve"}
"""Ana may read what is private, Bob may write to it, Eve may do neither.

What is open may be written by the last two.
"""
TEXT: Final = b"what Ana may read"


class People(NamedTuple):
    """A service, as each of them sees it."""

    url: str
    folder: Path

    def ask(
        self,
        method: str,
        path: str,
        name: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        """Send a request by *name*, or by nobody."""
        given = dict(headers or {})
        if name is not None:
            given["authorization"] = f"Bearer {TOKENS[name]}"
        return httpx.request(method, self.url + path, headers=given, content=content)


def caller(token: str) -> CallerSettings:
    """Configure who has *token*."""
    return CallerSettings(token_sha256=(hashlib.sha256(token.encode()).hexdigest(),))


def settings(folder: Path, **more: Any) -> Settings:
    """Serve two folders below *folder*: one is public, one is private."""
    for name in "open", "private":
        (folder / name).mkdir()
        (folder / name / "text.txt").write_bytes(TEXT)
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
    """The service, and what requests said of their bodies."""

    url: str
    payloads: list[bytes]


def _listen(app: AsgiApp, payloads: list[bytes]) -> AsgiApp:
    """Note what is signed of bodies."""
    answer = app.answer

    def listen(request: Request) -> Answer | None:
        if (payload := request.headers.get(b"x-amz-content-sha256")) is not None:
            payloads.append(payload)
        return answer(request)

    app.answer = listen
    return app


@contextmanager
def signing_service(folder: Path) -> Generator[Served]:
    """Serve two empty folders below *folder*, ``lab`` and ``repo``, to who has the key."""
    datasets = {}
    for name in ("lab", "repo"):
        (folder / name).mkdir()
        url = (folder / name).as_uri()
        datasets[name] = DatasetSettings(url=url, writable=True, read=("ann",), write=("ann",))
    payloads: list[bytes] = []
    settings = Settings(callers=_CALLERS, datasets=datasets)
    with serving(settings, around=lambda app: _listen(app, payloads)) as url:
        yield Served(url, payloads)


def environ() -> dict[str, str]:
    """Give programs the key, and nothing of what this machine has for other servers."""
    others = ("AWS_", "RESTIC_", "HTTP_PROXY", "http_proxy")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return kept | {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
