"""Datasets of the configuration: their roots, formats, and rules of access."""

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from shardgate.auth.access import ServedDataset
from shardgate.auth.tokens import read_grant
from shardgate.configuration import RootOptions, load
from shardgate.errors import ConfigurationError, StorageError
from shardgate.formats.contract import Format
from shardgate.formats.documents import DocumentFormat
from shardgate.formats.foreign import BEGIN_NBYTES, FILE_SUFFIXES, ForeignFile, explain_file
from shardgate.formats.icechunk.layout import Icechunk
from shardgate.formats.kerchunk.layout import Kerchunk
from shardgate.formats.members import ARCHIVE_SUFFIXES, SET_SUFFIXES, MemberFormat
from shardgate.formats.neuroglancer_precomputed.layout import MARKER as INFO
from shardgate.formats.neuroglancer_precomputed.layout import Precomputed
from shardgate.formats.references import Allowed, allow
from shardgate.formats.zarr.draft_2022 import Zarr2022
from shardgate.formats.zarr.layout import MARKER as ZARR_JSON
from shardgate.formats.zarr.layout import Zarr3
from shardgate.formats.zarr.v2 import Zarr2
from shardgate.formats.zip.layout import Zip
from shardgate.model import ObjectRef
from shardgate.read.budget import ByteBudget
from shardgate.read.containers import CheckAbsence, Containers
from shardgate.read.listing import Root
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.settings import PUBLIC, DatasetSettings, LimitSettings, Settings
from shardgate.storage.http1_client import RequestTarget
from shardgate.storage.local_files import folder_of
from shardgate.storage.stores import Stores, parse_root

# Ends of the names of roots that may be one object, by format; with `zip` any may.
_SUFFIXES: Final = {"auto": ARCHIVE_SUFFIXES, "zip": (), "kerchunk": SET_SUFFIXES}


def open_datasets(stores: Stores, settings: Settings) -> Mapping[str, ServedDataset]:
    """Open all datasets, by name."""
    return {name: _open(stores, name, settings) for name in settings.datasets}


def _open(stores: Stores, name: str, settings: Settings) -> ServedDataset:
    dataset = settings.datasets[name]
    allowed = open_allowed(stores, dataset, settings)
    rule = (PUBLIC,) if dataset.write is None else dataset.write
    writers = frozenset(rule if dataset.writable else ())
    scope = "public" if dataset.is_public else "private"
    root = open_root(stores, settings, name)
    return ServedDataset(
        name=name,
        root=root,
        containers=open_containers(dataset, settings.limits, allowed, root, stores.check_absence),
        format=dataset.format,
        cache_control=(dataset.cache_control or f"{scope}, max-age=60").encode(),
        is_writable=dataset.writable,
        readers=writers.union(dataset.read, dataset.admin, {read_grant(name)}),
        writers=writers,
        admins=frozenset(dataset.admin),
    )


def open_decoding(limits: LimitSettings) -> ByteBudget:
    """Return the budget for decoding and rewriting; its holders wait for stores only."""
    # Concurrent decodes may take twice the largest file, and one of them more.
    return ByteBudget(2 * limits.repository_file_bytes, wait_s=limits.deadline_s)


def session_formats(limits: LimitSettings) -> list[Format]:
    """Return the formats of sessions."""
    zarr = Zarr3(limits.whole_index_bytes, limits.metadata_bytes, limits.decoded_bytes)
    return [DocumentFormat("zarr", ZARR_JSON, (zarr,), limits.metadata_bytes)]


def open_root(stores: Stores, settings: Settings, dataset_name: str) -> ObjectRef:
    """Open the root of the dataset *dataset_name*."""
    dataset = settings.datasets[dataset_name]
    _check_local(dataset.url)
    store = settings.stores[dataset.store] if dataset.store else None
    return stores.open_root(
        dataset.url,
        store,
        dataset.store,
        dataset.redirects,
        follow_links=dataset.follow_links,
        may_be_object=_may_be_object(dataset),
    )


def _check_local(url: str) -> None:
    """Raise `ConfigurationError` if *url* is a local file that only a reference set can serve."""
    if not url.startswith("file://"):
        return
    with suppress(OSError), Path(os.fsdecode(folder_of(parse_root(url).bucket))).open("rb") as file:
        if reason := explain_file(file.read(BEGIN_NBYTES)):
            raise ConfigurationError(f"{url}: is {reason}")


def _may_be_object(dataset: DatasetSettings) -> bool:
    """Return whether the root may be one object: an archive, a reference set, or another file."""
    if dataset.view == "raw" or (suffixes := _SUFFIXES.get(dataset.format)) is None:
        return False
    is_named_so = dataset.url.rstrip("/").lower().endswith(suffixes)
    return dataset.format == "zip" or is_named_so or _may_be_foreign(dataset)


def _may_be_foreign(dataset: DatasetSettings) -> bool:
    """Return whether the root may be a `ForeignFile`; a final slash says that it is a folder."""
    return dataset.format == "auto" and dataset.url.lower().endswith(FILE_SUFFIXES)


def make_folders(settings: Settings) -> list[str]:
    """Make the folders of writable local roots, and that of records of tokens; return warnings of
    folders that do not exist.
    """
    warnings = list[str]()
    for name, dataset in settings.datasets.items():
        is_made = dataset.writable and not _may_be_object(dataset)
        warnings += _make_folder(f"datasets.{name}.url", dataset.url, is_made=is_made)
    if settings.tokens.url is not None:
        warnings += _make_folder("tokens.url", settings.tokens.url, is_made=True)
    return warnings


def _make_folder(setting: str, url: str, *, is_made: bool) -> Iterator[str]:
    """Yield a warning if the local folder *url* does not exist, or cannot be made."""
    if not url.startswith("file://"):
        return
    folder = Path(os.fsdecode(folder_of(parse_root(url).bucket)))
    try:
        if is_made:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.exists():
            yield f"{setting}: {url} does not exist"
    except OSError as error:
        yield f"{setting}: {url} cannot be made: {error.strerror}"


def open_allowed(
    stores: Stores, dataset: DatasetSettings, settings: Settings
) -> tuple[Allowed, ...]:
    """Open the allowed prefixes of virtual references."""
    allowed = []
    urls = [prefix.url for prefix in dataset.virtual_chunk_prefixes]
    redirects = [url for url in urls if url.startswith(("http://", "https://"))]
    scheme, _, rest = dataset.url.partition("://")
    own_server = f"{scheme}://"
    if scheme in ("http", "https"):  # whose token is not for other servers
        own_server += rest.partition("/")[0] + "/"
    for prefix in dataset.virtual_chunk_prefixes:
        is_alike = f"{prefix.url}/".startswith(own_server)
        name = prefix.store or (dataset.store if is_alike else None)
        store = None if name is None else settings.stores[name]
        root = stores.open_prefix(prefix.url, store, name, redirects)
        allowed.append(allow(prefix.url, root))
    return tuple(allowed)


def open_containers(
    dataset: DatasetSettings,
    limits: LimitSettings,
    allowed: tuple[Allowed, ...] = (),
    root: ObjectRef | None = None,
    check_absence: CheckAbsence | None = None,
) -> Containers:
    """Open the formats of *dataset*; virtual references must be in *allowed*. If *root* may be one
    object, *check_absence* is called where it is none.
    """
    if dataset.view == "raw":
        return Containers((), dataset.format)
    sizes = (limits.whole_index_bytes, limits.metadata_bytes, limits.decoded_bytes)
    zarr = (Zarr2022(*sizes), Zarr3(*sizes))
    precomputed = (Precomputed(limits.whole_index_bytes, limits.decoded_bytes),)
    is_named = dataset.format not in _SUFFIXES
    known: tuple[Format, ...] = (
        DocumentFormat("zarr", ZARR_JSON, zarr, limits.metadata_bytes, is_named=is_named),
        DocumentFormat("precomputed", INFO, precomputed, limits.metadata_bytes, is_named=is_named),
        Icechunk(
            limits.repository_file_bytes, limits.whole_index_bytes, allowed, is_named=is_named
        ),
    )
    formats = [each for each in known if not is_named or dataset.format == each.name]
    own = root if _may_be_object(dataset) else None
    member_formats: list[MemberFormat] = []
    if dataset.format in ("auto", "zip"):
        archive = own
        if own and _may_be_foreign(dataset):
            member_formats.append(ForeignFile(own))
            archive = None
        # Decoding a directory takes ten times its bytes, and the result has to fit into the cache.
        most_nbytes = limits.repository_file_bytes // 8
        member_formats.append(Zip(most_nbytes, limits.decoded_bytes, archive))
    elif dataset.format == "kerchunk":
        most_nbytes = limits.repository_file_bytes // 4  # likewise: up to twelve times
        member_formats.append(Kerchunk(most_nbytes, limits.decoded_bytes, allowed))
    has_zarr = not is_named or dataset.format == "zarr"
    walked = Zarr2(limits.metadata_bytes) if has_zarr else None
    check = check_absence if own else None
    return Containers(formats, dataset.format, tuple(member_formats), check, walked)


def exposures(settings: Settings) -> Iterator[str]:
    """Yield a warning for each dataset that lies in another one which more callers may read."""
    places = _places(settings)
    for (name, place), (outer_name, outer_place) in permutations(places.items(), 2):
        dataset = settings.datasets[name]
        outer = settings.datasets[outer_name]
        is_inside = place[: len(outer_place)] == outer_place
        if is_inside and outer.readers - dataset.readers and not dataset.is_public:
            yield (
                f"datasets.{name}: {dataset.url} lies in datasets.{outer_name}, {outer.url}, "
                f"whose readers can read it there although datasets.{name}.read does not name them"
            )


def open_token_root(stores: Stores, settings: Settings) -> ObjectRef | None:
    """Open the folder of records of tokens, if one is set.

    Raises: `ConfigurationError` if a dataset lies in it, or it in a dataset.
    """
    url = settings.tokens.url
    store = settings.tokens.store
    if url is None:
        return None
    own = _place(settings, url, store)
    for name, place in _places(settings).items():
        if all(one == other for one, other in zip(own, place, strict=False)):
            raise ConfigurationError(f"tokens.url: {url} and datasets.{name} lie in each other")
    return stores.open_root(url, settings.stores[store] if store else None, store)


def _places(settings: Settings) -> dict[str, tuple[str, ...]]:
    return {
        name: _place(settings, dataset.url, dataset.store)
        for name, dataset in settings.datasets.items()
    }


def _place(settings: Settings, url: str, store: str | None) -> tuple[str, ...]:
    """Return the server and the segments of the path of a root."""
    root = parse_root(url)
    scheme, _, place = root.bucket.partition("://")
    if scheme == "file":
        place = os.path.realpath(unquote(place))
    elif scheme in ("http", "https"):
        place = str(RequestTarget(root.bucket).origin)
        root = root._replace(key=unquote(root.key))
    endpoint = settings.stores[store].endpoint_url if store else None
    endpoint = endpoint or (os.environ.get("AWS_ENDPOINT_URL") if scheme == "s3" else None) or ""
    return scheme, endpoint.rstrip("/"), *filter(None, f"{place}/{root.key}".split("/"))


async def check_reachable(settings: Settings) -> None:
    """Open each root once, and the folder of records of tokens.

    Raises: `ConfigurationError` that names an unreachable one.
    """
    async with Stores(settings.limits) as stores:
        roots: dict[str, ObjectRef | None] = {
            f"datasets.{name}.url": open_root(stores, settings, name) for name in settings.datasets
        }
        roots["tokens.url"] = open_token_root(stores, settings)
        for setting, root in roots.items():
            try:
                if root is not None:
                    await stores.check_reachable(root)
            except StorageError as error:
                raise ConfigurationError(f"{setting}: {error}") from error


async def with_root[T](url: str, call: Callable[[Root], Awaitable[T]], options: RootOptions) -> T:
    """Open the root *url* as `serve` does, and return the result of *call* with it."""
    settings = load(None, os.environ, options.tables({"root": url}))
    async with Stores(settings.limits) as stores:
        dataset = _open(stores, "root", settings)
        await stores.check_reachable(dataset.root)
        memory = MetadataCache(settings.cache.index_bytes, open_decoding(settings.limits))
        reads = ReadCache(stores, memory, ttl_s=settings.cache.ttl_s)
        containers = replace(dataset.containers, format="auto")
        return await call(Root(dataset.root, stores, containers, reads))
