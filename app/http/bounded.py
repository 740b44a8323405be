"""uvicorn's HTTP/1.1 protocol, with bounds on what clients send beside bodies, and how slowly.

It bounds heads, what comes instead of one, what comes behind a body, the requests that wait
behind another, and how long a head may take: uvicorn bounds none of these. What is used of
`HttpToolsProtocol` beyond `asyncio.Protocol` is in this file and in `app.http.protocol`.
"""

import asyncio
import logging
import resource
import sys
from functools import cache
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.http.answer import AtHand, Given, Headers, combined
from app.http.bodies import is_announced
from app.http.heads import Again, written

HEAD_NBYTES: Final = 64 * 1024
"""So much may come before a head is complete, or behind a body; keys have up to 3 KiB."""
HEADERS: Final = 128
PIPELINED: Final = 256
"""Requests that wait behind one on their connection, at most."""
HEAD_S: Final = 10.0
"""Longest time for the first head of a connection, and for one that has begun."""
KEPT_S: Final = 5.0
"""Longest time from an answer to the next request."""

FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_CONTINUE: Final = b"100-continue"
_CONTINUE_LINE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE: Final = (b"connection", b"close")
_always: Final = Again()
"""The date and the like; uvicorn makes a new list of them each second."""
_log = logging.getLogger(__name__)


class RefusedError(Exception):
    """What a client sends is no request that can be answered."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


_MALFORMED: Final = (HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1")
_TOO_LARGE: Final = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the head of a request has up to {HEAD_NBYTES} bytes and {HEADERS} headers",
)
_TOO_MANY: Final = (HTTPStatus.SERVICE_UNAVAILABLE, "too many connections are open")


@cache
def most_connections() -> int:
    """Tell how many of the files that the process may open are for clients."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft * 3 // 4


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection on which something else arrives than requests, or too little."""

    app: Any
    cycle: Any
    timeout_keep_alive: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = KEPT_S
        self.running: Any = None
        """What answers now: a cycle of uvicorn's, which need not be the newest, or the like."""
        self.target: Any = None
        """The parsed target of the request whose head is complete."""
        self.given: Given = {}
        """The headers of that head, by name."""
        self._nbytes = 0
        """Have arrived since a head was complete or bytes of a body came."""
        self._is_heading = False
        """Whether a head has begun, and is not complete."""
        self._is_late = False
        self._is_refused = False
        self._is_resting = False
        """Whether the timer goes on although requests arrive."""
        self._idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Await the first request, unless files run out: stores need some too."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self._is_refused = True
            self._write_refusal(RefusedError(*_TOO_MANY))
            transport.close()
            return
        self._idle_since = self.loop.time()
        self._is_resting = True
        self._wake_in(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """Take what has arrived, unless it goes on without end."""
        if self._is_refused:
            return
        self._nbytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(_reason(error))
        else:
            if self._nbytes > HEAD_NBYTES:
                self._refuse(RefusedError(*_TOO_LARGE))

    def _feed(self, data: bytes) -> None:
        """Parse *data*; who asks for another protocol is answered in this one (RFC 9110 §7.8)."""
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            else:
                break

    def on_message_begin(self) -> None:
        """Begin a request; uvicorn's scope is made when uvicorn answers it."""
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._is_heading, self._is_late = True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; what comes behind a body is none."""
        if self._is_heading:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the head, and leave what is not begun to be answered at once to uvicorn."""
        self._check_head()
        if not self.begin():
            url, headers, is_expecting = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.headers, self.expect_100_continue = url, headers, is_expecting
            self.scope["headers"] = headers
            super().on_headers_complete()

    def begin(self) -> bool:
        """Begin to answer outside of ASGI, if that can be."""
        return False

    def _check_head(self) -> None:
        """Be sure that the head is one which all understand alike.

        Raises: `RefusedError`.
        """
        if self._nbytes > HEAD_NBYTES and _nbytes(self.url, self.headers) > HEAD_NBYTES:
            raise RefusedError(*_TOO_LARGE)
        if len(self.headers) > HEADERS:
            raise RefusedError(*_TOO_LARGE)
        given = self.given = combined(self.headers)
        is_each_once = len(given) == len(self.headers)
        hosts = b"host" in given if is_each_once else _count(b"host", self.headers)
        if hosts != 1 and (hosts or self.parser.get_http_version() == "1.1"):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "a request names one Host")
        if self.parser.should_upgrade() and not FRAMING.isdisjoint(given):
            # The parser takes what follows for the other protocol, or for a request.
            raise RefusedError(HTTPStatus.BAD_REQUEST, "who sends a body asks for no upgrade")
        if len(self.pipeline) >= PIPELINED:
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, "too many requests at once")
        self.target = httptools.parse_url(self.url)
        if self.target.path is None:
            raise RefusedError(*_MALFORMED)
        if self.target.host is not None:  # it takes the place of Host (RFC 9112 §3.2.2)
            authority = self.url.split(b"/", 3)[2].rpartition(b"@")[2]
            self.headers = [each for each in self.headers if each[0] != b"host"]
            self.headers.append((b"host", authority))
            given = self.given = combined(self.headers)
        if b"expect" in given:
            is_expected = _CONTINUE in given[b"expect"].lower().split(b", ")
            self.expect_100_continue = is_expected and self.parser.get_http_version() == "1.1"
        self._is_heading = False
        self._nbytes = 0

    def on_body(self, body: bytes) -> None:
        """Hand a part of a body on."""
        self.go_on()
        super().on_body(body)

    def go_on(self) -> None:
        """Note that a body arrives, which is bounded elsewhere."""
        self._nbytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop working for a client that has gone."""
        super().connection_lost(exc)
        self._end_running()
        self.stop_resting()

    def on_response_complete(self) -> None:
        """Await the next request."""
        super().on_response_complete()
        self._is_resting = self.timeout_keep_alive_task is not None
        self._nbytes = 0
        self._idle_since = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, and one on which a head comes too slowly."""
        now = self.loop.time()
        if self.is_under_way:
            self.stop_resting()
        elif (left := self._idle_since + self.timeout_keep_alive - now) > 0:
            self._wake_in(left)
        elif not self._is_heading:
            self.transport.close()
        elif self._is_late:
            self._refuse(RefusedError(HTTPStatus.REQUEST_TIMEOUT, "the head came too slowly"))
        else:
            self._is_late = True
            self._wake_in(HEAD_S)

    @property
    def is_under_way(self) -> bool:
        """Whether a request is being answered."""
        return self.running is not None and not self.running.response_complete

    def rest(self, since: float) -> None:
        """Await the next request as `on_response_complete` does, but set no timer for each."""
        self.server_state.total_requests += 1
        self._idle_since = since
        if not self._is_resting:
            self._is_resting = True
            self._wake_in(self.timeout_keep_alive)

    def _wake_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def stop_resting(self) -> None:
        """Await no request while one is answered."""
        self._is_resting = False
        self._unset_keepalive_if_required()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.stop_resting()
        self.running = cycle
        if cycle.waiting_for_100_continue and not is_announced(combined(cycle.scope["headers"])):
            # botocore up to 1.43.62 takes a final status line in its place for later answers too.
            self.transport.write(_CONTINUE_LINE)
            cycle.waiting_for_100_continue = False
        super()._start_asgi_task(cycle, app)

    def _refuse(self, refused: RefusedError) -> None:
        """Say why, if that cannot be taken for another answer, and end the connection."""
        self._is_refused = True
        is_another = self._is_heading or self.cycle is not self.running
        if self.is_under_way and (is_another or self.running.response_started):
            self.pipeline.clear()
            self.running.keep_alive = False
            self.flow.pause_reading()
            return
        if self._is_heading or self.is_under_way:
            self._write_refusal(refused)
        self.transport.close()
        self._end_running()

    def _write_refusal(self, refused: RefusedError) -> None:
        _log.debug("refused what %s sends: %s", self.client, refused)
        given = combined(self.headers or [])
        refusal: AtHand = self.app.refuse(refused.status, str(refused), given)
        self.write_answer(refusal.status, refusal.head + written([_CLOSE]), refusal.body)

    def _end_running(self) -> None:
        if self.running is not None:
            self.running.disconnected = True
            self.running.message_event.set()

    def write_answer(self, status: HTTPStatus, head: bytes, body: bytes) -> None:
        """Write the *head* of an answer, and the body as far as it is there."""
        always = _always.written(self.server_state.default_headers)
        self.transport.writelines((b"".join((STATUS_LINE[status], always, head, b"\r\n")), body))


def _reason(error: httptools.HttpParserError) -> RefusedError:
    """Tell what the parser, or what it called, did not take."""
    cause = error.__context__
    if isinstance(cause, RefusedError):
        return cause
    if not isinstance(error, httptools.HttpParserCallbackError) or isinstance(
        cause, httptools.HttpParserError
    ):
        return RefusedError(*_MALFORMED)
    _log.error("a request failed", exc_info=cause)
    return RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of this service")


def _count(name: bytes, headers: Headers) -> int:
    return sum(each == name for each, _ in headers)


def _nbytes(url: bytes, headers: Headers) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
