"""Pages that browsers show write only where `server.cors_origins` names them.

They do no more under a name that was pointed at the service afterwards (DNS rebinding).
"""

from collections.abc import Generator

import httpx
import pytest

from shardgate.settings import DatasetSettings, ServerSettings, Settings
from tests.attacks.raw import exchange
from tests.http.auth.people import TOKENS, caller
from tests.http.taking import get
from tests.support.serving import client_of, serving

NAMED = "https://a.example"
DELETION = b"<Delete><Object><Key>k</Key></Object></Delete>"


@pytest.fixture(scope="module")
def client() -> Generator[httpx.Client]:
    """Serve a place that may be written, by pages of one origin."""
    settings = Settings(
        server=ServerSettings(cors_origins=(NAMED,)),
        callers={"ana": caller(TOKENS["ana"])},
        datasets={
            "any": DatasetSettings(url="memory://any", writable=True),
            "private": DatasetSettings(url="memory://private", read=("ana",)),
        },
    )
    with client_of(settings) as opened:
        yield opened


@pytest.mark.parametrize("origin", ["https://b.example", "null"])
def test_other_pages_write_nothing(client: httpx.Client, origin: str) -> None:
    """Asking leave for it or not; named pages, the service's own, and what is no page do write."""
    headers = {"origin": origin, "content-type": "text/plain"}
    client.put("/any/k", content=b"x")
    for method, path in (
        ("PUT", "/any/k"),
        ("DELETE", "/any/k"),
        ("POST", "/any?delete"),
        ("POST", "/any/k?uploads"),
        ("POST", "/api/datasets"),
        ("DELETE", "/api/datasets/any/tags/t"),
    ):
        answer = client.request(method, path, content=DELETION, headers=headers)

        assert answer.status_code == 403
        assert "server.cors_origins" in answer.json()["detail"]
    assert get(client, "/any/k") == b"x"
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
    told = client.head(f"/any/{name}").headers
    assert told["content-type"] == "application/octet-stream"
    etag = told["etag"]
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


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/any/k"),
        ("DELETE", "/any/k"),
        ("POST", "/any?delete"),
        ("POST", "/api/datasets/any/sessions"),
        ("GET", "/private/k"),
        ("HEAD", "/private/k"),
        ("GET", "/private/"),
        ("GET", f"/~{TOKENS['ana']}/private/k"),
        ("GET", "/unknown/k"),
        ("GET", "/api/datasets/private"),
    ],
)
@pytest.mark.parametrize("host", ["rebound.example", "127.0.0.1.rebound.example:8000", "[x]", ""])
def test_another_name_opens_what_everybody_may_read_only(
    client: httpx.Client, method: str, path: str, host: str
) -> None:
    """Neither writes nor private data, to which unknown names are alike; pages can read why."""
    client.put("/any/k", content=b"x")
    headers = {"host": host, "origin": f"http://{host}", "authorization": "Bearer x"}
    answer = client.request(method, path, headers=headers)

    assert answer.status_code == 421
    assert answer.headers["vary"] == "Origin"
    if method != "HEAD":
        assert answer.json()["detail"] == f"server.hosts does not name {host!r}"
    assert get(client, "/any/k") == b"x"


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.:80", "127.0.0.1:", "10.0.0.7:8000", "[::1]:8000", "[FE80::1]"],
)
def test_addresses_and_this_machine_are_our_names(client: httpx.Client, host: str) -> None:
    """No name server can point them elsewhere; by other names all is read that everybody may."""
    private = {"authorization": f"Bearer {TOKENS['ana']}", "host": host}

    assert client.put("/any/k", content=b"x", headers={"host": host}).status_code == 200
    assert client.get("/private/k", headers=private).status_code == 404
    for path in ("/any/k", "/any/", "/", "/api/datasets", "/healthz", "/metrics"):
        answer = client.get(path, headers={"host": "server.lab:8000"})
        assert answer.status_code in {200, 401}


def test_the_host_of_an_absolute_target_counts(client: httpx.Client) -> None:
    """It takes the place of Host (RFC 9112 §3.2.2); clients of S3 are told in XML."""
    for target, host, status in (
        (b"http://rebound.example/any/k", b"localhost", b"421"),
        (b"http://localhost:8000/any/k", b"rebound.example", b"200"),
    ):
        head = b"PUT %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"

        assert exchange(str(client.base_url), head % (target, host)).split()[1] == status
    s3 = {"host": "rebound.example", "amz-sdk-invocation-id": "1"}
    answer = client.put("/any/k", content=b"x", headers=s3)
    assert answer.status_code == 421
    assert "<Code>InvalidRequest</Code>" in answer.text
    assert "server.hosts does not name" in answer.text


@pytest.mark.parametrize(("named", "status"), [("chunks.example", 200), ("*", 200), ("b.c", 421)])
def test_names_are_a_setting(named: str, status: int) -> None:
    """With any port, and with a star all of them."""
    settings = Settings(
        server=ServerSettings(hosts=(named,)),
        datasets={"any": DatasetSettings(url="memory://any", writable=True)},
    )
    with serving(settings) as url:
        headers = {"host": "Chunks.example:8443"}

        assert httpx.put(f"{url}/any/k", content=b"x", headers=headers).status_code == status
