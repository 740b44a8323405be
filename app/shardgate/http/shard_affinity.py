"""``/_shard/{dataset}/{key}``: keys that belong on one replica, for consistent hashing.

A balancer asks before each request for a chunk; no index is read. It has no credentials: of a
private dataset only trusted proxies get the name of a shard. Others get a hash of the path at once,
as they do for a dataset that does not exist.
"""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final

from shardgate.errors import BadKeyError, ShardgateError
from shardgate.formats.icechunk.keys import session_prefix
from shardgate.http.auth.access import Datasets
from shardgate.http.limits import Networks, is_within, peer_of
from shardgate.http.paths import Scope, split_target, split_token
from shardgate.http.problems import Headers, encode_headers
from shardgate.http.responses import (
    DeferredResponse,
    Exchange,
    ImmediateResponse,
    ResponseWriter,
    asgi_writer,
)
from shardgate.read.metadata_cache import SizedLRUCache
from shardgate.read.resolver import Resolver

PREFIX: Final = b"/_shard/"
"""Beginning of the paths; the name is reserved."""
_LONGEST_S: Final = 2.0
"""Longest look-up; after it the hash of the path has to do, as any replica can answer."""
_CACHED_NBYTES: Final = 16 * 1024**2
_CACHED_S: Final = 60.0
_CACHE_CONTROL: Final = (b"cache-control", b"max-age=%d" % _CACHED_S)
_OVERHEAD_NBYTES: Final = 512


class ShardAffinity:
    """Answers with an opaque name that is equal for all keys of a shard, or of a session."""

    def __init__(self, datasets: Datasets, resolver: Resolver, proxies: Networks) -> None:
        self._proxies = proxies
        self._datasets = datasets
        self._resolver = resolver
        self._names: SizedLRUCache[bytes, tuple[bytes, float]]
        """Names and the times at which they expire, by path."""
        self._names = SizedLRUCache(_CACHED_NBYTES, lambda path, _: len(path) + _OVERHEAD_NBYTES)

    def begin(self, raw_path: bytes, peer: bytes) -> ImmediateResponse | DeferredResponse:
        """Begin to answer outside of ASGI; see `GatewayProtocol`."""
        path = _target(raw_path)
        headers = _hash_headers(path)
        if self._may_know(path, peer):
            name, expires_at = self._names.get(path) or (b"", 0.0)
            if expires_at < time.monotonic():
                return partial(self._respond_later, path)
            headers = [(b"x-shard", name), _CACHE_CONTROL]
        return ImmediateResponse(HTTPStatus.NO_CONTENT, encode_headers(headers), b"")

    async def __call__(self, scope: Scope, _: Any, send: Any) -> None:
        """Answer an ASGI request of any method."""
        path, write = _target(scope["raw_path"]), asgi_writer(send)
        if self._may_know(path, peer_of(scope["client"])):
            await self._respond(path, write)
        else:
            await write(HTTPStatus.NO_CONTENT, _hash_headers(path), b"")

    def _may_know(self, path: bytes, peer: bytes) -> bool:
        """Return whether *peer* may know which keys share a shard with that of *path*."""
        try:
            dataset = self._datasets.get(split_target(path)[0])
        except BadKeyError:
            return True
        is_public = dataset is not None and dataset.is_public
        return is_public or is_within(peer.decode(), self._proxies)

    def _respond_later(self, path: bytes, exchange: Exchange) -> Awaitable[None]:
        return self._respond(path, exchange.write)

    async def _respond(self, path: bytes, write: ResponseWriter) -> None:
        headers = _hash_headers(path)[:1]
        if headers:
            with suppress(ShardgateError, TimeoutError):
                async with asyncio.timeout(_LONGEST_S):
                    name = _hash(await self._name(path))
                self._names.put(path, (name, time.monotonic() + _CACHED_S))
                headers = [(b"x-shard", name), _CACHE_CONTROL]
        await write(HTTPStatus.NO_CONTENT, headers, b"")

    async def _name(self, path: bytes) -> bytes:
        """Return the shard or session of *path*, or *path*. Raises: `ShardgateError`."""
        name, key = split_target(path)
        dataset = self._datasets.get(name)
        if dataset is None or key is None:
            return path
        if (session := session_prefix(key)) is not None:
            return f"{name}/{session}".encode()
        layout, rest, _ = await self._resolver.find_container(dataset, key)
        shard = await layout.shard(rest, self._resolver.root(dataset).fetch)
        return path if shard is None else shard.encode()


def _target(raw_path: bytes) -> bytes:
    """Return ``/{dataset}/{key}`` of a request, without a token."""
    _, path = split_token(raw_path[len(PREFIX) - 1 :])
    return path


def _hash(name: bytes) -> bytes:
    return blake2b(name, digest_size=8).hexdigest().encode()


def _hash_headers(path: bytes) -> Headers:
    """Return the headers of a key that shares its name with no other; none without a key."""
    _, _, key = path[1:].partition(b"/")
    return [(b"x-shard", _hash(path)), _CACHE_CONTROL] if key else []
