"""Web pages write only if `server.cors_origins` names their origin.

A page whose host name was rebound to the service (DNS rebinding) does not either.
"""

from collections.abc import Generator

import httpx
import pytest

from shardgate.settings import DatasetSettings, ServerSettings, Settings
from tests.support.attacks.raw import exchange
from tests.support.auth.people import TOKENS, caller
from tests.support.server.taking import get
from tests.support.serving import client_of

NAMED = "https://a.example"
DELETION = b"<Delete><Object><Key>k</Key></Object></Delete>"


@pytest.fixture(scope="module")
def client() -> Generator[httpx.Client]:
    """Serve a writable dataset to pages of one origin, and a private one."""
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
def test_write_of_another_origin_is_refused(client: httpx.Client, origin: str) -> None:
    """A write with the Origin of another page is 403.

    One of a named origin, of the service itself or without Origin succeeds.
    """
    headers = {"origin": origin, "content-type": "text/plain"}
    client.put("/any/k", content=b"x")
    for method, path in (
        *(("PUT", "/any/k"), ("DELETE", "/any/k"), ("POST", "/any?delete")),
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


@pytest.mark.parametrize("name", ["page.html", "picture.svg", "page.xhtml", "data.xml", "k"])
def test_stored_pages_are_sandboxed(client: httpx.Client, name: str) -> None:
    """Responses for objects have a sandbox policy and no type that browsers run.

    That holds for 200, 206 and 304, from the store and from memory.
    """
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
    ("host", "method", "path"),
    [
        *(
            ("rebound.example", method, path)
            for method, path in (
                *(("PUT", "/any/k"), ("DELETE", "/any/k"), ("POST", "/any?delete")),
                ("POST", "/api/datasets/any/sessions"),
                *(("GET", "/private/k"), ("HEAD", "/private/k"), ("GET", "/private/")),
                ("GET", f"/~{TOKENS['ana']}/private/k"),
                ("GET", "/unknown/k"),
                ("GET", "/api/datasets/private"),
            )
        ),
        *((host, "PUT", "/any/k") for host in ("127.0.0.1.rebound.example:8000", "[x]", "")),
    ],
)
def test_unknown_host_reads_public_datasets_only(
    client: httpx.Client, host: str, method: str, path: str
) -> None:
    """A write, or a read of a private or unknown dataset, with an unknown Host is 421."""
    client.put("/any/k", content=b"x")
    headers = {"host": host, "origin": f"http://{host}", "authorization": "Bearer x"}
    answer = client.request(method, path, headers=headers)

    assert answer.status_code == 421
    assert answer.headers["vary"] == "Accept, Origin"
    if method != "HEAD":
        assert answer.json()["detail"] == f"server.hosts does not name {host!r}"
    assert get(client, "/any/k") == b"x"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.:80", "127.0.0.1:", "10.0.0.7:8000", "[::1]:8000", "[FE80::1]"]
)
def test_ip_addresses_and_localhost_are_accepted_hosts(client: httpx.Client, host: str) -> None:
    """IP addresses and localhost are accepted hosts. Public datasets are read by any host."""
    private = {"authorization": f"Bearer {TOKENS['ana']}", "host": host}

    assert client.put("/any/k", content=b"x", headers={"host": host}).status_code == 200
    assert client.get("/private/k", headers=private).status_code == 404
    for path in ("/any/k", "/any/", "/", "/api/datasets", "/healthz", "/metrics"):
        answer = client.get(path, headers={"host": "server.lab:8000"})
        assert answer.status_code in {200, 401}


def test_host_of_an_absolute_target_is_used(client: httpx.Client) -> None:
    """The host of an absolute target replaces Host (RFC 9112 §3.2.2).

    S3 clients get the error in XML.
    """
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


@pytest.mark.parametrize(("named", "status"), [("chunks.example", 421), ("*", 200)])
def test_hosts_setting_allows_names(named: str, status: int) -> None:
    """`server.hosts` allows names with any port, and `*` all of them."""
    settings = Settings(
        server=ServerSettings(hosts=(named,)),
        datasets={"any": DatasetSettings(url="memory://any", writable=True)},
    )
    with client_of(settings) as client:
        for host, expected in (("Chunks.example:8443", 200), ("b.c", status)):
            answer = client.put("/any/k", content=b"x", headers={"host": host})
            assert answer.status_code == expected
