"""Responses: bytes become a head and a body, which is read whole, piece by piece, or not at all."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.storage.http1_client import (
    BadAnswerError,
    Connection,
    CutOffError,
    HttpClient,
    Response,
)
from tests.storage.http1.conftest import Serve
from tests.storage.http1.scripted import Do, Step, answer, fetch, until

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED_LINE = b"Transfer-Encoding: chunked\r\n"
HELLO = b"2\r\nhe\r\n3;name=value\r\nllo\r\n0\r\n"
"""Two chunks, one with an extension, and the last; trailers may follow."""


def parse(*pieces: bytes, is_bodiless: bool = False) -> Response:
    """Feed *pieces*."""
    parser = Response(cast("Connection", None), is_bodiless=is_bodiless, is_eager=False)
    for piece in pieces:
        parser.feed(piece)
    return parser


def seen(parser: Response) -> dict[str, object]:
    """Take all that there is to see."""
    names = (
        *("status", "headers", "length", "_nbytes", "has_begun", "has_head"),
        *("is_complete", "_is_until_close", "is_reusable"),
    )
    return {name: getattr(parser, name) for name in names} | {"body": parser._take()}


@dataclass(frozen=True)
class Sent:
    """The bytes of an answer, and what they mean."""

    data: bytes
    body: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)
    is_until_close: bool = False

    def after(self, interim: bytes) -> Self:
        """Announce it by other answers."""
        return type(self)(interim + self.data, self.body, self.headers, self.is_until_close)


def chunked(chunks: list[bytes], trailers: bytes) -> Sent:
    """Send *chunks* as they are."""
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    data = b"%s%s\r\n%s0\r\n%s\r\n" % (OK, CHUNKED_LINE, coded, trailers)
    return Sent(data, b"".join(chunks), {b"transfer-encoding": b"chunked"})


def measured(body: bytes) -> Sent:
    """Say how long *body* is."""
    length = b"%d" % len(body)
    data = b"%sContent-Length: %s\r\n\r\n%s" % (OK, length, body)
    return Sent(data, body, {b"content-length": length})


def unmeasured(body: bytes) -> Sent:
    """End *body* by closing the connection."""
    return Sent(b"%sETag: x\r\n\r\n%s" % (OK, body), body, {b"etag": b"x"}, is_until_close=True)


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


@given(ANSWERS, CUTS)
def test_an_answer_means_the_same_however_it_is_split(answer: Sent, cuts: list[int]) -> None:
    """Head, announcements, body and trailers may be cut anywhere."""
    assert seen(parse(*split(answer.data, cuts))) == {
        "status": 200,
        "headers": answer.headers,
        "length": len(answer.body) if b"content-length" in answer.headers else None,
        "body": answer.body,
        "_nbytes": len(answer.body),
        "has_begun": True,
        "has_head": True,
        "is_complete": not answer.is_until_close,
        "_is_until_close": answer.is_until_close,
        "is_reusable": not answer.is_until_close,
    }


@given(SELF_DELIMITED, CUTS, st.data())
def test_an_answer_cut_short_is_not_complete(
    answer: Sent, cuts: list[int], data: st.DataObject
) -> None:
    """Whatever is missing, be it the last byte, is missed."""
    kept = data.draw(st.integers(1, len(answer.data) - 1))

    assert not parse(*split(answer.data[:kept], cuts)).is_complete


@given(SELF_DELIMITED, CUTS, st.sampled_from([OK, b"x", b"\0", b"0\r\n\r\n"]))
def test_bytes_after_the_body_are_left_and_end_the_connection(
    answer: Sent, cuts: list[int], surplus: bytes
) -> None:
    """An answer with something behind it is whole, but nothing may follow on the connection."""
    *pieces, last = split(answer.data, cuts)
    parser = parse(*pieces, last + surplus)

    assert (parser.is_complete, parser.is_reusable, parser._take()) == (True, False, answer.body)


@given(ANSWERS, CUTS, st.sampled_from([b"", b"hello"]))
def test_the_answer_to_a_head_ends_with_its_head(
    answer: Sent, cuts: list[int], surplus: bytes
) -> None:
    """However long the body of a GET would be, none is waited for, or taken if it comes."""
    interim, _, rest = answer.data.partition(OK)
    head = interim + OK + rest.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    *pieces, last = split(head, cuts)
    parser = parse(*pieces, last + surplus, is_bodiless=True)

    assert (parser.is_complete, parser.headers, parser._take()) == (True, answer.headers, b"")
    assert not (surplus and parser.is_reusable)


@given(ANSWERS, st.binary(max_size=20), st.integers(0, 400), CUTS)
def test_any_bytes_are_parsed_or_refused(
    answer: Sent, damage: bytes, place: int, cuts: list[int]
) -> None:
    """Nothing but `BadAnswerError` is raised, whatever a server sends."""
    start = place % len(answer.data)
    data = answer.data[:start] + damage + answer.data[start + len(damage) :]
    try:
        parser = parse(*split(data, cuts))
    except BadAnswerError:
        return

    assert parser._nbytes == len(parser._take())


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("header", [b"", b"Content-Length: 5\r\n", CHUNKED_LINE])
def test_some_statuses_have_no_body(status: int, header: bytes) -> None:
    """An answer of 204 or 304 ends with its head; what a wrong server sends after it is left."""
    for body in (b"", b"hello"):
        parser = parse(b"HTTP/1.1 %d X\r\n%s\r\n%s" % (status, header, body))
        assert (parser.is_complete, parser.is_reusable, parser._take()) == (True, not body, b"")


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
def test_another_answer_may_follow_where_the_server_allows_it(
    head: bytes, *, is_reusable: bool
) -> None:
    """HTTP/1.1 keeps connections unless it says otherwise, HTTP/1.0 only if it says so."""
    assert parse(head + b"Content-Length: 2\r\n\r\nhi").is_reusable is is_reusable


@pytest.mark.parametrize("chunk", [b"x\r\n", b"-1\r\n", b"2\r\nabc\r\n", b"f" * 17 + b"\r\n"])
def test_a_damaged_chunk_is_refused_after_the_head(chunk: bytes) -> None:
    """Status and headers stay what they were, but the body has no end."""
    parser = parse(OK + CHUNKED_LINE + b"\r\n2\r\nhi\r\n")
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
        (
            b"Content-Encoding: gzip\r\nContent-Encoding: br\r\n",
            {b"content-encoding": b"gzip, br"},
        ),
    ],
)
@pytest.mark.parametrize("trailer", [b"ETag: forged", b"Content-Range: bytes 0-0/1", b"X-New: 1"])
def test_headers_are_those_of_the_head(
    lines: bytes, headers: dict[bytes, bytes], trailer: bytes
) -> None:
    """Names are in lower case, values stripped (RFC 9110 §5.5), the last one counts, no trailer.

    Content codings are those of all lines (§5.3): each was applied.
    """
    parser = parse(
        OK + lines + b"Transfer-Encoding: Chunked \r\n\r\n", HELLO + trailer + b"\r\n\r\n"
    )

    assert parser.headers == headers | {b"transfer-encoding": b"Chunked"}
    assert (parser.is_complete, parser._take()) == (True, b"hello")


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        b"\0\1\2\3",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        *(
            OK + lines + b"\r\nhi"
            for lines in (
                b"ETag : a\r\n",
                b"no colon\r\n",
                b"ETag: a\0b\r\n",
                b"ETag: a\r\n folded\r\n",
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
def test_what_is_not_http_or_has_no_certain_end_is_refused(data: bytes) -> None:
    """Other protocols, damaged heads, two lengths, unknown codings, bodies of interim responses."""
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
        (OK + CHUNKED_LINE + b"\r\n" + (b"4000\r\n%s\r\n" % (b"a" * 0x4000)) * 8, False),
    ],
)
def test_a_head_has_64_kib_at_most(data: bytes, *, is_refused: bool) -> None:
    """Headers and interim responses count, the body does not."""
    with pytest.raises(BadAnswerError, match="longer than") if is_refused else nullcontext():
        assert parse(*(data[i : i + 1000] for i in range(0, len(data), 1000))).has_head


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
    await until(lambda: response._nbytes > MIB // 2)
    await asyncio.sleep(0.05)
    return response._nbytes


async def test_an_eager_request_ends_with_the_body(serve: Serve, client: HttpClient) -> None:
    """Then reading need not wait; of a large one it ends with the first 512 KiB."""
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
@pytest.mark.parametrize("read", [Response.read, collect])
async def test_a_body_has_an_end(
    serve: Serve, client: HttpClient, steps: list[Step], read: Read
) -> None:
    """However a server tells the end, whole and in pieces the body is the same."""
    server = await serve([Do.READ, *steps])

    assert await read(await client.send("GET", server.target())) == b"hello"


@pytest.mark.parametrize(
    "data", [answer(b""), b"HTTP/1.1 304 Not Modified\r\n\r\n", CHUNKED + b"0\r\n\r\n"]
)
async def test_an_empty_body_has_no_pieces(serve: Serve, client: HttpClient, data: bytes) -> None:
    """There are no empty pieces either."""
    server = await serve([Do.READ, data])
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
@pytest.mark.parametrize("read", [Response.read, collect])
async def test_a_body_that_is_cut_off_raises(
    serve: Serve,
    client: HttpClient,
    transport: ssl.SSLContext | None,
    steps: list[Step],
    read: Read,
) -> None:
    """Half a body is never taken for a whole one; a proper end of TLS is no end of the body."""
    server = await serve([Do.READ, *steps], tls=transport)
    response = await client.send("GET", server.target())
    with pytest.raises(CutOffError):
        await read(response)


async def test_a_damaged_body_raises_where_it_is_read(serve: Serve, client: HttpClient) -> None:
    """The head is good, the connection is not."""
    server = await serve([Do.READ, CHUNKED, b"no chunk\r\n"])
    response = await client.send("GET", server.target(), is_eager=True)
    with pytest.raises(BadAnswerError):
        await response.read()

    await until(lambda: not server.open)


async def test_a_server_has_its_full_time_after_it_was_held_up(serve: Serve) -> None:
    """The time that a reader was busy is not the server's."""
    go_on, data = asyncio.Event(), answer(LARGE[:MIB])
    server = await serve([Do.READ, data[: 600 * 1024], go_on, 0.4, data[600 * 1024 :]])
    async with aclosing(HttpClient(connections=1, silence_s=2)) as client:
        response = await client.send("GET", server.target())
        await asyncio.sleep(2.2)
        go_on.set()

        assert await response.read() == LARGE[:MIB]


async def test_a_server_may_fall_silent_after_it_was_held_up(
    serve: Serve, hasty: HttpClient
) -> None:
    """Waiting for the rest ends as any waiting does."""
    server = await serve([Do.READ, answer(LARGE)[: 2 * MIB]])
    response = await hasty.send("GET", server.target())
    await held_up(response)
    with pytest.raises(TimeoutError):
        await response.read()


@pytest.mark.parametrize("is_begun", [False, True])
async def test_an_unread_body_stays_with_the_server(
    serve: Serve, client: HttpClient, transport: ssl.SSLContext | None, *, is_begun: bool
) -> None:
    """A busy reader holds up the server instead of filling the memory, and loses nothing."""
    server = await serve([Do.READ, answer(LARGE), Do.READ, answer()], tls=transport)
    response = await client.send("GET", server.target())
    first = await anext(response.pieces()) if is_begun else b""

    assert await held_up(response) < 1.5 * MIB
    assert server.sent_bytes < len(LARGE) // 2
    assert first + await response.read() == LARGE
    assert await fetch(client, server.target()) == b"hello"
    assert server.connections == 1


async def test_pieces_before_the_cut_are_passed_on(serve: Serve, client: HttpClient) -> None:
    """The cut is raised behind them, each time that the body is read."""
    server = await serve([Do.READ, HEAD, b"he", Do.CLOSE])
    response = await client.send("GET", server.target(), is_eager=True)
    pieces = response.pieces()

    assert (response.status, response.length, response.is_complete) == (200, 5, False)
    assert await anext(pieces) == b"he"
    for read in (anext(pieces), response.read()):
        with pytest.raises(CutOffError):
            await read


async def test_pieces_are_passed_on_as_they_arrive(serve: Serve, client: HttpClient) -> None:
    """None waits for the next one, and none is read again."""
    go_on = asyncio.Event()
    server = await serve([Do.READ, HEAD, b"he", go_on, b"llo"])
    response = await client.send("GET", server.target())

    assert await anext(response.pieces()) == b"he"
    go_on.set()
    assert await response.read() == b"llo"
