"""Opens what the configuration names: roots, the formats looked for in them, who may do what."""

import os
from collections.abc import Awaitable, Callable, Mapping

from app.formats.contract import Format
from app.formats.documents import DocumentFormat
from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.virtual import Allowed, allow
from app.formats.neuroglancer_precomputed.layout import MARKER as INFO
from app.formats.neuroglancer_precomputed.layout import Precomputed
from app.formats.zarr.draft_2022 import Zarr2022
from app.formats.zarr.layout import MARKER as ZARR_JSON
from app.formats.zarr.layout import Zarr3
from app.http.auth.tokens import read_grant
from app.model import ObjectRef
from app.resolve.containers import Containers
from app.resolve.listing import Root
from app.resolve.metadata_cache import MetadataCache, ReadCache
from app.resolve.resolver import Dataset
from app.settings import PUBLIC, DatasetSettings, LimitSettings, Settings, load
from app.storage.stores import Stores


def open_datasets(stores: Stores, settings: Settings) -> Mapping[str, Dataset]:
    """Open all datasets, by name."""
    return {name: _open(stores, name, settings) for name in settings.datasets}


def _open(stores: Stores, name: str, settings: Settings) -> Dataset:
    dataset = settings.datasets[name]
    allowed = open_allowed(stores, dataset, settings)
    writers = _writers(dataset)
    return Dataset(
        name=name,
        root=open_root(stores, settings, name),
        containers=Containers(formats(dataset, settings.limits, allowed), dataset.format),
        format=dataset.format,
        cache_control=_cache_control(dataset).encode(),
        is_writable=dataset.writable,
        readers=writers.union(dataset.read, {read_grant(name)}),
        writers=writers,
    )


def _writers(dataset: DatasetSettings) -> frozenset[str]:
    if not dataset.writable:
        return frozenset()
    return frozenset((PUBLIC,) if dataset.write is None else dataset.write)


def session_formats(limits: LimitSettings) -> list[Format]:
    """Name the formats of what is in sessions."""
    zarr = Zarr3(limits.whole_index_bytes, limits.metadata_bytes, limits.decoded_bytes)
    return [DocumentFormat("zarr", ZARR_JSON, (zarr,), limits.metadata_bytes)]


def _cache_control(dataset: DatasetSettings) -> str:
    kept_by = "public" if dataset.is_public else "private"
    return dataset.cache_control or f"{kept_by}, max-age=60"


def open_root(stores: Stores, settings: Settings, name: str) -> ObjectRef:
    """Open the root of the dataset *name*."""
    dataset = settings.datasets[name]
    store = settings.stores[dataset.store] if dataset.store else None
    return stores.open_root(dataset.url, store, dataset.store, dataset.redirects)


def open_allowed(
    stores: Stores, dataset: DatasetSettings, settings: Settings
) -> tuple[Allowed, ...]:
    """Open what virtual references may lead to."""
    allowed = []
    scheme = dataset.url.partition("://")[0]
    for prefix in dataset.virtual_chunk_prefixes:
        is_alike = prefix.url.startswith(f"{scheme}://")
        name = prefix.store or (dataset.store if is_alike else None)
        store = None if name is None else settings.stores[name]
        root = stores.open_prefix(prefix.url, store, name)
        allowed.append(allow(prefix.url, root))
    return tuple(allowed)


def formats(
    dataset: DatasetSettings, limits: LimitSettings, allowed: tuple[Allowed, ...] = ()
) -> list[Format]:
    """Name the formats whose containers are looked for in *dataset*.

    Virtual references of Icechunk may be followed where *allowed*.
    """
    if dataset.view == "raw":
        return []
    zarr = (
        Zarr2022(limits.whole_index_bytes, limits.metadata_bytes, limits.decoded_bytes),
        Zarr3(limits.whole_index_bytes, limits.metadata_bytes, limits.decoded_bytes),
    )
    precomputed = (Precomputed(limits.whole_index_bytes, limits.decoded_bytes),)
    known: tuple[Format, ...] = (
        DocumentFormat("zarr", ZARR_JSON, zarr, limits.metadata_bytes),
        DocumentFormat("precomputed", INFO, precomputed, limits.metadata_bytes),
        Icechunk(limits.repository_file_bytes, limits.whole_index_bytes, allowed),
    )
    return [each for each in known if dataset.format in ("auto", each.name)]


async def with_root[T](
    url: str, call: Callable[[Root], Awaitable[T]], allow_virtual: list[str] | None = None
) -> T:
    """Open the root *url* the way `serve` would, and hand it to *call*."""
    told = {"url": url, "virtual_chunk_prefixes": allow_virtual or []}
    settings = load(None, os.environ, {"datasets": {"root": told}})
    async with Stores(settings.limits) as stores:
        ref = open_root(stores, settings, "root")
        await stores.check_reachable(ref)
        memory = MetadataCache(settings.cache.index_bytes)
        fetch = ReadCache(stores, memory, ttl_s=settings.cache.ttl_s)
        dataset = settings.datasets["root"]
        allowed = open_allowed(stores, dataset, settings)
        containers = Containers(formats(dataset, settings.limits, allowed))
        return await call(Root(ref, stores, containers, fetch))
