"""ASGI entry: admission, authentication, and dispatch to the data plane or ``/api``."""

from collections.abc import MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from shardgate.errors import (
    BadKeyError,
    BusyError,
    ForeignPageError,
    MisdirectedError,
    OverdueError,
    ShardgateError,
    TooManyRequestsError,
)
from shardgate.http.auth.access import NOBODY
from shardgate.http.auth.authenticator import Authenticator
from shardgate.http.body import IncomingBody, lingering_writer
from shardgate.http.limits import ConcurrencyLimiter, Permit
from shardgate.http.paths import Scope, split_token, without_token
from shardgate.http.problems import encode_headers, problem
from shardgate.http.read import DataPlane
from shardgate.http.responses import (
    ALLOW,
    NO_STORE,
    Cors,
    DeferredResponse,
    Exchange,
    ImmediateResponse,
    RequestHeaders,
    Responder,
    asgi_writer,
    combine_headers,
    request_id,
)
from shardgate.http.shard_affinity import PREFIX, ShardAffinity
from shardgate.http.write import FOREIGN
from shardgate.settings import RESERVED

_NO_BODY: Final = (b"content-length", b"0")
_OPEN: Final = ("/healthz", "/docs", "/openapi.json")
_ALWAYS: Final = ("/healthz", "/readyz", "/metrics")
"""Paths that are answered however many requests run."""
_NOT_BELOW_TOKENS: Final = ("/readyz", "/metrics", "/docs")
"""Paths that proxies may keep private, and the API's page, which loads scripts of other sites."""
_READS: Final = ("GET", "HEAD")
_API_METHODS: Final = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"


class Gateway:
    """ASGI application that sends reserved names to *api*, and all others to *data*."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        api: Any,
        data: DataPlane,
        shards: ShardAffinity,
        *,
        authenticator: Authenticator,
        cors: Cors,
        limiter: ConcurrencyLimiter,
    ) -> None:
        self._api = api
        self._authenticator = authenticator
        self._data = data
        self._shards = shards
        self._cors = cors
        self._limiter = limiter

    def begin(
        self, raw_path: bytes, headers: RequestHeaders, peer: bytes, now: float
    ) -> ImmediateResponse | DeferredResponse | None:
        """Begin to answer a GET outside of ASGI; see `DataPlane.begin`."""
        if raw_path.startswith(PREFIX):
            return self._shards.begin(raw_path, peer)
        segment, raw_path = split_token(raw_path)
        begun = self._data.begin(raw_path, headers, now, segment)
        if begun is None or isinstance(begun, ImmediateResponse):
            return begun
        permit = self._limiter.read_permit(raw_path)
        return None if permit is None else partial(self._read, headers, begun, permit)

    async def _read(
        self,
        headers: RequestHeaders,
        begun: DeferredResponse,
        permit: Permit,
        exchange: Exchange,
    ) -> None:
        permit.exchange = exchange
        try:
            with permit:
                await begun(exchange)
        except (BusyError, OverdueError) as error:
            await Responder(headers, exchange.write, self._cors).fail(error)

    def refuse(self, status: HTTPStatus, detail: str, headers: RequestHeaders) -> ImmediateResponse:
        """Return the problem that malformed HTTP is; *headers* are those that have arrived."""
        response, body = problem(status, detail)
        response += [*self._cors.headers(headers.get(b"origin")), NO_STORE]
        response.append((b"x-request-id", request_id(headers.get(b"x-request-id"))))
        return ImmediateResponse(status, encode_headers(response), body)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request, or pass on the lifespan."""
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        if scope["raw_path"].startswith(PREFIX):
            await self._shards(scope, receive, send)
            return
        scope = without_token(scope)
        if scope["method"] == "OPTIONS" or scope["path"] in _ALWAYS:
            await self._respond(scope, receive, send)
        else:
            await self._respond_within_limits(scope, receive, send)

    async def _respond_within_limits(self, scope: Scope, receive: Any, send: Any) -> None:
        permit = self._limiter.permit(scope)

        async def send_begun(message: MutableMapping[str, Any]) -> None:
            permit.begin()
            await send(message)

        try:
            with permit:
                self._authenticator.demand_host(scope)
                await self._respond(scope, receive, send_begun)
        except (BusyError, MisdirectedError, OverdueError, TooManyRequestsError) as error:
            headers = combine_headers(scope["headers"])
            incoming = IncomingBody(receive, headers, timeout_s=0)
            write = lingering_writer(send, incoming)
            await Responder(headers, write, self._cors, scope["query_string"]).fail(error)

    async def _respond(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["path"] in {"/", ""} or scope["path"][1:].partition("/")[0] in RESERVED:
            await self._respond_reserved(scope, receive, send)
        else:
            await self._data(scope, receive, send)

    async def _respond_reserved(self, scope: Scope, receive: Any, send: Any) -> None:
        headers, method, path = combine_headers(scope["headers"]), scope["method"], scope["path"]
        responder = Responder(headers, asgi_writer(send), self._cors, scope["query_string"])
        if scope["raw_path"] == b"":
            # Relative links keep the token of /~TOKEN only below a slash.
            location = (b"location", f"./~{scope['token']}/".encode("latin-1"))
            status = HTTPStatus.TEMPORARY_REDIRECT
            await responder.send(status, [location, _NO_BODY, NO_STORE])
            return
        if "token" in scope and path.rstrip("/") in _NOT_BELOW_TOKENS:
            await responder.fail(BadKeyError("this is not served below a token"))
            return
        try:
            caller = NOBODY if path in _OPEN else await self._authenticator.caller(scope)
        except ShardgateError as error:
            await responder.fail(error)
            return
        scope["caller"] = caller

        async def send_completed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = responder.completed(message["headers"])
            await send(message)

        if method == "OPTIONS":
            await responder.preflight(_API_METHODS if path.startswith("/api/") else ALLOW)
        elif path == "/" and method == "GET" and responder.is_s3:
            await self._data.list_buckets(responder, caller)
        elif method not in _READS and responder.is_foreign:
            await responder.fail(ForeignPageError(FOREIGN))
        else:
            await self._api(scope, receive, send_completed)
