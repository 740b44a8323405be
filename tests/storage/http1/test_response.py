"""Heads come first, and bodies whole, piece by piece, or not at all."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from app.storage.http1.client import Client
from app.storage.http1.errors import BadAnswerError, CutOffError
from app.storage.http1.response import Response
from tests.storage.http1.conftest import Serve
from tests.storage.http1.scripted import Do, Step, answer, fetch, until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
UNMEASURED = b"HTTP/1.1 200 OK\r\n\r\n"
MIB = 1024**2
type Read = Callable[[Response], Awaitable[bytes]]
LARGE = bytes(range(256)) * (20 * MIB // 256)


async def collect(response: Response) -> bytes:
    """Read piece by piece."""
    return b"".join([piece async for piece in response.pieces()])


async def held_up(response: Response) -> int:
    """Wait until no more is taken in, and tell how much of the body lies here."""
    await until(lambda: response._parser.buffered > MIB // 2)
    await asyncio.sleep(0.05)
    return response._parser.buffered


async def test_a_response_has_status_headers_and_length(serve: Serve, client: Client) -> None:
    """All that a head says is there, whatever the status."""
    head = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nETag: x\r\n\r\n"
    server = await serve([Do.READ, head + b"no"])
    response = await client.send("GET", server.target())

    assert (response.status, response.length) == (404, 2)
    assert response.headers == {b"content-length": b"2", b"etag": b"x"}


async def test_a_body_may_come_after_its_head(serve: Serve, client: Client) -> None:
    """A request ends with the head; only reading waits for the body."""
    go_on = asyncio.Event()
    server = await serve([Do.READ, HEAD, go_on, b"hello"])
    response = await client.send("GET", server.target())
    go_on.set()

    assert await response.read() == b"hello"


async def test_an_eager_request_ends_with_the_body(serve: Serve, client: Client) -> None:
    """Then reading need not wait."""
    server = await serve([Do.READ, HEAD, 0.01, b"he", 0.01, b"llo"])
    response = await client.send("GET", server.target(), is_eager=True)

    assert response.is_complete


async def test_an_eager_request_does_not_wait_for_a_large_body(
    serve: Serve, client: Client
) -> None:
    """It ends with the first 512 KiB."""
    go_on, body = asyncio.Event(), LARGE[:MIB]
    data = answer(body)
    server = await serve([Do.READ, data[: 600 * 1024], go_on, data[600 * 1024 :]])
    response = await client.send("GET", server.target(), is_eager=True)
    assert not response.is_complete
    go_on.set()

    assert await response.read() == body


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([answer()], id="measured"),
        pytest.param([HEAD, 0.01, b"he", 0.01, b"llo"], id="measured, in parts"),
        pytest.param([CHUNKED, b"2\r\nhe\r\n", 0.01, b"3\r\nllo\r\n0\r\n\r\n"], id="chunked"),
        pytest.param([CHUNKED, b"5\r\nhello\r\n0\r\n", 0.01, b"ETag: x\r\n\r\n"], id="trailer"),
        pytest.param([UNMEASURED, b"he", 0.01, b"llo", Do.CLOSE], id="until it closes"),
        pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n", 0.01, answer()], id="announced"),
    ],
)
@pytest.mark.parametrize("read", [Response.read, collect])
async def test_a_body_has_an_end(
    serve: Serve, client: Client, steps: list[Step], read: Read
) -> None:
    """However a server tells the end, whole and in pieces the body is the same."""
    server = await serve([Do.READ, *steps])

    assert await read(await client.send("GET", server.target())) == b"hello"


@pytest.mark.parametrize(
    "data", [answer(b""), b"HTTP/1.1 304 Not Modified\r\n\r\n", CHUNKED + b"0\r\n\r\n"]
)
async def test_an_empty_body_has_no_pieces(serve: Serve, client: Client, data: bytes) -> None:
    """There are no empty pieces either."""
    server = await serve([Do.READ, data])
    response = await client.send("GET", server.target())

    assert [piece async for piece in response.pieces()] == []


async def test_pieces_are_passed_on_as_they_arrive(serve: Serve, client: Client) -> None:
    """None waits for the next one."""
    go_on = asyncio.Event()
    server = await serve([Do.READ, HEAD, b"he", go_on, b"llo"])
    pieces = (await client.send("GET", server.target())).pieces()

    assert await anext(pieces) == b"he"
    go_on.set()
    assert await anext(pieces) == b"llo"


async def test_reading_goes_on_after_a_piece(serve: Serve, client: Client) -> None:
    """What was passed on already is not read again."""
    go_on = asyncio.Event()
    server = await serve([Do.READ, HEAD, b"he", go_on, b"llo"])
    response = await client.send("GET", server.target())
    await anext(response.pieces())
    go_on.set()

    assert await response.read() == b"llo"


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([HEAD, b"he", Do.CLOSE], id="closed"),
        pytest.param([HEAD, b"he", 0.01, Do.RESET], id="reset"),
        pytest.param([CHUNKED, b"5\r\nhe", Do.CLOSE], id="in a chunk"),
        pytest.param([CHUNKED, b"2\r\nhe\r\n", Do.CLOSE], id="between chunks"),
        pytest.param([CHUNKED, b"2\r\nhe\r\n0\r\n", Do.CLOSE], id="in the trailers"),
        pytest.param([UNMEASURED, b"he", 0.01, Do.RESET], id="reset instead of closed"),
    ],
)
@pytest.mark.parametrize("read", [Response.read, collect])
async def test_a_body_that_is_cut_off_raises(
    serve: Serve, client: Client, steps: list[Step], read: Read
) -> None:
    """Half a body is never taken for a whole one."""
    server = await serve([Do.READ, *steps])
    response = await client.send("GET", server.target())
    with pytest.raises(CutOffError):
        await read(response)


@pytest.mark.parametrize("is_eager", [False, True])
async def test_a_body_that_is_cut_off_has_a_status(
    serve: Serve,
    client: Client,
    is_eager: bool,  # noqa: FBT001
) -> None:
    """The head was received, so that a refusal can be told even then."""
    server = await serve([Do.READ, HEAD, b"he", Do.CLOSE])
    response = await client.send("GET", server.target(), is_eager=is_eager)
    await until(lambda: not server.open)

    assert (response.status, response.length, response.is_complete) == (200, 5, False)


async def test_a_body_that_is_cut_off_stays_so(serve: Serve, client: Client) -> None:
    """Who reads again is not told that there was nothing."""
    server = await serve([Do.READ, HEAD, b"he", Do.CLOSE])
    response = await client.send("GET", server.target())
    for _ in range(2):
        with pytest.raises(CutOffError):
            await response.read()


async def test_pieces_before_the_cut_are_passed_on(serve: Serve, client: Client) -> None:
    """The reader may know what to do with them."""
    server = await serve([Do.READ, HEAD, b"he", Do.CLOSE])
    response = await client.send("GET", server.target(), is_eager=True)
    pieces = response.pieces()

    assert await anext(pieces) == b"he"
    with pytest.raises(CutOffError):
        await anext(pieces)


async def test_a_damaged_body_raises_where_it_is_read(serve: Serve, client: Client) -> None:
    """The head is good, the connection is not."""
    server = await serve([Do.READ, CHUNKED, b"no chunk\r\n"])
    response = await client.send("GET", server.target(), is_eager=True)
    with pytest.raises(BadAnswerError):
        await response.read()

    await until(lambda: not server.open)


async def test_an_unread_body_stays_with_the_server(serve: Serve, client: Client) -> None:
    """A reader that is busy holds up the server instead of filling the memory."""
    server = await serve([Do.READ, answer(LARGE)])
    response = await client.send("GET", server.target())

    assert await held_up(response) < 1.5 * MIB
    assert server.sent_bytes < len(LARGE) // 2


async def test_a_body_that_was_held_up_is_read_whole(serve: Serve, client: Client) -> None:
    """Reading lets the rest arrive."""
    server = await serve([Do.READ, answer(LARGE)])
    response = await client.send("GET", server.target())
    await held_up(response)

    assert await response.read() == LARGE


async def test_pieces_hold_the_server_up_as_well(serve: Serve, client: Client) -> None:
    """Between two pieces no more than a little is taken in."""
    server = await serve([Do.READ, answer(LARGE)])
    response = await client.send("GET", server.target())
    pieces = response.pieces()
    first = await anext(pieces)

    assert await held_up(response) < 1.5 * MIB
    assert first + b"".join([piece async for piece in pieces]) == LARGE


async def test_a_busy_reader_is_no_silence(serve: Serve, hasty: Client) -> None:
    """While we hold the server up, it need not say anything."""
    server = await serve([Do.READ, answer(LARGE)])
    response = await hasty.send("GET", server.target())
    await asyncio.sleep(0.5)

    assert await response.read() == LARGE


async def test_a_server_has_its_full_time_after_it_was_held_up(serve: Serve) -> None:
    """The time that a reader was busy is not the server's."""
    go_on, data = asyncio.Event(), answer(LARGE[:MIB])
    server = await serve([Do.READ, data[: 600 * 1024], go_on, 0.4, data[600 * 1024 :]])
    async with aclosing(Client(connections=1, silence_s=0.6)) as client:
        response = await client.send("GET", server.target())
        await asyncio.sleep(0.8)
        go_on.set()

        assert await response.read() == LARGE[:MIB]


async def test_a_server_may_fall_silent_after_it_was_held_up(serve: Serve, hasty: Client) -> None:
    """Waiting for the rest ends as any waiting does."""
    server = await serve([Do.READ, answer(LARGE)[: 2 * MIB]])
    response = await hasty.send("GET", server.target())
    await held_up(response)
    with pytest.raises(TimeoutError):
        await response.read()


async def test_a_body_that_was_held_up_keeps_its_connection(serve: Serve, client: Client) -> None:
    """The next answer arrives as if nothing had been."""
    server = await serve([Do.READ, answer(LARGE[: 4 * MIB]), Do.READ, answer()])
    response = await client.send("GET", server.target())
    await held_up(response)
    await response.read()

    assert await fetch(client, server.target()) == b"hello"
    assert server.connections == 1
