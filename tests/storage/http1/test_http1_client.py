"""Many requests share few connections, and no failure or cancellation costs one."""

import asyncio
import socket
import ssl
from collections.abc import Generator
from contextlib import aclosing

import pytest

from shardgate.storage import http1_client as client_module
from shardgate.storage.http1_client import (
    CutOffError,
    ExchangeError,
    HttpClient,
    NoAnswerError,
    RequestTarget,
)
from tests.storage.http1.conftest import Serve
from tests.storage.http1.scripted import Do, Step, answer, fetch, until

ANSWERED: list[Step] = [Do.READ, answer()]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
UNMEASURED = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture
def deaf() -> Generator[RequestTarget]:
    """Listen without accepting, with as many waiting as may."""
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


async def test_a_request_is_what_was_asked_for(serve: Serve, client: HttpClient) -> None:
    """Method, target and headers arrive as they are."""
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
    """A server that closed before it read the request did nothing; the caller does not notice."""
    scripts: list[list[Step]] = [[*ANSWERED, Do.READ, end], [Do.READ, answer(b"again")]]
    server = await serve(*scripts, tls=transport)
    await fetch(client, server.target("/a"))

    assert await fetch(client, server.target("/b")) == b"again"
    assert (server.paths, server.asked_on) == ([b"/a", b"/b", b"/b"], [0, 0, 1])


async def test_a_request_is_repeated_once_for_each_kept_connection(
    serve: Serve, client: HttpClient
) -> None:
    """A server that was restarted has closed them all."""
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


async def test_a_repeated_request_may_fail(serve: Serve, client: HttpClient) -> None:
    """The new connection is the last."""
    server = await serve([*ANSWERED, Do.READ, Do.CLOSE], [Do.READ, Do.CLOSE])
    await fetch(client, server.target())
    with pytest.raises(NoAnswerError):
        await client.send("GET", server.target())

    assert server.asked_on == [0, 0, 1]


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([Do.READ, Do.CLOSE], NoAnswerError),
        ([Do.READ, Do.RESET], ConnectionResetError),
        *(
            ([*ANSWERED, Do.READ, data, Do.CLOSE], NoAnswerError)
            for data in (b"H", HEAD[:-2], b"HTTP/1.1 100 Continue\r\n\r\n")
        ),
    ],
)
async def test_a_request_that_the_server_may_have_processed_is_not_repeated(
    serve: Serve, client: HttpClient, steps: list[Step], error: type[Exception]
) -> None:
    """A server that closes a new connection, or amid a response, has received the request."""
    server = await serve(steps, ANSWERED)
    if steps.count(Do.READ) > 1:
        await fetch(client, server.target())
    with pytest.raises(error):
        await client.send("GET", server.target())

    assert server.connections == 1


async def test_a_host_that_refuses_raises_as_sockets_do(serve: Serve, client: HttpClient) -> None:
    """`OSError` tells why nobody could be connected to."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await client.send("GET", RequestTarget(f"http://127.0.0.1:{unheard.getsockname()[1]}/"))


@pytest.mark.parametrize("is_eager", [False, True])
async def test_no_more_connections_are_open_than_allowed(
    serve: Serve, client: HttpClient, *, is_eager: bool
) -> None:
    """However many requests there are, each finds its turn."""
    server = await serve(ANSWERED * 20)
    requests = (fetch(client, server.target(), is_eager=is_eager) for _ in range(20))
    bodies = await asyncio.gather(*requests)

    assert bodies == [b"hello"] * 20
    assert server.connections == 2


async def test_releasing_twice_makes_room_once(serve: Serve, narrow: HttpClient) -> None:
    """No end counts more than once."""
    server = await serve([Do.READ, HEAD])
    response = await narrow.send("GET", server.target("/a"))
    response.release()
    response.release()
    await narrow.send("GET", server.target("/b"))
    waiting = asyncio.create_task(narrow.send("GET", server.target("/c")))
    await asyncio.sleep(0.02)

    assert server.paths == [b"/a", b"/b"]
    waiting.cancel()


async def test_a_silent_server_leaves_room_for_others(serve: Serve, narrow: HttpClient) -> None:
    """Each server has connections of its own."""
    silent, other = await serve([Do.READ]), await serve(ANSWERED)
    waiting = asyncio.create_task(fetch(narrow, silent.target()))
    await until(lambda: silent.requests)

    assert await fetch(narrow, other.target()) == b"hello"
    waiting.cancel()


async def test_requests_are_served_first_come_first_served(
    serve: Serve, narrow: HttpClient
) -> None:
    """Nobody who waits is overtaken."""
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
async def test_a_failure_makes_room(serve: Serve, hasty: HttpClient, steps: list[Step]) -> None:
    """Whatever goes wrong, others may go on."""
    server = await serve(steps, ANSWERED)
    with pytest.raises((ExchangeError, OSError)):
        await fetch(hasty, server.target())

    assert await fetch(hasty, server.target()) == b"hello"


async def test_a_host_that_cannot_be_connected_to_makes_room(
    hasty: HttpClient, deaf: RequestTarget
) -> None:
    """It is silent; the next request, also after a cancelled one, does not wait for ever."""
    cancelled = asyncio.create_task(hasty.send("GET", deaf))
    await asyncio.sleep(0.02)
    cancelled.cancel()
    async with asyncio.timeout(3):
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
async def test_a_cancelled_request_makes_room(
    serve: Serve, narrow: HttpClient, steps: list[Step]
) -> None:
    """Its connection is closed, for the answer may still come."""
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


async def test_a_request_cancelled_while_waiting_leaves_the_queue(
    serve: Serve, narrow: HttpClient
) -> None:
    """Those behind it go on, those before it are not disturbed."""
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
    """Whenever that is, the next request finds room, and an answer of its own."""
    server = await serve([Do.READ, Do.ECHO] * 200)
    for turns in range(60):
        cancelled = asyncio.create_task(fetch(narrow, server.target("/cancelled")))
        for _ in range(turns):
            await asyncio.sleep(0)
        is_late = not cancelled.cancel()
        await asyncio.wait([cancelled])
        assert await fetch(narrow, server.target(f"/{turns}")) == b"/%d" % turns

    assert is_late, "some moments were left out"


async def test_closing_fails_who_connects(serve: Serve, narrow: HttpClient) -> None:
    """A connection that is made too late is closed at once."""
    server = await serve(ANSWERED)
    connecting = asyncio.create_task(narrow.send("GET", server.target()))
    await asyncio.sleep(0)
    await narrow.aclose()

    with pytest.raises((NoAnswerError, ConnectionError)):
        await connecting
    await until(lambda: not server.open)


async def test_a_slow_reader_leaves_room_for_others(serve: Serve, narrow: HttpClient) -> None:
    """An unread response holds up only others of its kind: not heads, nor eager reads."""
    server = await serve([Do.READ, HEAD], [*ANSWERED, Do.READ, HEAD, *ANSWERED])
    slow = await narrow.send("GET", server.target("/a"))
    waiting = asyncio.create_task(fetch(narrow, server.target("/c")))
    quick = await narrow.send("GET", server.target("/b"), is_eager=True)

    assert await quick.read() == b"hello"
    assert (await narrow.send("HEAD", server.target("/d"))).length == 5
    assert server.paths == [b"/a", b"/b", b"/d"]
    slow.release()
    assert await waiting == b"hello"


async def test_a_closed_client_asks_nobody(serve: Serve, client: HttpClient) -> None:
    """Closing closes idle connections; doing so twice is harmless."""
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
async def test_closing_fails_what_is_under_way(
    serve: Serve, narrow: HttpClient, steps: list[Step], *, is_begun: bool
) -> None:
    """A head, a body however it ends, and requests that wait for room, which open nothing new."""
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


async def test_the_answer_to_a_head_keeps_its_connection(serve: Serve, client: HttpClient) -> None:
    """A length without a body confuses nobody."""
    server = await serve([Do.READ, HEAD, *ANSWERED])
    response = await client.send("HEAD", server.target())

    assert (response.length, await response.read()) == (5, b"")
    assert await fetch(client, server.target()) == b"hello"
    assert server.connections == 1


async def test_the_connection_that_was_idle_for_the_shortest_time_is_used(
    serve: Serve, client: HttpClient
) -> None:
    """The others may become old enough to be closed."""
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
    """The next request goes to a new one at once."""
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
    """The answer is good, but the next request goes to a new connection."""
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
    """A body that has arrived need not be read; the rest of another is not waited for."""
    server = await serve([Do.READ, *sent, *ANSWERED], ANSWERED, tls=transport)
    response = await client.send("GET", server.target(), is_eager=connections == 1)
    response.release()

    assert await fetch(client, server.target()) == b"hello"
    await until(lambda: server.open == 1)
    assert server.connections == connections


@pytest.mark.parametrize(("kept_s", "connections"), [(0.05, 2), (60.0, 1)])
async def test_a_connection_that_was_idle_for_long_is_closed_instead_of_used(
    serve: Serve,
    client: HttpClient,
    monkeypatch: pytest.MonkeyPatch,
    kept_s: float,
    connections: int,
) -> None:
    """A firewall may have forgotten it."""
    monkeypatch.setattr(client_module, "_KEPT_S", kept_s)
    server = await serve(ANSWERED * 2)
    await fetch(client, server.target())
    await asyncio.sleep(0.06)

    assert await fetch(client, server.target()) == b"hello"
    await until(lambda: server.open == 1)
    assert server.connections == connections


async def test_a_silent_server_is_not_asked_again(serve: Serve, hasty: HttpClient) -> None:
    """On a kept connection, however long it was idle, silence ends the request as well."""
    server = await serve([*ANSWERED, Do.READ], ANSWERED)
    await fetch(hasty, server.target())
    await asyncio.sleep(1.2)
    with pytest.raises(TimeoutError):
        await hasty.send("GET", server.target())

    assert server.connections == 1


async def test_slow_but_steady_is_no_silence(serve: Serve) -> None:
    """An answer may take longer than any of its pauses may last."""
    data = answer(b"0123456789")
    steps: list[Step] = [Do.READ]
    for byte in data:
        steps += [0.05, bytes([byte])]
    server = await serve(steps)
    async with aclosing(HttpClient(connections=1, silence_s=2)) as client:
        assert await fetch(client, server.target()) == b"0123456789"


@pytest.mark.parametrize("is_eager", [False, True])
async def test_a_body_that_stops_is_silence(
    serve: Serve, hasty: HttpClient, *, is_eager: bool
) -> None:
    """Head and first pieces were in time, and stay to be seen."""
    server = await serve([Do.READ, HEAD, b"he"])
    response = await hasty.send("GET", server.target(), is_eager=is_eager)
    pieces = response.pieces()

    assert (response.status, await anext(pieces)) == (200, b"he")
    for read in (anext(pieces), response.read()):
        with pytest.raises(TimeoutError):
            await read
    await until(lambda: not server.open)


async def test_a_handshake_without_answer_is_silence(serve: Serve, hasty: HttpClient) -> None:
    """It belongs to connecting."""
    server = await serve([])
    with pytest.raises(TimeoutError):
        await hasty.send("GET", server.target(scheme="https"))

    await until(lambda: not server.open)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_failed_handshake_makes_room(
    serve: Serve, tls: ssl.SSLContext, narrow: HttpClient, *, is_cancelled: bool
) -> None:
    """Neither refusing nor leaving a server costs a connection; none is asked in plain text."""
    server = await serve(ANSWERED, tls=tls)
    other = await serve([] if is_cancelled else [b"no TLS"])
    failing = asyncio.create_task(narrow.send("GET", other.target(scheme="https")))
    await until(lambda: other.connections)
    if is_cancelled:
        failing.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else ssl.SSLError):
        await failing

    assert await fetch(narrow, server.target()) == b"hello"


async def test_a_missing_file_of_authorities_makes_room() -> None:
    """Each request tells what is wrong, instead of waiting for the one before."""
    async with aclosing(HttpClient(connections=1, silence_s=60, ca_file="/nonexistent")) as client:
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                await client.send("GET", RequestTarget("https://127.0.0.1:1/"))


@pytest.mark.parametrize(("is_trusting", "host"), [(False, "127.0.0.1"), (True, "localhost")])
async def test_a_certificate_must_be_trusted_and_of_that_name(
    serve: Serve, tls: ssl.SSLContext, ca_file: str, host: str, *, is_trusting: bool
) -> None:
    """Without a file the authorities of the system are trusted."""
    server = await serve(ANSWERED, tls=tls)
    trusted = ca_file if is_trusting else None
    async with aclosing(HttpClient(connections=1, silence_s=60, ca_file=trusted)) as client:
        with pytest.raises(ssl.SSLCertVerificationError):
            await client.send("GET", server.target(host=host))

    assert not server.requests
