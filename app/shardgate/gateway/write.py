"""PUT, DELETE and POST of ``/{dataset}/{virtual key}``: dispatch, single keys, many keys."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple, cast
from urllib.parse import parse_qs

from shardgate.auditing import new_change, note
from shardgate.auth.access import Datasets, ServedDataset, why_read_only
from shardgate.auth.authenticator import Authenticator
from shardgate.errors import (
    BadBodyError,
    BadHeaderError,
    BadKeyError,
    BadParameterError,
    ForeignPageError,
    ReadOnlyError,
    ShardgateError,
    UnsupportedError,
)
from shardgate.formats.icechunk.keys import session_prefix
from shardgate.gateway import s3_dialect as dialect
from shardgate.icechunk.sessions.registry import Sessions
from shardgate.model import ETag, VirtualKey
from shardgate.read.bodies import Demand
from shardgate.read.budget import ByteBudget, ByteReservation
from shardgate.read.resolver import Resolver
from shardgate.server.body import ContentCoding, IncomingBody, Payload, read_payload
from shardgate.server.conditions import parse_demand
from shardgate.server.problems import status_of
from shardgate.server.request import Headers, Request, RequestHeaders, check_key
from shardgate.server.responses import ALLOW, NO_STORE, Responder
from shardgate.storage.contract import ObjectHeaders
from shardgate.storage.http_headers import METADATA, object_headers
from shardgate.write.writer import Eraser, KeyWrite, Outcome, Writer

COPY_SOURCE: Final = b"x-amz-copy-source"
FOREIGN: Final = "server.cors_origins does not name the page that would write"
_WEBDAV: Final = frozenset({"PROPFIND", "PROPPATCH", "MKCOL", "COPY", "MOVE", "LOCK", "UNLOCK"})
_NO_WEBDAV: Final = (
    "WebDAV is not served: list by S3 (?list-type=2), or by the links on the page of a folder"
)
_WITH_POST: Final = b"GET, HEAD, PUT, DELETE, POST, OPTIONS"


class WriteRequest(NamedTuple):
    """Request that writes; nothing of its body has been read."""

    query: bytes
    headers: RequestHeaders
    incoming: IncomingBody
    responder: Responder
    dataset: ServedDataset
    key: VirtualKey
    """Empty for a request of the whole dataset."""
    names: frozenset[bytes]
    """Names of the parameters in the query."""
    held: ByteReservation
    """Bytes in flight, released when the request is answered."""
    max_nbytes: int
    """Largest body of an object."""
    find: Callable[[str], Awaitable[ServedDataset]]
    """Returns another dataset by its name, if the caller may read it."""

    async def read_payload(self) -> Payload:
        """Read the bytes of an object. Raises: see `read_payload`."""
        return await read_payload(
            self.incoming, self.headers, self.held, most_nbytes=self.max_nbytes
        )

    def demand(self, prefix: bytes = b"") -> Demand | None:
        """Parse the preconditions, whose names begin with *prefix*. Raises: `BadHeaderError`."""
        if_match = self.headers.get(prefix + b"if-match")
        if_none_match = self.headers.get(prefix + b"if-none-match")
        return parse_demand(
            None if if_match is None else if_match.decode("latin-1"),
            None if if_none_match is None else if_none_match.decode("latin-1"),
        )

    def object_headers(self) -> ObjectHeaders:
        """Return the headers to store. Raises: `BadHeaderError`, `UnknownCodingError`."""
        stored = object_headers(self.headers)
        named = sum([name.startswith(METADATA) for name in self.headers])
        most_nbytes = 1800  # S3 takes 2,048, of which the service needs some for ids of writes
        if len(stored.metadata) < named or stored.nbytes > most_nbytes:
            raise BadHeaderError(
                "user metadata is ASCII, of 1,800 bytes at most, and not named shardgate-…"
            )
        return stored._replace(coding=ContentCoding.parse(self.headers).name)

    def parameter(self, name: str) -> str:
        """Return the parameter *name*. Raises: `BadParameterError` if it is absent or repeated."""
        try:
            text = self.query.decode("ascii")
            values = parse_qs(text, keep_blank_values=True, errors="strict").get(name, ())
        except ValueError:
            raise BadParameterError("the query is not percent-encoded UTF-8") from None
        if len(values) != 1:
            raise BadParameterError(f"{name} must be given once")
        return values[0]

    async def send_written(self, etag: ETag | None) -> None:
        """Send S3's response to an object that was written."""
        headers: Headers = [(b"content-length", b"0"), NO_STORE]
        if etag is not None:
            headers.append((b"etag", etag.encode("latin-1")))
        await self.responder.send(HTTPStatus.OK, headers)

    async def send_xml(self, body: bytes) -> None:
        """Send a document of S3."""
        await self.responder.send_document(dialect.MEDIA_TYPE, body)


type Put = Callable[[Payload, ObjectHeaders | None], Awaitable[ETag | None]]
type Handler = Callable[[WriteRequest], Awaitable[None]]
type Copy = Callable[[WriteRequest, Put], Awaitable[None]]
"""Answers CopyObject by passing the source to the put; see `multipart.copy`."""


class WritePlane:
    """Answers requests that write."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        datasets: Datasets,
        authenticator: Authenticator,
        sessions: Sessions,
        writer: Writer,
        *,
        copy: Copy,
        upload_steps: Mapping[str, Handler],
        eraser: Eraser,
        resolver: Resolver,
        budget: ByteBudget,
        max_chunk_nbytes: int,
    ) -> None:
        self._datasets = datasets
        self._authenticator = authenticator
        self._sessions = sessions
        self._writer = writer
        self._eraser = eraser
        self._resolver = resolver
        self._copy = copy
        self._budget = budget
        self._max_chunk_nbytes = max_chunk_nbytes
        self._of_keys = {"PUT": self._put, "DELETE": self._delete, **upload_steps}
        # By method, with the parameter that must be given.
        self._of_datasets = {
            "POST": (b"delete", self._delete_objects),
            "DELETE": (b"prefix", self._erase),
        }

    async def allowed_methods(self, request: Request) -> bytes:
        """Return the methods that are allowed on the path, whether or not it names an object."""
        if request.fault is not None:
            return ALLOW
        dataset = self._datasets.get(request.name)
        if not self._datasets.is_all_public and (dataset is None or not dataset.is_public):
            return _WITH_POST  # a private dataset is indistinguishable from a missing one
        names = dialect.parameter_names(request.query)
        return await self._methods_of(dataset, request.key, names)

    async def _methods_of(
        self, dataset: ServedDataset | None, key: VirtualKey | None, names: frozenset[bytes]
    ) -> bytes:
        """Return the methods of *key* or *dataset*; POST of a key is a step of an upload."""
        if dataset is None or not dataset.is_writable:
            return ALLOW
        with suppress(ShardgateError):  # of a session: the request itself will tell
            if await self._is_read_only(dataset, key or VirtualKey("")):
                return ALLOW
        if key and dialect.upload_step("POST", names) is None:
            return b"GET, HEAD, PUT, DELETE, OPTIONS"
        return _WITH_POST

    async def _is_read_only(self, dataset: ServedDataset, key: VirtualKey) -> bool:
        return await self._resolver.is_read_only(*await self._sessions.route(dataset, key))

    async def respond(self, request: Request, incoming: IncomingBody, responder: Responder) -> None:
        """Answer *request*, whose body is *incoming*."""
        method = request.method
        query = request.query
        key = request.key
        dataset = await self._authenticator.enter(request, request.name)
        names = dialect.parameter_names(query) if query else frozenset[bytes]()
        step = dialect.upload_step(method, names) if key and names else None
        is_served = method in {"PUT", "DELETE"} or (method == "POST" and (step or not key))
        if not dataset.is_writable or not is_served:
            reason = "" if dataset.is_writable else f": {why_read_only(dataset.name)}"
            detail = _NO_WEBDAV if method in _WEBDAV else f"{method} is not served here{reason}"
            allow = await self._methods_of(dataset, key, names)
            status = HTTPStatus.METHOD_NOT_ALLOWED
            await responder.problem(status, detail, (b"allow", allow))
            return
        await self._authenticator.demand_writing(request, dataset)
        if responder.is_foreign:
            raise ForeignPageError(FOREIGN)
        dialect.demand_served(method, names, request.headers, of_key=bool(key), step=step)
        if key:
            if b"prefix" in names:
                raise BadParameterError("prefix goes with a dataset, not with a key")
            handle = self._of_keys[step or method]
        else:
            handle = partial(_refuse, method)
            if method in self._of_datasets:
                parameter, handler = self._of_datasets[method]
                if parameter in names:
                    handle = handler
        held = ByteReservation(self._budget)
        try:
            await handle(
                WriteRequest(
                    query, request.headers, incoming, responder, dataset, key or VirtualKey(""),
                    names, held, self._max_chunk_nbytes,
                    partial(self._authenticator.enter, request),
                )
            )  # fmt: skip
        finally:
            await held.release()

    async def _put(self, request: WriteRequest) -> None:
        demand = request.demand()
        headers = request.object_headers()

        async def put(payload: Payload, source: ObjectHeaders | None = None) -> ETag | None:
            # A copy keeps the headers of its source, or else the coding.
            stored = source or headers._replace(coding=headers.coding or payload.coding)
            dataset, key = await self._sessions.route(request.dataset, request.key)
            return await self._writer.put(dataset, KeyWrite(key, payload.body, stored, demand))

        if COPY_SOURCE in request.headers:
            await self._copy(request, put)
            return
        if b"content-range" in request.headers:
            raise BadHeaderError("a PUT with Content-Range is not served: bodies are written whole")
        payload = await request.read_payload()
        if not request.key.endswith("/"):
            etag = await put(payload)
        elif payload.body:
            raise BadBodyError("a key that ends in a slash is a folder: its body must be empty")
        else:
            await self._check_folder(request.dataset, request.key)
            etag = ETag('"d41d8cd98f00b204e9800998ecf8427e"')  # S3's of an empty object
        await request.send_written(etag)

    async def _check_folder(self, dataset: ServedDataset, key: VirtualKey) -> None:
        """Raise `ReadOnlyError` for a folder in a container that is never written."""
        if await self._is_read_only(dataset, key):
            raise ReadOnlyError(f"{key} lies in a container that is read only")

    async def _delete(self, request: WriteRequest) -> None:
        demand = request.demand()
        if request.key.endswith("/"):  # S3 clients delete folders, which are no objects here
            await self._check_folder(request.dataset, request.key)
        else:
            with suppress(BadKeyError):  # where no such chunk can be, none is
                dataset, key = await self._sessions.route(request.dataset, request.key)
                await self._writer.put(dataset, KeyWrite(key, None, demand=demand))
        await request.responder.send(HTTPStatus.NO_CONTENT, [NO_STORE])

    async def _delete_objects(self, request: WriteRequest) -> None:
        document = request._replace(max_nbytes=dialect.MAX_DOCUMENT_NBYTES)
        payload = await document.read_payload()
        deletion = await asyncio.to_thread(dialect.parse_deletion, payload.body)
        outcomes = await self._delete_each(request.dataset, deletion)
        keys = [key for key, _ in deletion.keys]
        await request.send_xml(dialect.deleted(keys, outcomes, is_quiet=deletion.is_quiet))

    async def _delete_each(
        self, dataset: ServedDataset, deletion: dialect.Deletion
    ) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        changes = {key: new_change(action="DeleteObjects", key=key) for key in dict(deletion.keys)}
        by_session: defaultdict[str, list[KeyWrite]] = defaultdict(list)
        for key, etag in deletion.keys:
            try:
                demand = parse_demand(etag, None)
                checked = check_key(key)
                if checked.endswith("/"):
                    await self._check_folder(dataset, checked)
                elif checked:
                    write = KeyWrite(checked, None, demand=demand, change=changes[key])
                    by_session[session_prefix(key) or ""].append(write)
            except ShardgateError as error:
                outcomes[key] = error
        for session, writes in by_session.items():  # "" is that of keys outside of sessions
            written = await self._write_below(dataset, VirtualKey(f"{session}/"), writes)
            for each, outcome in zip(writes, written, strict=True):
                # A key that cannot exist, as below the name of a folder, counts as deleted.
                outcomes[each.key] = None if isinstance(outcome, BadKeyError) else outcome
        for key, change in changes.items():
            refusal = outcomes.get(key)
            if change is not None and isinstance(refusal, ShardgateError):
                change["status"] = status_of(refusal)
        return [outcomes.get(key) for key, _ in deletion.keys]

    async def _write_below(
        self, dataset: ServedDataset, lead: VirtualKey, writes: Sequence[KeyWrite]
    ) -> Sequence[Outcome]:
        """Write keys that begin with *lead* if that names a session."""
        try:
            routed, _ = await self._sessions.route(dataset, lead)
        except ShardgateError as error:
            return [error] * len(writes)
        if routed is not dataset:
            start = len(lead)
            writes = [each._replace(key=VirtualKey(each.key[start:])) for each in writes]
        return await self._writer.put_each(routed, writes)

    async def _erase(self, request: WriteRequest) -> None:
        """Delete all keys that begin with the parameter ``prefix``."""
        prefix = request.parameter("prefix")
        note(key=prefix)
        if not prefix.endswith("/"):
            raise BadParameterError(f"prefix must end in a slash, found {prefix!r}")
        dataset, below = await self._sessions.route(request.dataset, check_key(prefix))
        # A node of a session is deleted as a whole, all else key by key.
        nodes = await self._sessions.erase(dataset, below)
        count = nodes or await self._eraser.erase(dataset, below)
        note(deleted=count)
        body = json.dumps({"deleted": count}).encode()
        await request.responder.send_document(b"application/json", body)


async def _refuse(method: str, request: WriteRequest) -> None:
    """Refuse a request of a whole dataset."""
    responder = request.responder
    if not dialect.speaks_s3(responder.request):
        what = {"PUT": "a key", "DELETE": "a key, or ?prefix= of a folder in it", "POST": "?delete"}
        raise BadParameterError(f"{method} of a whole dataset needs {what[method]}")
    if method != "PUT":
        raise UnsupportedError(f"{method} of a bucket is not served")
    status = HTTPStatus.CONFLICT  # as S3 answers clients that create a bucket again
    detail = f"the dataset {request.dataset.name} exists already"
    document = dialect.error_document(responder.request, status, "BucketAlreadyOwnedByYou", detail)
    await responder.send(status, [*cast("Headers", document.headers), NO_STORE], document.body)
