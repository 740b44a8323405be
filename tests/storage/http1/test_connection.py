"""Connections are kept where that is safe, and given up where it is not."""

import asyncio
import time
from contextlib import aclosing

import pytest

from app.storage.http1 import client as client_module
from app.storage.http1.client import Client
from tests.storage.http1.conftest import Serve
from tests.storage.http1.scripted import Do, Step, answer, fetch, until

ANSWERED: list[Step] = [Do.READ, answer()]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"


async def test_a_connection_is_used_again(serve: Serve, client: Client) -> None:
    """Requests one after the other share a connection."""
    server = await serve(ANSWERED * 3)
    for path in ("/a", "/b", "/c"):
        assert await fetch(client, server.target(path)) == b"hello"

    assert (server.paths, server.connections) == ([b"/a", b"/b", b"/c"], 1)


async def test_the_answer_to_a_head_keeps_its_connection(serve: Serve, client: Client) -> None:
    """A length without a body confuses nobody."""
    server = await serve([Do.READ, HEAD, *ANSWERED])
    response = await client.send("HEAD", server.target())

    assert (response.length, await response.read()) == (5, b"")
    assert await fetch(client, server.target()) == b"hello"
    assert server.connections == 1


async def test_servers_do_not_share_connections(serve: Serve, client: Client) -> None:
    """A connection is for one host and port."""
    servers = [await serve(ANSWERED), await serve(ANSWERED)]
    for server in servers:
        await fetch(client, server.target())

    assert [server.connections for server in servers] == [1, 1]


async def test_the_connection_that_was_idle_for_the_shortest_time_is_used(
    serve: Serve, client: Client
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
    serve: Serve, client: Client
) -> None:
    """The next request goes to a new one at once."""
    server = await serve([*ANSWERED, Do.CLOSE], ANSWERED)
    await fetch(client, server.target())
    await until(lambda: not server.open)
    await asyncio.sleep(0.01)

    assert await fetch(client, server.target()) == b"hello"
    assert server.asked_on == [0, 1]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(answer(headers=b"Connection: close\r\n"), id="close"),
        pytest.param(answer().replace(b"1.1", b"1.0"), id="HTTP/1.0"),
        pytest.param(answer() + b"surplus", id="surplus"),
        pytest.param(answer() + answer(b"another"), id="two answers"),
    ],
)
async def test_a_connection_that_may_not_be_used_again_is_closed(
    serve: Serve, client: Client, data: bytes
) -> None:
    """The answer is good, but the next request goes to a new connection."""
    server = await serve([Do.READ, data], ANSWERED)

    assert await fetch(client, server.target()) == b"hello"
    await until(lambda: not server.open)
    assert await fetch(client, server.target()) == b"hello"
    assert server.connections == 2


@pytest.mark.parametrize("data", [answer(b"poison"), b"\0"])
async def test_unsolicited_bytes_close_an_idle_connection(
    serve: Serve, client: Client, data: bytes
) -> None:
    """What nobody asked for is not taken for the next answer."""
    idle = asyncio.Event()
    server = await serve([*ANSWERED, idle, data], ANSWERED)
    await fetch(client, server.target())
    idle.set()
    await until(lambda: not server.open)

    assert await fetch(client, server.target()) == b"hello"


async def test_an_incomplete_answer_that_is_released_closes_its_connection(
    serve: Serve, client: Client
) -> None:
    """Nobody waits for the rest of a body that nobody wants."""
    server = await serve([Do.READ, HEAD, b"he"], ANSWERED)
    response = await client.send("GET", server.target())
    response.release()
    await until(lambda: not server.open)

    assert await fetch(client, server.target()) == b"hello"


async def test_a_complete_answer_that_is_released_keeps_its_connection(
    serve: Serve, client: Client
) -> None:
    """A body that is here already need not be read."""
    server = await serve(ANSWERED * 2)
    response = await client.send("GET", server.target(), is_eager=True)
    response.release()
    await fetch(client, server.target())

    assert server.connections == 1


@pytest.mark.parametrize(("kept_s", "connections"), [(0.05, 2), (60.0, 1)])
async def test_a_connection_that_was_idle_for_long_is_closed_instead_of_used(
    serve: Serve,
    client: Client,
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


async def test_a_server_that_does_not_answer_is_silent(serve: Serve, hasty: Client) -> None:
    """Waiting for a head ends, not too early, and closes the connection."""
    server = await serve([Do.READ])
    began_at = time.monotonic()
    with pytest.raises(TimeoutError):
        await hasty.send("GET", server.target())

    assert time.monotonic() - began_at > 0.07
    await until(lambda: not server.open)


async def test_a_silent_server_is_not_asked_again(serve: Serve, hasty: Client) -> None:
    """On a kept connection, however long it was idle, silence ends the request as well."""
    server = await serve([*ANSWERED, Do.READ], ANSWERED)
    await fetch(hasty, server.target())
    await asyncio.sleep(0.4)
    with pytest.raises(TimeoutError):
        await hasty.send("GET", server.target())

    assert server.connections == 1


async def test_a_body_that_stops_is_silence(serve: Serve, hasty: Client) -> None:
    """The head was in time, and stays to be seen."""
    server = await serve([Do.READ, HEAD, b"he"])
    response = await hasty.send("GET", server.target())
    with pytest.raises(TimeoutError):
        await response.read()

    assert response.status == 200
    await until(lambda: not server.open)


async def test_pieces_that_stop_are_silence(serve: Serve, hasty: Client) -> None:
    """What came before is passed on."""
    server = await serve([Do.READ, HEAD, b"he"])
    pieces = (await hasty.send("GET", server.target())).pieces()

    assert await anext(pieces) == b"he"
    with pytest.raises(TimeoutError):
        await anext(pieces)


async def test_an_eager_request_meets_silence_in_the_body_when_it_reads(
    serve: Serve, hasty: Client
) -> None:
    """What befalls the body does not hide the head."""
    server = await serve([Do.READ, HEAD, b"he"])
    response = await hasty.send("GET", server.target(), is_eager=True)

    assert response.status == 200
    with pytest.raises(TimeoutError):
        await response.read()


async def test_slow_but_steady_is_no_silence(serve: Serve) -> None:
    """An answer may take longer than any of its pauses may last."""
    data = answer(b"0123456789")
    steps: list[Step] = [Do.READ]
    for start in range(0, len(data), 8):
        steps += [0.12, data[start : start + 8]]
    server = await serve(steps)
    async with aclosing(Client(connections=1, silence_s=0.6)) as client:
        assert await fetch(client, server.target()) == b"0123456789"


async def test_a_pause_between_requests_is_no_silence(serve: Serve) -> None:
    """Each request gives the server its full time."""
    server = await serve([*ANSWERED, Do.READ, 0.4, answer(b"late")])
    async with aclosing(Client(connections=1, silence_s=0.6)) as client:
        await fetch(client, server.target())
        await asyncio.sleep(0.4)

        assert await fetch(client, server.target()) == b"late"
