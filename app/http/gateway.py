"""The door: ours first, then datasets."""

from collections.abc import MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from app.errors import (
    BadKeyError,
    BusyError,
    ForeignPageError,
    MisdirectedError,
    OverdueError,
    ShardgateError,
    TooManyRequestsError,
)
from app.http.answer import (
    ALLOW,
    NO_STORE,
    Answer,
    AtHand,
    Body,
    Given,
    Headers,
    Later,
    Write,
    asgi_writer,
    combined,
    request_id,
)
from app.http.bodies import Incoming, lingering_writer
from app.http.cors import Cors
from app.http.credentials.caller import NOBODY
from app.http.credentials.door import Door, Request, split_token, without_token
from app.http.crowd import Crowd, Place
from app.http.dataplane import DataPlane
from app.http.heads import encode_headers
from app.http.problems import problem
from app.http.shard_of import PREFIX, ShardNames
from app.http.writing import FOREIGN
from app.setting_fields import RESERVED

_NO_BODY: Final = (b"content-length", b"0")
_OPEN: Final = ("/healthz", "/docs", "/openapi.json")
_ALWAYS: Final = ("/healthz", "/readyz", "/metrics")
"""Tell how busy we are, however busy we are."""
_NOT_BELOW_TOKENS: Final = ("/readyz", "/metrics", "/docs")
"""Proxies keep some inside by their paths; the page of the API loads scripts of others."""
_READING: Final = ("GET", "HEAD")
_WRITING: Final = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"


class Gateway:
    """Sends what is ours to the control plane, and everything else to the data plane."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        control: Any,
        data: DataPlane,
        shards: ShardNames,
        *,
        door: Door,
        cors: Cors,
        crowd: Crowd,
    ) -> None:
        self._control = control
        self._door = door
        self._data = data
        self._shards = shards
        self._cors = cors
        self._crowd = crowd

    def begin(
        self, raw_path: bytes, given: Given, peer: bytes, now: float
    ) -> AtHand | Later | None:
        """Begin to answer a GET outside of ASGI; see `DataPlane.begin`."""
        if raw_path.startswith(PREFIX):
            return self._shards.begin(raw_path, peer)
        segment, raw_path = split_token(raw_path)
        begun = self._data.begin(raw_path, given, now, segment)
        if begun is None or isinstance(begun, AtHand):
            return begun
        place = self._crowd.place_of_read()
        return None if place is None else partial(self._read, given, begun, place)

    async def _read(self, given: Given, begun: Later, place: Place, write: Write) -> None:
        async def write_at_last(status: HTTPStatus, headers: Headers, body: Body) -> None:
            place.served()
            await write(status, headers, body)

        try:
            with place:
                await begun(write_at_last)
        except (BusyError, OverdueError) as error:
            await Answer(given, write, self._cors).fail(error)

    def refuse(self, status: HTTPStatus, detail: str, given: Given) -> AtHand:
        """Tell of what is no request, as far as what is *given* has arrived."""
        found, body = problem(status, detail)
        found += [*self._cors.headers(given.get(b"origin")), NO_STORE]
        found.append((b"x-request-id", request_id(given.get(b"x-request-id"))))
        return AtHand(status, encode_headers(found), body)

    async def __call__(self, scope: Request, receive: Any, send: Any) -> None:
        """Speak ASGI."""
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        if scope["raw_path"].startswith(PREFIX):
            await self._shards(scope, receive, send)
            return
        scope = without_token(scope)
        if scope["method"] == "OPTIONS" or scope["path"] in _ALWAYS:
            await self._respond(scope, receive, send)
        else:
            await self._respond_in_turn(scope, receive, send)

    async def _respond_in_turn(self, scope: Request, receive: Any, send: Any) -> None:
        place = self._crowd.place_of(scope)

        async def send_at_last(message: MutableMapping[str, Any]) -> None:
            place.served()
            await send(message)

        try:
            with place:
                self._door.demand_host(scope)
                await self._respond(scope, receive, send_at_last)
        except (BusyError, MisdirectedError, OverdueError, TooManyRequestsError) as error:
            given = combined(scope["headers"])
            incoming = Incoming(receive, given, timeout_s=0)
            write = lingering_writer(send, incoming)
            await Answer(given, write, self._cors, scope["query_string"]).fail(error)

    async def _respond(self, scope: Request, receive: Any, send: Any) -> None:
        if scope["path"] in {"/", ""} or scope["path"][1:].partition("/")[0] in RESERVED:
            await self._ours(scope, receive, send)
        else:
            await self._data(scope, receive, send)

    async def _ours(self, scope: Request, receive: Any, send: Any) -> None:
        query = scope["query_string"]
        answer = Answer(combined(scope["headers"]), asgi_writer(send), self._cors, query)
        if scope["raw_path"] == b"":
            await answer.send(
                HTTPStatus.TEMPORARY_REDIRECT, [_below(scope["token"]), _NO_BODY, NO_STORE]
            )
            return

        async def decorate(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = answer.completed(message["headers"])
            await send(message)

        if "token" in scope and scope["path"].rstrip("/") in _NOT_BELOW_TOKENS:
            await answer.fail(BadKeyError("this is not served below a token"))
            return
        try:
            caller = NOBODY if scope["path"] in _OPEN else await self._door.caller(scope)
        except ShardgateError as error:
            await answer.fail(error)
            return
        scope["caller"] = caller
        if scope["method"] == "OPTIONS":
            await answer.preflight(_WRITING if scope["path"].startswith("/api/") else ALLOW)
        elif scope["path"] == "/" and scope["method"] == "GET" and answer.is_s3:
            await self._data.list_buckets(answer, caller)
        elif scope["method"] not in _READING and answer.is_foreign:
            await answer.fail(ForeignPageError(FOREIGN))
        else:
            await self._control(scope, receive, decorate)


def _below(token: str) -> tuple[bytes, bytes]:
    """Lead from ``/~TOKEN`` to where relative links keep the token."""
    return b"location", f"./~{token}/".encode("latin-1")
