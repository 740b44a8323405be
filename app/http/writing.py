"""PUT, DELETE and POST of the data plane: which request is answered by what, and single keys."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from app.errors import (
    BadBodyError,
    BadHeaderError,
    BadKeyError,
    BadParameterError,
    ForeignPageError,
    UnsupportedError,
)
from app.http.answer import NO_STORE, Answer
from app.http.asked import Asked, Limits, allowed
from app.http.bodies import Incoming
from app.http.bulk import Bulk
from app.http.copying import SOURCE, Copier
from app.http.credentials.door import Door, Request
from app.http.payload import Payload, read_payload
from app.http.s3_requests import names_in, unserved, uploading
from app.http.target import split_target
from app.http.uploading import Uploading
from app.model import ETag, VirtualKey
from app.resolve.budget import ByteBudget
from app.resolve.resolver import Dataset, Resolver
from app.resolve.uploads import Uploads
from app.resolve.write import Eraser, KeyWrite, Writer
from app.storage.contract import ObjectHeaders

FOREIGN: Final = "server.cors_origins does not name the page that would write"
_OF_NOTHING: Final = ETag('"d41d8cd98f00b204e9800998ecf8427e"')
"""How S3 names an object of no bytes."""
_OF_BUCKETS: Final = {
    "PUT": ("CreateBucket", "a key"),
    "DELETE": ("DeleteBucket", "a key, or ?prefix= of a folder in it"),
    "POST": ("PostObject", "?delete"),
}
"""What a request of a whole dataset is to clients of S3, and what it needs here."""

type _Respond = Callable[[Asked], Awaitable[None]]


class WritingPlane:
    """Answers requests with bodies, and those that take keys away."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        door: Door,
        resolver: Resolver,
        writer: Writer,
        eraser: Eraser,
        uploads: Uploads,
        *,
        budget: ByteBudget,
        limits: Limits,
    ) -> None:
        self._door = door
        self._writer = writer
        self._budget = budget
        self._limits = limits
        self._bulk = Bulk(writer, eraser)
        self._copier = Copier(resolver, limits)
        self._of_uploads: Mapping[str, _Respond] = Uploading(uploads, self._copier, limits).steps
        self._of_keys: Mapping[str, _Respond] = {"PUT": self._put, "DELETE": self._delete}
        self._of_datasets: Mapping[str, Mapping[bytes, _Respond]] = {
            "POST": {b"delete": self._bulk.delete},
            "DELETE": {b"prefix": self._bulk.erase},
        }

    def incoming(self, scope: Request, receive: Any, given: Mapping[bytes, bytes]) -> Incoming:
        """Take charge of the body that *receive* brings."""
        return Incoming(receive, given, timeout_s=self._limits.timeout_s, scope=scope)

    async def respond(self, answer: Answer, scope: Request, incoming: Incoming) -> None:
        """Answer one request."""
        method, query = scope["method"], scope["query_string"]
        name, key = split_target(scope["raw_path"])
        dataset = await self._door.enter(scope, name)
        names = names_in(query)
        respond = self._find(method, key, names)
        if respond is None or not dataset.is_writable:
            await _refuse(answer, method, dataset, allowed(dataset, key, names))
            return
        await self._door.demand_writing(scope, dataset)
        if answer.is_foreign:
            raise ForeignPageError(FOREIGN)
        operation = unserved(method, names, answer.given, of_key=bool(key))
        if operation is not None:
            raise UnsupportedError(f"{operation} is not served")
        enter = partial(self._door.enter, scope)
        key = key or VirtualKey("")
        await respond(Asked(answer, incoming, dataset, key, query, names, self._budget, enter))

    def _find(
        self, method: str, key: VirtualKey | None, names: frozenset[bytes]
    ) -> _Respond | None:
        """Choose what answers; `None` for a method that is not served there."""
        if key:
            step = uploading(method, names)
            found = self._of_keys.get(method) if step is None else self._of_uploads[step]
        else:
            known = self._of_datasets.get(method, {})
            found = next((known[name] for name in known if name in names), None)
        if found is not None:
            return found
        operation = unserved(method, names, {}, of_key=bool(key))
        if operation is not None:
            return partial(_refuse_operation, operation)
        return partial(_refuse_whole, method) if not key and method in _OF_BUCKETS else None

    async def _put(self, asked: Asked) -> None:
        asked.refuse_parameters()
        demand, headers = asked.demand(), asked.headers()

        def put(payload: Payload, source: ObjectHeaders | None = None) -> Awaitable[ETag | None]:
            kept = (source or headers)._replace(is_gzip=payload.is_gzip)
            return self._writer.put(asked.dataset, KeyWrite(asked.key, payload.body, kept, demand))

        if SOURCE in asked.given:
            await self._copier.copy(asked, put)
            return
        if b"content-range" in asked.given:
            raise BadHeaderError("a part of a body, of which Content-Range tells, is not taken")
        async with asked.held() as held:
            payload = await read_payload(
                asked.incoming, asked.given, held, most_nbytes=self._limits.max_chunk_nbytes
            )
            if asked.key.endswith("/"):
                if payload.body:
                    raise BadBodyError("a key that ends in a slash names a folder: it has no bytes")
                etag: ETag | None = _OF_NOTHING
            else:
                etag = await put(payload)
        await asked.tell_written(etag)

    async def _delete(self, asked: Asked) -> None:
        """Take a key away; folders are none, though clients of S3 delete those as well."""
        asked.refuse_parameters()
        demand = asked.demand()
        if not asked.key.endswith("/"):
            with suppress(BadKeyError):  # where no such chunk can be, none is
                await self._writer.put(asked.dataset, KeyWrite(asked.key, None, demand=demand))
        await asked.answer.send(HTTPStatus.NO_CONTENT, [NO_STORE])


async def _refuse_operation(operation: str, _: Asked) -> None:
    raise UnsupportedError(f"{operation} is not served")


async def _refuse_whole(method: str, asked: Asked) -> None:
    operation, need = _OF_BUCKETS[method]
    if asked.answer.is_s3 and method == "PUT":
        detail = f"the dataset {asked.dataset.name} exists already"
        await asked.answer.problem(HTTPStatus.CONFLICT, detail, code="BucketAlreadyOwnedByYou")
        return
    if asked.answer.is_s3:
        await _refuse_operation(operation, asked)
    raise BadParameterError(f"{method} of a whole dataset needs {need}")


async def _refuse(answer: Answer, method: str, dataset: Dataset, allow: bytes) -> None:
    detail = f"{method} is not served here"
    if not dataset.is_writable:
        detail = f"{detail}: {dataset.name} is not writable"
    await answer.problem(HTTPStatus.METHOD_NOT_ALLOWED, detail, (b"allow", allow))
