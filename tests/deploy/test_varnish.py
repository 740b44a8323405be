"""Varnish with `deploy/varnish/default.vcl`: which requests it answers, and how."""

import gzip
import shlex
import subprocess
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import httpx
import pytest

from shardgate.settings import Settings
from tests.support.deploy.balancer import BRIEF, EXPIRED_S, cached
from tests.support.deploy.edges import Edge, documented, edging, varnishing
from tests.support.lacking import need
from tests.support.serving import serving


class Lab(NamedTuple):
    """Varnish before a gateway, and the folder that it serves."""

    edge: Edge
    root: Path

    def keep(self, name: str, body: bytes) -> None:
        """Store an object."""
        (self.root / name).write_bytes(body)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Request *path*; an underscore in the name of a header is a hyphen."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.edge.client.get(path, headers=named)


def settings(root: Path) -> Settings:
    """Return the settings of a gateway of *root*."""
    caching = {
        "brief": BRIEF,
        "lasting": "public, max-age=3600",
        "kept": "public, max-age=3600",
        "stale": f"{BRIEF}, Stale-While-Revalidate=3600",
    }
    datasets = {
        name: {"url": str(root), "cache_control": control} for name, control in caching.items()
    }
    trusting = {"trusted_proxies": ["127.0.0.0/8"]}
    return Settings.model_validate(
        {"server": trusting, "cache": {"ttl_s": 0.1}, "datasets": datasets}
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Start Varnish before a gateway."""
    root: Path = tmp_path_factory.mktemp("root")
    with edging("varnish", tmp_path_factory.mktemp("varnish"), settings(root)) as edge:
        yield Lab(edge, root)


@pytest.fixture
def name() -> str:
    """Return the name of an object that no other test uses."""
    return uuid4().hex


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("HEAD", "/lasting/{}", {}),
        ("GET", "/lasting/{}", {"range": "bytes=0-1"}),
        ("GET", "/lasting/{}", {"if-match": '"x"'}),
        ("GET", "/lasting/{}", {"if-unmodified-since": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        ("GET", "/lasting/{}", {"amz-sdk-invocation-id": "x"}),
        ("GET", "/lasting/{}", {"authorization": "Bearer x"}),
        ("GET", "/lasting/{}", {"cookie": "a=b"}),
        ("GET", "/lasting/{}?a=b", {}),
        ("GET", "/~x/lasting/{}", {}),
        ("GET", "/%7Ex/lasting/{}", {}),
        ("GET", "/lasting/", {}),
        ("OPTIONS", "/lasting/{}", {}),
    ],
)
def test_other_requests_pass_the_cache(
    lab: Lab, name: str, method: str, target: str, headers: dict[str, str]
) -> None:
    """Ranges, preconditions, credentials, queries and HEAD get the answer of the gateway."""
    lab.keep(name, b"bytes")
    assert cached(lab.get(f"/lasting/{name}")) == "miss"
    path = target.format(name)
    answers = [lab.edge.client.request(method, path, headers=headers) for _ in range(2)]
    own = httpx.request(method, f"{lab.edge.gateway_url}{path}", headers=headers, timeout=20)

    assert [cached(each) for each in answers] == [None, None]
    assert {each.status_code for each in answers} == {own.status_code}
    assert {each.content for each in answers} == {own.content}


def test_content_codings_do_not_mix(lab: Lab, name: str) -> None:
    """Clients get the stored gzip or the inflated bytes as they accept, with the gateway's ETag."""
    plain = b"plain text " * 100
    lab.keep(f"{name}.gz", gzip.compress(plain))
    path = f"/lasting/{name}"
    for expected in "miss", "hit":
        for accepted, coding in (("gzip", "gzip"), ("identity", None)):
            answer = lab.get(path, accept_encoding=accepted)
            asked = {"accept-encoding": accepted}
            own = httpx.get(f"{lab.edge.gateway_url}{path}", headers=asked, timeout=20)
            assert cached(answer) == expected
            assert answer.headers.get("content-encoding") == coding
            assert answer.headers["etag"] == own.headers["etag"]
            assert answer.content == plain


def test_request_id_of_a_hit_is_its_own(lab: Lab, name: str) -> None:
    """A hit has the X-Request-ID of its own request, not of the one that filled the cache."""
    lab.keep(name, b"bytes")
    answers = [lab.get(f"/lasting/{name}", x_request_id=each) for each in ("first", "second")]

    assert [each.headers["x-request-id"] for each in answers] == ["first", "second"]
    assert cached(answers[1]) == "hit"


def test_expired_chunk_is_served_only_where_cache_control_gives_leave(lab: Lab, name: str) -> None:
    """An expired answer is served with `stale-while-revalidate`, and not without."""
    lab.keep(name, b"old")
    for dataset in "stale", "brief":
        assert lab.get(f"/{dataset}/{name}").content == b"old"
    lab.keep(name, b"newer")
    time.sleep(EXPIRED_S)
    leave, none = (lab.get(f"/{dataset}/{name}") for dataset in ("stale", "brief"))

    assert (cached(leave), leave.content) == ("stale", b"old")
    assert (cached(none), none.content) == ("miss", b"newer")


def test_purge_that_a_proxy_passes_on_is_refused(lab: Lab, name: str) -> None:
    """A PURGE of a client behind a proxy on the same machine is 403, and drops nothing."""
    lab.keep(name, b"bytes")
    path = f"/lasting/{name}"
    lab.get(path)
    refused = lab.edge.client.request("PURGE", path, headers={"x-forwarded-for": "192.0.2.1"})

    assert refused.status_code == 403
    assert cached(lab.get(path)) == "hit"


def test_forged_prefix_is_removed(lab: Lab, name: str) -> None:
    """A client's X-Forwarded-Prefix fills no other URL with the answer of a key."""
    lab.keep(name, b"bytes")
    forged = lab.get(f"/forged/lasting/{name}", x_forwarded_prefix="/forged")

    assert forged.status_code == 404


def test_documented_ban_drops_a_dataset(lab: Lab, name: str) -> None:
    """The command of the page that bans a dataset drops its answers, and no others."""
    lab.keep(name, b"bytes")
    paths = [f"/{dataset}/{name}" for dataset in ("lasting", "kept")]
    for path in paths:
        lab.get(path)
    (command,) = documented("varnishadm")
    _, *words = shlex.split(command.replace("/em/", "/lasting/"))
    subprocess.run([need("varnishadm"), "-n", str(lab.edge.folder / "varnish"), *words], check=True)

    assert [cached(lab.get(path)) for path in paths] == ["miss", "hit"]


def test_expired_answer_is_an_error_when_no_gateway_answers(tmp_path: Path) -> None:
    """Without a gateway an expired answer, absence too, is a 503 that pages can read."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "object").write_bytes(b"bytes")
    with ExitStack() as running:
        with serving(settings(root)) as gateway_url:
            port = running.enter_context(varnishing(tmp_path, gateway_url))
            client = running.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
            statuses = [client.get(f"/brief/{name}").status_code for name in ("object", "absent")]
            assert statuses == [200, 404]
        time.sleep(EXPIRED_S)
        for name in "object", "absent":
            answer = client.get(f"/brief/{name}")
            assert answer.status_code == 503
            told = {"access-control-allow-origin": "*", "cache-control": "no-store"}
            assert told.items() <= dict(answer.headers).items()
            assert answer.json()["detail"] == "no gateway answered"
