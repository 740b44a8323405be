"""Callers, and datasets that not all of them may see."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from app.settings import CallerSettings, DatasetSettings, Settings

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
