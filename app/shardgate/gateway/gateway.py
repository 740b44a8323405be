"""Dispatch of requests: virtual keys to reads and writes, reserved paths to their routes."""

import logging
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any, Final, cast

from shardgate.auth.access import NOBODY, Caller
from shardgate.auth.authenticator import Authenticator
from shardgate.errors import (
    BadKeyError,
    BusyError,
    ForeignPageError,
    MisdirectedError,
    OverdueError,
    RequestError,
    ShardgateError,
    TooManyRequestsError,
)
from shardgate.gateway.admission import ConcurrencyLimiter, Permit
from shardgate.gateway.read import ReadPlane
from shardgate.gateway.s3_dialect import speaks_s3
from shardgate.gateway.shard_affinity import NAME as SHARDS
from shardgate.gateway.shard_affinity import PREFIX as SHARDS_PREFIX
from shardgate.gateway.shard_affinity import ShardAffinity
from shardgate.gateway.write import FOREIGN, WritePlane
from shardgate.server.body import ClientGoneError
from shardgate.server.problems import Failure, problem
from shardgate.server.request import (
    Asgi,
    Exchange,
    Headers,
    Request,
    RequestHeaders,
    Response,
    request_id,
)
from shardgate.server.responses import ALLOW, NO_STORE, Cors, Explain, Responder
from shardgate.settings import SIGN_IN

_READS: Final = ("GET", "HEAD")
_log = logging.getLogger(__name__)


class Gateway:
    """Sends requests of virtual keys to *reads* and *writes*, and all others to *api*, an ASGI
    application.
    """

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        api: Any,
        reads: ReadPlane,
        writes: WritePlane,
        shards: ShardAffinity,
        *,
        authenticator: Authenticator,
        cors: Cors,
        explain: Explain,
        limiter: ConcurrencyLimiter,
    ) -> None:
        self._api = api
        self._authenticator = authenticator
        self._reads = reads
        self._writes = writes
        self._shards = shards
        self._cors = cors
        self._explain = explain
        self._limiter = limiter

    def cached(self, request: Request) -> Response | None:
        """Return the response if it is in memory: to a GET, or with the name of a shard."""
        if request.name == SHARDS and request.raw_path.startswith(SHARDS_PREFIX):
            return self._shards.cached(request)
        try:
            return self._reads.cached(request)
        except RequestError:  # `respond` raises it again
            return None

    async def respond(self, request: Request, exchange: Exchange) -> None:
        """Send the response, within the limits."""
        if request.name == SHARDS and request.raw_path.startswith(SHARDS_PREFIX):
            await self._shards.respond(request, exchange)
            return
        responder = Responder(request, exchange, self._cors, self._explain)
        respond = self._respond_route if request.needs_asgi else self._respond_key
        # Operators want to see a service that is at its limits.
        is_watching = request.needs_asgi and request.path in {"/healthz", "/readyz", "/metrics"}
        if request.method == "OPTIONS" or is_watching:
            await respond(request, responder)
            return
        try:
            with Permit(self._limiter, request, exchange):
                self._authenticator.demand_host(request)
                await respond(request, responder)
        except (BusyError, MisdirectedError, OverdueError, TooManyRequestsError) as error:
            await responder.fail(error)

    def refuse(self, status: HTTPStatus, detail: str, headers: RequestHeaders) -> Response:
        """Return the problem document of malformed HTTP; *headers* are those that have arrived."""
        refusal = problem(Failure(status, detail))
        sent_headers = [
            *cast("Headers", refusal.headers),
            *self._cors.headers(headers.get(b"origin")),
            NO_STORE,
            (b"x-request-id", request_id(headers.get(b"x-request-id"))),
        ]
        return Response(status, sent_headers, refusal.body)

    async def _respond_key(self, request: Request, responder: Responder) -> None:
        """Read or write; an error becomes a problem document, or ends a response that has begun."""
        exchange = responder.exchange
        try:
            if request.method == "OPTIONS":
                await responder.preflight(await self._writes.allowed_methods(request))
            elif request.fault is not None:
                await responder.fail(request.fault)
            elif request.method in _READS:
                await self._reads.respond(request, responder)
            elif request.body is not None:
                await self._writes.respond(request, request.body, responder)
        except ShardgateError as error:
            if exchange.status:
                _log.warning("an answer broke off", exc_info=error)
                raise
            await responder.fail(error)
        except ClientGoneError:
            pass  # no one waits for a response
        except Exception:
            if exchange.status:
                raise
            _log.exception("a request failed")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            await responder.problem(status, "a fault of this service")

    async def _respond_route(self, request: Request, responder: Responder) -> None:
        method = request.method
        path = request.path
        if path == "" and not speaks_s3(request):
            # Relative links keep the token of /~TOKEN, or a mount, only below a slash.
            here = request.base_path.rpartition("/")[2]
            location = (b"location", f"./{here}/".encode("latin-1"))
            headers = [location, (b"content-length", b"0"), NO_STORE]
            await responder.send(HTTPStatus.TEMPORARY_REDIRECT, headers)
            return
        # Proxies may keep the first two private; the page sends requests without a token.
        is_fixed = path.rstrip("/") in {"/readyz", "/metrics", "/docs"} or request.name in SIGN_IN
        if request.segment is not None and is_fixed:
            await responder.fail(BadKeyError("this is not served below a token"))
            return
        is_open = path in {"/healthz", "/docs", "/openapi.json"}
        try:
            caller = NOBODY if is_open else await self._authenticator.caller(request)
        except ShardgateError as error:
            await responder.fail(error)
            return
        if method == "OPTIONS":
            api_methods = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"
            await responder.preflight(api_methods if path.startswith("/api/") else ALLOW)
        elif path in {"/", ""} and method == "GET" and speaks_s3(request):
            await self._reads.list_buckets(responder, caller)
        elif method not in _READS and responder.is_foreign:
            await responder.fail(ForeignPageError(FOREIGN))
        else:
            await self._call_api(responder, caller)

    async def _call_api(self, responder: Responder, caller: Caller) -> None:
        """Call the API, whose routes find *responder*, *caller*, token and body in the scope."""
        request = responder.request
        # No other requests reach routes, see `Request.needs_asgi`.
        scope, receive, send = cast("Asgi", request.asgi)

        async def send_completed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = responder.completed(message["headers"])
            await send(message)

        below = {
            # ASGI servers send no body in response to HEAD.
            "method": "GET" if request.method == "HEAD" else request.method,
            "root_path": request.root_path,
            "path": request.root_path + request.path,
            "raw_path": request.raw_path,
            "caller": caller,
            "responder": responder,
            "token": request.token,
            "body": request.body,
        }
        await self._api({**scope, **below}, receive, send_completed)
