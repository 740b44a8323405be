"""``/_shard/{dataset}/{key}``: keys that belong on one replica, for consistent hashing.

A balancer asks before each request for a chunk; no index is read. It has no credentials: of a
private dataset only trusted proxies get the name of a shard, and not for a client whose request
they pass on. Others get a hash of the path at once, as they do for a dataset that does not exist.
"""

import asyncio
import time
from contextlib import suppress
from hashlib import blake2b
from http import HTTPStatus
from typing import Final

from shardgate.auth.access import Datasets
from shardgate.errors import BadKeyError, ShardgateError
from shardgate.formats.icechunk.keys import session_prefix
from shardgate.model import SHARDED
from shardgate.read.metadata_cache import SizedLRUCache
from shardgate.read.resolver import Resolver
from shardgate.server.request import (
    Exchange,
    Headers,
    Networks,
    Request,
    Response,
    is_within,
    split_target,
    split_token,
    strip_prefix,
)
from shardgate.settings import first_segment

NAME: Final = "_shard"
"""First segment of the paths; the name is reserved."""
PREFIX: Final = b"/_shard/"
_CACHED_S: Final = 60.0
_CACHE_CONTROL: Final = (b"cache-control", b"max-age=%d" % _CACHED_S)


class ShardAffinity:
    """Answers with an opaque name that is equal for all keys of a shard, or of a session."""

    def __init__(self, datasets: Datasets, resolver: Resolver, proxies: Networks) -> None:
        self._proxies = proxies
        self._datasets = datasets
        self._resolver = resolver
        # Names and the times at which they expire, by path.
        # An entry takes some 500 bytes beside its path.
        self._names = SizedLRUCache[bytes, tuple[bytes, float]](
            16 * 1024**2, lambda path, _: len(path) + 512
        )

    def cached(self, request: Request) -> Response | None:
        """Return the response to a request of any method, if no index has to be read for it."""
        path = self._path_in(request)
        headers = _hash_headers(path)
        if self._may_know(path, request):
            name, expires_at = self._names.get(path) or (b"", 0.0)
            if expires_at < time.monotonic():
                return None
            headers = [(b"x-shard", name), _CACHE_CONTROL]
        return Response(HTTPStatus.NO_CONTENT, headers)

    async def respond(self, request: Request, exchange: Exchange) -> None:
        """Answer a request, with the hash of its path if the look-up takes too long."""
        path = self._path_in(request)
        headers = _hash_headers(path)[:1]  # not to be cached: the next look-up may be faster
        if headers and self._may_know(path, request):
            # Without a name the hash of the path has to do, as any replica can answer.
            with suppress(ShardgateError, TimeoutError):
                async with asyncio.timeout(2.0):
                    name = _hash(await self._name(path))
                self._names.put(path, (name, time.monotonic() + _CACHED_S))
                headers = [(b"x-shard", name), _CACHE_CONTROL]
        await exchange.write(Response(HTTPStatus.NO_CONTENT, headers))

    def _path_in(self, request: Request) -> bytes:
        """Return the path of the key, without a prefix of the service and a token."""
        path = request.raw_path[len(PREFIX) - 1 :]
        root_path = request.root_path
        if root_path and self._datasets.get(first_segment(root_path)) is None:
            path = strip_prefix(path, root_path)
        return split_token(path)[1]

    def _may_know(self, path: bytes, request: Request) -> bool:
        """Return whether who asks may know which keys share a shard with that of *path*."""
        try:
            dataset = self._datasets.get(split_target(path)[0])
        except BadKeyError:
            return True
        if dataset is not None and dataset.is_public:
            return True
        if b"x-forwarded-for" in request.headers:  # of a client behind the proxy
            return False
        return is_within(request.peer.decode(), self._proxies)

    async def _name(self, path: bytes) -> bytes:
        """Return the shard or session of *path*, or *path*. Raises: `ShardgateError`."""
        name, key = split_target(path)
        dataset = self._datasets.get(name)
        if dataset is None or key is None:
            return path
        if (session := session_prefix(key.removeprefix(SHARDED))) is not None:
            return f"{name}/{session}".encode()
        container = await self._resolver.find_container(dataset, key)
        shard = await container.layout.shard(container.rest, self._resolver.new_tracker())
        return path if shard is None else shard.encode()


def _hash(name: bytes) -> bytes:
    return blake2b(name, digest_size=8).hexdigest().encode()


def _hash_headers(path: bytes) -> Headers:
    """Return the headers of a key that shares its name with no other; none without a key."""
    _, _, key = path[1:].partition(b"/")
    return [(b"x-shard", _hash(path)), _CACHE_CONTROL] if key else []
