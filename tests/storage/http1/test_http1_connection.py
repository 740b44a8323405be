"""Responses of the HTTP client: parsing, and reading whole, in pieces, or not at all."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self, cast
from unittest.mock import create_autospec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.storage.http1_client import (
    BadAnswerError,
    Connection,
    CutOffError,
    HttpClient,
    HttpResponse,
)
from tests.support.storage.http1.scripted import HEAD, Do, Serve, Step, answer, fetch, until

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED_LINE = b"Transfer-Encoding: chunked\r\n"
CHUNKED = OK + CHUNKED_LINE + b"\r\n"
HELLO = b"2\r\nhe\r\n3;name=value\r\nllo\r\n0\r\n"
"""Two chunks, one with an extension, and the last; trailers may follow."""


def parse(*pieces: bytes, is_bodiless: bool = False) -> HttpResponse:
    """Parse *pieces*."""
    parser = HttpResponse(cast("Connection", None), is_bodiless=is_bodiless)
    for piece in pieces:
        parser.feed(piece)
    return parser


def body_of(parser: HttpResponse) -> bytes:
    """Return the body of a complete response."""
    return asyncio.run(parser.read())


def seen(parser: HttpResponse) -> dict[str, object]:
    """Return all attributes of a response, and its body after the connection has closed."""
    names = ("status", "headers", "length", "has_begun", "has_head", "is_complete", "is_reusable")
    found = {name: getattr(parser, name) for name in names}
    parser.close(None)
    return found | {"body": body_of(parser)}


@dataclass(frozen=True)
class Sent:
    """The bytes of a response, and their meaning."""

    data: bytes
    body: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)
    is_until_close: bool = False

    def after(self, interim: bytes) -> Self:
        """Precede the response by interim ones."""
        return type(self)(interim + self.data, self.body, self.headers, self.is_until_close)


def chunked(chunks: list[bytes], trailers: bytes) -> Sent:
    """Return a chunked response of *chunks*."""
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    data = b"%s%s\r\n%s0\r\n%s\r\n" % (OK, CHUNKED_LINE, coded, trailers)
    return Sent(data, b"".join(chunks), {b"transfer-encoding": b"chunked"})


def measured(body: bytes) -> Sent:
    """Return a response with a Content-Length."""
    length = b"%d" % len(body)
    data = b"%sContent-Length: %s\r\n\r\n%s" % (OK, length, body)
    return Sent(data, body, {b"content-length": length})


def unmeasured(body: bytes) -> Sent:
    """Return a response that ends with its connection."""
    return Sent(b"%sETag: x\r\n\r\n%s" % (OK, body), body, {b"etag": b"x"}, is_until_close=True)


few = settings(max_examples=40)
BODIES = st.binary(max_size=40)
INTERIMS = st.lists(
    st.sampled_from(
        [
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 102 Processing\r\nContent-Length: 3\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nETag: y\r\nLink: </a>\r\n\r\n",
            b"HTTP/1.1 199 Whatever\r\nETag: z\r\n\r\n",
        ]
    ),
    max_size=3,
).map(b"".join)
SELF_DELIMITED = st.builds(measured, BODIES) | st.builds(
    chunked,
    st.lists(st.binary(min_size=1, max_size=40), max_size=4),
    st.sampled_from([b"", b"X-Sum: 1\r\n", b"ETag: z\r\nX-Sum: 1\r\n"]),
)
ANSWERS = st.builds(Sent.after, SELF_DELIMITED | st.builds(unmeasured, BODIES), INTERIMS)
CUTS = st.lists(st.integers(0, 400))


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut *data* at some places, as a network does."""
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(places)]


@few
@given(ANSWERS, CUTS)
def test_response_does_not_depend_on_its_splits(answer: Sent, cuts: list[int]) -> None:
    """A response is parsed alike wherever its head, interim responses or body are cut."""
    assert seen(parse(*split(answer.data, cuts))) == {
        "status": 200,
        "headers": answer.headers,
        "length": len(answer.body) if b"content-length" in answer.headers else None,
        "body": answer.body,
        "has_begun": True,
        "has_head": True,
        "is_complete": not answer.is_until_close,
        "is_reusable": not answer.is_until_close,
    }


@few
@given(SELF_DELIMITED, st.integers(1, 400))
def test_truncated_response_is_not_complete(answer: Sent, place: int) -> None:
    """A response that lacks even its last byte is not complete."""
    kept = place % len(answer.data) or len(answer.data) - 1

    assert not parse(answer.data[:kept]).is_complete


@few
@given(SELF_DELIMITED, CUTS, st.sampled_from([OK, b"x", b"\0", b"0\r\n\r\n"]))
def test_surplus_bytes_end_the_connection(answer: Sent, cuts: list[int], surplus: bytes) -> None:
    """A response with bytes after its body is complete, and its connection not reusable."""
    *pieces, last = split(answer.data, cuts)
    parser = parse(*pieces, last + surplus)

    assert (parser.is_complete, parser.is_reusable) == (True, False)
    assert body_of(parser) == answer.body


@few
@given(ANSWERS, CUTS, st.sampled_from([b"", b"hello"]))
def test_response_to_head_has_no_body(answer: Sent, cuts: list[int], surplus: bytes) -> None:
    """A response to HEAD ends with its head, and bytes that follow are not its body."""
    interim, _, rest = answer.data.partition(OK)
    head = interim + OK + rest.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    *pieces, last = split(head, cuts)
    parser = parse(*pieces, last + surplus, is_bodiless=True)

    assert (parser.is_complete, parser.headers) == (True, answer.headers)
    assert body_of(parser) == b""
    assert not (surplus and parser.is_reusable)


@few
@given(ANSWERS, st.binary(max_size=20), st.integers(0, 400))
def test_damaged_response_raises_only_bad_answer(answer: Sent, damage: bytes, place: int) -> None:
    """Any bytes are parsed, or raise BadAnswerError."""
    start = place % len(answer.data)
    data = answer.data[:start] + damage + answer.data[start + len(damage) :]
    with suppress(BadAnswerError):
        parse(data)


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("header", [b"", b"Content-Length: 5\r\n", CHUNKED_LINE])
def test_204_and_304_have_no_body(status: int, header: bytes) -> None:
    """A response of 204 or 304 ends with its head, whatever its headers announce."""
    for body in (b"", b"hello"):
        parser = parse(b"HTTP/1.1 %d X\r\n%s\r\n%s" % (status, header, body))
        assert (parser.is_complete, parser.is_reusable) == (True, not body)
        assert body_of(parser) == b""


@pytest.mark.parametrize(
    ("head", "is_reusable"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 404 Not Found\r\n", True),
        (b"HTTP/1.1 200\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Close, X\r\n", False),
        (b"HTTP/1.1 200 OK\r\nUpgrade: h2c\r\nConnection: upgrade\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_connection_header_decides_reuse(head: bytes, *, is_reusable: bool) -> None:
    """A connection is reusable unless it has `close`, and for HTTP/1.0 only with `keep-alive`."""
    assert parse(head + b"Content-Length: 2\r\n\r\nhi").is_reusable is is_reusable


@pytest.mark.parametrize("chunk", [b"x\r\n", b"-1\r\n", b"2\r\nabc\r\n", b"f" * 17 + b"\r\n"])
def test_damaged_chunk_is_refused(chunk: bytes) -> None:
    """A damaged chunk raises BadAnswerError, and the response keeps its status."""
    parser = parse(CHUNKED + b"2\r\nhi\r\n")
    with pytest.raises(BadAnswerError):
        parser.feed(chunk)

    assert (parser.status, parser.is_complete, parser.is_reusable) == (200, False, False)


@pytest.mark.parametrize(
    ("lines", "headers"),
    [
        (b"ETag: A\r\nX-b: C\r\n", {b"etag": b"A", b"x-b": b"C"}),
        (b'ETag:\t "a b" \t\r\n', {b"etag": b'"a b"'}),
        (b"ETag:\r\nX-A: 1\r\n", {b"etag": b"", b"x-a": b"1"}),
        (b"ETag: a\r\nETag: b\r\n", {b"etag": b"b"}),
        (b"Content-Encoding: gzip\r\nContent-Encoding: br\r\n", {b"content-encoding": b"gzip, br"}),
    ],
)
@pytest.mark.parametrize("trailer", [b"ETag: forged", b"Content-Range: bytes 0-0/1", b"X-New: 1"])
def test_headers_are_parsed_from_the_head_only(
    lines: bytes, headers: dict[bytes, bytes], trailer: bytes
) -> None:
    """Header names are lower case, values are stripped (RFC 9110 §5.5), and trailers are ignored.

    The last of repeated headers counts, but Content-Encodings are joined (§5.3).
    """
    parser = parse(
        OK + lines + b"Transfer-Encoding: Chunked \r\n\r\n", HELLO + trailer + b"\r\n\r\n"
    )

    assert parser.headers == headers | {b"transfer-encoding": b"Chunked"}
    assert parser.is_complete
    assert body_of(parser) == b"hello"


@pytest.mark.parametrize(
    "data",
    [
        *(b"garbage", b"\0\1\2\3", b"SSH-2.0-OpenSSH_9.6\r\n"),
        b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        *(
            OK + lines + b"\r\nhi"
            for lines in (
                *(b"ETag : a\r\n", b"no colon\r\n", b"ETag: a\0b\r\n", b"ETag: a\r\n folded\r\n"),
                b"Content-Length: 2\r\nContent-Length: 3\r\n",
                b"Content-Length: 2, 3\r\n",
                b"Content-Length: -1\r\n",
                b"Content-Length: +2\r\n",
                b"Content-Length: 0x2\r\n",
                b"Content-Length: 99999999999999999999\r\n",
                b"Content-Length:\r\n",
                CHUNKED_LINE + b"Content-Length: 2\r\n",
                b"Content-Length: 2\r\n" + CHUNKED_LINE,
                b"Transfer-Encoding: gzip\r\n",
                b"Transfer-Encoding: gzip, chunked\r\n",
                b"Transfer-Encoding: identity\r\n",
                b"Transfer-Encoding: chunked, chunked\r\n",
            )
        ),
        *(
            b"HTTP/1.1 " + status + b" X\r\n" + body + OK + b"Content-Length: 2\r\n\r\nhi"
            for status in (b"000", b"099", b"104", b"199")
            for body in (b"Content-Length: 2\r\n\r\nno", CHUNKED_LINE + b"\r\n2\r\nno\r\n0\r\n\r\n")
        ),
    ],
)
def test_invalid_or_ambiguous_response_is_refused(data: bytes) -> None:
    """Other protocols, damaged heads, two lengths and unknown codings raise BadAnswerError."""
    with pytest.raises(BadAnswerError):
        parse(data)


@pytest.mark.parametrize(
    ("data", "is_refused"),
    [
        (OK + b"X: " + b"a" * 70_000, True),
        (OK + b"X: a\r\n" * 12_000, True),
        (b"HTTP/1.1 200 " + b"a" * 70_000, True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 3_000, True),
        (OK + b"X: %s\r\nContent-Length: 0\r\n\r\n" % (b"a" * 65_000), False),
        (CHUNKED + (b"4000\r\n%s\r\n" % (b"a" * 0x4000)) * 8, False),
    ],
)
def test_a_head_has_64_kib_at_most(data: bytes, *, is_refused: bool) -> None:
    """A head, with interim responses, of more than 64 KiB is refused; a body may be longer."""
    with pytest.raises(BadAnswerError, match="longer than") if is_refused else nullcontext():
        assert parse(*(data[i : i + 1000] for i in range(0, len(data), 1000))).has_head


UNMEASURED = OK + b"\r\n"
MIB = 1024**2
type Read = Callable[[HttpResponse], Awaitable[bytes]]
LARGE = bytes(range(256)) * (20 * MIB // 256)


async def collect(response: HttpResponse) -> bytes:
    """Read a response piece by piece."""
    return b"".join([piece async for piece in response.pieces()])


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a growing list of the numbers of bytes that responses have received."""
    counts: list[int] = []
    feed = HttpResponse.feed

    def count(response: HttpResponse, data: bytes | memoryview) -> None:
        counts.append(len(data))
        feed(response, data)

    monkeypatch.setattr(HttpResponse, "feed", count)
    return counts


async def held_up(received: list[int]) -> int:
    """Wait until no more is received, and return how much was."""
    await until(lambda: sum(received) > MIB // 2)
    await asyncio.sleep(0.05)
    return sum(received)


async def test_eager_request_reads_the_body(serve: Serve, client: HttpClient) -> None:
    """An eager request returns when its body has arrived, or the first 512 KiB of a large one."""
    go_on, body = asyncio.Event(), LARGE[:MIB]
    data = answer(body)
    small: list[Step] = [Do.READ, HEAD, 0.01, b"he", 0.01, b"llo"]
    server = await serve([*small, Do.READ, data[: 600 * 1024], go_on, data[600 * 1024 :]])
    assert (await client.send("GET", server.target(), is_eager=True)).is_complete

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
@pytest.mark.parametrize("read", [HttpResponse.read, collect])
async def test_body_is_read_whole_and_in_pieces(
    serve: Serve, client: HttpClient, steps: list[Step], read: Read
) -> None:
    """A body with a length, with chunks or until the close is the same whole and in pieces."""
    server = await serve([Do.READ, *steps])

    assert await read(await client.send("GET", server.target())) == b"hello"


async def test_an_empty_body_has_no_pieces(serve: Serve, client: HttpClient) -> None:
    """An empty body has no pieces, with a length and in chunks."""
    server = await serve([Do.READ, answer(b""), Do.READ, CHUNKED + b"0\r\n\r\n"])
    for _ in range(2):
        response = await client.send("GET", server.target())
        assert [piece async for piece in response.pieces()] == []


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
@pytest.mark.parametrize("read", [HttpResponse.read, collect])
async def test_truncated_body_raises(
    serve: Serve,
    client: HttpClient,
    transport: ssl.SSLContext | None,
    steps: list[Step],
    read: Read,
) -> None:
    """A body that is cut off raises CutOffError, with TLS too."""
    server = await serve([Do.READ, *steps], tls=transport)
    response = await client.send("GET", server.target())
    with pytest.raises(CutOffError):
        await read(response)


async def test_damaged_body_raises_when_read(serve: Serve, client: HttpClient) -> None:
    """A damaged body raises BadAnswerError when it is read, and closes its connection."""
    server = await serve([Do.READ, CHUNKED, b"no chunk\r\n"])
    response = await client.send("GET", server.target(), is_eager=True)
    with pytest.raises(BadAnswerError):
        await response.read()

    await until(lambda: not server.open)


async def test_timeout_does_not_count_the_readers_pause(serve: Serve) -> None:
    """The time in which a reader does not read is not part of the server's timeout."""
    go_on, data = asyncio.Event(), answer(LARGE[:MIB])
    server = await serve([Do.READ, data[: 600 * 1024], go_on, 0.4, data[600 * 1024 :]])
    async with aclosing(HttpClient(connections=1, silence_s=2)) as client:
        response = await client.send("GET", server.target())
        await asyncio.sleep(2.2)
        go_on.set()

        assert await response.read() == LARGE[:MIB]


async def test_silence_after_a_readers_pause_is_a_timeout(
    serve: Serve, hasty: HttpClient, received: list[int]
) -> None:
    """A server that is silent after a reader's pause raises TimeoutError."""
    server = await serve([Do.READ, answer(LARGE)[: 2 * MIB]])
    response = await hasty.send("GET", server.target())
    await held_up(received)
    with pytest.raises(TimeoutError):
        await response.read()


@pytest.mark.parametrize("is_begun", [False, True])
async def test_unread_body_is_not_buffered(
    serve: Serve,
    client: HttpClient,
    transport: ssl.SSLContext | None,
    received: list[int],
    *,
    is_begun: bool,
) -> None:
    """An unread large body is not received beyond 1.5 MiB, and nothing of it is lost."""
    server = await serve([Do.READ, answer(LARGE), Do.READ, answer()], tls=transport)
    response = await client.send("GET", server.target())
    first = await anext(response.pieces()) if is_begun else b""

    assert await held_up(received) - len(first) < 1.5 * MIB
    assert server.sent_bytes < len(LARGE) // 2
    assert first + await response.read() == LARGE
    assert await fetch(client, server.target()) == b"hello"
    assert server.connections == 1


async def test_small_pieces_are_handed_on_together(serve: Serve, client: HttpClient) -> None:
    """A body in chunks of one byte that has arrived is one piece."""
    body = b"1\r\na\r\n" * 10_000 + b"0\r\n\r\n"
    server = await serve([Do.READ, CHUNKED, body])
    response = await client.send("GET", server.target(), is_eager=True)
    pieces = [piece async for piece in response.pieces()]

    assert b"".join(pieces) == b"a" * 10_000
    assert len(pieces) == 1


async def test_flood_after_the_reader_was_woken_is_paused() -> None:
    """A connection that fills its buffer again and again before its reader runs is paused."""
    transport = create_autospec(asyncio.Transport)
    transport.is_closing.return_value = False
    buffer = memoryview(bytearray(256 * 1024))
    connection = Connection(60, buffer)
    connection.connection_made(transport)
    response = HttpResponse(connection, is_bodiless=False)
    connection.send(b"", response, lambda _: None)
    reading = asyncio.ensure_future(anext(response.pieces()))
    await asyncio.sleep(0)
    for data in (answer(LARGE)[: len(buffer)], *[LARGE[: len(buffer)]] * 2):
        transport.pause_reading.assert_not_called()
        connection.get_buffer(-1)[:] = data
        connection.buffer_updated(len(buffer))

    transport.pause_reading.assert_called_once_with()
    assert len(await reading) > 0
    connection.close()


async def test_slow_reader_of_pieces_is_not_flooded(
    serve: Serve, client: HttpClient, transport: ssl.SSLContext | None, received: list[int]
) -> None:
    """A reader that is slower than the server never has more than 1 MiB of the body to read."""
    server = await serve([Do.READ, answer(LARGE)], tls=transport)
    response = await client.send("GET", server.target())
    read, most_nbytes = b"", 0
    async for piece in response.pieces():
        read += piece
        await asyncio.sleep(0.01)
        most_nbytes = max(most_nbytes, sum(received) - len(read))

    assert read == LARGE
    assert most_nbytes < MIB


@pytest.mark.parametrize(("end", "error"), [([Do.CLOSE], CutOffError), ([], TimeoutError)])
@pytest.mark.parametrize("is_eager", [False, True])
async def test_pieces_before_a_failure_are_returned(
    serve: Serve, hasty: HttpClient, end: list[Step], error: type[Exception], *, is_eager: bool
) -> None:
    """The pieces before a truncation or silence are returned, and each later read raises."""
    server = await serve([Do.READ, HEAD, b"he", *end])
    response = await hasty.send("GET", server.target(), is_eager=is_eager)
    pieces = response.pieces()

    assert (response.status, response.length, response.is_complete) == (200, 5, False)
    assert await anext(pieces) == b"he"
    for read in (anext(pieces), response.read()):
        with pytest.raises(error):
            await read
    await until(lambda: not server.open)


async def test_pieces_are_returned_as_they_arrive(serve: Serve, client: HttpClient) -> None:
    """A piece is returned when it arrives, and once."""
    go_on = asyncio.Event()
    server = await serve([Do.READ, HEAD, b"he", go_on, b"llo"])
    response = await client.send("GET", server.target())

    assert await anext(response.pieces()) == b"he"
    go_on.set()
    assert await response.read() == b"llo"
