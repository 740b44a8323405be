"""`shardgate.server.protocol`: plain GETs and ASGI requests are answered alike, on raw sockets."""

import asyncio
import inspect
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState
from uvicorn.supervisors import Multiprocess

from shardgate.errors import TruncatedReadError
from shardgate.gateway.gateway import Gateway
from shardgate.model import ByteRange, Condition, ETag, ObjectRef
from shardgate.server.protocol import GatewayProtocol
from shardgate.server.request import Exchange, Request, Response
from shardgate.settings import Settings
from shardgate.storage.contract import Found, NotModified
from shardgate.storage.memory import MemoryStore
from tests.support.attacks.raw import connect, heard
from tests.support.files import write_files
from tests.support.formats.zarr.building import build
from tests.support.serving import serving

CHUNK = b"0123456789"
KEPT_S = 2
"""Idle connections are kept for so long."""
TICK_S = 0.01
"""Timers of the loop count milliseconds."""
LARGE = b"x" * 3_000_000
HUGE = bytes(30_000_000)  # more than the system takes for a client that does not read
CHUNKS = {"c/0/0": CHUNK, "c/0/1": b"another", "c/1/1": LARGE}
GET = b"GET /em/%s HTTP/1.1\r\nHost: test\r\n%s\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store an array."""
    folder = tmp_path_factory.mktemp("em")
    write_files(build(CHUNKS), folder)
    return folder


@pytest.fixture(scope="module", params=["at hand", "to be read"])
def url(request: pytest.FixtureRequest, folder: Path) -> Generator[str]:
    """Serve the array with every chunk in the cache, or none."""
    with serving(_settings(folder, cached=request.param == "at hand")) as url:
        for key in CHUNKS:
            _ask(url, _get(key))
        yield url


def _settings(folder: Path, *, cached: bool) -> Settings:
    """Return settings that stream the large chunk unless it is cached."""
    return Settings(
        server={"cors_origins": ["https://a.example"], "keep_alive_s": KEPT_S},
        cache={} if cached else {"chunk_bytes": 0},
        limits={} if cached else {"stream_bytes": 1_000_000},
        datasets={"em": {"url": folder.as_uri()}},
    )


def _get(key: str, headers: bytes = b"") -> bytes:
    return GET % (key.encode(), headers)


def _read_answer(connection: socket.socket) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Read one response: its first line, headers, and body."""
    with connection.makefile("rb", buffering=0) as stream:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += stream.read(1) or pytest.fail(f"closed after {head!r}")
        line, *fields = head.rstrip().split(b"\r\n")
        headers = dict(field.split(b": ", 1) for field in fields)
        body, length = b"", int(headers.get(b"content-length", b"0"))
        while len(body) < length:
            body += stream.read(length - len(body)) or pytest.fail("closed in the body")
    return line, headers, body


def _ask(url: str, request: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    with connect(url) as connection:
        connection.sendall(request)
        return _read_answer(connection)


def _without_id(headers: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {k: v for k, v in headers.items() if k not in {b"x-request-id", b"date", b"connection"}}


@pytest.mark.parametrize(
    "headers",
    [
        *(b"", b"Range: bytes=2-4\r\n", b"Range: bytes=-3\r\n", b"Range: bytes=99-\r\n"),
        *(b"Range: bytes=x\r\n", b'If-Match: "other"\r\n', b"If-None-Match: *\r\n"),
        b"Origin: https://a.example\r\n",
        b"Origin: https://b.example\r\n",
    ],
)
def test_both_ways_respond_alike(url: str, headers: bytes) -> None:
    """A GET through ASGI (`Connection: close`) gets the response of a kept connection."""
    short = _ask(url, _get("c/0/0", headers))
    long = _ask(url, _get("c/0/0", headers + b"Connection: close\r\n"))

    assert short[0] == long[0]
    assert _without_id(short[1]) == _without_id(long[1])
    assert short[2] == long[2]


def test_unknown_parameters_are_ignored(url: str) -> None:
    """An unknown parameter changes no response. S3 clients get errors in XML."""
    plain = _ask(url, _get("c/0/0"))
    signed = b"Authorization: AWS4-HMAC-SHA256 x\r\n"

    assert _ask(url, _get("c/0/0?v=1", signed))[::2] == plain[::2]
    assert _ask(url, _get("c/0/0?token=acl&v=3"))[::2] == plain[::2]
    _, headers, body = _ask(url, _get("nothing", signed))
    assert headers[b"content-type"] == b"application/xml"
    assert b"<Code>NoSuchKey</Code>" in body


def test_unusual_requests_are_answered(url: str) -> None:
    """`OPTIONS *` is 204, invalid HTTP 400, HTTP/1.0 is closed; repeated conditions are a list."""
    for path in (b"*", b"/"):
        line, headers, _ = _ask(url, b"OPTIONS %s HTTP/1.1\r\nHost: test\r\n\r\n" % path)
        assert line.split()[1] == b"204"
        assert b"access-control-allow-methods" in headers
    assert b" 400 " in _ask(url, b"what?\r\n\r\n")[0]
    with connect(url) as connection:
        connection.sendall(b"GET /em/c/0/0 HTTP/1.0\r\n\r\n")
        assert heard(connection).endswith(CHUNK)  # it is closed
    etag = _ask(url, _get("c/0/0"))[1][b"etag"]
    lines = b'If-None-Match: %s\r\nIf-None-Match: "other"\r\n' % etag
    assert _ask(url, _get("c/0/0", lines))[0].split()[1] == b"304"


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    """Pipelined requests are answered in order, and bodies of GET are discarded."""
    keys = ["c/0/0", "c/7/7", "c/0/1", "zarr.json", "nothing", "c/0/0"]
    statuses = [b"200", b"404", b"200", b"200", b"404", b"200"]
    with connect(url) as connection:
        connection.sendall(b"".join(map(_get, keys)))
        answers = [_read_answer(connection) for _ in keys]
        for key in keys:
            connection.sendall(_get(key, b"Content-Length: 5\r\n") + b"hello")
            answers.append(_read_answer(connection))

    assert [answer[0].split()[1] for answer in answers] == statuses * 2
    assert [answers[at][2] for at in (0, 2, 5)] == [CHUNK, b"another", CHUNK]
    assert [answer[2] for answer in answers[:6]] == [answer[2] for answer in answers[6:]]


def test_slow_reader_gets_everything(url: str) -> None:
    """A client that does not read for longer than `keep_alive_s` still gets all responses."""
    with connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(_get("c/1/1") * 5)
        time.sleep(KEPT_S + 0.5)
        answers = [_read_answer(connection)[2] for _ in range(5)]

    assert answers == [LARGE] * 5


@pytest.mark.parametrize(
    "url", ["at hand", pytest.param("to be read", marks=pytest.mark.soak)], indirect=True
)
def test_idle_connection_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection is closed `keep_alive_s` after its last response, and not before."""
    monkeypatch.setattr("shardgate.server.protocol.HEAD_S", 3.0)  # or the first look takes longer
    with connect(url) as connection:
        for key in ["c/0/0", "c/9/9", "c/0/1", "c/0/0"]:
            time.sleep(KEPT_S / 3)
            asked_at = time.monotonic()
            connection.sendall(_get(key))
            _read_answer(connection)

        assert connection.recv(1) == b""
        assert time.monotonic() - asked_at >= KEPT_S - TICK_S


@pytest.mark.parametrize(("sent", "is_echoed"), [(b"mine-1", True), (b"a b", False), (b"", False)])
def test_request_ids_of_clients_are_echoed(url: str, sent: bytes, *, is_echoed: bool) -> None:
    """A valid X-Request-ID is echoed; a missing or invalid one is replaced by a new one."""
    headers = b"X-Request-ID: %b\r\n" % sent if sent else b""
    ids = {_ask(url, _get("c/0/0", headers))[1][b"x-request-id"] for _ in range(2)}

    assert (ids == {sent}) is is_echoed
    assert len(ids) == (1 if is_echoed else 2)


class _Gated(MemoryStore):
    """Holds reads of shards until its gate is open, and breaks off streams."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.cancelled = threading.Event(), threading.Event()
        self.ended = threading.Event()
        self.is_open = self.streams_on = False
        self.surplus = b""
        for key, data in build(CHUNKS | {"c/1/0": HUGE}).items():
            self.place(ObjectRef("memory://bucket", key), data)
        self.place(ObjectRef("memory://bucket", "notes"), b"notes")

    async def get(self, ref: ObjectRef, *args: Any, **kwargs: Any) -> Found | NotModified | None:
        """Read, once the gate is open."""
        if kwargs.get("if_match") is not None:
            self.asked.set()
            try:
                while not self.is_open:  # noqa: ASYNC110  it is opened by another thread
                    await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        found = await super().get(ref, *args, **kwargs)
        if ref.key == "notes" and isinstance(found, Found):
            return replace(found, etag=ETag('"\xe9"'))
        return found

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Yield a beginning, and the rest if *streams_on*."""

        async def pieces() -> AsyncIterator[bytes]:
            data = LARGE if byte_range.length == len(LARGE) else HUGE
            yield data[:1000]
            if not self.streams_on:
                raise TruncatedReadError(ref, "as ordered")
            for at in range(1000, len(data), 100_000):
                yield data[at : at + 100_000]
            yield self.surplus

        try:
            yield pieces()
        finally:
            self.ended.set()


@contextmanager
def _serving(store: _Gated) -> Generator[str]:
    settings = Settings(
        limits={"stream_bytes": 1_000_000}, datasets={"em": {"url": "memory://bucket"}}
    )
    with serving(settings, wrap=lambda _: store) as url:
        yield url


def _metrics(url: str) -> bytes:
    return _ask(url, b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n")[2]


def test_disconnected_client_cancels_its_read() -> None:
    """A read is cancelled when its client disconnects, which is counted as gone, not as failed.

    An ETag that is not ASCII is returned as stored, and matches.
    """
    store = _Gated()
    with _serving(store) as url:
        for headers in (b"", b"Connection: close\r\n"):
            with connect(url) as connection:
                connection.sendall(_get("c/0/0", headers))
                assert store.asked.wait(10)
            assert store.cancelled.wait(10)
            store.asked.clear()
            store.cancelled.clear()
        assert b'{dataset="em",method="GET",outcome="gone"} 2.0' in _metrics(url)
        store.is_open = True

        assert _ask(url, _get("c/0/0"))[2] == CHUNK
        etag = _ask(url, _get("notes"))[1][b"etag"]
        again = _ask(url, _get("notes", b"If-None-Match: %s\r\n" % etag))[0]
        assert (etag, again.split()[1]) == (b'"\xe9"', b"304")


def test_interrupted_response_closes_the_connection() -> None:
    """A response whose stream breaks off closes the connection, and is counted as failed."""
    store = _Gated()
    with _serving(store) as url, connect(url) as connection:
        connection.sendall(_get("c/1/1"))
        received = heard(connection)
        metrics = _metrics(url)

    assert b"content-length: %d" % len(LARGE) in received
    assert received.endswith(b"\r\n\r\n" + LARGE[:1000])
    assert b'{dataset="em",method="GET",outcome="failed"} 1.0' in metrics
    assert b'shardgate_sent_bytes_total{dataset="em"} 1000.0' in metrics
    assert b"shardgate_requests_in_flight 1.0" in metrics  # the scrape


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> _Gated:
    """Return a store that streams, with a short limit for stalled clients."""
    monkeypatch.setattr("shardgate.server.protocol._STALLED_S", 0.3)
    store = _Gated()
    store.is_open = store.streams_on = True
    return store


def test_stalled_client_is_disconnected(streaming: _Gated) -> None:
    """A client that reads nothing for the limit is disconnected, and its stream is closed."""
    with _serving(streaming) as url, connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(_get("c/1/0"))

        assert streaming.ended.wait(10)


def test_slow_client_is_not_disconnected(streaming: _Gated) -> None:
    """A client that reads slowly gets the whole response."""
    received = 0
    with _serving(streaming) as url, connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(_get("c/1/1"))
        while received < len(LARGE):
            received += len(connection.recv(200_000))
            time.sleep(0.05)

    assert streaming.ended.is_set()


def test_response_longer_than_announced_is_cut(streaming: _Gated) -> None:
    """Surplus bytes of a store are not sent."""
    streaming.surplus = b"HTTP/1.1 200 OK\r\n\r\n"
    with _serving(streaming) as url, connect(url) as connection:
        connection.sendall(_get("c/1/1"))
        received = heard(connection)

    assert streaming.surplus not in received.partition(b"\r\n\r\n")[2]


def test_cached_response_does_not_overtake_a_waiting_one() -> None:
    """A response from memory does not overtake an earlier one that waits for its read."""
    store = _Gated()
    with _serving(store) as url, connect(url) as connection:
        _ask(url, _get("zarr.json"))
        connection.sendall(_get("c/0/0") + _get("zarr.json") + _get("c/0/1"))
        assert store.asked.wait(10)
        store.is_open = True
        bodies = [_read_answer(connection)[2] for _ in range(3)]

    assert (bodies[0], bodies[2]) == (CHUNK, b"another")


def test_internal_error_closes_its_connection_only(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error closes its connection, and other connections are served.

    That of a request under way is counted as failed.
    """
    cached = Gateway.cached
    respond = Gateway.respond

    def broken(self: Gateway, request: Request) -> Response | None:
        if request.path == "/em/fault":
            raise RuntimeError("at once")
        return cached(self, request)

    async def failing(self: Gateway, request: Request, exchange: Exchange) -> None:
        if request.path == "/em/later":
            raise RuntimeError("later")
        await respond(self, request, exchange)

    monkeypatch.setattr(Gateway, "cached", broken)
    monkeypatch.setattr(Gateway, "respond", failing)
    with connect(url) as other:
        for key in ("fault", "later"):
            with connect(url) as connection:
                connection.sendall(_get(key))
                assert connection.recv(1) == b""
        other.sendall(_get("c/0/0"))
        assert _read_answer(other)[2] == CHUNK
    metrics = _metrics(url)
    assert b'{dataset="em",method="GET",outcome="failed"} 1.0' in metrics
    assert b"shardgate_requests_in_flight 1.0" in metrics  # the scrape


def test_response_is_finished_at_shutdown() -> None:
    """A request that waits at shutdown gets its response, with `Connection: close`."""
    store = _Gated()
    with ExitStack() as clients:
        with _serving(store) as url:
            client = clients.enter_context(connect(url))
            client.sendall(_get("c/0/0"))
            assert store.asked.wait(10)
            threading.Timer(0.5, setattr, (store, "is_open", True)).start()
        _, headers, body = _read_answer(client)

    assert (headers[b"connection"], body) == (b"close", CHUNK)


def test_uvicorn_has_the_private_members_that_are_relied_on() -> None:
    """The protocol's class of uvicorn has the private members that are relied on.

    Check this first when raising its cap in ``pyproject.toml``.
    """
    overridden = {name for name in vars(GatewayProtocol) if name in vars(HttpToolsProtocol)}
    config = uvicorn.Config(lambda: None, interface="asgi3", http=GatewayProtocol, log_config=None)
    protocol = HttpToolsProtocol(config, ServerState(), {}, asyncio.new_event_loop())
    protocol.loop.close()
    cycle = inspect.signature(RequestResponseCycle.__init__).parameters

    assert overridden >= {
        "__init__", "connection_made", "connection_lost", "data_received", "on_message_begin",
        "on_header", "on_headers_complete", "on_body", "on_message_complete", "pause_writing",
        "resume_writing", "_start_asgi_task", "on_response_complete", "timeout_keep_alive_handler",
    }  # fmt: skip
    assert vars(protocol).keys() >= {
        "app", "client", "connections", "cycle", "expect_100_continue", "flow", "headers", "loop",
        "parser", "pipeline", "scope", "server_state", "tasks", "timeout_keep_alive",
        "timeout_keep_alive_task", "transport",
    }  # fmt: skip
    assert "_unset_keepalive_if_required" in dir(protocol)
    assert isinstance(protocol.parser, httptools.HttpRequestParser)
    assert isinstance(protocol.server_state.default_headers, list)
    assert {"scope", "keep_alive", "message_event", "expect_100_continue"} <= cycle.keys()
    assert set(RequestResponseCycle.__init__.__code__.co_names) >= {
        "disconnected", "response_started", "response_complete", "waiting_for_100_continue",
    }  # fmt: skip
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
    assert {"startup", "handle_exit"} <= vars(uvicorn.Server).keys()
    assert {"init_processes", "terminate_all"} <= vars(Multiprocess).keys()
