"""GET and HEAD of ``/{dataset}/{virtual key}``."""

import html
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Final, cast

from shardgate.auth.access import Caller, Datasets, ServedDataset
from shardgate.auth.authenticator import Authenticator
from shardgate.concurrency import is_many, run_in_thread
from shardgate.formats.compression import CODINGS
from shardgate.formats.icechunk.keys import SESSION
from shardgate.formats.listing import Name
from shardgate.gateway import s3_dialect as dialect
from shardgate.gateway.entity_headers import cache_headers, entity_headers
from shardgate.icechunk.sessions.registry import Sessions
from shardgate.model import VirtualKey
from shardgate.read.bodies import Entity, Opened, Selection
from shardgate.read.listing import Page
from shardgate.read.resolver import CachedEntity, Resolver
from shardgate.server.conditions import Conditions, Negotiation, choose, etag_of_selected
from shardgate.server.request import Headers, Request, Response, encode_headers, quote_segment
from shardgate.server.responses import NO_STORE, Cors, Responder, page_headers

MOST_LINKS: Final = 10_000
"""Most links of one HTML page."""

type SendPage = Callable[[Responder, ServedDataset, VirtualKey], Awaitable[bool]]
"""Sends the page of a folder to a browser; false if nothing is found there."""


class ReadPlane:
    """Answers requests that read virtual keys."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        datasets: Datasets,
        authenticator: Authenticator,
        resolver: Resolver,
        sessions: Sessions,
        *,
        cors: Cors,
        send_page: SendPage,
    ) -> None:
        self._authenticator = authenticator
        self._datasets = datasets
        self._resolver = resolver
        self._sessions = sessions
        self._cors = cors
        self._send_page = send_page

    def cached(self, request: Request) -> Response | None:
        """Return the response to a GET of bytes in memory. Raises: `RequestError`."""
        key = request.key
        if request.method != "GET" or request.query or not key or key.endswith("/"):
            return None
        dataset = self._datasets.get(request.name)
        if dataset is None or not dataset.is_public:
            caller = self._authenticator.cached_reader(request, dataset)
            if dataset is None or caller is None:
                return None
        found = self._resolver.get_cached(dataset, key)
        if found is None or (entity := found.entity) is None:
            return None
        conditions = Conditions.parse("GET", request.headers)
        selection = choose(conditions, partial(_negotiate, request), entity)
        body = None if selection is None else self._resolver.cached_body(entity, selection.reads)
        if selection is None or body is None:
            return None
        head = found.heads.get(selection) or self._encode_head(dataset, key, found, selection)
        if not head:
            return None
        cors = self._cors.head(request.headers.get(b"origin"))
        lines = b"%b%bx-request-id: %b\r\n" % (head, cors, request.id)
        return Response(selection.status, lines, body)

    def _encode_head(
        self, dataset: ServedDataset, key: VirtualKey, found: CachedEntity, selection: Selection
    ) -> bytes:
        """Return the headers of a selection, and keep them unless it is a range.

        They are empty if the response is a problem.
        """
        entity = cast("Entity", found.entity)
        head = encode_headers(entity_headers(dataset, key, entity, selection) or [])
        if head and selection.status is not HTTPStatus.PARTIAL_CONTENT:
            self._resolver.keep_head(dataset, key, found, selection, head)
        return head

    async def list_buckets(self, responder: Responder, caller: Caller) -> None:
        """Answer ListBuckets of an S3 client."""
        names = [each.name for each in self._datasets.readable_by(caller)]
        await responder.send_document(dialect.MEDIA_TYPE, dialect.bucket_list(names))

    async def respond(self, request: Request, responder: Responder) -> None:
        """Answer a GET or HEAD, which has a valid key, if any. Raises: any `ShardgateError`."""
        method = request.method
        names: frozenset[bytes] = frozenset()
        if request.query:
            names = dialect.parameter_names(request.query)
        key = request.key
        dataset = await self._authenticator.enter(request, request.name)
        if names:
            dialect.demand_served(method, names, {}, of_key=bool(key))
        if key:
            place = await self._route(dataset, key) if SESSION in key else (dataset, key)
            if b"tagging" in names:
                await self._list_tags(responder, *place)
            elif key.endswith("/"):
                await self._list(responder, *place)
            else:
                conditions = Conditions.parse(method, request.headers)
                await self._read(*place, conditions, responder)
        else:
            await self._respond_dataset(request, responder, dataset, names)

    async def _respond_dataset(
        self,
        request: Request,
        responder: Responder,
        dataset: ServedDataset,
        names: frozenset[bytes],
    ) -> None:
        """Answer a request of the whole *dataset*, whose query has parameters of these *names*."""
        method = request.method
        key = request.key
        is_s3 = dialect.speaks_s3(request)
        if dialect.lists_objects(method, names, is_s3=is_s3):
            await self._list_objects(responder, dataset, dialect.ListRequest.parse(request.query))
        elif is_s3 or dialect.describes_bucket(names):
            await _describe_bucket(responder, method, names)
        elif key is None and Conditions.parse(method, request.headers).is_plain_get:
            await _redirect(responder, dataset, f"./{quote_segment(dataset.name)}/")
        elif key is None:
            detail = "a dataset is no object; its keys follow a slash"
            await _send_missing(responder, dataset, detail)
        else:
            await self._list(responder, dataset, key)

    async def _read(
        self, dataset: ServedDataset, key: VirtualKey, conditions: Conditions, responder: Responder
    ) -> None:
        resolver = self._resolver
        negotiate = partial(_negotiate, responder.request)
        choose_part = partial(choose, conditions, negotiate)
        async with resolver.open(dataset, key, choose_part, conditions.reading) as opened:
            if opened is not None:
                await _send_entity(responder, dataset, key, opened)
            elif conditions.is_plain_get and await resolver.is_group(dataset, key):
                # fsspec asks for the page of a nested group without the slash.
                location = f"./{quote_segment(key.rpartition('/')[2])}/"
                await _redirect(responder, dataset, location)
            else:
                why = await resolver.explain_absence(dataset, key)
                detail = f"{dataset.name} has no {key}{why and f': {why}'}"
                await _send_missing(responder, dataset, detail)

    async def _route(
        self, dataset: ServedDataset, key: VirtualKey
    ) -> tuple[ServedDataset, VirtualKey]:
        """Return the dataset of *key*, and the key in it; responses of sessions are not stored."""
        routed, key_below = await self._sessions.route(dataset, key)
        if routed is not dataset:
            routed = replace(routed, cache_control=b"no-store")
        return routed, key_below

    async def _list_objects(
        self, responder: Responder, dataset: ServedDataset, request: dialect.ListRequest
    ) -> None:
        window = request.window
        routed, prefix = await self._route(dataset, VirtualKey(window.prefix))
        lead = window.prefix.removesuffix(prefix)  # that of a session, which its keys lack
        page = await self._resolver.page(routed, window.below(lead), request.limit)
        if lead:
            entries = [entry._replace(key=lead + entry.key) for entry in page.entries]
            page = Page(entries, page.after and lead + page.after)
        body = request.format(dataset.name, page)
        headers = _listing_headers(routed, dialect.MEDIA_TYPE, body)
        await responder.send(HTTPStatus.OK, headers, body)

    async def _list_tags(
        self, responder: Responder, dataset: ServedDataset, key: VirtualKey
    ) -> None:
        def choose_nothing(_: Entity) -> Selection:
            return Selection(HTTPStatus.OK)

        async with self._resolver.open(dataset, key, choose_nothing) as opened:
            if opened is None:
                await _send_missing(responder, dataset, f"{dataset.name} has no {key}")
            else:
                await responder.send_document(dialect.MEDIA_TYPE, dialect.no_tags())

    async def _list(self, responder: Responder, dataset: ServedDataset, prefix: VirtualKey) -> None:
        """Send the page of a folder to a browser, and a plain page of links to other clients."""
        missing = f"there are no keys below {dataset.name}/{prefix}"
        if responder.request.accepts_html:
            if not await self._send_page(responder, dataset, prefix):
                await _send_missing(responder, dataset, missing)
            return
        listed = await self._resolver.first_names(dataset, prefix, MOST_LINKS + 1)
        if not listed:
            await _send_missing(responder, dataset, missing)
            return
        path = f"/{dataset.name}/{prefix}"
        body = await run_in_thread(listing_page, path, listed, is_long=is_many(len(listed)))
        headers = _listing_headers(dataset, b"text/html; charset=utf-8", body)
        headers.append((b"vary", b"Accept"))
        headers += [header for header in page_headers() if header not in headers]
        await responder.send(HTTPStatus.OK, headers, body)


def _negotiate(request: Request) -> Negotiation:
    return Negotiation(request.headers.get(b"accept-encoding"), dialect.speaks_s3(request))


async def _describe_bucket(responder: Responder, method: str, names: frozenset[bytes]) -> None:
    """Answer HeadBucket, GetBucketLocation or GetBucketVersioning."""
    if method == "HEAD":
        headers = [(b"content-length", b"0"), (b"x-amz-bucket-region", b"us-east-1"), NO_STORE]
        await responder.send(HTTPStatus.OK, headers)
    else:
        await responder.send_document(dialect.MEDIA_TYPE, dialect.bucket_property(names))


async def _redirect(responder: Responder, dataset: ServedDataset, location: str) -> None:
    headers = [(b"location", location.encode()), (b"content-length", b"0")]
    await responder.send(HTTPStatus.TEMPORARY_REDIRECT, headers + cache_headers(dataset))


async def _send_missing(responder: Responder, dataset: ServedDataset, detail: str) -> None:
    """Send 404; clients may cache absence like any response that can change."""
    await responder.problem(HTTPStatus.NOT_FOUND, detail, *cache_headers(dataset))


async def _send_entity(
    responder: Responder, dataset: ServedDataset, key: VirtualKey, opened: Opened
) -> None:
    status = opened.selection.status
    entity = opened.entity
    if (headers := entity_headers(dataset, key, entity, opened.selection)) is not None:
        await responder.send(status, headers, opened.body)
    elif status is HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        unsatisfied = (b"content-range", b"bytes */%d" % entity.length)
        detail = f"{key} has {entity.length} bytes, none of them in the range"
        await responder.problem(status, detail, unsatisfied)
    elif status is HTTPStatus.NOT_ACCEPTABLE:
        other = "identity neither" if entity.coding in CODINGS else "and cannot be removed here"
        detail = f"Content-Encoding: {entity.coding} of {key} is not accepted, {other}"
        await responder.problem(status, detail, (b"vary", b"Accept-Encoding"))
    else:
        etag = etag_of_selected(entity, opened.selection)
        detail = f"the current version of {key} is {etag}"
        await responder.problem(status, detail, (b"etag", etag.encode("latin-1")))


def _listing_headers(dataset: ServedDataset, media_type: bytes, body: bytes) -> Headers:
    length = (b"content-length", b"%d" % len(body))
    return [(b"content-type", media_type), length, *cache_headers(dataset)]


def listing_page(path: str, listed: Sequence[Name]) -> bytes:
    """Return the HTML page of *path*, which ends in a slash, with up to `MOST_LINKS` links."""
    rows = "\n".join(map(_link, listed[:MOST_LINKS]))
    if len(listed) > MOST_LINKS:
        rows += "\n<li>and more: <code>?list-type=2</code> gives all by the page</li>"
    title = html.escape(path)
    return (
        f"<!doctype html>\n<html><head><title>{title}</title></head>\n"
        f"<body><h1>{title}</h1>\n<ul>\n{rows}\n</ul></body></html>\n"
    ).encode()


def _link(listed: Name) -> str:
    name, nbytes = listed  # the size is known of objects only
    size = "" if nbytes is None else f" {nbytes:,} bytes"
    # "./" keeps a name with a colon from being read as a scheme.
    return f'<li><a href="./{quote_segment(name)}">{html.escape(name)}</a>{size}</li>'
