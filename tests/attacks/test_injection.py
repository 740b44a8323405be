"""Nothing that clients or stores say becomes a line of a head, and no page gets credentials."""

import json
from collections.abc import Generator

import httpx
import pytest

from app.settings import DatasetSettings, ServerSettings, Settings
from tests.attacks.raw import exchange, statuses
from tests.serving import serving
from tests.storage.faulty import FaultyServer

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
PAGES = [{"origin": origin} for origin in ("https://a.example", "https://b.example", "null")]


@pytest.fixture(scope="module")
def urls() -> Generator[list[str]]:
    """Serve a place that may be written, for all pages and for those of one origin."""
    datasets = {"any": DatasetSettings(url="memory://any", writable=True)}
    named = ServerSettings(cors_origins=("https://a.example",))
    with (
        serving(Settings(datasets=datasets)) as for_all,
        serving(Settings(server=named, datasets=datasets)) as for_one,
    ):
        yield [for_all, for_one]


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "POST"])
@pytest.mark.parametrize("path", PATHS)
def test_no_key_becomes_a_header(urls: list[str], method: str, path: str) -> None:
    """Whatever is asked of it."""
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
def test_no_header_comes_back_that_is_none(urls: list[str], header: str, value: bytes) -> None:
    """What is echoed is checked before."""
    for method in (b"GET", b"OPTIONS"):
        request = b"%s /any/k HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % method
        received = exchange(urls[0], request + b"%s: %s\r\n\r\n" % (header.encode(), value))

        assert value not in received.partition(b"\r\n\r\n")[0]


def test_no_header_of_a_store_is_passed_on(faulty: FaultyServer) -> None:
    """But what we ask it for; a tag that is none is no tag."""
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


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "POST", "TRACE"])
@pytest.mark.parametrize("path", ["/any/k", "/any/../k", "/api/datasets", "/", "/nothing/k"])
@pytest.mark.parametrize("headers", PAGES, ids=lambda headers: headers["origin"])
def test_no_page_may_send_credentials_of_a_browser(
    urls: list[str], method: str, path: str, headers: dict[str, str]
) -> None:
    """Cookies and the like mean nothing here; ``*`` or a name is all that pages are told."""
    asked = {"access-control-request-method": "PUT", "access-control-request-headers": "cookie"}
    for url, allowed in zip(urls, ({"*"}, {"https://a.example"}), strict=True):
        answer = httpx.request(method, url + path, headers=headers | asked, content=b"")

        assert "access-control-allow-credentials" not in answer.headers
        assert "cookie" not in answer.headers.get("access-control-allow-headers", "").lower()
        told = answer.headers.get("access-control-allow-origin")
        assert told in allowed or (told is None and headers["origin"] not in allowed)


def test_nothing_that_is_stored_runs_in_a_browser(urls: list[str]) -> None:
    """Pages of ours show names as text; what others have stored is no page."""
    name = "<img src=x onerror=alert(1)>"
    with httpx.Client(base_url=urls[0]) as client:
        for key in (name, "page.html", "script.js", "image.svg"):
            client.put(f"/any/{key}", content=b"<script>alert(1)</script>")
            served = client.get(f"/any/{key}").headers["content-type"]
            assert served == "application/octet-stream"
        listed = client.get("/any/", headers={"accept": "text/html"}).text
        problem = client.get("/any/<script>alert(1)</script>")

    assert "<img" not in listed
    assert "&lt;img" in listed
    assert problem.headers["content-type"] == "application/problem+json"
    assert json.loads(problem.content)["status"] == 404
