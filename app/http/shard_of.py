"""``/_shard/{dataset}/{key}``: tells a balancer which keys belong together, on one replica.

It is asked before each request for a chunk, and reads no index. A balancer has no credentials: it
is told of datasets that not everybody may read if it is a proxy that is trusted. Of those, and of
what is not there, others are told the hash of what they ask for.
"""

import asyncio
import time
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from cachetools import LRUCache

from app.errors import BadKeyError, ShardgateError
from app.formats.contract import Layout
from app.http.answer import AtHand, Headers, Later, Scope, Write, asgi_writer
from app.http.clients import Networks, is_within, peer_of
from app.http.credentials.access import Datasets
from app.http.credentials.door import split_token
from app.http.heads import encode_headers
from app.http.target import split_target
from app.model import VirtualKey
from app.resolve.icechunk.session_keys import session_of
from app.resolve.metadata_cache import SizedLRUCache
from app.resolve.resolver import Dataset, Resolver

PREFIX: Final = b"/_shard/"
"""How the paths begin; no dataset is called so."""
_LONGEST_S: Final = 2.0
"""What takes longer to find out is not worth it: any replica can answer."""
_KNOWN_NBYTES: Final = 16 * 1024**2
_KNOWN_S: Final = 60.0
_CONTAINERS: Final = 256
_OVERHEAD_NBYTES: Final = 512


class _Known(NamedTuple):
    name: bytes
    expires_at: float


class _Container(NamedTuple):
    layout: Layout
    expires_at: float


class ShardNames:
    """Names shards, and by themselves what is in none; names tell nothing but what is equal."""

    def __init__(self, datasets: Datasets, resolver: Resolver, proxies: Networks) -> None:
        self._proxies = proxies
        self._datasets = datasets
        self._resolver = resolver
        self._known: SizedLRUCache[bytes, _Known]
        self._known = SizedLRUCache(_KNOWN_NBYTES, lambda path, _: len(path) + _OVERHEAD_NBYTES)

        self._containers: LRUCache[tuple[str, str], _Container] = LRUCache(_CONTAINERS)

    def begin(self, raw_path: bytes, peer: bytes) -> AtHand | Later:
        """Begin to answer outside of ASGI; see `GatewayProtocol`."""
        path = _asked(raw_path)
        if not self._may_know(path, peer):
            return AtHand(HTTPStatus.NO_CONTENT, encode_headers(_by_itself(path)), b"")
        known = self._known.get(path)
        if known is None or known.expires_at < time.monotonic():
            return partial(self._answer, path)
        return AtHand(HTTPStatus.NO_CONTENT, encode_headers([(b"x-shard", known.name)]), b"")

    async def __call__(self, scope: Scope, _: Any, send: Any) -> None:
        """Speak ASGI, whatever the method."""
        path, write = _asked(scope["raw_path"]), asgi_writer(send)
        if self._may_know(path, peer_of(scope["client"])):
            await self._answer(path, write)
        else:
            await write(HTTPStatus.NO_CONTENT, _by_itself(path), b"")

    def _may_know(self, path: bytes, peer: bytes) -> bool:
        """Tell whether *peer* may know which keys are like that of *path*."""
        try:
            dataset = self._datasets.get(split_target(path)[0])
        except BadKeyError:
            return True
        if dataset is None or dataset.is_public:
            return True
        return is_within(peer.decode(), self._proxies)

    async def _answer(self, path: bytes, write: Write) -> None:
        headers = _by_itself(path)
        if headers:
            with suppress(ShardgateError, TimeoutError):
                async with asyncio.timeout(_LONGEST_S):
                    name = _opaque(await self._name(path))
                self._known.put(path, _Known(name, time.monotonic() + _KNOWN_S))
                headers = [(b"x-shard", name)]
        await write(HTTPStatus.NO_CONTENT, headers, b"")

    async def _name(self, path: bytes) -> bytes:
        """Name the shard that *path* leads into, or the session; else that is *path* itself.

        Raises: `BadKeyError`, `DamagedError`, `StorageError`.
        """
        name, key = split_target(path)
        dataset = self._datasets.get(name)
        if dataset is None or key is None:
            return path
        if (session := session_of(key)) is not None:
            return f"{name}/{session}".encode()
        layout, rest = await self._enclosing(dataset, key)
        shard = await layout.shard(rest, self._resolver.root(dataset).fetch)
        return path if shard is None else shard.encode()

    async def _enclosing(self, dataset: Dataset, key: VirtualKey) -> tuple[Layout, VirtualKey]:
        """Find the container of *key* among those that were found of late, which takes less."""
        now = time.monotonic()
        ends = [at for at, letter in enumerate(key, 1) if letter == "/"]
        for at in (0, *ends):
            known = self._containers.get((dataset.name, key[:at]))
            rest = VirtualKey(key[at:])
            if known is not None and known.expires_at > now and known.layout.encloses(rest):
                return known.layout, rest
        root = self._resolver.root(dataset)
        layout, rest = await root.containers.find(root.ref, key, root.fetch)
        if layout.encloses(rest):
            lead = key[: len(key) - len(rest)]
            self._containers[dataset.name, lead] = _Container(layout, now + _KNOWN_S)
        return layout, rest


def _asked(raw_path: bytes) -> bytes:
    """Give ``/{dataset}/{key}`` of what is asked, without a token before it."""
    _, path = split_token(raw_path[len(PREFIX) - 1 :])
    return path


def _opaque(name: bytes) -> bytes:
    return blake2b(name, digest_size=8).hexdigest().encode()


def _by_itself(path: bytes) -> Headers:
    """Name what is in no shard; a dataset without a key has no name, and goes anywhere."""
    _, _, key = path[1:].partition(b"/")
    return [(b"x-shard", _opaque(path))] if key else []
