"""The composition root: settings in, an ASGI application out. Importing it does nothing."""

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import NamedTuple

from fastapi import APIRouter, FastAPI

from shardgate.api.administration import build_administration
from shardgate.api.api import build_api
from shardgate.api.repositories import build_repositories, build_repository_changes
from shardgate.api.sessions import build_commits, build_sessions
from shardgate.api.token_routes import build_tokens
from shardgate.auth.access import Datasets
from shardgate.auth.authenticator import Authenticator, BearerTokens, Hosts, Identify
from shardgate.auth.logins import LoginTokens, caller_of_page
from shardgate.auth.oidc import Issuers
from shardgate.auth.oidc_client import OidcClient
from shardgate.auth.sigv4 import Signatures
from shardgate.auth.token_records import TokenRecords
from shardgate.auth.tokens import TokenMint
from shardgate.concurrency import largest_share
from shardgate.datasets import open_datasets, open_decoding, open_token_root, session_formats
from shardgate.gateway import s3_multipart as multipart
from shardgate.gateway.admission import ConcurrencyLimiter
from shardgate.gateway.audit import AuditedApp, AuditLog
from shardgate.gateway.gateway import Gateway
from shardgate.gateway.read import ReadPlane
from shardgate.gateway.s3_dialect import explain_to_s3
from shardgate.gateway.shard_affinity import NAME as SHARDS
from shardgate.gateway.shard_affinity import ShardAffinity
from shardgate.gateway.write import WritePlane
from shardgate.icechunk.repo_swap import RepoSwaps
from shardgate.icechunk.sessions.registry import Sessions
from shardgate.icechunk.trains import Committer
from shardgate.model import ObjectRef
from shardgate.observability.logging import open_access_log
from shardgate.observability.metrics import Metrics
from shardgate.observability.tracing import Tracing
from shardgate.read.budget import BucketBudgets, ByteBudget
from shardgate.read.chunks import ChunkReader
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.read.resolver import Resolver
from shardgate.server.asgi import AsgiApp
from shardgate.server.body import RequestBodyReader
from shardgate.server.instrumentation import InstrumentedApp
from shardgate.server.request import PathPrefix
from shardgate.server.responses import Cors, Explain
from shardgate.settings import Settings
from shardgate.storage.contract import ObjectStore
from shardgate.storage.memory import MemoryStore
from shardgate.storage.stores import Stores
from shardgate.storage.wrappers import Call, OnCall, TracedStore
from shardgate.web.chunk_grids import ChunkGrids
from shardgate.web.dataset_page import DatasetPages
from shardgate.web.error_page import ErrorPages
from shardgate.web.login import build_login
from shardgate.web.login_commands import build_command_login
from shardgate.web.pictures import build_pictures
from shardgate.web.previews import Previews, worker_command
from shardgate.web.start_page import OverviewCache, StartPage
from shardgate.web.token_page import build_token_page
from shardgate.web.viewer import ViewerLinks, add_viewer
from shardgate.write.rewrite import Rewrites
from shardgate.write.uploads import Uploads
from shardgate.write.writer import Eraser, PassthroughWriter, Writer


class Shared(NamedTuple):
    """Parts that all other parts of the service use."""

    settings: Settings
    metrics: Metrics
    stores: Stores
    datasets: Datasets
    reads: ReadCache
    swaps: RepoSwaps
    resolver: Resolver
    bodies: ByteBudget
    """For request bodies in flight."""
    decoding: ByteBudget
    """For work in progress: decoding has up to three quarters, each other kind a quarter."""
    rewriting: ByteBudget
    """For shards that are rewritten, or joined by the commit of a session."""
    sessions: Sessions


class _Access(NamedTuple):
    """Parts that tell callers apart."""

    authenticator: Authenticator
    routes: Sequence[APIRouter]
    """Routes of tokens, and of signing in."""
    opened: Sequence[AbstractAsyncContextManager[object]]
    """Parts to open while the service runs."""


def create_app(
    settings: Settings,
    *,
    wrap: Callable[[ObjectStore], ObjectStore] = lambda store: store,
    tracing: Tracing | None = None,
) -> AsgiApp:
    """Build the service; *wrap* is applied to every store, for tests that observe or break it."""
    shared = _build_shared(settings, wrap, tracing)
    server = settings.server
    bodies = RequestBodyReader(shared.bodies)
    access = _build_access(shared, bodies)
    on_rewrite = shared.metrics.stores.on_rewrite
    rewrites = Rewrites(shared.stores, shared.reads, shared.rewriting, on_rewrite)
    committer = Committer(shared.swaps, _quarter(shared.decoding), shared.metrics.on_commit)
    overviews = OverviewCache(shared.resolver)
    grids = ChunkGrids(shared.resolver)
    access_log = open_access_log(server)
    on_loss = shared.metrics.on_audit_loss
    audit_log = None if server.audit_log is None else AuditLog(server.audit_log, on_loss)
    parts = [aclosing(each) for each in (shared.sessions, rewrites, committer, overviews, grids)]

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for log in (access_log, audit_log):
                if log is not None:
                    log.start()
                    stack.callback(log.close)
            if tracing is not None:
                stack.push_async_callback(tracing.aclose)
            for part in (shared.stores, *access.opened, *parts):
                await stack.enter_async_context(part)
            yield

    explain = ErrorPages(settings.login).explain
    api = build_api(
        shared.datasets,
        shared.resolver,
        shared.metrics,
        [*access.routes, *_build_routes(shared, committer, bodies, grids)],
        start_page=StartPage(shared.datasets, overviews, settings.login),
        explain=explain,
    )
    add_viewer(api)
    writes = _build_writing(shared, rewrites, access.authenticator)
    gateway = _build_gateway(shared, access.authenticator, api, writes, explain)
    app = InstrumentedApp(
        gateway if audit_log is None else AuditedApp(gateway, audit_log),
        {dataset.name: dataset.is_public for dataset in shared.datasets},
        shared.metrics.requests,
        access_log=access_log,
        tracing=tracing,
        proxies=server.trusted_proxies,
        unobserved=(SHARDS,),  # which balancers request before each request that they forward
    )
    prefix = PathPrefix(server.root_path, server.trusted_proxies, settings.datasets)
    return AsgiApp(app, lifespan, prefix, timeout_s=settings.limits.timeout_s)


def _build_gateway(
    shared: Shared,
    authenticator: Authenticator,
    api: FastAPI,
    writes: WritePlane,
    explain: Explain,
) -> Gateway:
    limits = shared.settings.limits
    datasets = shared.datasets
    resolver = shared.resolver
    proxies = shared.settings.server.trusted_proxies
    cors = Cors(shared.settings.server.cors_origins)
    send_page = DatasetPages(resolver, shared.settings.login).send
    return Gateway(
        api,
        ReadPlane(
            datasets, authenticator, resolver, shared.sessions, cors=cors, send_page=send_page
        ),
        writes,
        ShardAffinity(datasets, resolver, proxies),
        authenticator=authenticator,
        cors=cors,
        explain=explain_to_s3(explain),
        limiter=ConcurrencyLimiter(
            most=limits.requests,
            most_per_client=limits.client_requests,
            longest_s=limits.answer_s,
            several_datasets=len(shared.settings.datasets) > 1,
            proxies=proxies,
        ),
    )


def _quarter(decoding: ByteBudget) -> ByteBudget:
    """Return the share of *decoding* for one kind of work."""
    return decoding.share(decoding.max_bytes // 4)


def _build_shared(
    settings: Settings, wrap: Callable[[ObjectStore], ObjectStore], tracing: Tracing | None
) -> Shared:
    limits = settings.limits
    worker = None if settings.server.workers == 1 else str(os.getpid())
    metrics = Metrics(settings.datasets, worker=worker)
    on_call = _call_observer(metrics, tracing)
    on_write = metrics.stores.on_write
    stores = Stores(limits, wrap=lambda store: TracedStore(wrap(store), on_call), on_write=on_write)
    decoding = open_decoding(limits)
    memory = MetadataCache(
        settings.cache.index_bytes,
        decoding.share(largest_share(decoding.max_bytes), wait_s=limits.answer_s),
    )
    reads = ReadCache(stores, memory, ttl_s=settings.cache.ttl_s)
    metrics.caches.watch("index", reads.cache, reads.counters)
    datasets = Datasets(open_datasets(stores, settings), settings.server.metrics)
    budget = ByteBudget(limits.in_flight_bytes, wait_s=limits.timeout_s)
    responses = BucketBudgets(budget, [each.root.bucket for each in datasets])
    chunks = ChunkReader(
        stores,
        responses,
        max_bytes=settings.cache.chunk_bytes,
        max_gap_bytes=limits.coalesce_gap_bytes,
        max_span_bytes=limits.stream_bytes,
    )
    metrics.caches.watch("chunk", chunks.cache, chunks.counters)
    resolver = Resolver(
        stores,
        reads,
        chunks,
        responses,
        stream_bytes=limits.stream_bytes,
        decoded_bytes=limits.decoded_bytes,
    )
    swaps = RepoSwaps(stores, reads)
    formats = session_formats(limits)
    sessions = Sessions(swaps, stores.volatile, formats, _quarter(decoding), metrics.on_session)
    metrics.caches.watch_budget("bodies", budget)
    metrics.caches.watch_budget("decoding", decoding)
    return Shared(
        settings,
        metrics,
        stores,
        datasets,
        reads,
        swaps,
        resolver,
        bodies=budget.share(largest_share(limits.in_flight_bytes)),
        decoding=decoding,
        rewriting=_quarter(decoding),
        sessions=sessions,
    )


def _call_observer(metrics: Metrics, tracing: Tracing | None) -> OnCall:
    if tracing is None:
        return metrics.stores.on_call

    def on_call(call: Call) -> None:
        metrics.stores.on_call(call)
        tracing.on_call(call)

    return on_call


def _build_access(shared: Shared, bodies: RequestBodyReader) -> _Access:
    settings = shared.settings
    login = settings.login
    issuers = Issuers(settings.issuers)
    records = TokenRecords(MemoryStore(), ObjectRef("memory://tokens", ""))
    if (root := open_token_root(shared.stores, settings)) is not None:
        records = TokenRecords(shared.stores, root)
    mint = TokenMint(settings.tokens, shared.datasets, records)
    identify: list[Identify] = [mint.identify]
    routes: list[APIRouter] = [build_tokens(mint, bodies)]
    opened: list[AbstractAsyncContextManager[object]] = [aclosing(issuers), aclosing(records)]
    find_login = None
    if login.issuer is not None:
        logins = LoginTokens(settings, shared.datasets, records)
        flow = OidcClient(issuers.by_name[login.issuer], login)
        identify.append(logins.identify)
        routes.append(build_token_page(logins, mint, bodies))
        routes.append(build_login(flow, logins, login.viewers))
        proxies = settings.server.trusted_proxies
        routes.append(build_command_login(flow, logins, bodies, proxies))
        opened.append(aclosing(flow))
        find_login = partial(caller_of_page, logins)
    tokens = BearerTokens(settings.callers, [*identify, issuers.identify])
    signatures = Signatures(settings.callers)
    hosts = Hosts(settings.server.host, settings.server.hosts)
    authenticator = Authenticator(shared.datasets, tokens, signatures, hosts, find_login)
    records.on_end = authenticator.forget
    return _Access(authenticator, routes, opened)


def _build_routes(
    shared: Shared, committer: Committer, bodies: RequestBodyReader, grids: ChunkGrids
) -> list[APIRouter]:
    datasets = shared.datasets
    resolver = shared.resolver
    previews = Previews(resolver, _quarter(shared.decoding), worker_command())
    links = ViewerLinks(resolver, previews, shared.settings.login.viewers)
    commits = build_commits(
        datasets,
        resolver,
        bodies,
        committer,
        max_chunk_nbytes=shared.settings.limits.max_chunk_bytes,
        decoded=_quarter(shared.decoding),
    )
    return [
        build_pictures(datasets, previews, grids, links),
        build_repositories(datasets, resolver, _quarter(shared.decoding)),
        build_repository_changes(datasets, resolver, committer.swaps, bodies),
        build_administration(datasets, resolver, committer.swaps, bodies),
        commits,
        build_sessions(datasets, resolver, shared.sessions, committer, bodies),
    ]


def _build_writing(shared: Shared, rewrites: Rewrites, authenticator: Authenticator) -> WritePlane:
    limits = shared.settings.limits
    stores = shared.stores
    sessions = shared.sessions
    objects = PassthroughWriter(
        stores,
        shared.reads,
        document_bytes=limits.metadata_bytes,
        decoded_bytes=limits.decoded_bytes,
    )
    writer = Writer(stores, shared.reads, objects, rewrites)
    copy = partial(multipart.copy, sessions, shared.resolver)
    uploads = Uploads(stores, writer, sessions.route, max_nbytes=limits.max_chunk_bytes)
    return WritePlane(
        shared.datasets,
        authenticator,
        sessions,
        writer,
        copy=copy,
        upload_steps=multipart.MultipartUploads(uploads, partial(copy, is_part=True)).steps,
        eraser=Eraser(shared.resolver, objects, writer),
        resolver=shared.resolver,
        budget=shared.bodies,
        max_chunk_nbytes=limits.max_chunk_bytes,
    )
