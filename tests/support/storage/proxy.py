"""A real proxy in front of a server, with faults at chosen requests.

It passes requests on unchanged, so that signatures stay right.
"""

import asyncio
import http.client
import re
import socket
import threading
from collections.abc import Callable, Container, Generator
from contextlib import closing, contextmanager, suppress
from enum import Enum, StrEnum
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from shardgate.model import ObjectRef
from shardgate.storage.contract import ObjectWriter
from tests.support.storage.listening import Handler, Listener


class Mishap(StrEnum):
    """Faults of one request."""

    ANSWER_LOST = "it is done, and the connection breaks"
    REQUEST_LOST = "the connection breaks before it is done"
    BODY_LOST = "the connection breaks when the server has its head"
    DONE_AND_500 = "it is done, and the proxy says 500"
    ERROR = "500"
    SLOW_DOWN = "503 SlowDown"
    CONFLICT = "409 ConditionalRequestConflict, if it is a conditional write"


_PAGE: Final = b"<html><body><h1>Sorry</h1></body></html>\n"
_XML: Final = b"<Error><Code>%b</Code></Error>"


class Lie(Enum):
    """Responses of something that is not the server, instead of the server's own."""

    PAGE_404 = 404, _PAGE
    EMPTY_404 = 404, b""
    UPLOAD_404 = 404, _XML % b"NoSuchUpload"
    BUCKET_404 = 404, _XML % b"NoSuchBucket"
    QUOTED_404 = 404, b"<html><body><Code>NoSuchKey</Code></body></html>"
    PAGE_410 = 410, _PAGE
    KEY_410 = 410, _XML % b"NoSuchKey"
    PAGE_403 = 403, _PAGE
    PAGE_400 = 400, _PAGE
    EMPTY_204 = 204, b""
    EMPTY_200 = 200, b""
    PAGE_200 = 200, b"<!doctype html><p>Sorry<br>\n"
    XHTML_200 = 200, _PAGE
    REDIRECT = 302, _PAGE
    MOVED = 301, _PAGE
    EMPTY_304 = 304, b""
    EMPTY_412 = 412, b""
    EMPTY_416 = 416, b""
    PAGE_502 = 502, _PAGE


class Twist(StrEnum):
    """Changes of the server's response."""

    NO_ETAG = "it has no ETag"
    OTHER_ETAG = "it has the ETag of something else"
    CUT = "its body ends before its length"
    SHORT = "its body and length are shorter than its range"
    LONG = "its body and length are longer than its range"
    SURPLUS = "its body is longer than its length"
    OTHER_RANGE = "it has another range of the object"
    PAGE = "its body is HTML, and its range and ETag are as they were"
    STALE = "it is the first answer to the same GET or HEAD"


_STATUS: Final = {
    Mishap.DONE_AND_500: (500, "InternalError"),
    Mishap.ERROR: (500, "InternalError"),
    Mishap.SLOW_DOWN: (503, "SlowDown"),
    Mishap.CONFLICT: (409, "ConditionalRequestConflict"),
}
type Fault = Mishap | Lie | Twist
type Answer = tuple[int, list[tuple[str, str]], bytes]
_DONE: Final = {Mishap.ANSWER_LOST, Mishap.DONE_AND_500}
_CONDITIONS: Final = {"if-match", "if-none-match", "x-goog-if-generation-match"}
_HOP: Final = {"transfer-encoding", "connection", "content-length"}


class Proxy:
    """Counts requests, and spoils some."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.seen: list[str] = []
        self.before: Callable[[str], object] = lambda _request: None
        """Called with each request before it is counted; it may wait."""
        self.between: Callable[[], object] = lambda: None
        """Called after the spoilt request was passed on or dropped."""
        self.hides: Callable[[str, str], bool] = lambda _method, _header: False
        """Whether a method's header is removed; for ``host`` the proxy's is sent instead."""
        self.unknown = "no such header"
        """Requests with this header are answered 501."""
        self.passes_on = False
        """Whether the request of a `Lie` is passed on."""
        self.first: dict[tuple[str, str, str | None], Answer] = {}
        """First responses, for `Twist.STALE`."""
        self._order: tuple[Container[int], Fault] | None = None
        self._lock = threading.Lock()
        self._server = Listener(_Handler, self)
        self.url = self._server.url

    def spoil(self, nth: Container[int], mishap: Fault) -> None:
        """Apply *mishap* to each *nth* request from now, and forget earlier orders."""
        with self._lock:
            self.seen.clear()
            self._order = nth, mishap

    def heal(self) -> None:
        """Pass all requests on unchanged, and forget those that were seen."""
        with self._lock:
            self.seen.clear()
            self._order = None
            self.between = lambda: None
            self.passes_on = False

    def note(self, request: str) -> Fault | None:
        """Count a request, and return its fault."""
        with self._lock:
            self.seen.append(request)
            if self._order is not None and len(self.seen) - 1 in self._order[0]:
                return self._order[1]
            return None

    @contextmanager
    def running(self) -> Generator["Proxy"]:
        """Pass requests on until the context ends."""
        with self._server.running():
            yield self


async def cancel_probes(store: ObjectWriter, root: ObjectRef, proxy: Proxy) -> None:
    """Probe the server of *store* again and again, each time for another folder of *root*, and
    cancel the caller at another of the probe's requests.
    """
    before = len(proxy.seen)
    await store.verify_conditional_writes(root.join("whole"))
    requests = len(proxy.seen) - before

    for nth in range(1, requests + 1, 2):
        before = len(proxy.seen)
        probe = store.verify_conditional_writes(root.join(f"{nth}"))
        verification = asyncio.ensure_future(probe)
        while len(proxy.seen) < before + nth and not verification.done():  # noqa: ASYNC110  it is another thread
            await asyncio.sleep(0.001)
        verification.cancel()
        await asyncio.wait([verification])
        if remaining := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(remaining)


class _Handler(Handler[Proxy]):
    def answer(self) -> None:
        owner = self.server.owner
        condition = " if" if self._is_conditional() else ""
        request = f"{self.command} {self.path}{condition}"
        owner.before(request)
        mishap = owner.note(request)
        body = self.body()
        if owner.unknown in self.headers:
            self._refuse(501, "NotImplemented")
            return
        if mishap is None or (mishap is Mishap.CONFLICT and not condition):
            self._send(*self._passed_on(body))
            return
        if isinstance(mishap, Lie):
            self._lie(mishap, body)
            return
        if isinstance(mishap, Twist):
            self._twist(mishap, self._passed_on(body))
            return
        if mishap in _DONE:
            self._passed_on(body)
        if mishap is Mishap.BODY_LOST:
            self._pass_head_on()
        owner.between()
        if mishap in _STATUS:
            self._refuse(*_STATUS[mishap])
            return
        self.reset()

    def _lie(self, lie: Lie, body: bytes) -> None:
        if self.server.owner.passes_on:
            self._passed_on(body)
        status, text = lie.value
        headers = [("Content-Type", "text/html" if text[1:5] != b"Erro" else "application/xml")]
        if lie in (Lie.REDIRECT, Lie.MOVED):
            headers.append(("Location", "/elsewhere/login"))
        self._send(status, headers, text)

    def _twist(self, twist: Twist, answer: Answer) -> None:
        status, headers, body = answer
        told, announced = dict(headers), None
        match twist:
            case Twist.NO_ETAG:
                told.pop("ETag", None)
            case Twist.OTHER_ETAG if "ETag" in told:
                told["ETag"] = '"00000000000000000000000000000000"'
            case Twist.STALE if self.command in ("GET", "HEAD"):
                key = self.command, self.path.partition("?")[0], self.headers.get("Range")
                status, headers, body = self.server.owner.first.setdefault(key, answer)
                told = dict(headers)
            case Twist.CUT | Twist.SURPLUS if self.command == "GET":
                announced = len(body)
                body = body[:-3] if twist is Twist.CUT else body + b"more"
                self.close_connection = twist is Twist.CUT
            case Twist.SHORT if status == 206:
                body = body[:-3]
            case Twist.LONG if status == 206:
                body += b"more"
            case Twist.OTHER_RANGE if status == 206:
                first, last, size = map(int, re.findall("[0-9]+", told["Content-Range"]))
                told["Content-Range"] = f"bytes {first + 1}-{last + 1}/{size + 1}"
            case Twist.PAGE if status == 206:
                body = _PAGE
        self._send(status, list(told.items()), body, announced)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, [], f"<Error><Code>{code}</Code></Error>".encode())

    def _is_conditional(self) -> bool:
        is_write = self.command not in ("GET", "HEAD")
        return is_write and bool(_CONDITIONS & {k.lower() for k in self.headers})

    def _passed_on(self, body: bytes) -> Answer:
        with closing(self._begun()) as upstream:
            upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
            return answer.status, answer.getheaders(), data

    def _pass_head_on(self) -> None:
        """Send the head without its body, and give the server time to act on that."""
        with closing(self._begun()) as upstream:
            upstream.endheaders()
            upstream.sock.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                upstream.sock.recv(1)

    def _begun(self) -> http.client.HTTPConnection:
        owner = self.server.owner
        return self.begin_upstream(owner.upstream, partial(owner.hides, self.command))

    def _send(
        self, status: int, headers: list[tuple[str, str]], body: bytes, announced: int | None = None
    ) -> None:
        self.send_response_only(status)
        length = str(len(body) if announced is None else announced)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
            elif name.lower() == "content-length" and self.command == "HEAD":
                length = value
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
