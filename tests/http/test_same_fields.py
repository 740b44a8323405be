"""`app.http.same_fields`: who asks again with the same fields is answered as who asks anew."""

import socket
import time
from collections.abc import Generator
from pathlib import Path
from string import ascii_letters, digits
from typing import Final

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.http.answer import AtHand, Given, Later
from app.http.gateway import Gateway
from app.http.protocol import GatewayProtocol
from app.http.same_fields import fields_of, path_before
from app.settings import DatasetSettings, Settings
from tests.attacks.raw import connect, heard
from tests.serving import serving

HEAD: Final = b"%s %s HTTP/1.1\r\n%s\r\n"
HOST: Final = b"Host: x\r\n"
BODIED: Final = HOST + b"Content-Length: 56\r\n"
INNER: Final = HEAD % (b"GET", b"/any/other", BODIED)
"""A head that is a body, as long as it says that its own is."""
LINE: Final = b"GET /any/there HTTP/1.1"
FIELDS: Final = b"\r\nHost: x\r\n\r\n"

type Pieces = tuple[bytes, ...]
type Parsed = tuple[bytes, dict[bytes, bytes], bytes]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve two files."""
    folder: Path = tmp_path_factory.mktemp("any")
    (folder / "there").write_bytes(b"bytes")
    (folder / "other").write_bytes(b"others")
    settings = Settings(datasets={"any": DatasetSettings(url=folder.as_uri())})
    with serving(settings) as served:
        yield served


class _Head:
    """What httptools makes of a head."""

    def __init__(self, data: bytes) -> None:
        self.url, self.headers, self.is_complete = b"", list[tuple[bytes, bytes]](), False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_message_complete(self) -> None:
        self.is_complete = True


_PATH_LIKE: Final = st.text(ascii_letters + digits + "/%.-_~!$&'()*+,;=:@", max_size=20)
_ANYTHING: Final = st.text(st.characters(max_codepoint=0x7F), max_size=2)


@given(st.builds("/{}{}{}".format, _PATH_LIKE, _ANYTHING, _PATH_LIKE).map(str.encode))
@example(b"/em//c/0/%31")
@example(b"//other/em")
@example(b"/em?x")
@example(b"/em#x")
@example(b"*")
@example(b"http://other/em")
@example(b"/em HTTP/1.1\r\nGET /em")
def test_a_path_is_what_the_parser_takes_for_it(target: bytes) -> None:
    """None is taken of a target that holds more."""
    data = b"GET " + target + b" HTTP/1.1" + FIELDS
    path = path_before(FIELDS, data)
    if path is None:
        return
    head = _Head(data)
    url = httptools.parse_url(head.url)

    assert head.url == url.path == path
    assert not url.query
    assert not url.fragment
    assert (head.parser.get_method(), head.parser.get_http_version()) == (b"GET", "1.1")
    assert (head.headers, head.is_complete) == ([(b"Host", b"x")], True)


@given(_PATH_LIKE)
def test_paths_of_chunks_are_taken(path: str) -> None:
    """All that needs no parser is."""
    target = b"/" + path.encode()

    assert path_before(FIELDS, b"GET " + target + b" HTTP/1.1" + FIELDS) == target


@pytest.mark.parametrize(
    "data",
    [
        LINE.replace(b"GET", b"HEAD") + FIELDS,
        LINE.replace(b"GET", b"get") + FIELDS,
        LINE.replace(b"1.1", b"1.0") + FIELDS,
        LINE + b" " + FIELDS,
        b"\r\n" + LINE + FIELDS,
        LINE[1:] + FIELDS,
        FIELDS,
        LINE + FIELDS[:-1],
        LINE + FIELDS + b"\n",
        LINE + b"\r\nA: b" + FIELDS,
        LINE + FIELDS + LINE + FIELDS,
    ],
)
def test_other_heads_are_left_to_the_parser(data: bytes) -> None:
    """Other methods, versions, lines, fields, parts of heads, and several."""
    assert path_before(FIELDS, data) is None


@pytest.mark.parametrize("begin", [b"GET /any/a", b"", b"xGET /any/a"])
def test_fields_follow_the_first_line(begin: bytes) -> None:
    """However little of that line came with them, or of a body before it."""
    assert fields_of(begin + b" HTTP/1.1" + FIELDS, [(b"host", b"x")]) == FIELDS


@pytest.mark.parametrize(
    "data",
    [
        FIELDS[2:],
        b"\r\n" + LINE + FIELDS,
        LINE + FIELDS + b"x",
        LINE + FIELDS + b"\r\n",
        LINE + FIELDS + LINE + FIELDS,
        LINE + FIELDS.replace(b"\r\n\r\n", b"\n\r\n"),
        LINE + FIELDS + b"body\r\n\r\n",
        LINE.replace(b"there", b"there" * 1000) + FIELDS,
    ],
)
def test_what_is_no_lone_head_has_no_fields(data: bytes) -> None:
    """Nor has one that is long."""
    assert fields_of(data, [(b"host", b"x")]) is None


def _read(connection: socket.socket, *, has_body: bool) -> Parsed:
    """Read an answer, without what differs each time."""
    with connection.makefile("rb", buffering=0) as stream:
        while (line := stream.readline()).startswith(b"HTTP/1.1 100 "):
            stream.readline()
        headers = {}
        while (field := stream.readline()) not in {b"\r\n", b""}:
            name, _, value = field.partition(b": ")
            headers[name] = value
        body = stream.read(int(headers.get(b"content-length", b"0"))) if has_body else b""
    return line, {k: v for k, v in headers.items() if k not in {b"date", b"x-request-id"}}, body


def _ask(connection: socket.socket, pieces: Pieces) -> Parsed:
    """Send the first piece, read the answer, and send the rest."""
    connection.sendall(pieces[0])
    has_body = not pieces[0].startswith(b"HEAD")
    answer = _read(connection, has_body=has_body)
    for piece in pieces[1:]:
        connection.sendall(piece)
    return answer


_PATHS: Final = [b"/any/there", b"/any/other", b"/any/th%65re", b"/any/none", b"/any/", b"/any"]
_ODD_PATHS: Final = [b"/any/there?x", b"/any/there?acl", b"//any/there", b"http://y/any/there"]
_ODD_FIELDS: Final = [
    HOST + b"Range: bytes=1-2\r\n",
    HOST + b"If-None-Match: *\r\n",
    HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    HOST + b"Expect: 100-continue\r\nContent-Length: 0\r\n",
]


@st.composite
def _requests(draw: st.DrawFn) -> Pieces:
    method = draw(st.sampled_from([b"GET", b"GET", b"GET", b"HEAD"]))
    path = draw(st.sampled_from(_PATHS) | st.sampled_from(_ODD_PATHS))
    fields = draw(st.sampled_from([HOST, HOST, HOST + b"A: b\r\n"]) | st.sampled_from(_ODD_FIELDS))
    body = draw(st.sampled_from([b"", b"", b"", b"", b"hello", INNER]))
    if not body or any(each in fields for each in (b"Content-Length", b"Upgrade")):
        return (HEAD % (method, path, fields),)
    head = HEAD % (method, path, fields + b"Content-Length: %d\r\n" % len(body))
    return (head, body) if draw(st.booleans()) else (head + body,)


_PLAIN: Final = (HEAD % (b"GET", b"/any/there", HOST),)
_PART: Final = (HEAD % (b"GET", b"/any/there", HOST + b"Range: bytes=1-2\r\n"),)


@given(st.lists(_requests(), min_size=3, max_size=10))
@example([(HEAD % (b"GET", b"/any/there", BODIED), INNER)] * 4)
@example([_PLAIN, _PLAIN, _PART, _PLAIN, _PLAIN])
@example([_PART, _PART, _PLAIN, _PART, _PART])
def test_a_connection_answers_as_several_do(url: str, requests: list[Pieces]) -> None:
    """Each request gets the answer that it gets as the first of a connection."""
    alone = []
    for pieces in requests:
        with connect(url) as connection:
            alone.append(_ask(connection, pieces))
    with connect(url) as connection:
        together = [_ask(connection, pieces) for pieces in requests]

    assert together == alone


def test_empty_lines_are_no_fields(url: str) -> None:
    """They may come before a request (RFC 9112 §2.2), and behind one without Host."""
    with connect(url) as connection:
        for _ in range(2):
            _ask(connection, (HEAD % (b"GET", b"/any/there", HOST),))
        _ask(connection, (HEAD % (b"GET", b"/any/other", HOST), b"\r\n\r\n\r\n"))
        time.sleep(0.05)
        line, _, _ = _ask(connection, (HEAD % (b"GET", b"/any/there", b"") + b"\r\n",))

    assert line.split()[1] == b"400"


@pytest.mark.parametrize("before", [0, 3])
def test_a_fault_ends_its_connection_only(
    url: str, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Whether the head was parsed or not."""
    begin = Gateway.begin

    def broken(
        self: Gateway, raw_path: bytes, given: Given, peer: bytes, now: float
    ) -> AtHand | Later | None:
        if raw_path == b"/any/fault":
            raise RuntimeError("as ordered")
        return begin(self, raw_path, given, peer, now)

    monkeypatch.setattr(Gateway, "begin", broken)
    with connect(url) as connection, connect(url) as other:
        for _ in range(before):
            _ask(connection, _PLAIN)
        connection.sendall(HEAD % (b"GET", b"/any/fault", HOST))

        assert heard(connection) == b""
        assert _ask(other, _PLAIN)[2] == b"bytes"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Tell the names of the fields that are parsed."""
    names: list[bytes] = []
    parse = GatewayProtocol.on_header

    def on_header(self: GatewayProtocol, name: bytes, value: bytes) -> None:
        names.append(name)
        parse(self, name, value)

    monkeypatch.setattr(GatewayProtocol, "on_header", on_header)
    return names


def test_the_same_fields_are_parsed_twice(url: str, parsed: list[bytes]) -> None:
    """Whatever is asked for, and however often."""
    with connect(url) as connection:
        for path in [b"/any/there", b"/any/other", b"/any/there", b"/any/th%65re"]:
            _ask(connection, (HEAD % (b"GET", path, HOST + b"A: b\r\n"),))

    assert parsed == [b"Host", b"A"] * 2


@pytest.mark.parametrize("fields", [HOST + b"Content-Length: 0\r\n", HOST + b"A: %05000d\r\n" % 0])
def test_fields_that_may_not_be_kept_are_parsed_again(
    url: str, parsed: list[bytes], fields: bytes
) -> None:
    """Those that tell of a body, and long ones."""
    with connect(url) as connection:
        for _ in range(4):
            _ask(connection, (HEAD % (b"GET", b"/any/there", fields),))

    assert len(parsed) == 8
