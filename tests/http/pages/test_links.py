"""`shardgate.http.pages.links`: the files of Neuroglancer, as the service serves them."""

import re
from collections.abc import Generator
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest

from shardgate.http.pages.links import VIEWER
from shardgate.http.responses import csp_digest
from shardgate.settings import Settings
from tests.support.pages import parse
from tests.support.serving import client_of


@pytest.fixture(scope="module")
def client() -> Generator[httpx.Client]:
    """Serve the viewer without datasets."""
    with client_of(Settings()) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(client: httpx.Client) -> httpx.Response:
    """Return the viewer's page."""
    return client.get(f"/{VIEWER}")


def test_short_viewer_paths_redirect(client: httpx.Client) -> None:
    """Short paths redirect to the viewer's page, and unknown files are 404."""
    for path in ("/viewer", "/viewer/", f"/{VIEWER}".rstrip("/")):
        answer = client.get(path)
        assert answer.status_code == 307
        assert urlsplit(answer.headers["location"]).path == f"/{VIEWER}"
    absent = client.get(f"/{VIEWER}nothing.js")
    assert absent.status_code == 404
    assert absent.headers["content-type"] == "application/problem+json"


def test_viewer_page_allows_its_own_scripts_only(page: httpx.Response) -> None:
    """The viewer's Content-Security-Policy allows its own files and its inline script's digest."""
    policy = page.headers["content-security-policy"]
    first = next(parse(page.text).iter("script"))

    assert first.text
    assert "EventSource" in first.text
    assert f"script-src 'self' '{csp_digest(first.text)}' 'wasm-unsafe-eval' blob:;" in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cache-control"] == "no-cache"


def test_viewer_files_are_immutable(client: httpx.Client, page: httpx.Response) -> None:
    """Each file of the viewer has its type, an ETag and an immutable Cache-Control."""
    types = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        answer = client.get(f"/{VIEWER}{name}")
        headers = answer.headers

        assert answer.status_code == 200
        assert headers["content-type"] == types[name.rpartition(".")[2]]
        assert headers["cache-control"] == "public, max-age=31536000, immutable"
        again = client.get(f"/{VIEWER}{name}", headers={"if-none-match": headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        *("../__init__.py", "../../__init__.py", "%2e%2e/__init__.py", "..%2f..%2f__init__.py"),
        *("....//__init__.py", "..%5c__init__.py", "%00", "//etc/passwd", "%2fetc%2fpasswd"),
    ],
)
def test_paths_outside_of_the_viewer_are_refused(client: httpx.Client, path: str) -> None:
    """A path that leads out of the viewer's folder is 400 or 404."""
    connection = HTTPConnection(client.base_url.host, client.base_url.port or 80, timeout=60)
    connection.request("GET", f"/{VIEWER}{path}")
    answer = connection.getresponse()
    body = answer.read()
    connection.close()

    assert answer.status in {400, 404}
    assert b"import" not in body
    assert b"root:" not in body
