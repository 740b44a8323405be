"""``/{dataset}/{virtual key}``: a plain ASGI callable, for speed."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from app.errors import (
    BadKeyError,
    RequestError,
    ShardgateError,
    UnsupportedError,
)
from app.formats.listing import Name
from app.http.answer import (
    ALLOW,
    Answer,
    AtHand,
    Given,
    Later,
    Respond,
    Write,
    asgi_writer,
    combined,
    request_id,
)
from app.http.asked import allowed
from app.http.bodies import lingering_writer
from app.http.buckets import list_buckets, send_xml, tell_of_bucket
from app.http.cors import Cors
from app.http.credentials.access import Datasets
from app.http.credentials.caller import NOBODY, Caller
from app.http.credentials.door import UNKNOWN, Door, Request
from app.http.disconnect import ClientGoneError, UntilDisconnect
from app.http.entity_headers import describe, entity_headers, head_of, keeping, listing_headers
from app.http.heads import encode_headers
from app.http.pages import MOST_LINKS, listing_page, page_headers
from app.http.s3 import MEDIA_TYPE, ListRequest
from app.http.s3_answers import no_tags
from app.http.s3_requests import lists_objects, names_in, unserved
from app.http.selection import Conditions, Selection, choose, etag_of_selected
from app.http.target import spell, split_target
from app.http.writing import WritingPlane
from app.model import VirtualKey
from app.observability.requests import note_caller
from app.resolve.bodies import Entity, Opened
from app.resolve.resolver import Dataset, Resolver

_EVERY_METHOD: Final = b"GET, HEAD, PUT, DELETE, POST, OPTIONS"
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_log = logging.getLogger(__name__)


class DataPlane:
    """Answers requests for virtual keys."""

    def __init__(
        self,
        datasets: Datasets,
        door: Door,
        resolver: Resolver,
        writing: WritingPlane,
        cors: Cors,
    ) -> None:
        self._door = door
        self._visitors = door.visitors
        self._datasets = datasets
        self._resolver = resolver
        self._writing = writing
        self._cors = cors

    def begin(
        self, raw_path: bytes, given: Given, now: float, segment: bytes | None = None
    ) -> AtHand | Later | None:
        """Begin to answer a GET for a chunk or document outside of ASGI; see `GatewayProtocol`.

        `None` leaves the request to ASGI. It is *now* by the clock of the event loop. A token
        was in the first *segment* of the path.
        """
        try:
            name, key = split_target(raw_path)
            dataset = self._datasets.get(name)
            if dataset is None or not key or key.endswith("/"):
                return None
            caller = NOBODY
            if not dataset.is_public:
                shown = segment or given.get(b"authorization", b"")
                asked = dataset.name, shown, segment is not None
                visitor, until = self._visitors.get(asked, UNKNOWN)
                if until <= now:
                    visitor = self._door.recall(dataset, asked, now)
                if visitor is None or not self._door.hosts.admits(given.get(b"host", b"")):
                    return None
                caller = visitor
            conditions = Conditions.parse("GET", given)
            at_hand = self._at_hand(dataset, key, conditions)
        except RequestError:
            return None
        if at_hand is None:
            read = partial(self._read, dataset, key, conditions)
            return partial(self._read_later, given, caller, read)
        entity, selection, body = at_hand
        if (described := describe(dataset, key, entity, selection)) is None:
            return None
        common, more = described
        name_of_request = request_id(given.get(b"x-request-id"))
        head = b"%b%b%bx-request-id: %b\r\n" % (
            head_of(common),
            self._cors.head(given.get(b"origin")),
            encode_headers(more) if more else b"",
            name_of_request,
        )
        return AtHand(selection.status, head, body, name_of_request, name, caller.name)

    def _read_later(
        self,
        given: Given,
        caller: Caller,
        read: Callable[[Answer], Awaitable[None]],
        write: Write,
    ) -> Awaitable[None]:
        note_caller(caller.name)
        answer = Answer(given, write, self._cors)
        return self._guarded(answer, partial(read, answer))

    async def __call__(self, scope: Request, receive: Any, send: Any) -> None:
        """Answer one request of the ASGI type ``http``."""
        given, query = combined(scope["headers"]), scope["query_string"]
        with suppress(ClientGoneError):
            if scope["method"] in _READS:
                answer = Answer(given, asgi_writer(send), self._cors, query)
                async with UntilDisconnect(receive):
                    await self._guarded(answer, partial(self._respond, answer, scope))
            else:
                incoming = self._writing.incoming(scope, receive, given)
                answer = Answer(given, lingering_writer(send, incoming), self._cors, query)
                respond = partial(self._writing.respond, answer, scope, incoming)
                await self._guarded(answer, respond)

    async def list_buckets(self, answer: Answer, caller: Caller) -> None:
        """Answer S3 clients that ask what is served."""
        await list_buckets(answer, [each.name for each in self._datasets.seen_by(caller)])

    async def _guarded(self, answer: Answer, respond: Respond) -> None:
        """Let *respond* fail with a problem document; what broke off is raised again."""
        try:
            await respond()
        except ShardgateError as error:
            if answer.has_started:
                _log.warning("an answer broke off", exc_info=error)
                raise
            await answer.fail(error)
        except ClientGoneError:
            raise
        except Exception:
            if answer.has_started:
                raise
            _log.exception("a request failed")
            await answer.problem(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of this service")

    async def _respond(self, answer: Answer, scope: Request) -> None:
        method, query = scope["method"], scope["query_string"]
        if method == "OPTIONS":
            await answer.preflight(self._allowed(scope["raw_path"], names_in(query)))
            return
        name, key = split_target(scope["raw_path"])
        dataset = await self._door.enter(scope, name)
        names = names_in(query) if query else frozenset[bytes]()
        operation = unserved(method, names, {}, of_key=bool(key))
        if operation is not None and answer.is_s3:
            raise UnsupportedError(f"{operation} is not served")
        if key and b"tagging" in names and answer.is_s3:
            await self._list_tags(answer, dataset, key)
        elif key and not key.endswith("/"):
            conditions = Conditions.parse(method, answer.given)
            await self._read(dataset, key, conditions, answer)
        elif not key and lists_objects(method, names, is_s3=answer.is_s3):
            await self._list_objects(answer, dataset, ListRequest.parse(query))
        elif not key and answer.is_s3:
            await tell_of_bucket(answer, method, names)
        elif key is None:
            await _missing(answer, dataset, "", "a dataset is no object; its keys follow a slash")
        else:
            await self._list(answer, dataset, key)

    def _allowed(self, raw_path: bytes, names: frozenset[bytes]) -> bytes:
        """List the methods that are served of what *raw_path* names, which may be nothing."""
        try:
            name, key = split_target(raw_path)
        except BadKeyError:
            return ALLOW
        dataset = self._datasets.get(name)
        if not self._datasets.is_all_public and (dataset is None or not dataset.is_public):
            return _EVERY_METHOD  # whether there is such a dataset takes credentials
        return allowed(dataset, key, names)

    def _at_hand(
        self, dataset: Dataset, key: VirtualKey, conditions: Conditions
    ) -> tuple[Entity, Selection, bytes] | None:
        """Find what needs no waiting, without the means to wait."""
        entity = self._resolver.recall(dataset, key)
        if entity is None:
            return None
        if (selection := choose(conditions, entity)) is None:
            return None
        body = self._resolver.at_hand(entity, selection.reads)
        return None if body is None else (entity, selection, body)

    async def _read(
        self, dataset: Dataset, key: VirtualKey, conditions: Conditions, answer: Answer
    ) -> None:
        def choose_part(entity: Entity) -> Selection | None:
            return choose(conditions, entity)

        async with self._resolver.open(dataset, key, choose_part, conditions.reading) as opened:
            if opened is not None:
                await _send_entity(answer, dataset, key, opened)
            elif conditions.is_plain_get and await self._resolver.is_group(dataset, key):
                await _redirect_to_page(answer, dataset, key)
            else:
                await _missing(answer, dataset, key, f"{dataset.name} has no {key}")

    async def _list_objects(self, answer: Answer, dataset: Dataset, request: ListRequest) -> None:
        page = await self._resolver.page(dataset, request.window, request.limit)
        body = request.answer(dataset.name, page)
        headers = listing_headers(dataset, request.window.prefix, MEDIA_TYPE, body)
        await answer.send(HTTPStatus.OK, headers, body)

    async def _list_tags(self, answer: Answer, dataset: Dataset, key: VirtualKey) -> None:
        def choose_nothing(_: Entity) -> Selection:
            return Selection(HTTPStatus.OK)

        async with self._resolver.open(dataset, key, choose_nothing) as opened:
            if opened is None:
                await _missing(answer, dataset, key, f"{dataset.name} has no {key}")
            else:
                await send_xml(answer, no_tags())

    async def _list(self, answer: Answer, dataset: Dataset, prefix: VirtualKey) -> None:
        listed: list[Name] = []
        async with aclosing(self._resolver.list(dataset, prefix)) as names:
            async for name in names:
                listed.append(name)
                if len(listed) > MOST_LINKS:
                    break
        if not listed:
            await _missing(answer, dataset, prefix, f"{dataset.name} has nothing below {prefix}")
            return
        body = listing_page(f"/{dataset.name}/{prefix}", listed)
        headers = listing_headers(dataset, prefix, b"text/html; charset=utf-8", body)
        headers += [header for header in page_headers() if header not in headers]
        await answer.send(HTTPStatus.OK, headers, body)


async def _missing(answer: Answer, dataset: Dataset, key: str, detail: str) -> None:
    """Answer 404; absence is cached by clients like any answer that can change."""
    await answer.problem(HTTPStatus.NOT_FOUND, detail, *keeping(dataset, key))


async def _redirect_to_page(answer: Answer, dataset: Dataset, key: VirtualKey) -> None:
    """Lead fsspec to the page of a group: it asks for nested ones without the slash."""
    name = spell(key.rpartition("/")[2])
    headers = [
        (b"location", f"./{name}/".encode()),
        (b"content-length", b"0"),
        *keeping(dataset, key),
    ]
    await answer.send(HTTPStatus.TEMPORARY_REDIRECT, headers)


async def _send_entity(
    answer: Answer, dataset: Dataset, key: VirtualKey, opened: Opened[Selection]
) -> None:
    status, entity = opened.choice.status, opened.entity
    if (headers := entity_headers(dataset, key, opened)) is not None:
        await answer.send(status, headers, opened.body)
    elif status is HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        spelled = b"bytes */%d" % entity.length
        detail = f"{key} has {entity.length} bytes, none of them in the range"
        await answer.problem(status, detail, (b"content-range", spelled))
    else:
        etag = etag_of_selected(entity, opened.choice)
        detail = f"the current version of {key} is {etag}"
        await answer.problem(status, detail, (b"etag", etag.encode("latin-1")))
