"""One root, opened for a command the way the service would open it."""

import os
from collections.abc import Awaitable, Callable
from typing import Final

from app.configuration import load
from app.datasets import formats, open_allowed, open_root
from app.resolve.containers import Containers
from app.resolve.listing import Root
from app.resolve.metadata_cache import MetadataCache, ReadCache
from app.storage.stores import Stores

_ROOT: Final = "root"
"""The name of the only dataset."""


async def with_root[T](
    url: str, call: Callable[[Root], Awaitable[T]], allow_virtual: list[str] | None = None
) -> T:
    """Open the root *url* the way `serve` would, and hand it to *call*."""
    told = {"url": url, "virtual_chunk_prefixes": allow_virtual or []}
    settings = load(None, os.environ, {"datasets": {_ROOT: told}})
    async with Stores(settings.limits) as stores:
        ref = open_root(stores, settings, _ROOT)
        await stores.check_reachable(ref)
        memory = MetadataCache(settings.cache.index_bytes)
        fetch = ReadCache(stores, memory, ttl_s=settings.cache.ttl_s)
        dataset = settings.datasets[_ROOT]
        allowed = open_allowed(stores, dataset, settings)
        containers = Containers(formats(dataset, settings.limits, allowed))
        return await call(Root(ref, stores, containers, fetch))
