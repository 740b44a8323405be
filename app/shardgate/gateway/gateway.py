"""Admission, authentication, and dispatch to the data plane or ``/api``.

Admission limits concurrent requests, in all and of each kind, and the wait for a response.
"""

from collections import Counter
from collections.abc import MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Self

from shardgate.concurrency import Deadline, Deadlines, largest_share
from shardgate.errors import (
    BadKeyError,
    BusyError,
    ForeignPageError,
    MisdirectedError,
    OverdueError,
    ShardgateError,
    TooManyRequestsError,
)
from shardgate.auth.access import NOBODY, Caller
from shardgate.auth.authenticator import Authenticator
from shardgate.server.problems import problem
from shardgate.gateway.read import DataPlane
from shardgate.server.request import (
    Answer,
    Asgi,
    DeferredResponse,
    Exchange,
    Networks,
    Request,
    RequestHeaders,
    Response,
    client_of,
    request_id,
)
from shardgate.server.responses import ALLOW, NO_STORE, Cors, Explain, Responder
from shardgate.gateway.shard_affinity import NAME as SHARDS
from shardgate.gateway.shard_affinity import PREFIX, ShardAffinity
from shardgate.gateway.write import FOREIGN
from shardgate.settings import RESERVED, SIGN_IN

_NO_BODY: Final = (b"content-length", b"0")
_OPEN: Final = ("/healthz", "/docs", "/openapi.json")
_ROOTS: Final = (b"/", b"")
_ALWAYS: Final = ("/healthz", "/readyz", "/metrics")
"""Paths without a limit on concurrent requests."""
_NOT_BELOW_TOKENS: Final = ("/readyz", "/metrics", "/docs")
"""Paths that proxies may keep private, and the API's page, which sends requests without a token."""
_READS: Final = ("GET", "HEAD")
_API_METHODS: Final = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"

type _Group = tuple[str, str]
"""Kind of requests, and their dataset; empty for all datasets."""


class ConcurrencyLimiter:
    """Admits *most* requests at a time, and *most_per_client* of each client unless that is 0.

    Three quarters of *most* may be requests of one of *several_datasets*, which wait for its store,
    and three quarters of any share may be writes, which wait for their clients. A read whose
    response has not begun after *longest_s* is cancelled.
    """

    def __init__(
        self,
        *,
        most: int,
        most_per_client: int,
        longest_s: float,
        proxies: Networks,
        several_datasets: bool,
    ) -> None:
        self.most = most
        self.most_per_dataset = largest_share(most) if several_datasets else most
        self.most_per_client = most_per_client
        self.deadlines = Deadlines(longest_s)
        self._proxies = proxies
        self.running = 0
        self.by_group: dict[_Group, int] = {}
        self.by_client: Counter[str] = Counter()

    def permit(self, request: Request, exchange: Exchange) -> "Permit":
        """Return the permit to answer *request* by *exchange*, to be entered."""
        client = None
        if self.most_per_client and request.peer:
            client = client_of(request.peer.decode(), request.headers, self._proxies)
        is_read = request.method in _READS
        return Permit(self, exchange, client, request.dataset, is_read=is_read)


class Permit(Deadline):
    """Permission to answer one request while the block lasts.

    Raises: on entering `BusyError`, `TooManyRequestsError`; on leaving `OverdueError` if the
    response of a read did not begin in time.
    """

    __slots__ = ("_exchange", "_groups", "_limiter", "client", "is_read")

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        exchange: Exchange,
        client: str | None,
        dataset: str,
        *,
        is_read: bool,
    ) -> None:
        super().__init__(limiter.deadlines)
        self._limiter = limiter
        self._exchange = exchange
        self.client = client
        self.is_read = is_read
        most = limiter.most_per_dataset
        self._groups: tuple[tuple[_Group, int], ...] = ((("requests", dataset), most),)
        if not is_read:
            self._groups += (
                (("writes", dataset), largest_share(most)),
                (("writes", ""), largest_share(limiter.most)),
            )

    def __enter__(self) -> Self:
        limiter, client = self._limiter, self.client
        if limiter.running >= limiter.most:
            raise BusyError(f"too many concurrent requests (limit {limiter.most})")
        by_group = limiter.by_group
        for (kind, dataset), limit in self._groups:
            if by_group.get((kind, dataset), 0) >= limit:
                what = f"{kind} of {dataset}" if dataset else kind
                raise BusyError(f"too many concurrent {what} (limit {limit})")
        if client is not None:
            if limiter.by_client[client] >= (limit := limiter.most_per_client):
                text = f"too many concurrent requests from this client (limit {limit})"
                raise TooManyRequestsError(text)
            limiter.by_client[client] += 1
        limiter.running += 1
        for group, _ in self._groups:
            by_group[group] = by_group.get(group, 0) + 1
        return super().__enter__() if self.is_read else self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        limiter, client = self._limiter, self.client
        limiter.running -= 1
        for group, _ in self._groups:
            limiter.by_group[group] -= 1
            if not limiter.by_group[group]:
                del limiter.by_group[group]
        if client is not None:
            limiter.by_client[client] -= 1
            if not limiter.by_client[client]:
                del limiter.by_client[client]
        try:
            super().__exit__(kind, *raised)
        except TimeoutError:
            raise OverdueError("the answer took too long") from None

    def cancel(self) -> None:
        """Cancel the read, unless its response has begun."""
        if not self._exchange.status:
            super().cancel()


class Gateway:
    """Sends reserved names to the ASGI application *api*, and all others to *data*."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        api: Any,
        data: DataPlane,
        shards: ShardAffinity,
        *,
        authenticator: Authenticator,
        cors: Cors,
        explain: Explain,
        limiter: ConcurrencyLimiter,
    ) -> None:
        self._api = api
        self._authenticator = authenticator
        self._data = data
        self._shards = shards
        self._cors = cors
        self._explain = explain
        self._limiter = limiter

    def answer(self, request: Request) -> Answer | None:
        """Answer a request; `None` if it must come through ASGI."""
        if request.name == SHARDS and request.raw_path.startswith(PREFIX):
            return self._shards.answer(request)
        answer: Answer
        if request.name in RESERVED or request.raw_path in _ROOTS:
            if request.asgi is None:
                return None
            answer = partial(self._answer_reserved, request, request.asgi)
            if request.path in _ALWAYS:
                return answer
        else:
            answer = self._data.answer(request)
        if isinstance(answer, Response) or request.method == "OPTIONS":
            return answer
        return partial(self._answer_within_limits, request, answer)

    async def _answer_within_limits(
        self, request: Request, answer: DeferredResponse, exchange: Exchange
    ) -> None:
        try:
            with self._limiter.permit(request, exchange):
                self._authenticator.demand_host(request)
                await answer(exchange)
        except (BusyError, MisdirectedError, OverdueError, TooManyRequestsError) as error:
            await Responder(request, exchange, self._cors, self._explain).fail(error)

    def refuse(self, status: HTTPStatus, detail: str, headers: RequestHeaders) -> Response:
        """Return the problem response to malformed HTTP; *headers* are those that have arrived."""
        response, body = problem(status, detail)
        response += [*self._cors.headers(headers.get(b"origin")), NO_STORE]
        response.append((b"x-request-id", request_id(headers.get(b"x-request-id"))))
        return Response(status, response, body)

    async def _answer_reserved(self, request: Request, asgi: Asgi, exchange: Exchange) -> None:
        method, path = request.method, request.path
        responder = Responder(request, exchange, self._cors, self._explain)
        if path == "" and not responder.is_s3:
            # Relative links keep the token of /~TOKEN, or a mount, only below a slash.
            here = request.base_path.rpartition("/")[2]
            location = (b"location", f"./{here}/".encode("latin-1"))
            status = HTTPStatus.TEMPORARY_REDIRECT
            await responder.send(status, [location, _NO_BODY, NO_STORE])
            return
        if request.segment is not None and (
            path.rstrip("/") in _NOT_BELOW_TOKENS or request.name in SIGN_IN
        ):
            await responder.fail(BadKeyError("this is not served below a token"))
            return
        try:
            caller = NOBODY if path in _OPEN else await self._authenticator.caller(request)
        except ShardgateError as error:
            await responder.fail(error)
            return
        if method == "OPTIONS":
            await responder.preflight(_API_METHODS if path.startswith("/api/") else ALLOW)
        elif path in {"/", ""} and method == "GET" and responder.is_s3:
            await self._data.list_buckets(responder, caller)
        elif method not in _READS and responder.is_foreign:
            await responder.fail(ForeignPageError(FOREIGN))
        else:
            await self._call_api(asgi, responder, caller)

    async def _call_api(self, asgi: Asgi, responder: Responder, caller: Caller) -> None:
        """Call the API, whose routes find *responder*, *caller*, token and body in the scope.

        HEAD is GET to them: ASGI servers send no body.
        """
        request, (scope, receive, send) = responder.request, asgi

        async def send_completed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = responder.completed(message["headers"])
            await send(message)

        below = {
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
