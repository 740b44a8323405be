"""The composition root: settings in, an ASGI application out. Importing it does nothing."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from fastapi import FastAPI

from app.formats.contract import Format
from app.formats.documents import DocumentFormat
from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.virtual import Allowed, allow
from app.formats.neuroglancer_precomputed.layout import MARKER as INFO
from app.formats.neuroglancer_precomputed.layout import Precomputed
from app.formats.zarr_sharding_indexed.layout import MARKER as ZARR_JSON
from app.formats.zarr_sharding_indexed.layout import Zarr3
from app.formats.zarr_storage_transformer.layout import Zarr2022
from app.http.asked import Limits
from app.http.control import build_control
from app.http.cors import Cors
from app.http.dataplane import DataPlane
from app.http.documents import DocumentReader
from app.http.gateway import Gateway
from app.http.icechunk.commits import build_commits
from app.http.icechunk.repository_changes import build_creation, build_repository_changes
from app.http.icechunk.sessions import build_sessions
from app.http.metrics import Metrics
from app.http.taking import Taker
from app.http.writing import WritingPlane
from app.model import ObjectRef
from app.resolve.budget import ByteBudget
from app.resolve.chunks import ChunkReader
from app.resolve.containers import Containers
from app.resolve.erasing import Eraser
from app.resolve.fetch import Memory, ReadCache
from app.resolve.icechunk.chunk_files import ChunkFiles
from app.resolve.icechunk.committing import Committer
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.resolve.icechunk.session_keys import (
    Doors,
    SessionEraser,
    SessionResolver,
    SessionWriter,
)
from app.resolve.icechunk.sessions import Sessions
from app.resolve.icechunk.stateless import StatelessCommits
from app.resolve.objects import ObjectWriter
from app.resolve.resolver import Dataset, Resolver
from app.resolve.rewriting import Rewrites
from app.resolve.uploads import Uploads
from app.resolve.writing import Writer
from app.settings import DatasetSettings, LimitSettings, Settings
from app.storage.contract import ObjectStore
from app.storage.stores import Stores


def create_app(
    settings: Settings, *, wrap: Callable[[ObjectStore], ObjectStore] = lambda store: store
) -> Gateway:
    """Build the service; *wrap* goes around every store, to watch it or to inject faults."""
    limits = settings.limits
    metrics = Metrics()
    stores = Stores(limits, wrap=wrap, on_write=metrics.on_write)
    fetch = ReadCache(stores, Memory(settings.cache.index_bytes), ttl_s=settings.cache.ttl_s)
    chunks = ChunkReader(
        stores,
        max_bytes=settings.cache.chunk_bytes,
        max_gap_bytes=limits.coalesce_gap_bytes,
        max_span_bytes=limits.stream_bytes,
    )
    budget = ByteBudget(limits.in_flight_bytes, wait_s=limits.timeout_s)
    room = ByteBudget(limits.in_flight_bytes, wait_s=limits.deadline_s)
    sessions = Sessions(stores, fetch)
    inside = open_inside(
        sessions, around=fetch, budget=budget, room=room, limits=limits, metrics=metrics
    )
    doors = Doors(sessions, Containers(session_formats(limits)), fetch)
    resolver = SessionResolver(
        stores,
        fetch,
        chunks,
        budget,
        stream_bytes=limits.stream_bytes,
        decoded_bytes=limits.decoded_bytes,
        doors=doors,
        inner=inside.resolver,
    )
    objects = ObjectWriter(
        stores, fetch, document_bytes=limits.metadata_bytes, decoded_bytes=limits.decoded_bytes
    )
    rewrites = Rewrites(stores, fetch, room, metrics.on_rewrite)
    writer = SessionWriter(stores, fetch, objects, rewrites, doors=doors, inner=inside.writer)
    datasets = {
        name: Dataset(
            name=name,
            root=_open_root(stores, dataset, settings),
            containers=Containers(
                formats(dataset, limits, open_allowed(stores, dataset, settings))
            ),
            format=dataset.format,
            cache_control=dataset.cache_control.encode(),
            is_writable=dataset.writable,
        )
        for name, dataset in settings.datasets.items()
    }

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        async with stores, aclosing(rewrites), aclosing(inside.rewrites):
            yield

    cors = Cors(settings.server.cors_origins)
    swaps = RepoSwaps(stores, fetch)
    rewriting = ByteBudget(limits.repository_file_bytes, wait_s=limits.deadline_s)
    files = ChunkFiles(stores)
    committer = Committer(swaps, rewriting)
    commits = build_commits(
        datasets,
        resolver,
        Taker(budget, timeout_s=limits.timeout_s),
        files,
        StatelessCommits(committer, files),
        max_chunk_nbytes=limits.max_chunk_bytes,
        decoded=ByteBudget(limits.repository_file_bytes, wait_s=limits.deadline_s),
    )
    documents = DocumentReader(budget, limits.timeout_s)
    routes = [
        build_creation(datasets, swaps, documents),
        build_repository_changes(datasets, resolver, swaps, documents),
        commits,
        build_sessions(datasets, resolver, sessions, committer, documents),
    ]
    control = build_control(datasets, resolver, metrics, lifespan, routes)
    bounds = Limits(limits.max_chunk_bytes, limits.max_batch_bytes, limits.timeout_s)
    uploads = Uploads(stores, writer, max_nbytes=limits.max_chunk_bytes)
    eraser = SessionEraser(resolver, objects, writer, doors=doors, inner=inside.eraser)
    writing = WritingPlane(
        datasets, resolver, writer, eraser, uploads, budget=budget, limits=bounds
    )
    return Gateway(control, DataPlane(datasets, resolver, writing, cors), cors)


class Inside(NamedTuple):
    """What reads and writes the keys of sessions: it asks each time, and shares no answer."""

    resolver: Resolver
    writer: Writer
    eraser: Eraser
    rewrites: Rewrites


def open_inside(  # noqa: PLR0913 - what it shares with what is around sessions
    sessions: Sessions,
    *,
    around: ReadCache,
    budget: ByteBudget,
    room: ByteBudget,
    limits: LimitSettings,
    metrics: Metrics,
) -> Inside:
    """Build what reads and writes the keys of *sessions*."""
    stores = sessions.stores
    fetch = ReadCache(stores, around.memory, ttl_s=0, is_shared=False)
    chunks = ChunkReader(
        stores,
        max_bytes=0,
        max_gap_bytes=limits.coalesce_gap_bytes,
        max_span_bytes=limits.stream_bytes,
    )
    resolver = Resolver(
        stores,
        fetch,
        chunks,
        budget,
        stream_bytes=limits.stream_bytes,
        decoded_bytes=limits.decoded_bytes,
    )
    objects = ObjectWriter(
        stores, fetch, document_bytes=limits.metadata_bytes, decoded_bytes=limits.decoded_bytes
    )
    rewrites = Rewrites(stores, fetch, room, metrics.on_rewrite)
    writer = Writer(stores, fetch, objects, rewrites)
    return Inside(resolver, writer, Eraser(resolver, objects, writer), rewrites)


def session_formats(limits: LimitSettings) -> list[Format]:
    """Name the formats of what is in sessions."""
    zarr = Zarr3(limits.whole_index_bytes, limits.metadata_bytes, limits.decoded_bytes)
    return [DocumentFormat("zarr", ZARR_JSON, (zarr,), limits.metadata_bytes)]


def _open_root(stores: Stores, dataset: DatasetSettings, settings: Settings) -> ObjectRef:
    if dataset.store is None:
        return stores.open_root(dataset.url)
    return stores.open_root(dataset.url, settings.stores[dataset.store], dataset.store)


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
