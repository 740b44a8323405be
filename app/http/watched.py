"""Counts requests, and tells the log and traces of them, around what answers them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Protocol
from urllib.parse import unquote

from app.http.answer import AtHand, Body, Given, Headers, Later, Write, combined
from app.http.clients import Networks, name_client, peer_of
from app.http.shard_of import PREFIX as SHARDS
from app.seeing.outcomes import OTHER, known_method, outcome_of
from app.seeing.request_counts import NO_DATASET
from app.seeing.requests import Requests
from app.seeing.seen import Seen, begin_seeing, mask_tokens
from app.seeing.told import Details, Run, details_at_hand
from app.seeing.tracing import Tracing

_TOKEN: Final = "~"  # noqa: S105  begins the segment of a path that is one


class Service(Protocol):
    """What answers requests; see `Gateway`."""

    def begin(
        self, raw_path: bytes, given: Given, peer: bytes, now: float, /
    ) -> AtHand | Later | None:
        """Begin to answer a GET of *peer* outside of ASGI, *now* by the event loop."""
        ...

    def refuse(self, status: HTTPStatus, detail: str, given: Given, /) -> AtHand:
        """Answer what is no request."""
        ...

    async def __call__(self, scope: Any, receive: Any, send: Any, /) -> None:
        """Speak ASGI."""
        ...


class Watched:
    """Tells of each request of *service* when it is over."""

    def __init__(
        self,
        service: Service,
        is_public: Mapping[str, bool],
        requests: Requests,
        *,
        tracing: Tracing | None = None,
        proxies: Networks = (),
    ) -> None:
        """Tell apart the datasets that everybody may read: which *is_public*, by name.

        Requests that come through *proxies* are those of who is behind them.
        """
        self.service = service
        self.counts = requests.counts
        self.requests = requests
        self._is_public = is_public
        self._is_all_public = all(is_public.values())
        self._tracing = tracing
        self._proxies = proxies
        self._is_brief = tracing is None and not requests.has_keys
        """Whether nothing is told of paths of what was at hand."""

    def begin(
        self, raw_path: bytes, given: Given, peer: bytes, now: float
    ) -> AtHand | Later | None:
        """Begin to answer a GET outside of ASGI, *now* by the event loop; see `GatewayProtocol`.

        *peer* is the address of who is connected.

        What balancers ask before each request is not told besides.
        """
        begun = self.service.begin(raw_path, given, peer, now)
        if not isinstance(begun, AtHand):
            if begun is None or raw_path.startswith(SHARDS):
                return begun
            return partial(self._answer_later, begun, raw_path, given, peer)
        status, _, body, request_id, dataset, caller = begun
        if not dataset:
            return begun
        if self._is_brief:
            client = self._behind(peer, given) if self._proxies else peer
            kind = now, status, dataset, caller, None
            self.requests.tell(kind, request_id, len(body), client)
        else:
            self._tell_at_hand(begun, raw_path, given, peer, now)
        return begun

    def refuse(self, status: HTTPStatus, detail: str, given: Given) -> AtHand:
        """Answer what is no request: it is counted, and has no line."""
        refusal = self.service.refuse(status, detail, given)
        details = Details(OTHER, outcome_of(status), None)
        kind = 0.0, status, NO_DATASET, "", details
        self.counts.count([Run(kind, (b"", len(refusal.body), b""))])
        return refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Speak ASGI."""
        if scope["type"] != "http":
            await self.service(scope, receive, send)
            self.requests.end()
            return
        method = known_method(scope["method"])
        seen = self._see(
            method, scope["raw_path"], combined(scope["headers"]), peer_of(scope["client"])
        )

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
        self._tell(asyncio.get_running_loop().time(), seen, seen.seconds)

    async def _answer_later(
        self, begun: Later, raw_path: bytes, given: Given, peer: bytes, write: Write
    ) -> None:
        seen = self._see("GET", raw_path, given, peer)

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

    def _tell_at_hand(
        self, begun: AtHand, raw_path: bytes, given: Given, peer: bytes, now: float
    ) -> None:
        """Tell of what was at hand, with its key or trace."""
        status, _, body, request_id, dataset, caller = begun
        seen = self._see("GET", raw_path, given, peer)
        seen.status, seen.nbytes, seen.dataset, seen.caller = status, len(body), dataset, caller
        seen.request_id, seen.outcome = request_id, details_at_hand(status).outcome
        self._tell(now, seen, None)

    def _tell(self, now: float, seen: Seen, seconds: float | None) -> None:
        key = seen.key if self.requests.has_keys else ""
        details = Details(seen.method, seen.outcome, seconds, key, seen.trace_id)
        kind = now, seen.status, seen.dataset, seen.caller, details
        self.requests.tell(kind, seen.request_id, seen.nbytes, seen.client)
        if self._tracing is not None:
            self._tracing.end(seen)

    def _see(self, method: str, raw_path: bytes, given: Given, peer: bytes) -> Seen:
        dataset, key = self._split(raw_path)
        is_public = self._is_public.get(dataset, self._is_all_public)
        seen = Seen(method, dataset, key, self._behind(peer, given), is_private=not is_public)
        if self._tracing is not None:
            self._tracing.begin(seen, given.get(b"traceparent"))
        return seen

    def _behind(self, peer: bytes, given: Given) -> bytes:
        """Name who sends through *peer*, which may be a proxy."""
        if not self._proxies:
            return peer
        return name_client(peer.decode(), given, self._proxies).encode()

    def _split(self, raw_path: bytes) -> tuple[str, str]:
        """Find the dataset of a path, and what of it is asked for: all of what is no dataset."""
        path = raw_path[1:].decode("latin-1")
        first, _, key = path.partition("/")
        if unquote(first).startswith(_TOKEN):
            path = key
            first, _, key = path.partition("/")
        name = unquote(first)
        dataset, key = (name, key) if name in self._is_public else (NO_DATASET, path)
        return dataset, mask_tokens(key)


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
