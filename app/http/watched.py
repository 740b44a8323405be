"""Counts requests, and tells the log and traces of them, around what answers them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from functools import partial
from http import HTTPStatus
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Protocol
from urllib.parse import unquote

from app.http.answer import AtHand, Body, Headers, Later, Write, combined
from app.http.clients import Client, Networks, name_client
from app.http.shard_of import PREFIX as SHARDS
from app.seeing.access_log import AccessLog
from app.seeing.outcomes import OTHER, Outcome, known_method, outcome_of
from app.seeing.request_counts import NO_DATASET, RequestCounts
from app.seeing.seen import Seen, begin_seeing
from app.seeing.tracing import Tracing

_TRACEPARENT: Final = b"traceparent"
_UNCHANGED: Final = HTTPStatus.NOT_MODIFIED
_OUTCOMES: Final[tuple[Outcome, Outcome]] = ("not_modified", "hit")
_TOKEN: Final = "~"  # noqa: S105  begins the segment of a path that is one


class Service(Protocol):
    """What answers requests; see `Gateway`."""

    def begin(self, raw_path: bytes, headers: Headers, client: Client, /) -> AtHand | Later | None:
        """Begin to answer a GET outside of ASGI."""
        ...

    def refuse(self, status: HTTPStatus, detail: str, headers: Headers, /) -> AtHand:
        """Answer what is no request."""
        ...

    async def __call__(self, scope: Any, receive: Any, send: Any, /) -> None:
        """Speak ASGI."""
        ...


class Watched:
    """Tells of each request of *service* when it is over."""

    def __init__(  # noqa: PLR0913 - its parts, each made by the composition root
        self,
        service: Service,
        is_public: Mapping[str, bool],
        counts: RequestCounts,
        *,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
        proxies: Networks = (),
    ) -> None:
        """Tell apart the datasets that everybody may read: which *is_public*, by name.

        Requests that come through *proxies* are those of who is behind them.
        """
        self.service = service
        self.counts = counts
        self._is_public = is_public
        self._is_all_public = all(is_public.values())
        self._access_log = access_log
        self._tracing = tracing
        self._proxies = proxies

    def begin(
        self, raw_path: bytes, headers: Headers, client: Client = None
    ) -> AtHand | Later | None:
        """Begin to answer a GET outside of ASGI; see `GatewayProtocol`.

        What balancers ask before each request is not told besides.
        """
        if raw_path.startswith(SHARDS):
            return self.service.begin(raw_path, headers, client)
        began = perf_counter()
        begun = self.service.begin(raw_path, headers, client)
        if isinstance(begun, AtHand):
            is_modified = begun.status is not _UNCHANGED
            self.counts.count_at_hand(begun.dataset, len(begun.body), is_modified=is_modified)
            if self._tracing is not None:
                self._trace_at_hand(begun, raw_path, headers, client, perf_counter() - began)
            elif self._access_log is not None:
                ended, client_name = perf_counter(), self._address(client, headers)
                key = self._split(raw_path)[1] if self._access_log.has_keys else ""
                status, found, body, dataset, caller = begun
                name, outcome = found[-1][1], _OUTCOMES[is_modified]
                self._access_log.tell(
                    (began, ended, name, "GET", dataset, status, outcome, client_name, caller,
                     len(body), key, "")
                )  # fmt: skip
            return begun
        return begun and partial(self._answer_later, begun, raw_path, headers, client)

    def refuse(self, status: HTTPStatus, detail: str, headers: Headers) -> AtHand:
        """Answer what is no request."""
        refusal = self.service.refuse(status, detail, headers)
        self.counts.count(NO_DATASET, OTHER, outcome_of(status), len(refusal.body), 0)
        return refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Speak ASGI."""
        if scope["type"] != "http":
            await self.service(scope, receive, send)
            if self._access_log is not None:
                self._access_log.flush()
            return
        method = known_method(scope["method"])
        seen = self._see(method, scope["raw_path"], scope["headers"], scope["client"])

        async def watched(message: MutableMapping[str, Any]) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                return
            seen.nbytes += len(message.get("body", b""))
            if not message.get("more_body"):
                seen.end()

        with _UnderWay(self, seen):
            await self.service(scope, receive, watched)

    def enter(self, seen: Seen) -> None:
        """Begin to watch a request that waits for something."""
        begin_seeing(seen)
        if self._tracing is not None:
            self._tracing.enter(seen)
        self.counts.in_flight += 1

    def leave(self, seen: Seen) -> None:
        """Tell of it, now that it is over."""
        self.counts.in_flight -= 1
        seconds = seen.seconds
        self.counts.count(seen.dataset, seen.method, seen.outcome, seen.nbytes, seconds)
        self._tell(seen, seconds)

    async def _answer_later(
        self, begun: Later, raw_path: bytes, headers: Headers, client: Client, write: Write
    ) -> None:
        seen = self._see("GET", raw_path, headers, client)

        async def counted(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in pieces:
                seen.nbytes += len(piece)
                yield piece

        async def watched(status: HTTPStatus, headers: Headers, body: Body) -> None:
            seen.status = status
            if isinstance(body, bytes):
                await write(status, headers, body)
                seen.nbytes = len(body)
            else:
                await write(status, headers, counted(body))
            seen.end()

        with _UnderWay(self, seen):
            await begun(watched)

    def _trace_at_hand(
        self, begun: AtHand, raw_path: bytes, headers: Headers, client: Client, seconds: float
    ) -> None:
        seen = self._see("GET", raw_path, headers, client)
        seen.status, seen.nbytes = begun.status, len(begun.body)
        seen.outcome = _OUTCOMES[begun.status is not _UNCHANGED]
        seen.request_id, seen.caller = begun.headers[-1][1], begun.caller
        self._tell(seen, seconds)

    def _tell(self, seen: Seen, seconds: float) -> None:
        if self._access_log is not None:
            key = seen.key if self._access_log.has_keys else ""
            answered = (seen.method, seen.dataset, seen.status, seen.outcome)
            shared = (*answered, seen.client, seen.caller)
            asked = (seen.began, seen.began + seconds, seen.request_id)
            self._access_log.tell((*asked, *shared, seen.nbytes, key, seen.trace_id))
        if self._tracing is not None:
            self._tracing.end(seen)

    def _see(self, method: str, raw_path: bytes, headers: Headers, client: Client) -> Seen:
        dataset, key = self._split(raw_path)
        is_public = self._is_public.get(dataset, self._is_all_public)
        seen = Seen(method, dataset, key, self._address(client, headers), is_private=not is_public)
        if self._tracing is not None:
            traceparent = (value for name, value in headers if name == _TRACEPARENT)
            self._tracing.begin(seen, next(traceparent, None))
        return seen

    def _address(self, client: Client, headers: Headers) -> str:
        if client is None:
            return ""
        if not self._proxies:
            return client[0]
        return name_client(client[0], combined(headers), self._proxies)

    def _split(self, raw_path: bytes) -> tuple[str, str]:
        """Find the dataset of a path, and what of it is asked for: all of what is no dataset."""
        path = raw_path[1:].decode("latin-1")
        first, _, key = path.partition("/")
        if unquote(first).startswith(_TOKEN):
            path = key
            first, _, key = path.partition("/")
        name = unquote(first)
        return (name, key) if name in self._is_public else (NO_DATASET, path)


class _UnderWay:
    """A request while *watched* waits for its answer."""

    __slots__ = ("_seen", "_watched")

    def __init__(self, watched: Watched, seen: Seen) -> None:
        self._watched = watched
        self._seen = seen

    def __enter__(self) -> None:
        self._watched.enter(self._seen)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._seen.outcome = "failed"
        self._watched.leave(self._seen)
