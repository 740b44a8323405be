"""Request smuggling and header injection: ambiguous requests end the connection."""

from collections.abc import Generator

import httpx
import pytest

from shardgate.settings import DatasetSettings, ServerSettings, Settings
from tests.support.attacks.raw import connect, exchange, heard, statuses
from tests.support.attacks.smuggling import CHUNKED, GET, LAST, UNCLEAR
from tests.support.serving import serving
from tests.support.storage.faulty import FaultyServer


@pytest.fixture(scope="module")
def urls() -> Generator[list[str]]:
    """Serve a writable dataset twice, with CORS for all origins and for one."""
    datasets = {"any": DatasetSettings(url="memory://any", writable=True)}
    named = ServerSettings(cors_origins=("https://a.example",))
    with (
        serving(Settings(datasets=datasets)) as for_all,
        serving(Settings(server=named, datasets=datasets)) as for_one,
    ):
        httpx.put(f"{for_one}/any/there", content=b"bytes\n").raise_for_status()
        yield [for_all, for_one]


@pytest.fixture(scope="module")
def url(urls: list[str]) -> str:
    """Return the URL of the service that allows one origin and has an object."""
    return urls[1]


@pytest.mark.parametrize("request_bytes", UNCLEAR.values(), ids=UNCLEAR)
def test_ambiguous_request_ends_the_connection(url: str, request_bytes: bytes) -> None:
    """An ambiguous request gets 400 or 411; it stores nothing, and nothing behind it is read."""
    assert statuses(exchange(url, request_bytes + LAST)) in ([400], [411])
    assert httpx.get(f"{url}/any/k").status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        CHUNKED + b"\r\n5\r\nhello\r\n0\r\n\r\n",
        CHUNKED + b"\r\n0\r\nRange: bytes=0-0\r\nIf-None-Match: *\r\n\r\n",
        b"Content-Length: 5\r\n\r\nhello",
    ],
    ids=["chunks", "trailers", "length"],
)
def test_body_of_a_get_is_skipped(url: str, body: bytes) -> None:
    """The body and the trailers of a GET are skipped, and the next request is answered."""
    assert statuses(exchange(url, GET + body + LAST)) == [200, 404]


@pytest.mark.parametrize("path", [b"/nothing/k", b"/any/k?acl", b"/any", b"/any/there/../k"])
@pytest.mark.parametrize("length", [b"Content-Length: %d\r\n\r\n", CHUNKED + b"\r\n%x\r\n"])
def test_body_of_a_refused_put_is_not_the_next_request(
    url: str, path: bytes, length: bytes
) -> None:
    """The body of a refused PUT is not read as a request; the connection is closed."""
    head = b"PUT %s HTTP/1.1\r\nHost: localhost\r\n" % path + length % len(LAST)
    for pieces in ([head + LAST + b"\r\n0\r\n\r\n" + LAST], [head, LAST, LAST]):
        received = exchange(url, *pieces)

        assert len(statuses(received)) == 1
        assert b"connection: close" in received


@pytest.mark.parametrize("path", [b"/api/datasets", b"/api/nothing", b"/healthz", b"/"])
def test_unread_body_of_a_post_is_not_the_next_request(url: str, path: bytes) -> None:
    """The body of a POST that is refused before the body arrives is not read as a request."""
    body = GET + b"\r\n"
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path, len(body))
    first, *others = statuses(exchange(url, head, body, LAST))

    assert first >= 400
    assert others in ([], [404])


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_upgrade_is_ignored(url: str, protocol: bytes) -> None:
    """A request to upgrade to h2c or websocket, and those behind it, are answered in HTTP/1.1."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\n\r\n" % protocol
    answers = statuses(exchange(url, GET + upgrade + GET + upgrade, GET + b"\r\n" + LAST))

    assert answers == [200, 200, 200, 404]


def test_malformed_request_gets_a_problem_document(url: str) -> None:
    """A malformed request gets a problem document with its CORS headers and its request id."""
    headers = b"Origin: https://a.example\r\nX-Request-ID: mine\r\nX-B: c\r\nX A: b\r\n"
    received = exchange(url, GET + headers)

    for line in (
        b"content-type: application/problem+json",
        b"access-control-allow-origin: https://a.example",
        b"x-request-id: mine",
        b"connection: close",
    ):
        assert line in received


def test_request_before_a_malformed_one_is_answered(url: str) -> None:
    """A request before a malformed one on the same connection is answered with 200."""
    for good in (GET + b"\r\n", b"GET /any/ HTTP/1.1\r\nHost: x\r\n\r\n"):
        assert statuses(exchange(url, good + b"what?\r\n\r\n" + LAST))[0] == 200


def test_connection_half_closed_within_a_head_is_closed(url: str) -> None:
    """A connection half-closed by its client within a head is closed without a response."""
    httpx.get(f"{url}/any/there")
    with connect(url) as connection:
        connection.sendall(GET + b"\r\n")
        assert connection.recv(65536)
        connection.sendall(LAST[:-2])
        connection.shutdown(1)
        assert heard(connection) == b""
    assert httpx.get(f"{url}/healthz").is_success


EVIL = "x%0d%0aSet-Cookie:%20a=b"
PATHS = [
    f"/any/{EVIL}",
    f"/any/{EVIL}/",
    f"/any/@branch.{EVIL}/zarr.json",
    f"/any/@tag.{EVIL}/",
    f"/any?list-type=2&prefix={EVIL}",
    f"/any?list-type=2&encoding-type=url&start-after={EVIL}",
    f"/any/k?versionId={EVIL}",
    f"/{EVIL}/k",
    f"/~{EVIL}/any/k",
    f"/api/datasets/{EVIL}",
    f"/api/datasets/any?path={EVIL}",
    f"/api/datasets/any/history?ref={EVIL}",
]


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "POST"])
@pytest.mark.parametrize("path", PATHS)
def test_line_break_in_a_path_adds_no_header(urls: list[str], method: str, path: str) -> None:
    """A path with an encoded line break gets one response, to which it adds no header."""
    body = "Content-Length: 0\r\nConnection: close\r\n\r\n"
    received = exchange(urls[0], f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{body}".encode())

    assert len(statuses(received)) == 1
    assert b"set-cookie" not in received.partition(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize(
    "header",
    [
        "X-Request-ID",
        "Origin",
        "Range",
        "If-None-Match",
        "Accept",
        "Access-Control-Request-Headers",
    ],
)
@pytest.mark.parametrize("value", [b"a\x0bb", b"a\tb", b"\xff\xfe", b"%0d%0aSet-Cookie: a=b"])
def test_invalid_header_value_is_not_echoed(urls: list[str], header: str, value: bytes) -> None:
    """A request header with an invalid value is not echoed in the response's head."""
    for method in (b"GET", b"OPTIONS"):
        request = b"%s /any/k HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % method
        received = exchange(urls[0], request + b"%s: %s\r\n\r\n" % (header.encode(), value))

        assert value not in received.partition(b"\r\n\r\n")[0]


def test_headers_of_the_store_are_not_passed_on(faulty: FaultyServer) -> None:
    """A response has no headers of the store other than ETag and Last-Modified."""
    settings = Settings(datasets={"any": DatasetSettings(url=f"{faulty.url}/bucket")})
    faulty.put("bucket", "k", b"bytes")
    with serving(settings) as url:
        answer = httpx.get(f"{url}/any/k")

    assert answer.content == b"bytes"
    assert answer.headers.keys() <= {
        "date", "etag", "cache-control", "accept-ranges", "content-length", "content-type",
        "access-control-allow-origin", "access-control-expose-headers", "x-request-id",
        "last-modified", "x-content-type-options", "content-security-policy",
    }  # fmt: skip


@pytest.mark.parametrize("origin", ["https://a.example", "https://b.example", "null"])
@pytest.mark.parametrize("path", ["/any/k", "/any/../k", "/api/datasets", "/", "/nothing/k"])
def test_cors_never_allows_credentials_of_a_browser(
    urls: list[str], path: str, origin: str
) -> None:
    """CORS headers allow ``*`` or the configured origin, and never credentials or cookies."""
    headers = {"origin": origin, "access-control-request-method": "PUT"}
    headers["access-control-request-headers"] = "cookie"
    for url, allowed in zip(urls, ("*", "https://a.example"), strict=True):
        with httpx.Client(headers=headers) as client:
            for method in ("GET", "HEAD", "PUT", "OPTIONS", "POST", "TRACE"):
                told = client.request(method, url + path, content=b"").headers

                assert "access-control-allow-credentials" not in told
                assert "cookie" not in told.get("access-control-allow-headers", "").lower()
                page = told.get("access-control-allow-origin")
                assert page == allowed or (page is None and origin != allowed)
