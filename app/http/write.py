"""PUT, DELETE and POST of ``/{dataset}/{virtual key}``: dispatch, single keys, many keys."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

from app.errors import (
    BadBodyError,
    BadHeaderError,
    BadKeyError,
    BadParameterError,
    ForeignPageError,
    ShardgateError,
    UnsupportedError,
)
from app.http import s3
from app.http.auth.authenticator import Authenticator
from app.http.body import ContentCoding, IncomingBody, Payload, read_payload
from app.http.conditions import parse_demand
from app.http.paths import Scope, check_key, split_target
from app.http.problems import Headers
from app.http.responses import ALLOW, NO_STORE, RequestHeaders, Responder
from app.model import ETag, VirtualKey
from app.resolve.bodies import Demand
from app.resolve.budget import ByteBudget, ByteReservation
from app.resolve.containers import Dataset
from app.resolve.icechunk.sessions import KeyRouter
from app.resolve.write import KeyWrite, Outcome
from app.storage.contract import ObjectHeaders
from app.storage.http_headers import METADATA, object_headers

COPY_SOURCE: Final = b"x-amz-copy-source"
FOREIGN: Final = "server.cors_origins does not name the page that would write"
_MAX_METADATA_NBYTES: Final = 1800
"""S3 takes 2,048, of which the service needs some for ids of writes."""
_ETAG_OF_FOLDER: Final = ETag('"d41d8cd98f00b204e9800998ecf8427e"')
"""S3's ETag of an empty object."""
_BUCKET_OPERATIONS: Final = {
    "PUT": ("CreateBucket", "a key"),
    "DELETE": ("DeleteBucket", "a key, or ?prefix= of a folder in it"),
    "POST": ("PostObject", "?delete"),
}
"""S3's operation that a request of a whole dataset would be, and what the request lacks here."""


class BodyLimits(NamedTuple):
    """Bounds on request bodies."""

    max_chunk_nbytes: int
    timeout_s: float
    """Longest silence of a client that sends a body."""


class WriteRequest(NamedTuple):
    """Request that writes; nothing of its body has been read."""

    responder: Responder
    incoming: IncomingBody
    dataset: Dataset
    key: VirtualKey
    """Empty for a request of the whole dataset."""
    query: bytes
    names: frozenset[bytes]
    """Names of the parameters in *query*."""
    budget: ByteBudget
    find: Callable[[str], Awaitable[Dataset]]
    """Returns another dataset by its name, if the caller may read it."""

    @property
    def headers(self) -> RequestHeaders:
        """Headers of the request."""
        return self.responder.headers

    @asynccontextmanager
    async def reserved(self) -> AsyncGenerator[ByteReservation]:
        """Return a reservation of bytes, released at the end of the block."""
        held = ByteReservation(self.budget)
        try:
            yield held
        finally:
            await held.release()

    def demand(self, prefix: bytes = b"") -> Demand | None:
        """Parse the preconditions, whose names begin with *prefix*. Raises: `BadHeaderError`."""
        if_match, if_none_match = (
            None if value is None else value.decode("latin-1")
            for value in map(self.headers.get, (prefix + b"if-match", prefix + b"if-none-match"))
        )
        return parse_demand(if_match, if_none_match)

    def object_headers(self) -> ObjectHeaders:
        """Return the headers to store. Raises: `BadHeaderError`, `UnknownCodingError`."""
        stored = object_headers(self.headers)
        named = sum(name.startswith(METADATA) for name in self.headers)
        if len(stored.metadata) < named or stored.nbytes > _MAX_METADATA_NBYTES:
            raise BadHeaderError(
                "user metadata is ASCII, of 1,800 bytes at most, and not named shardgate-…"
            )
        return stored._replace(is_gzip=ContentCoding.parse(self.headers).is_gzip)

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

    def refuse_prefix(self) -> None:
        """Raise `BadParameterError` for ``?prefix=``, which is for a whole dataset, on a key."""
        if b"prefix" in self.names:
            raise BadParameterError("prefix goes with a dataset, not with a key")

    async def send_written(self, etag: ETag | None) -> None:
        """Send S3's response to an object that was written."""
        headers: Headers = [(b"content-length", b"0"), NO_STORE]
        if etag is not None:
            headers.append((b"etag", etag.encode("latin-1")))
        await self.responder.send(HTTPStatus.OK, headers)

    async def send_xml(self, body: bytes) -> None:
        """Send a document of S3."""
        await self.responder.send_document(s3.MEDIA_TYPE, body)


type Put = Callable[[Payload, ObjectHeaders | None], Awaitable[ETag | None]]
type Handler = Callable[[WriteRequest], Awaitable[None]]
type Copy = Callable[[WriteRequest, Put], Awaitable[None]]
"""Answers CopyObject by passing the source to the put; see `s3_uploads.Copier`."""


def allowed_methods(
    dataset: Dataset | None, key: VirtualKey | None, names: frozenset[bytes] = frozenset()
) -> bytes:
    """Return the methods of *key* or *dataset*; POST of a key is a step of a multipart upload."""
    if dataset is None:
        return ALLOW
    writes = ["PUT", "DELETE"] if dataset.is_writable else []
    is_posted = s3.upload_step("POST", names) is not None if key else True
    posts = ["POST"] if writes and is_posted else []
    return ", ".join(["GET", "HEAD", *writes, *posts, "OPTIONS"]).encode()


class WritePlane:
    """Answers requests that write."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        authenticator: Authenticator,
        router: KeyRouter,
        copy: Copy,
        upload_steps: Mapping[str, Handler],
        *,
        budget: ByteBudget,
        limits: BodyLimits,
    ) -> None:
        self._authenticator = authenticator
        self._router = router
        self._copy = copy
        self._upload_steps = upload_steps
        self._budget = budget
        self._limits = limits
        self._of_keys: Mapping[str, Handler] = {"PUT": self._put, "DELETE": self._delete}
        self._of_datasets: Mapping[str, tuple[bytes, Handler]] = {
            "POST": (b"delete", self._delete_objects),
            "DELETE": (b"prefix", self._erase),
        }
        """By method, with the parameter that must be given."""

    def incoming(self, scope: Scope, receive: Any, headers: RequestHeaders) -> IncomingBody:
        """Return the body that *receive* brings, unread."""
        return IncomingBody(receive, headers, timeout_s=self._limits.timeout_s, scope=scope)

    async def respond(self, responder: Responder, scope: Scope, incoming: IncomingBody) -> None:
        """Answer one request."""
        method, query = scope["method"], scope["query_string"]
        name, key = split_target(scope["raw_path"])
        dataset = await self._authenticator.enter(scope, name)
        names = s3.parameter_names(query)
        handler = self._find_handler(method, key, names)
        if handler is None or not dataset.is_writable:
            reason = "" if dataset.is_writable else f": {dataset.name} is not writable"
            allow = (b"allow", allowed_methods(dataset, key, names))
            detail = f"{method} is not served here{reason}"
            await responder.problem(HTTPStatus.METHOD_NOT_ALLOWED, detail, allow)
            return
        await self._authenticator.demand_writing(scope, dataset)
        if responder.is_foreign:
            raise ForeignPageError(FOREIGN)
        _refuse_unserved(s3.unserved_operation(method, names, responder.headers, of_key=bool(key)))
        find = partial(self._authenticator.enter, scope)
        key = key or VirtualKey("")
        await handler(
            WriteRequest(responder, incoming, dataset, key, query, names, self._budget, find)
        )

    def _find_handler(
        self, method: str, key: VirtualKey | None, names: frozenset[bytes]
    ) -> Handler | None:
        """Return the handler of a request; `None` for a method that is not served there."""
        step = s3.upload_step(method, names) if key else None
        if step is not None:
            return self._upload_steps[step]
        if key and method in self._of_keys:
            return self._of_keys[method]
        if not key and method in self._of_datasets:
            name, handler = self._of_datasets[method]
            if name in names:
                return handler
        operation = s3.unserved_operation(method, names, {}, of_key=bool(key))
        if operation is None and (key or method not in _BUCKET_OPERATIONS):
            return None
        return partial(_refuse, method, operation)

    async def _put(self, request: WriteRequest) -> None:
        request.refuse_prefix()
        demand, headers = request.demand(), request.object_headers()

        def put(payload: Payload, source: ObjectHeaders | None = None) -> Awaitable[ETag | None]:
            stored = (source or headers)._replace(is_gzip=payload.is_gzip)
            change = KeyWrite(request.key, payload.body, stored, demand)
            return self._router.put(request.dataset, change)

        if COPY_SOURCE in request.headers:
            await self._copy(request, put)
            return
        if b"content-range" in request.headers:
            raise BadHeaderError("a PUT with Content-Range is not served: bodies are written whole")
        async with request.reserved() as held:
            payload = await read_payload(
                request.incoming, request.headers, held, most_nbytes=self._limits.max_chunk_nbytes
            )
            if not request.key.endswith("/"):
                etag = await put(payload)
            elif payload.body:
                raise BadBodyError("a key that ends in a slash is a folder: its body must be empty")
            else:
                etag = _ETAG_OF_FOLDER
        await request.send_written(etag)

    async def _delete(self, request: WriteRequest) -> None:
        """Delete a key; S3 clients also delete folders, which do not exist as objects."""
        request.refuse_prefix()
        demand = request.demand()
        if not request.key.endswith("/"):
            with suppress(BadKeyError):  # where no such chunk can be, none is
                await self._router.put(request.dataset, KeyWrite(request.key, None, demand=demand))
        await request.responder.send(HTTPStatus.NO_CONTENT, [NO_STORE])

    async def _delete_objects(self, request: WriteRequest) -> None:
        """Answer DeleteObjects."""
        async with request.reserved() as held:
            payload = await read_payload(
                request.incoming, request.headers, held, most_nbytes=s3.MAX_DOCUMENT_NBYTES
            )
            deletion = await asyncio.to_thread(s3.parse_deletion, payload.body)
            outcomes = await self._delete_each(request.dataset, deletion)
        keys = [key for key, _ in deletion.keys]
        await request.send_xml(s3.deleted(keys, outcomes, is_quiet=deletion.is_quiet))

    async def _delete_each(self, dataset: Dataset, deletion: s3.Deletion) -> list[Outcome]:
        """Delete keys; a key that cannot exist, as below a folder's name, counts as deleted."""
        outcomes: dict[str, Outcome] = {}
        changes = []
        for key, etag in deletion.keys:
            try:
                demand = parse_demand(etag, None)
                if check_key(key) and not key.endswith("/"):
                    changes.append(KeyWrite(VirtualKey(key), None, demand=demand))
            except ShardgateError as error:
                outcomes[key] = error
        written = await self._router.put_each(dataset, changes)
        for change, outcome in zip(changes, written, strict=True):
            outcomes[change.key] = None if isinstance(outcome, BadKeyError) else outcome
        return [outcomes.get(key) for key, _ in deletion.keys]

    async def _erase(self, request: WriteRequest) -> None:
        """Delete all keys that begin with the parameter ``prefix``."""
        prefix = request.parameter("prefix")
        if not prefix.endswith("/"):
            raise BadParameterError(f"prefix must end in a slash, found {prefix!r}")
        count = await self._router.erase(request.dataset, check_key(prefix))
        body = json.dumps({"deleted": count}).encode()
        await request.responder.send_document(b"application/json", body)


def _refuse_unserved(operation: str | None) -> None:
    if operation is not None:
        raise UnsupportedError(f"{operation} is not served")


async def _refuse(method: str, operation: str | None, request: WriteRequest) -> None:
    """Refuse an operation that only S3 has, or a request of a whole dataset without parameters."""
    _refuse_unserved(operation)
    bucket_operation, need = _BUCKET_OPERATIONS[method]
    if request.responder.is_s3:
        if method != "PUT":
            _refuse_unserved(bucket_operation)
        detail = f"the dataset {request.dataset.name} exists already"
        code = "BucketAlreadyOwnedByYou"
        await request.responder.problem(HTTPStatus.CONFLICT, detail, code=code)
        return
    raise BadParameterError(f"{method} of a whole dataset needs {need}")
