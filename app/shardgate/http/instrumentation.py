"""Metrics, access log and traces around the application."""

import time
from asyncio import CancelledError
from collections.abc import Awaitable, Mapping, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote

from shardgate.http.limits import Networks, client_of, peer_of
from shardgate.http.responses import (
    DeferredResponse,
    Exchange,
    ImmediateResponse,
    RequestHeaders,
    combine_headers,
)
from shardgate.http.shard_affinity import PREFIX as SHARDS
from shardgate.observability.logging import AccessLog, AccessRecord
from shardgate.observability.metrics import RequestMetrics
from shardgate.observability.requests import (
    NO_DATASET,
    OTHER_METHOD,
    Outcome,
    RequestContext,
    current_request,
    method_label,
    outcome_of,
)
from shardgate.observability.tracing import Tracing

_TOKEN: Final = "~"  # noqa: S105  begins the segment of a path that is one


class InstrumentedApp:
    """Counts, logs and traces each request of an application."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        app: Any,
        is_public: Mapping[str, bool],
        metrics: RequestMetrics,
        *,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
        proxies: Networks = (),
    ) -> None:
        """Wrap the `Gateway` *app*, whose datasets *is_public* maps by name; see `client_of`."""
        self.app = app
        self.metrics = metrics
        self._is_public = is_public
        self._is_all_public = all(is_public.values())
        self._access_log = access_log
        self._tracing = tracing
        self._proxies = proxies
        self._has_keys = access_log is not None and access_log.has_keys

    def begin(
        self, raw_path: bytes, headers: RequestHeaders, peer: bytes, now: float
    ) -> ImmediateResponse | DeferredResponse | None:
        """Begin to answer a GET outside of ASGI; see `GatewayProtocol`.

        *peer* is the address of the connection. Requests to ``/_shard``, which balancers send
        before each other one, are neither counted nor logged.
        """
        begun: ImmediateResponse | DeferredResponse | None
        begun = self.app.begin(raw_path, headers, peer, now)
        if not isinstance(begun, ImmediateResponse):
            if begun is None or raw_path.startswith(SHARDS):
                return begun
            return partial(self._respond, begun, raw_path, headers, peer)
        status, _, body, request_id, dataset, caller = begun
        if not dataset:
            return begun
        outcome: Outcome = "not_modified" if status == HTTPStatus.NOT_MODIFIED else "hit"
        self.metrics.count(dataset, "GET", outcome, len(body))
        if self._tracing is not None or self._has_keys:
            self._record_immediate(begun, outcome, raw_path, headers, peer)
        elif self._access_log is not None:
            client = self._client(peer, headers) if self._proxies else peer
            self._access_log.add(
                AccessRecord(
                    time.time(), request_id, "GET", dataset, status, outcome, len(body), client,
                    caller,
                )
            )  # fmt: skip
        return begun

    def refuse(self, status: HTTPStatus, detail: str, headers: RequestHeaders) -> ImmediateResponse:
        """Answer a malformed request: it is counted, but not logged."""
        refusal: ImmediateResponse = self.app.refuse(status, detail, headers)
        self.metrics.count(NO_DATASET, OTHER_METHOD, outcome_of(status), len(refusal.body))
        return refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Speak ASGI."""
        if scope["type"] != "http":
            await self._run_lifespan(scope, receive, send)
            return
        method = method_label(scope["method"])
        headers = combine_headers(scope["headers"])
        request = self._context(method, scope["raw_path"], headers, peer_of(scope["client"]))

        async def send_and_count(message: MutableMapping[str, Any]) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                request.status = message["status"]
                return
            request.nbytes += len(message.get("body", b""))
            if not message.get("more_body"):
                request.outcome = outcome_of(request.status)

        await self._follow(request, self.app(scope, receive, send_and_count))

    async def _run_lifespan(self, scope: Any, receive: Any, send: Any) -> None:
        if self._access_log is None:
            await self.app(scope, receive, send)
            return
        self._access_log.start()
        try:
            await self.app(scope, receive, send)
        finally:
            self._access_log.close()

    async def _respond(
        self,
        begun: DeferredResponse,
        raw_path: bytes,
        headers: RequestHeaders,
        peer: bytes,
        exchange: Exchange,
    ) -> None:
        request = self._context("GET", raw_path, headers, peer)
        await self._follow(request, begun(exchange), exchange)

    def _context(
        self, method: str, raw_path: bytes, headers: RequestHeaders, peer: bytes
    ) -> RequestContext:
        dataset, key = self._split(raw_path)
        is_public = self._is_public.get(dataset, self._is_all_public)
        client = self._client(peer, headers) if self._proxies else peer
        request = RequestContext(method, dataset, key, client, is_private=not is_public)
        if self._tracing is not None:
            self._tracing.begin(request, headers.get(b"traceparent"))
        return request

    async def _follow(
        self, request: RequestContext, answer: Awaitable[None], exchange: Exchange | None = None
    ) -> None:
        """Wait for *answer*, which is written to *exchange* if not through ASGI; count and log."""
        current_request.set(request)
        if self._tracing is not None:
            self._tracing.enter(request)
        self.metrics.in_flight += 1
        is_failed = False
        try:
            await answer
        except CancelledError:
            raise
        except BaseException:
            is_failed = True
            raise
        finally:
            self.metrics.in_flight -= 1
            if exchange is not None:
                request.status, request.nbytes = exchange.status, exchange.sent_nbytes
                if exchange.response_complete:
                    request.outcome = outcome_of(request.status)
            if is_failed:
                request.outcome = "failed"
            seconds = time.perf_counter() - request.started_at
            self.metrics.count(
                request.dataset, request.method, request.outcome, request.nbytes, seconds
            )
            self._record(request, seconds)

    def _record_immediate(
        self,
        begun: ImmediateResponse,
        outcome: Outcome,
        raw_path: bytes,
        headers: RequestHeaders,
        peer: bytes,
    ) -> None:
        """Log and trace a response from memory, if the log has keys or there is tracing."""
        request = self._context("GET", raw_path, headers, peer)
        request.status, request.nbytes, request.outcome = begun.status, len(begun.body), outcome
        request.request_id, request.dataset = begun.request_id, begun.dataset
        request.caller = begun.caller
        self._record(request, None)

    def _record(self, request: RequestContext, seconds: float | None) -> None:
        if self._access_log is not None:
            key = request.key if self._has_keys else ""
            self._access_log.add(
                AccessRecord(
                    time.time(), request.request_id, request.method, request.dataset,
                    request.status, request.outcome, request.nbytes, request.client,
                    request.caller, seconds, request.trace_id, key,
                )
            )  # fmt: skip
        if self._tracing is not None:
            self._tracing.end(request)

    def _client(self, peer: bytes, headers: RequestHeaders) -> bytes:
        """Return the address of the client, which *peer* may be a proxy of."""
        return client_of(peer.decode(), headers, self._proxies).encode()

    def _split(self, raw_path: bytes) -> tuple[str, str]:
        """Return the dataset of a path and its key; the whole path if it names no dataset."""
        path = raw_path[1:].decode("latin-1")
        first, _, key = path.partition("/")
        if unquote(first).startswith(_TOKEN):
            path = key
            first, _, key = path.partition("/")
        name = unquote(first)
        return (name, key) if name in self._is_public else (NO_DATASET, path)
