"""Pages that browsers show write only where `server.cors_origins` names them."""

from collections.abc import Generator

import httpx
import pytest

from app.settings import DatasetSettings, ServerSettings, Settings
from tests.http.taking import get
from tests.serving import serving

NAMED = "https://a.example"
DELETION = b"<Delete><Object><Key>k</Key></Object></Delete>"


@pytest.fixture(scope="module")
def client() -> Generator[httpx.Client]:
    """Serve a place that may be written, by pages of one origin."""
    settings = Settings(
        server=ServerSettings(cors_origins=(NAMED,)),
        datasets={"any": DatasetSettings(url="memory://any", writable=True)},
    )
    with serving(settings) as url, httpx.Client(base_url=url, timeout=20) as opened:
        yield opened


@pytest.mark.parametrize("origin", ["https://b.example", "null"])
def test_other_pages_write_nothing(client: httpx.Client, origin: str) -> None:
    """Neither with what browsers ask leave for, nor with what they send at once."""
    headers = {"origin": origin, "content-type": "text/plain"}
    client.put("/any/k", content=b"x")
    for method, path in (
        ("PUT", "/any/k"),
        ("DELETE", "/any/k"),
        ("POST", "/any?delete"),
        ("POST", "/any/k?uploads"),
    ):
        answer = client.request(method, path, content=DELETION, headers=headers)

        assert answer.status_code == 403
        assert "server.cors_origins" in answer.json()["detail"]
    assert get(client, "/any/k") == b"x"
    body = b'{"keys": [{"key": "k"}]}'
    assert client.post("/any?batch", content=body, headers=headers).content.endswith(b"\nx")


def test_named_pages_and_the_service_s_own_write(client: httpx.Client) -> None:
    """And what is no page."""
    own = str(client.base_url).rstrip("/")
    for number, headers in enumerate([{"origin": NAMED}, {"origin": own}, {}]):
        body = b"%d" % number
        assert client.put("/any/k", content=body, headers=headers).status_code == 200
        assert get(client, "/any/k") == body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/any/page.html", 200),
        ("HEAD", "/any/page.html", 200),
        ("GET", "/any/", 200),
        ("GET", "/any?list-type=2", 200),
        ("GET", "/any?list-type=2&max-keys=x", 400),
        ("GET", "/any/none", 404),
        ("PATCH", "/any/k", 405),
        ("OPTIONS", "/any/k", 204),
        ("GET", "/_shard/any/k", 204),
        ("GET", "/", 200),
        ("GET", "/docs", 200),
        ("GET", "/api/none", 404),
    ],
)
def test_browsers_guess_no_type(client: httpx.Client, method: str, path: str, status: int) -> None:
    """Every answer says once that its Content-Type is meant."""
    client.put("/any/page.html", content=b"<script>")
    answer = client.request(method, path)

    assert answer.status_code == status
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["page.html", "picture.svg", "page.xhtml", "data.xml", "k"])
def test_stored_pages_are_not_of_this_origin(client: httpx.Client, name: str) -> None:
    """Objects are sandboxed, at first, from memory, when they have not changed, and in part."""
    client.put(f"/any/{name}", content=b"<script>")
    etag = client.head(f"/any/{name}").headers["etag"]
    for headers, status in (
        ({"x": "1"}, 200),
        ({"x": "2"}, 200),
        ({"if-none-match": etag}, 304),
        ({"range": "bytes=0-1"}, 206),
    ):
        answer = client.get(f"/any/{name}", headers=headers)

        assert answer.status_code == status
        assert answer.headers["content-security-policy"] == "sandbox"
        assert answer.headers["x-content-type-options"] == "nosniff"
