"""How the tests of rules ask the service: with raw headers, and with a store that is watched."""

from collections.abc import Callable
from typing import Any, Final

import httpx

from app.model import ObjectRef
from app.storage.contract import ObjectStore
from app.storage.wrappers import StoreWrapper

ARRAY: Final = "/bucket/index/zarr_end_little_crc"
HOLES: Final = "/bucket/fill/zero_zarr"
KINDS: Final = {
    "chunk": f"{ARRAY}/c/0/0/0",
    "compressed chunk": "/bucket/inside/gzip_zarr/c/1/0/1",
    "metadata": f"{ARRAY}/zarr.json",
    "consolidated metadata": "/bucket/groups/consolidated/zarr.json",
    "chunk of an array that is not sharded": "/bucket/plain/v3/c/0/0/0",
    "format 2": "/bucket/plain/v2/.zarray",
    "outside of containers": "/bucket/notes/read%20me.txt",
    "raw": "/raw/index/zarr_end_little_crc/c/0/0/0",
}


class Watched(StoreWrapper):
    """Store that calls *on_read* with the object before each call; *on_read* may raise or wait."""

    def __init__(self, inner: ObjectStore, on_read: Callable[[ObjectRef], Any]) -> None:
        super().__init__(inner)
        self._on_read = on_read

    def store_of(self, ref: ObjectRef) -> ObjectStore:
        """Announce the call."""
        self._on_read(ref)
        return super().store_of(ref)


def connect(url: str) -> httpx.Client:
    """Open a client that sends no header unasked, not even Accept-Encoding."""
    client = httpx.Client(base_url=url, timeout=30)
    del client.headers["accept-encoding"]
    return client


def raw_body(client: httpx.Client, method: str, path: str, **headers: str) -> bytes:
    """Give the bytes that came over the wire."""
    with client.stream(method, path, headers=_named(headers)) as answer:
        return b"".join(answer.iter_raw())


def ask(client: httpx.Client, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    """Ask with *headers*, in whose names underscores stand for hyphens."""
    return client.request(method, path, headers=_named(headers))


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
