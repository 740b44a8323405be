"""Roots that the command line names: their options and names, the settings, and one root opened."""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, Final, NamedTuple

from shardgate.configuration import load
from shardgate.datasets import formats, open_allowed, open_decoding, open_root
from shardgate.errors import ConfigurationError, StorageError
from shardgate.read.containers import Containers
from shardgate.read.listing import Root
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.settings import Settings, dataset_name
from shardgate.storage.stores import Stores

_ANONYMOUS: Final = "anonymous"
"""Store of public buckets."""
_CLOUDS: Final = ("s3://", "gs://", "az://")


class RootOptions(NamedTuple):
    """Options for all roots of the command line."""

    allow_virtual: Sequence[str] = ()
    anonymous: bool = False
    writable: bool = False

    def tables(self, roots: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return the tables `stores` and `datasets` of the settings for *roots*, URLs by name."""
        datasets = {name: self._with_store({"url": url}) for name, url in roots.items()}
        for table in datasets.values():
            if self.writable:
                table["writable"] = True
            if self.allow_virtual:
                table["virtual_chunk_prefixes"] = [
                    self._with_store({"url": prefix}) for prefix in self.allow_virtual
                ]
        stores = {_ANONYMOUS: {"anonymous": True}} if self.anonymous else {}
        return {"stores": stores, "datasets": datasets}

    def _with_store(self, table: dict[str, Any]) -> dict[str, Any]:
        is_cloud = table["url"].startswith(_CLOUDS)
        return {**table, "store": _ANONYMOUS} if self.anonymous and is_cloud else table


def load_settings(
    roots: Sequence[str], options: Mapping[str, Any], of_roots: RootOptions
) -> Settings:
    """Load the configuration of the command line, and of the file it names."""
    server_options = {name: value for name, value in options.items() if value is not None}
    if len(roots) == 1 and roots[0].endswith(".toml"):
        for name, value in of_roots._asdict().items():
            if value:
                option = name.replace("_", "-")
                raise ConfigurationError(
                    f"--{option} cannot be combined with a configuration file; set it there"
                )
        return load(Path(roots[0]), os.environ, {"server": server_options})
    return load(None, os.environ, {"server": server_options, **of_roots.tables(_named(roots))})


def _named(roots: Sequence[str]) -> dict[str, str]:
    """Return the URLs of *roots* by the names of their datasets."""
    urls: dict[str, str] = {}
    for root in roots:
        if root.endswith(".toml"):
            raise ConfigurationError(f"{root}: a configuration file goes without roots beside it")
        name, url = _split_name(root)
        try:
            dataset_name(name)
        except ValueError as error:
            suggested = str(error).rpartition(" ")[2]
            reason = f"is not a name for a dataset; write {suggested}={quote(url)}"
            raise ConfigurationError(f"datasets.{name}: {reason}") from error
        if name in urls:
            raise ConfigurationError(f"two datasets are called {name}: write NAME={url}")
        urls[name] = url
    return urls


def _split_name(root: str) -> tuple[str, str]:
    """Split ``NAME=URL``; an existing path, and what looks like one, may hold ``=`` too."""
    name, separator, url = root.partition("=")
    is_path = name.startswith(("/", ".", "~")) or "://" in name or Path(root).exists()
    return (name, url) if separator and url and not is_path else (_default_name(root), root)


def _default_name(url: str) -> str:
    """Return the last part of the path, without the extension of a format."""
    path = url if "://" in url else str(Path(url).expanduser().absolute())
    name = PurePosixPath(path).name
    for ending in (".zarr", ".precomputed", ".icechunk"):
        name = name.removesuffix(ending)
    return name


async def check_reachable(settings: Settings) -> None:
    """Open each root once. Raises: `ConfigurationError` that names an unreachable one."""
    async with Stores(settings.limits) as stores:
        for name in settings.datasets:
            try:
                await stores.check_reachable(open_root(stores, settings, name))
            except StorageError as error:
                raise ConfigurationError(f"datasets.{name}.url: {error}") from error


async def with_root[T](url: str, call: Callable[[Root], Awaitable[T]], options: RootOptions) -> T:
    """Open the root *url* as `serve` does, and return the result of *call* with it."""
    settings = load(None, os.environ, options.tables({"root": url}))
    async with Stores(settings.limits) as stores:
        ref = open_root(stores, settings, "root")
        await stores.check_reachable(ref)
        memory = MetadataCache(settings.cache.index_bytes, open_decoding(settings.limits))
        fetch = ReadCache(stores, memory, ttl_s=settings.cache.ttl_s)
        dataset = settings.datasets["root"]
        allowed = open_allowed(stores, dataset, settings)
        containers = Containers(formats(dataset, settings.limits, allowed))
        return await call(Root(ref, stores, containers, fetch))
