"""Metrics, access log and traces around the application."""

import time
from asyncio import CancelledError
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Final

from shardgate.observability.logging import AccessLog, AccessRecord
from shardgate.observability.metrics import (
    METHODS,
    NO_DATASET,
    OTHER_METHOD,
    Outcome,
    RequestContext,
    RequestMetrics,
    current_request,
    outcome_of,
)
from shardgate.observability.tracing import Tracing
from shardgate.server.request import (
    Application,
    Exchange,
    Networks,
    Request,
    RequestHeaders,
    Response,
    client_of,
)

_NOT_MODIFIED: Final = HTTPStatus.NOT_MODIFIED


class InstrumentedApp:
    """Counts, logs and traces each request."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        app: Application,
        is_public: Mapping[str, bool],
        metrics: RequestMetrics,
        *,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
        proxies: Networks = (),
        unobserved: Collection[str] = (),
    ) -> None:
        """Wrap *app*, whose datasets *is_public* maps by name; see `client_of`.

        Requests to *unobserved*, first segments of paths, are neither counted nor logged.
        """
        self.app = app
        self.metrics = metrics
        self._is_public = is_public
        self._is_all_public = all(is_public.values())
        self._access_log = access_log
        self._tracing = tracing
        self._proxies = proxies
        self._unobserved = unobserved
        self._has_keys = access_log is not None and access_log.has_keys

    def cached(self, request: Request) -> Response | None:
        """Return the response to a GET if it is in memory, counted and logged."""
        response = self.app.cached(request)
        if response is None or request.name in self._unobserved:
            return response
        status = response.status
        body = response.body
        nbytes = len(body) if isinstance(body, bytes) else 0
        outcome: Outcome = "not_modified" if status is _NOT_MODIFIED else "hit"
        self.metrics.count(request.name, "GET", outcome, nbytes)
        if self._tracing is not None or self._has_keys:
            context = self._context(request)
            context.status = status
            context.nbytes = nbytes
            context.outcome = outcome
            self._record(context, None)
        elif self._access_log is not None:
            client = self._client(request) if self._proxies else request.peer
            caller = "" if request.caller is None else request.caller.name
            self._access_log.add(
                AccessRecord(
                    time.time(), request.id, "GET", request.name, status, outcome, nbytes, client,
                    caller,
                )
            )  # fmt: skip
        return response

    def refuse(self, status: HTTPStatus, detail: str, headers: RequestHeaders) -> Response:
        """Answer a malformed request: it is counted, but not logged."""
        refusal = self.app.refuse(status, detail, headers)
        nbytes = len(refusal.body) if isinstance(refusal.body, bytes) else 0
        self.metrics.count(NO_DATASET, OTHER_METHOD, outcome_of(status), nbytes)
        return refusal

    def _context(self, request: Request) -> RequestContext:
        path = request.raw_path[1:].decode("latin-1")
        if request.name in self._is_public:
            dataset = request.name
            key = path.partition("/")[2]
            is_public = self._is_public[dataset]
        else:
            dataset = NO_DATASET
            key = path
            is_public = self._is_all_public
        client = self._client(request) if self._proxies else request.peer
        method = request.method if request.method in METHODS else OTHER_METHOD
        context = RequestContext(method, dataset, key, client, is_private=not is_public)
        context.request_id = request.id
        context.caller = "" if request.caller is None else request.caller.name
        if self._tracing is not None:
            self._tracing.begin(context, request.headers.get(b"traceparent"))
        return context

    async def respond(self, request: Request, exchange: Exchange) -> None:
        """Send the response, count it and log it."""
        if request.name in self._unobserved:
            await self.app.respond(request, exchange)
            return
        context = self._context(request)
        current_request.set(context)
        if self._tracing is not None:
            self._tracing.enter(context)
        self.metrics.in_flight += 1
        is_failed = False
        try:
            await self.app.respond(request, exchange)
        except CancelledError:
            raise  # the client has gone
        except BaseException:
            is_failed = True
            raise
        finally:
            self.metrics.in_flight -= 1
            context.status = exchange.status
            context.nbytes = exchange.sent_nbytes
            if exchange.response_complete:
                context.outcome = outcome_of(context.status)
            if is_failed:
                context.outcome = "failed"
            seconds = time.perf_counter() - context.started_at
            self.metrics.count(
                context.dataset, context.method, context.outcome, context.nbytes, seconds
            )
            if self._access_log is not None or self._tracing is not None:
                self._record(context, seconds)

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

    def _client(self, request: Request) -> bytes:
        """Return the address of the client, whose proxy the peer may be."""
        return client_of(request.peer.decode(), request.headers, self._proxies).encode()
