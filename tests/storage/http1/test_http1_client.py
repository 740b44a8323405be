"""The HTTP client: requests share few connections, and failures and cancellations cost none."""

import asyncio
import socket
import ssl
from collections.abc import Generator
from contextlib import aclosing
from pathlib import Path

import pytest

from shardgate.storage import http1_client as client_module
from shardgate.storage.http1_client import (
    CutOffError,
    ExchangeError,
    HttpClient,
    NoAnswerError,
    RequestTarget,
)
from tests.support.storage.http1.scripted import HEAD, Do, Serve, Step, answer, fetch, until

ANSWERED: list[Step] = [Do.READ, answer()]
UNMEASURED = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture
def deaf() -> Generator[RequestTarget]:
    """Listen without accepting, with a full queue of waiting connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)  # noqa: FBT003
            each.connect_ex(listener.getsockname())
        yield RequestTarget(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        for each in waiting:
            each.close()


async def test_request_is_sent_as_given(serve: Serve, client: HttpClient) -> None:
    """A request has the method, target and headers that it was given."""
    server = await serve(ANSWERED)
    await client.send("GET", server.target("/a?b=c"), b"Range: bytes=0-1\r\nX-Empty:\r\n")

    assert server.requests == [
        b"GET /a?b=c HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept-Encoding: identity\r\n"
        b"User-Agent: shardgate\r\nRange: bytes=0-1\r\nX-Empty:\r\n\r\n" % server.port
    ]


@pytest.mark.parametrize("end", [Do.CLOSE, Do.RESET])
async def test_a_request_on_a_kept_connection_that_closes_is_repeated(
    serve: Serve, client: HttpClient, transport: ssl.SSLContext | None, end: Do
) -> None:
    """A request is repeated on a new connection if a kept one closes before any response."""
    scripts: list[list[Step]] = [[*ANSWERED, Do.READ, end], [Do.READ, answer(b"again")]]
    server = await serve(*scripts, tls=transport)
    await fetch(client, server.target("/a"))

    assert await fetch(client, server.target("/b")) == b"again"
    assert (server.paths, server.asked_on) == ([b"/a", b"/b", b"/b"], [0, 0, 1])


async def test_request_is_repeated_for_kept_connections(serve: Serve, client: HttpClient) -> None:
    """A request is repeated for each kept connection that a restarted server has closed."""
    both = asyncio.Event()
    kept: list[Step] = [Do.READ, both, answer(), Do.READ, Do.CLOSE]
    server = await serve(kept, kept, ANSWERED)
    async with asyncio.TaskGroup() as group:
        group.create_task(fetch(client, server.target()))
        group.create_task(fetch(client, server.target()))
        await until(lambda: server.connections == 2)
        both.set()
    await until(lambda: len(server.requests) == 2)

    assert await fetch(client, server.target()) == b"hello"
    assert sorted(server.asked_on) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("scripts", "error", "asked_on"),
    [
        ([[Do.READ, Do.CLOSE], ANSWERED], NoAnswerError, [0]),
        ([[Do.READ, Do.RESET], ANSWERED], ConnectionResetError, [0]),
        *(
            ([[*ANSWERED, Do.READ, data, Do.CLOSE], ANSWERED], NoAnswerError, [0, 0])
            for data in (b"H", HEAD[:-2], b"HTTP/1.1 100 Continue\r\n\r\n")
        ),
        ([[*ANSWERED, Do.READ, Do.CLOSE], [Do.READ, Do.CLOSE]], NoAnswerError, [0, 0, 1]),
    ],
)
async def test_a_request_that_the_server_may_have_processed_is_not_repeated(
    serve: Serve,
    client: HttpClient,
    scripts: list[list[Step]],
    error: type[Exception],
    asked_on: list[int],
) -> None:
    """A request is not repeated if a new connection closes, or if a response has begun."""
    server = await serve(*scripts)
    if scripts[0].count(Do.READ) > 1:
        await fetch(client, server.target())
    with pytest.raises(error):
        await client.send("GET", server.target())

    assert server.asked_on == asked_on


@pytest.mark.parametrize("is_eager", [False, True])
async def test_connections_are_bounded(serve: Serve, client: HttpClient, *, is_eager: bool) -> None:
    """Twenty concurrent requests are served by no more connections than the client allows."""
    server = await serve(ANSWERED * 20)
    requests = (fetch(client, server.target(), is_eager=is_eager) for _ in range(20))
    bodies = await asyncio.gather(*requests)

    assert bodies == [b"hello"] * 20
    assert server.connections == 2


async def test_response_is_released_once(serve: Serve, narrow: HttpClient) -> None:
    """Releasing a response twice frees one connection."""
    server = await serve([Do.READ, HEAD])
    response = await narrow.send("GET", server.target("/a"))
    response.release()
    response.release()
    await narrow.send("GET", server.target("/b"))
    waiting = asyncio.create_task(narrow.send("GET", server.target("/c")))
    await asyncio.sleep(0.02)

    assert server.paths == [b"/a", b"/b"]
    waiting.cancel()


async def test_each_server_has_its_own_connections(serve: Serve, narrow: HttpClient) -> None:
    """A silent server uses no connections of another server."""
    silent, other = await serve([Do.READ]), await serve(ANSWERED)
    waiting = asyncio.create_task(fetch(narrow, silent.target()))
    await until(lambda: silent.requests)

    assert await fetch(narrow, other.target()) == b"hello"
    waiting.cancel()


async def test_requests_are_served_in_order(serve: Serve, narrow: HttpClient) -> None:
    """Requests that wait for a connection are served in the order of their arrival."""
    server = await serve(ANSWERED * 10)
    paths = [f"/{number}" for number in range(10)]
    await asyncio.gather(*(fetch(narrow, server.target(path)) for path in paths))

    assert server.paths == [path.encode() for path in paths]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([Do.CLOSE], id="closed at once"),
        pytest.param([Do.READ, Do.RESET], id="reset before the head"),
        pytest.param([Do.READ, b"garbage"], id="garbage"),
        pytest.param([Do.READ, HEAD, b"he", Do.CLOSE], id="closed in the body"),
        pytest.param([Do.READ, HEAD, b"he", 0.01, Do.RESET], id="reset in the body"),
        pytest.param([Do.READ], id="silent before the head"),
        pytest.param([Do.READ, HEAD], id="silent before the body"),
    ],
)
async def test_failure_releases_its_connection(
    serve: Serve, hasty: HttpClient, steps: list[Step]
) -> None:
    """A failed request releases its connection for the next one."""
    server = await serve(steps, ANSWERED)
    with pytest.raises((ExchangeError, OSError)):
        await fetch(hasty, server.target())

    assert await fetch(hasty, server.target()) == b"hello"


async def test_connect_timeout_releases_connection(hasty: HttpClient, deaf: RequestTarget) -> None:
    """A host that does not accept raises TimeoutError, for the next request too."""
    cancelled = asyncio.create_task(hasty.send("GET", deaf))
    await asyncio.sleep(0.02)
    cancelled.cancel()
    async with asyncio.timeout(30):
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await hasty.send("GET", deaf)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([Do.READ], id="before the head"),
        pytest.param([Do.READ, HEAD[:-2]], id="in the head"),
        pytest.param([Do.READ, HEAD, b"he"], id="in the body"),
        pytest.param([*ANSWERED, Do.READ], id="on a kept connection"),
    ],
)
async def test_cancelled_request_releases_its_connection(
    serve: Serve, narrow: HttpClient, steps: list[Step]
) -> None:
    """A cancelled request closes its connection, and the next one is served."""
    server = await serve(steps, ANSWERED)
    if steps.count(Do.READ) > 1:
        await fetch(narrow, server.target())
    cancelled = asyncio.create_task(fetch(narrow, server.target()))
    await until(lambda: len(server.requests) == steps.count(Do.READ))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled

    await until(lambda: not server.open)
    assert await fetch(narrow, server.target()) == b"hello"


async def test_cancelled_waiting_request_leaves_queue(serve: Serve, narrow: HttpClient) -> None:
    """A request that is cancelled while it waits is not sent; those before and after it are."""
    go_on = asyncio.Event()
    server = await serve([Do.READ, go_on, answer(), *ANSWERED])
    paths = ["/first", "/cancelled", "/last"]
    first, cancelled, last = (
        asyncio.create_task(fetch(narrow, server.target(path))) for path in paths
    )
    await until(lambda: server.requests)
    cancelled.cancel()
    go_on.set()

    assert [await first, await last] == [b"hello", b"hello"]
    assert server.paths == [b"/first", b"/last"]


async def test_a_request_may_be_cancelled_at_any_moment(serve: Serve, narrow: HttpClient) -> None:
    """After a request is cancelled at any turn of the loop, the next gets its own response."""
    server = await serve([Do.READ, Do.ECHO] * 200)
    for turns in range(60):
        cancelled = asyncio.create_task(fetch(narrow, server.target("/cancelled")))
        for _ in range(turns):
            await asyncio.sleep(0)
        is_late = not cancelled.cancel()
        await asyncio.wait([cancelled])
        assert await fetch(narrow, server.target(f"/{turns}")) == b"/%d" % turns

    assert is_late, "some moments were left out"


async def test_closing_fails_connecting_requests(serve: Serve, narrow: HttpClient) -> None:
    """Closing the client fails a request that is connecting, and closes its connection."""
    server = await serve(ANSWERED)
    connecting = asyncio.create_task(narrow.send("GET", server.target()))
    await asyncio.sleep(0)
    await narrow.aclose()

    with pytest.raises((NoAnswerError, ConnectionError)):
        await connecting
    await until(lambda: not server.open)


async def test_unread_response_blocks_no_eager_request(serve: Serve, narrow: HttpClient) -> None:
    """An unread response delays other streamed responses, but no HEAD and no eager read."""
    server = await serve([Do.READ, HEAD], [*ANSWERED, Do.READ, HEAD, *ANSWERED])
    slow = await narrow.send("GET", server.target("/a"))
    waiting = asyncio.create_task(fetch(narrow, server.target("/c")))
    quick = await narrow.send("GET", server.target("/b"), is_eager=True)

    assert await quick.read() == b"hello"
    assert (await narrow.send("HEAD", server.target("/d"))).length == 5
    assert server.paths == [b"/a", b"/b", b"/d"]
    slow.release()
    assert await waiting == b"hello"


async def test_closed_client_sends_nothing(serve: Serve, client: HttpClient) -> None:
    """A closed client closes its connections, and its requests raise NoAnswerError."""
    server = await serve(ANSWERED)
    await fetch(client, server.target())
    await client.aclose()
    await client.aclose()
    await until(lambda: not server.open)

    with pytest.raises(NoAnswerError):
        await client.send("GET", server.target())
    assert server.connections == 1


@pytest.mark.parametrize(
    ("steps", "is_begun"),
    [
        ([Do.READ], False),
        ([*ANSWERED, Do.READ], False),
        ([Do.READ, HEAD, b"he"], True),
        ([Do.READ, UNMEASURED, b"he"], True),
        ([Do.READ, HEAD.replace(b"5", b"%d" % 2**30), b"he"], True),
        ([Do.READ, answer(bytes(2**24))], True),
    ],
)
async def test_closing_fails_running_and_waiting_requests(
    serve: Serve, narrow: HttpClient, steps: list[Step], *, is_begun: bool
) -> None:
    """Closing fails requests before and in their responses, and waiting ones."""
    server = await serve(steps, ANSWERED)
    if steps.count(Do.READ) > 1:
        await fetch(narrow, server.target())
    if is_begun:
        response = await narrow.send("GET", server.target())
        reading = asyncio.create_task(response.read())
    else:
        reading = asyncio.create_task(fetch(narrow, server.target()))
    waiting = [asyncio.create_task(fetch(narrow, server.target())) for _ in range(2)]
    await until(lambda: len(server.requests) == steps.count(Do.READ))
    await narrow.aclose()

    with pytest.raises(CutOffError if is_begun else (NoAnswerError, ConnectionError)):
        await reading
    for each in waiting:
        with pytest.raises((NoAnswerError, ConnectionError)):
            await each
    await until(lambda: not server.open)
    assert server.connections == 1


async def test_head_response_keeps_its_connection(serve: Serve, client: HttpClient) -> None:
    """A HEAD response with a Content-Length has no body, and its connection is reused."""
    server = await serve([Do.READ, HEAD, *ANSWERED])
    response = await client.send("HEAD", server.target())

    assert (response.length, await response.read()) == (5, b"")
    assert await fetch(client, server.target()) == b"hello"
    assert server.connections == 1


async def test_most_recently_used_connection_is_reused(serve: Serve, client: HttpClient) -> None:
    """The most recently used idle connection is reused first."""
    early, late = asyncio.Event(), asyncio.Event()
    server = await serve(
        [Do.READ, early, answer(), *ANSWERED], [Do.READ, late, answer(), *ANSWERED]
    )
    async with asyncio.TaskGroup() as group:
        first = group.create_task(fetch(client, server.target()))
        await until(lambda: server.requests)
        group.create_task(fetch(client, server.target()))
        early.set()
        await first
        late.set()
    await fetch(client, server.target())

    assert server.asked_on == [0, 1, 1]


async def test_an_idle_connection_that_the_server_closes_is_forgotten(
    serve: Serve, client: HttpClient, transport: ssl.SSLContext | None
) -> None:
    """An idle connection that the server closes is not used for the next request."""
    server = await serve([*ANSWERED, Do.CLOSE], ANSWERED, tls=transport)
    await fetch(client, server.target())
    await until(lambda: not server.open)
    await asyncio.sleep(0.01)

    assert await fetch(client, server.target()) == b"hello"
    assert server.asked_on == [0, 1]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([answer(headers=b"Connection: close\r\n")], id="close"),
        pytest.param([answer().replace(b"1.1", b"1.0")], id="HTTP/1.0"),
        pytest.param([answer() + b"surplus"], id="surplus"),
        pytest.param([answer() + answer(b"another")], id="two answers"),
        pytest.param([answer(), 0.02, answer(b"poison")], id="unsolicited answer"),
        pytest.param([answer(), 0.02, b"\0"], id="unsolicited byte"),
    ],
)
async def test_a_connection_that_may_not_be_used_again_is_closed(
    serve: Serve, client: HttpClient, steps: list[Step]
) -> None:
    """A connection with `close`, HTTP/1.0 or surplus bytes is closed after its response."""
    server = await serve([Do.READ, *steps], ANSWERED)

    assert await fetch(client, server.target()) == b"hello"
    await until(lambda: not server.open)
    assert await fetch(client, server.target()) == b"hello"
    assert server.connections == 2


@pytest.mark.parametrize(("sent", "connections"), [([HEAD, b"he"], 2), ([answer()], 1)])
async def test_a_released_response_keeps_its_connection_if_complete(
    serve: Serve,
    client: HttpClient,
    transport: ssl.SSLContext | None,
    sent: list[Step],
    connections: int,
) -> None:
    """A response that is released unread keeps its connection if its body has arrived."""
    server = await serve([Do.READ, *sent, *ANSWERED], ANSWERED, tls=transport)
    response = await client.send("GET", server.target(), is_eager=connections == 1)
    response.release()

    assert await fetch(client, server.target()) == b"hello"
    await until(lambda: server.open == 1)
    assert server.connections == connections


@pytest.mark.parametrize(("kept_s", "connections"), [(0.05, 2), (60.0, 1)])
async def test_long_idle_connection_is_not_reused(
    serve: Serve,
    client: HttpClient,
    monkeypatch: pytest.MonkeyPatch,
    kept_s: float,
    connections: int,
) -> None:
    """A connection that was idle for longer than `_KEPT_S` is closed, and not reused."""
    monkeypatch.setattr(client_module, "_KEPT_S", kept_s)
    server = await serve(ANSWERED * 2)
    await fetch(client, server.target())
    await asyncio.sleep(0.06)

    assert await fetch(client, server.target()) == b"hello"
    await until(lambda: server.open == 1)
    assert server.connections == connections


async def test_silence_on_a_kept_connection_is_a_timeout(serve: Serve, hasty: HttpClient) -> None:
    """Silence on a kept connection raises TimeoutError, and the request is not repeated."""
    server = await serve([*ANSWERED, Do.READ], ANSWERED)
    await fetch(hasty, server.target())
    await asyncio.sleep(1.2)
    with pytest.raises(TimeoutError):
        await hasty.send("GET", server.target())

    assert server.connections == 1


async def test_slow_steady_response_is_no_timeout(serve: Serve) -> None:
    """A response that takes longer than the timeout is read if each of its pauses is shorter."""
    data = answer(b"0123456789")
    steps: list[Step] = [Do.READ]
    for byte in data:
        steps += [0.05, bytes([byte])]
    server = await serve(steps)
    async with aclosing(HttpClient(connections=1, silence_s=2)) as client:
        assert await fetch(client, server.target()) == b"0123456789"


async def test_stalled_handshake_is_a_timeout(serve: Serve, hasty: HttpClient) -> None:
    """A TLS handshake without an answer raises TimeoutError."""
    server = await serve([])
    with pytest.raises(TimeoutError):
        await hasty.send("GET", server.target(scheme="https"))

    await until(lambda: not server.open)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_failed_handshake_releases_its_connection(
    serve: Serve, tls: ssl.SSLContext, narrow: HttpClient, *, is_cancelled: bool
) -> None:
    """A failed or cancelled TLS handshake leaves room for requests to another server."""
    server = await serve(ANSWERED, tls=tls)
    other = await serve([] if is_cancelled else [b"no TLS"])
    failing = asyncio.create_task(narrow.send("GET", other.target(scheme="https")))
    await until(lambda: other.connections)
    if is_cancelled:
        failing.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else ssl.SSLError):
        await failing

    assert await fetch(narrow, server.target()) == b"hello"


async def test_missing_ca_file_fails_each_request() -> None:
    """Each request of a client whose CA file is missing raises an error that names the file."""
    async with aclosing(HttpClient(connections=1, silence_s=60, ca_file="/nonexistent")) as client:
        for _ in range(2):
            with pytest.raises(ssl.SSLError, match="in /nonexistent cannot be read: No such file"):
                await client.send("GET", RequestTarget("https://127.0.0.1:1/"))


@pytest.mark.parametrize("name", ["none.pem", "garbage.pem"])
async def test_unusable_ssl_cert_file_fails_each_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Each request over TLS fails if SSL_CERT_FILE is missing or no certificate.

    The error names the variable and the file.
    """
    (tmp_path / "garbage.pem").write_text("garbage")
    monkeypatch.setenv("SSL_CERT_FILE", path := str(tmp_path / name))
    async with aclosing(HttpClient(connections=1, silence_s=60)) as client:
        for _ in range(2):
            with pytest.raises(ssl.SSLError, match=f"SSL_CERT_FILE, {path}, cannot be read"):
                await client.send("GET", RequestTarget("https://127.0.0.1:1/"))


@pytest.mark.parametrize(("is_trusting", "host"), [(False, "127.0.0.1"), (True, "localhost")])
async def test_a_certificate_must_be_trusted_and_of_that_name(
    serve: Serve, tls: ssl.SSLContext, ca_file: str, host: str, *, is_trusting: bool
) -> None:
    """A certificate that is not trusted, or of another host, raises SSLCertVerificationError."""
    server = await serve(ANSWERED, tls=tls)
    trusted = ca_file if is_trusting else None
    async with aclosing(HttpClient(connections=1, silence_s=60, ca_file=trusted)) as client:
        with pytest.raises(ssl.SSLCertVerificationError):
            await client.send("GET", server.target(host=host))

    assert not server.requests
