"""uvicorn's HTTP/1.1 protocol, which answers plain GETs itself, and limits connections.

A plain GET is answered from the parser's callback: `data_received` feeds the parser,
`on_headers_complete` checks the head and asks the application, and `write_response` writes a
response that is in memory. One that needs I/O gets a task, but neither ASGI scope nor messages.
Everything else becomes a request of ASGI. Measured, that saves 20 µs of 45 for a cached chunk,
and 29 µs of 104 for one that must be read.

uvicorn limits neither heads, trailers, requests that wait behind another one, slow heads nor the
number of connections; all of that is done here. Its private members that this module relies on are
named in ``tests/server/test_protocol.py``.
"""

import asyncio
import logging
import resource
import socket
import sys
from collections import OrderedDict
from functools import cache
from http import HTTPStatus
from typing import Any, Final, Self, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from shardgate.errors import ShardgateError
from shardgate.read.bodies import Pieces
from shardgate.server.asgi import BY_NAME, AsgiApp
from shardgate.server.body import has_body
from shardgate.server.request import (
    FORWARDED_PREFIX,
    Headers,
    Request,
    RequestHeaders,
    Response,
    combine_headers,
    encode_headers,
    peer_of,
)

HEAD_NBYTES: Final = 64 * 1024
"""Longest head; also the most that may follow a body, such as trailers. Keys have up to 3 KiB."""
MAX_HEADERS: Final = 128
MAX_PIPELINED: Final = 256
"""Requests that wait behind one on their connection."""
HEAD_S: Final = 10.0
"""Longest wait for the first head to begin; a head that has begun has to end within twice that."""
_STALLED_S: Final = 30.0
_CLOSE: Final = (b"connection", b"close")
_log = logging.getLogger(__name__)


class RefusedRequestError(Exception):
    """The bytes of a client are no request that can be answered; the connection ends."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


MALFORMED: Final = (HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1")
TOO_LARGE: Final = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the head of a request has up to {HEAD_NBYTES} bytes and {MAX_HEADERS} headers",
)


def check_head(
    parser: Any, url: bytes, headers: Headers, received_nbytes: int, *, is_1_1: bool
) -> tuple[Any, Headers, RequestHeaders]:
    """Check that every HTTP implementation understands a head within the last *received_nbytes*.

    Return the target as `httptools.parse_url` does, and the *headers*, whose names are lower-case,
    in their order and by name; ``host`` is that of an absolute target. Raises:
    `RefusedRequestError`.
    """
    if len(headers) > MAX_HEADERS:
        raise RefusedRequestError(*TOO_LARGE)
    # What was received may be several heads; only then it takes counting.
    if received_nbytes > HEAD_NBYTES and _nbytes(url, headers) > HEAD_NBYTES:
        raise RefusedRequestError(*TOO_LARGE)
    by_name = dict(headers)
    if len(by_name) == len(headers):
        hosts = int(b"host" in by_name)
    else:
        by_name = combine_headers(headers)
        hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (is_1_1 and not hosts):
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "a request names one Host")
    if parser.should_upgrade() and {b"content-length", b"transfer-encoding"} & by_name.keys():
        # The parser takes what follows for the other protocol, or for a request.
        detail = "a request with a body cannot ask for an upgrade"
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, detail)
    target = httptools.parse_url(url)
    if target.path is None:
        raise RefusedRequestError(*MALFORMED)
    if target.host is not None:
        # The host of an absolute target takes the place of Host (RFC 9112 §3.2.2).
        authority = url.split(b"/", 3)[2].rpartition(b"@")[2]
        headers = [each for each in headers if each[0] != b"host"]
        headers.append((b"host", authority))
        by_name = combine_headers(headers)
    return target, headers, by_name


def _nbytes(url: bytes, headers: Headers) -> int:
    # Each header also has ": " and a line break.
    return len(url) + sum([len(name) + len(value) + 4 for name, value in headers])


@cache
def max_connections() -> int:
    """Return three quarters of the files that the process may open: stores need some too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft * 3 // 4


class GatewayProtocol(HttpToolsProtocol):
    """One connection of a client."""

    app: AsgiApp
    cycle: Any
    timeout_keep_alive: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Connections that wait for a request, the longest idle first.
        self._idle: OrderedDict[GatewayProtocol, None]
        # The state of the server is what all its connections share.
        self._idle = vars(self.server_state).setdefault("idle", OrderedDict())
        # The cycle or exchange that was begun last; `cycle` may wait behind it.
        self._answering: Any = None
        self._peer = b""
        self._is_plain = False  # whether the last request was a GET that is answered here
        self._received_nbytes = 0  # bytes since the last complete head, or the last bytes of a body
        self.is_in_head = False
        # Headers of the head that had begun when the timer last ran out.
        self._slow_head: Any = None
        self._is_refused = False  # whether further bytes are dropped
        self._waiting_since = 0.0
        self._timeout_s = HEAD_S
        self._stall_timer: asyncio.TimerHandle | None = None
        # uvicorn's default headers, a new list each second, and their lines.
        self._defaults: tuple[Any, bytes] = None, b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request; one connection too many takes the place of an idle one."""
        super().connection_made(transport)
        self._peer = peer_of(self.client)
        self.app.metrics.connections += 1
        if len(self.connections) > max_connections() and not self._close_longest_idle():
            self._is_refused = True
            status = HTTPStatus.SERVICE_UNAVAILABLE
            self._write_refusal(RefusedRequestError(status, "too many connections are open"))
            transport.close()
            return
        self._waiting_since = self.loop.time()
        self._idle[self] = None
        self._set_timer(HEAD_S)

    def _close_longest_idle(self) -> bool:
        """Close the connection that has waited longest for a request; return whether one waits."""
        while self._idle:
            longest, _ = self._idle.popitem(last=False)
            if not longest.is_in_head:
                longest.transport.close()
                return True
        return False

    def data_received(self, data: bytes) -> None:
        """Parse *data*; an upgrade to another protocol is not taken up (RFC 9110 §7.8)."""
        if self._is_refused:
            return
        self._received_nbytes += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    # The parser has stopped behind the head; the next request may follow.
                    data = data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._refuse(_reason(error))
        else:
            if self._received_nbytes > HEAD_NBYTES:
                self._refuse(RefusedRequestError(*TOO_LARGE))

    def on_message_begin(self) -> None:
        """Begin a head; a scope is made only for requests of ASGI."""
        self.url = b""
        self.headers = []
        self.is_in_head = True
        self._idle.pop(self, None)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; drop trailers."""
        if self.is_in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Answer a plain GET, or make a request of ASGI."""
        parser = self.parser
        is_1_1 = parser.get_http_version() == "1.1"
        target, headers, by_name = check_head(
            parser, self.url, self.headers, self._received_nbytes, is_1_1=is_1_1
        )
        if len(self.pipeline) >= MAX_PIPELINED:
            raise RefusedRequestError(HTTPStatus.TOO_MANY_REQUESTS, "too many requests at once")
        self.is_in_head = False
        self._received_nbytes = 0
        request = None
        # What this does not admit takes the way of ASGI, which can wait, read bodies, and close.
        if (
            (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and is_1_1
            and not target.query
            and target.host is None
            and b"expect" not in by_name
            and parser.get_method() == b"GET"
            and parser.should_keep_alive()
        ):
            path = target.path
            root_path = ""
            prefix = self.app.prefix
            if prefix.root_path or FORWARDED_PREFIX in by_name:
                root_path, path = prefix.split(path, by_name, self._peer)
            request = Request("GET", path, headers, by_name, self._peer)
            request.root_path = root_path
            request.sent_path = target.path
        self._is_plain = request is not None and not request.needs_asgi
        if request is None or not self._is_plain:
            self._begin_asgi(headers, by_name, is_1_1=is_1_1)
        elif (response := self.app.cached(request)) is not None:
            self.write_response(response)
            self._wait(self.loop.time())
        else:
            self.cycle = self._answering = _ConnectionExchange(self, request)

    def _begin_asgi(self, headers: Headers, by_name: RequestHeaders, *, is_1_1: bool) -> None:
        url = self.url
        super().on_message_begin()  # makes the scope, and forgets the URL
        self.url = url
        self.headers = self.scope["headers"] = headers
        self.scope[BY_NAME] = by_name  # type: ignore[typeddict-unknown-key]  # ours
        expected = by_name.get(b"expect", b"").lower().split(b", ")
        self.expect_100_continue = is_1_1 and b"100-continue" in expected
        super().on_headers_complete()

    def write_response(self, response: Response, *more: tuple[bytes, bytes]) -> None:
        """Write *response*, with uvicorn's default headers and *more*; no pieces of a body."""
        defaults, default_lines = self._defaults
        if defaults is not self.server_state.default_headers:
            defaults = self.server_state.default_headers
            default_lines = encode_headers(defaults)
            self._defaults = defaults, default_lines
        headers = response.headers
        lines = headers if isinstance(headers, bytes) else encode_headers([*headers, *more])
        head = b"".join((STATUS_LINE[response.status], default_lines, lines, b"\r\n"))
        body = response.body
        self.transport.writelines((head, body) if isinstance(body, bytes) else (head,))

    def on_body(self, body: bytes) -> None:
        """Pass a part of a body to uvicorn; drop that of a plain GET."""
        self._received_nbytes = 0
        if not self._is_plain:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request of ASGI."""
        if not self._is_plain:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        if cycle.waiting_for_100_continue and not has_body(cycle.scope[BY_NAME]):
            # botocore up to 1.43.62 takes a final status line in its place for later answers too.
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Begin the request that waits, or wait for the next one."""
        self._received_nbytes = 0
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._wait(self.loop.time())

    def _wait(self, now: float) -> None:
        self._waiting_since = now
        self._timeout_s = self.timeout_keep_alive
        self._idle[self] = None
        # uvicorn sets a timer after each response, which takes 7 µs; the one that runs is kept.
        if self.timeout_keep_alive_task is None:
            self._set_timer(min(HEAD_S, self._timeout_s))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop working for a client that has gone."""
        super().connection_lost(exc)
        self.app.metrics.connections -= 1
        self._idle.pop(self, None)
        self._end_answering()
        self._unset_keepalive_if_required()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle or slow connection, or set the timer anew to look at it again."""
        self.timeout_keep_alive_task = None
        if self._is_answering():
            return
        left_s = self._waiting_since + self._timeout_s - self.loop.time()
        if self.is_in_head and self._slow_head is self.headers:  # each head has a list of its own
            status = HTTPStatus.REQUEST_TIMEOUT
            self._refuse(RefusedRequestError(status, "the head came too slowly"))
        elif self.is_in_head:
            self._slow_head = self.headers
            self._set_timer(HEAD_S)
        elif left_s > 0:
            self._set_timer(min(HEAD_S, left_s))
        else:
            self.transport.close()

    def _set_timer(self, seconds: float) -> None:
        handler = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(seconds, handler)

    def pause_writing(self) -> None:
        """Wait for a slow client, but not for one that takes nothing."""
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _watch_stall(self) -> None:
        # A client that takes nothing of a response holds memory in vain.
        left_nbytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(_STALLED_S, self._check_stall, left_nbytes)

    def _check_stall(self, left_nbytes: int) -> None:
        if self.transport.get_write_buffer_size() < left_nbytes:
            self._watch_stall()
        else:
            self.transport.abort()

    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _refuse(self, refused: RefusedRequestError) -> None:
        """Send the reason, unless it could be taken for another response, and close."""
        self._is_refused = True
        # The fault may be in a later request than the one that is being answered.
        is_another = self.is_in_head or self.cycle is not self._answering
        if self._is_answering() and (is_another or self._answering.response_started):
            self.pipeline.clear()
            self._answering.keep_alive = False
            self.flow.pause_reading()
            return
        if self.is_in_head or self._is_answering():
            self._write_refusal(refused)
        self.transport.close()
        self._end_answering()

    def _write_refusal(self, refused: RefusedRequestError) -> None:
        _log.debug("refused a request of %s: %s", self.client, refused)
        headers = combine_headers(self.headers or [])
        self.write_response(self.app.refuse(refused.status, str(refused), headers), _CLOSE)

    def _end_answering(self) -> None:
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()


class _ConnectionExchange:
    """A response that needs I/O.

    It takes the place of uvicorn's cycle: uvicorn reads `response_complete`, clears `keep_alive`
    when the service stops, and sets `disconnected` and the event when the client has gone.
    """

    def __init__(self, protocol: GatewayProtocol, request: Request) -> None:
        self._protocol = protocol
        self.response_started = self.response_complete = False
        self.status = self.sent_nbytes = 0
        self.keep_alive = True
        self.disconnected = False
        self._task = protocol.loop.create_task(self._run(request))
        protocol.tasks.add(self._task)
        self._task.add_done_callback(protocol.tasks.discard)

    @property
    def message_event(self) -> Self:
        """The event that uvicorn sets when the client has gone."""
        # As an attribute it would be a cycle of references, left to the garbage collector.
        return self

    def set(self) -> None:
        """Set the event: cancel the work for a client that has gone."""
        self._task.cancel()

    async def _run(self, request: Request) -> None:
        """Respond; a connection whose response broke off can only be closed."""
        try:
            await self._protocol.app.respond(request, self)
        except ShardgateError:
            pass  # the gateway has logged it
        except Exception:  # noqa: BLE001  nothing else would log it
            _log.exception("an answer broke off")
        finally:
            if not self.response_complete:
                self._protocol.transport.close()

    async def write(self, response: Response) -> None:
        """Write a response, and return when the client has taken most of it."""
        self.status = response.status
        if self._protocol.flow.write_paused:
            await self._protocol.flow.drain()
        self.response_started = True
        self._protocol.write_response(response, *([] if self.keep_alive else [_CLOSE]))
        body = response.body
        if not isinstance(body, bytes):
            fields = dict(cast("Headers", response.headers))
            await self._write_pieces(body, int(fields[b"content-length"]))
        if self._protocol.flow.write_paused:
            await self._protocol.flow.drain()
        if isinstance(body, bytes):
            self.sent_nbytes = len(body)
        self.response_complete = True
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()

    async def _write_pieces(self, pieces: Pieces, length: int) -> None:
        if (lowat := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
            # With more bytes that the network has not taken, clients that read one connection
            # after the other leave some of them without a byte for a second.
            connection = self._protocol.transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, lowat, 64 * 1024)
        async for piece in pieces:
            if self._protocol.flow.write_paused:
                await self._protocol.flow.drain()
            length -= len(piece)
            if length < 0:  # the client would take it for the next response
                break
            self._protocol.transport.write(piece)
            self.sent_nbytes += len(piece)
        if length:
            raise RuntimeError(f"{length} bytes of the body are missing")


def _reason(error: httptools.HttpParserError) -> RefusedRequestError:
    """Return the refusal that a callback raised, or the one for a fault of the parser or ours."""
    cause = error.__context__
    if isinstance(cause, RefusedRequestError):
        return cause
    is_callback = isinstance(error, httptools.HttpParserCallbackError)
    if not is_callback or isinstance(cause, httptools.HttpParserError):
        return RefusedRequestError(*MALFORMED)
    _log.error("a request failed", exc_info=cause)
    return RefusedRequestError(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of this service")
