"""Many requests share few connections, and no failure or cancellation costs one."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing

import pytest

from app.storage.http1.client import Client
from app.storage.http1.errors import BadAnswerError, CutOffError, ExchangeError, NoAnswerError
from app.storage.http1.target import Target
from tests.storage.http1.conftest import Serve
from tests.storage.http1.scripted import Do, Step, answer, fetch, until

ANSWERED: list[Step] = [Do.READ, answer()]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
UNMEASURED = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture
async def narrow() -> AsyncGenerator[Client]:
    """Open a patient client of one connection."""
    async with aclosing(Client(connections=1, silence_s=60)) as opened:
        yield opened


@pytest.fixture
def deaf() -> Generator[Target]:
    """Listen without accepting, with as many waiting as may."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)  # noqa: FBT003
            each.connect_ex(listener.getsockname())
        yield Target(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        for each in waiting:
            each.close()


async def test_a_request_is_what_was_asked_for(serve: Serve, client: Client) -> None:
    """Method, target and headers arrive as they are."""
    server = await serve(ANSWERED)
    await client.send("GET", server.target("/a?b=c"), b"Range: bytes=0-1\r\nX-Empty:\r\n")

    assert server.requests == [
        b"GET /a?b=c HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept-Encoding: identity\r\n"
        b"User-Agent: shardgate\r\nRange: bytes=0-1\r\nX-Empty:\r\n\r\n" % server.port
    ]


@pytest.mark.parametrize("end", [Do.CLOSE, Do.RESET])
async def test_a_request_on_a_connection_that_closes_meanwhile_is_repeated(
    serve: Serve, client: Client, end: Do
) -> None:
    """A server that closed before it heard the request did nothing; nobody notices."""
    server = await serve([*ANSWERED, Do.READ, end], [Do.READ, answer(b"again")])
    await fetch(client, server.target("/a"))

    assert await fetch(client, server.target("/b")) == b"again"
    assert (server.paths, server.asked_on) == ([b"/a", b"/b", b"/b"], [0, 0, 1])


async def test_a_request_is_repeated_once_for_each_kept_connection(
    serve: Serve, client: Client
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


async def test_a_repeated_request_may_fail(serve: Serve, client: Client) -> None:
    """The new connection is the last."""
    server = await serve([*ANSWERED, Do.READ, Do.CLOSE], [Do.READ, Do.CLOSE])
    await fetch(client, server.target())
    with pytest.raises(NoAnswerError):
        await client.send("GET", server.target())

    assert server.asked_on == [0, 0, 1]


@pytest.mark.parametrize(
    ("end", "error"), [(Do.CLOSE, NoAnswerError), (Do.RESET, ConnectionResetError)]
)
async def test_a_request_on_a_new_connection_is_not_repeated(
    serve: Serve, client: Client, end: Do, error: type[Exception]
) -> None:
    """A server that closes it was asked, and says no."""
    server = await serve([Do.READ, end], ANSWERED)
    with pytest.raises(error):
        await client.send("GET", server.target())

    assert server.connections == 1


@pytest.mark.parametrize("data", [b"H", HEAD[:-2], b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_request_that_was_half_answered_is_not_repeated(
    serve: Serve, client: Client, data: bytes
) -> None:
    """The server heard it."""
    server = await serve([*ANSWERED, Do.READ, data, Do.CLOSE], ANSWERED)
    await fetch(client, server.target())
    with pytest.raises(NoAnswerError):
        await client.send("GET", server.target())

    assert server.connections == 1


async def test_what_is_not_http_is_no_answer(serve: Serve, client: Client) -> None:
    """The connection is of no more use."""
    server = await serve([Do.READ, b"SSH-2.0-OpenSSH\r\n"])
    with pytest.raises(BadAnswerError):
        await client.send("GET", server.target())

    await until(lambda: not server.open)


async def test_a_host_that_refuses_raises_as_sockets_do(serve: Serve, client: Client) -> None:
    """`OSError` tells why nobody could be connected to."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await client.send("GET", Target(f"http://127.0.0.1:{unheard.getsockname()[1]}/"))


async def test_connecting_may_not_take_longer_than_silence(
    serve: Serve, hasty: Client, deaf: Target
) -> None:
    """A host that drops packets is silent."""
    with pytest.raises(TimeoutError):
        await hasty.send("GET", deaf)


@pytest.mark.parametrize("is_eager", [False, True])
async def test_no_more_connections_are_open_than_allowed(
    serve: Serve,
    client: Client,
    is_eager: bool,  # noqa: FBT001
) -> None:
    """However many requests there are, each finds its turn."""
    server = await serve(ANSWERED * 20)
    requests = (fetch(client, server.target(), is_eager=is_eager) for _ in range(20))
    bodies = await asyncio.gather(*requests)

    assert bodies == [b"hello"] * 20
    assert server.connections == 2


async def test_one_request_too_many_waits_for_the_end_of_another(
    serve: Serve, narrow: Client
) -> None:
    """An answer that was not read to its end keeps its place."""
    go_on = asyncio.Event()
    server = await serve([Do.READ, HEAD, go_on, b"hello", *ANSWERED])
    response = await narrow.send("GET", server.target("/a"))
    waiting = asyncio.create_task(fetch(narrow, server.target("/b")))
    await asyncio.sleep(0.02)
    assert server.paths == [b"/a"]
    go_on.set()
    await response.read()

    assert await waiting == b"hello"


async def test_releasing_lets_the_next_request_go_on(serve: Serve, narrow: Client) -> None:
    """Not wanting an answer is an end of it."""
    server = await serve([Do.READ, HEAD], ANSWERED)
    response = await narrow.send("GET", server.target())
    waiting = asyncio.create_task(fetch(narrow, server.target()))
    response.release()

    assert await waiting == b"hello"


async def test_releasing_twice_makes_room_once(serve: Serve, narrow: Client) -> None:
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


async def test_a_slow_reader_leaves_room_for_bodies_that_are_read_at_once(
    serve: Serve, narrow: Client
) -> None:
    """An answer that nobody takes holds up only others of its kind."""
    server = await serve([Do.READ, HEAD], ANSWERED)
    slow = await narrow.send("GET", server.target("/a"))
    quick = await narrow.send("GET", server.target("/b"), is_eager=True)

    assert await quick.read() == b"hello"
    slow.release()


async def test_a_slow_reader_leaves_room_for_heads(serve: Serve, narrow: Client) -> None:
    """Without a body there is nothing to be slow with."""
    server = await serve([Do.READ, HEAD])
    slow = await narrow.send("GET", server.target("/a"))

    assert (await narrow.send("HEAD", server.target("/b"))).length == 5
    slow.release()


async def test_a_silent_server_leaves_room_for_others(serve: Serve, narrow: Client) -> None:
    """Each server has connections of its own."""
    silent, other = await serve([Do.READ]), await serve(ANSWERED)
    waiting = asyncio.create_task(fetch(narrow, silent.target()))
    await until(lambda: silent.requests)

    assert await fetch(narrow, other.target()) == b"hello"
    waiting.cancel()


async def test_requests_are_served_first_come_first_served(serve: Serve, narrow: Client) -> None:
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
async def test_a_failure_makes_room(serve: Serve, hasty: Client, steps: list[Step]) -> None:
    """Whatever goes wrong, others may go on."""
    server = await serve(steps, ANSWERED)
    with pytest.raises((ExchangeError, OSError)):
        await fetch(hasty, server.target())

    assert await fetch(hasty, server.target()) == b"hello"


async def test_a_host_that_cannot_be_connected_to_makes_room(hasty: Client, deaf: Target) -> None:
    """The next one connects too, here in vain, instead of waiting for ever."""
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
    serve: Serve, narrow: Client, steps: list[Step]
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


async def test_a_request_cancelled_while_connecting_makes_room(hasty: Client, deaf: Target) -> None:
    """The next one connects, here in vain, instead of waiting for ever."""
    cancelled = asyncio.create_task(hasty.send("GET", deaf))
    await asyncio.sleep(0.02)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled

    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError):
            await hasty.send("GET", deaf)


async def test_a_request_cancelled_while_waiting_leaves_the_queue(
    serve: Serve, narrow: Client
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


async def test_a_request_may_be_cancelled_at_any_moment(serve: Serve, narrow: Client) -> None:
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


async def test_closing_closes_idle_connections(serve: Serve, client: Client) -> None:
    """Nothing is left open."""
    server = await serve(ANSWERED)
    await fetch(client, server.target())
    assert server.open
    await client.aclose()

    await until(lambda: not server.open)


@pytest.mark.parametrize("steps", [[Do.READ], [*ANSWERED, Do.READ]], ids=["new", "kept"])
async def test_closing_fails_who_waits_for_a_head(
    serve: Serve, client: Client, steps: list[Step]
) -> None:
    """Nothing is repeated on a connection that nobody would close."""
    server = await serve(steps, ANSWERED)
    if steps.count(Do.READ) > 1:
        await fetch(client, server.target())
    waiting = asyncio.create_task(client.send("GET", server.target()))
    await until(lambda: len(server.requests) == steps.count(Do.READ))
    await client.aclose()

    with pytest.raises((NoAnswerError, ConnectionError)):
        await waiting
    await until(lambda: not server.open)
    assert server.connections == 1


@pytest.mark.parametrize("head", [HEAD, UNMEASURED, HEAD.replace(b"5", b"%d" % 2**30)])
async def test_closing_cuts_bodies_off(serve: Serve, client: Client, head: bytes) -> None:
    """What was not received is not taken for the end."""
    server = await serve([Do.READ, head, b"he"])
    response = await client.send("GET", server.target())
    waiting = asyncio.create_task(response.read())
    await asyncio.sleep(0.01)
    await client.aclose()

    with pytest.raises(CutOffError):
        await waiting


async def test_closing_cuts_off_a_body_that_was_held_up(serve: Serve, client: Client) -> None:
    """Reading after the end raises as it does before."""
    server = await serve([Do.READ, answer(bytes(2**24))])
    response = await client.send("GET", server.target(), is_eager=True)
    await asyncio.sleep(0.02)
    closing = asyncio.create_task(client.aclose())
    await asyncio.sleep(0)
    with pytest.raises(CutOffError):
        await response.read()

    await closing


async def test_closing_fails_who_waits_for_room(serve: Serve, narrow: Client) -> None:
    """No new connection is opened for them."""
    server = await serve([Do.READ])
    waiting = [asyncio.create_task(narrow.send("GET", server.target())) for _ in range(3)]
    await until(lambda: server.requests)
    await narrow.aclose()
    done = await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(each, NoAnswerError | ConnectionError) for each in done)
    assert server.connections == 1


async def test_closing_fails_who_connects(serve: Serve, narrow: Client) -> None:
    """A connection that is made too late is closed at once."""
    server = await serve(ANSWERED)
    connecting = asyncio.create_task(narrow.send("GET", server.target()))
    await asyncio.sleep(0)
    await narrow.aclose()

    with pytest.raises((NoAnswerError, ConnectionError)):
        await connecting
    await until(lambda: not server.open)


async def test_a_closed_client_asks_nobody(serve: Serve, client: Client) -> None:
    """After the end there is no beginning."""
    server = await serve(ANSWERED)
    await client.aclose()
    with pytest.raises(NoAnswerError):
        await client.send("GET", server.target())

    assert not server.connections


async def test_closing_twice_is_closing(serve: Serve, client: Client) -> None:
    """The second time there is nothing to do."""
    server = await serve(ANSWERED)
    await fetch(client, server.target())
    await client.aclose()
    await client.aclose()

    await until(lambda: not server.open)
