"""nginx with the configuration in `deploy/`: forwarding, caching, retries and limits."""

import os
import re
import ssl
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest
import yaml

from shardgate.settings import DatasetSettings, Settings
from shardgate.storage.contract import ObjectStore
from tests.support.attacks.raw import heard, statuses
from tests.support.attacks.smuggling import LAST, UNCLEAR
from tests.support.clients.services import Watched
from tests.support.deploy.balancer import (
    HELLO,
    TOKEN,
    Balancer,
    Received,
    Recorder,
    balancing,
    has_ipv6,
    recording,
)
from tests.support.deploy.programs import CHART, ROOT
from tests.support.serving import serving

PATHS: Final = (
    *("/em/c/0/1", "/em/@branch.a%2Fb/c%20d/%7Ee", "/em//c/0//1", "/em/../c/./0", "/em/%2e%2e/%7F"),
    *("/em/a+b?x=%2F&y=+", "/em?list-type=2&prefix=a/", "/", f"/~{TOKEN}/em/c/0"),
)


class Site(NamedTuple):
    """nginx before two replicas that record requests."""

    nginx: Balancer
    replicas: Sequence[Recorder]

    def send(self, method: str, target: str, **headers: str) -> int:
        """Send a request for *target* verbatim; return the status."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.nginx.send(method, target, named).status

    @property
    def received(self) -> list[Received]:
        """Requests that arrived at all replicas."""
        return [request for each in self.replicas for request in each.received]

    @property
    def asked(self) -> list[Received]:
        """Requests for names of shards that arrived at all replicas."""
        return [request for each in self.replicas for request in each.asked]

    @property
    def shares(self) -> list[int]:
        """Number of requests of each replica, in ascending order."""
        return sorted(len(each.received) for each in self.replicas)

    def change(self, **values: bytes | bool | None) -> None:
        """Change the responses of all replicas."""
        for each in self.replicas:
            vars(each).update(values)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[Site]:
    """Start nginx before two recorders."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(recording(Recorder())) for _ in range(2)]
        urls = [each.url for each in replicas]
        folder = tmp_path_factory.mktemp("nginx")
        yield Site(stack.enter_context(balancing(folder, urls)), replicas)


@pytest.fixture
def site(running: Site) -> Generator[Site]:
    """Return the site with empty recorders; reset failed replicas after the test."""
    for each in running.replicas:
        each.received.clear()
        each.asked.clear()
    running.change(name=b"name", answers=True, response=HELLO)
    yield running
    if not all(each.answers and each.name for each in running.replicas):
        running.nginx.send_to([each.url for each in running.replicas])


def only(requests: list[Received]) -> Received:
    """Return the only request."""
    [request] = requests
    return request


@pytest.mark.parametrize("target", PATHS)
def test_request_target_is_forwarded_verbatim(site: Site, target: str) -> None:
    """A request target reaches the replica, and the path its shard's name, byte for byte."""
    assert site.send("GET", target) == 200

    assert only(site.received).target == target
    path = target.partition("?")[0]
    assert only(site.asked).target == f"/_shard{path}"


def test_request_target_over_http_2_is_forwarded_verbatim(site: Site) -> None:
    """A request target and the host of an HTTP/2 request reach the replica unchanged."""
    with site.nginx.client(http2=True) as client:
        client.get("/em//@tag.a%2Fb/%20?x=%2F").raise_for_status()

    request = only(site.received)
    assert request.target == "/em//@tag.a%2Fb/%20?x=%2F"
    assert request.headers["host"] == site.nginx.host


def test_headers_are_forwarded(site: Site) -> None:
    """Host and long credentials are forwarded; X-Forwarded-For and others are set by nginx."""
    given = {"authorization": "Bearer " + "x" * 12_000, "range": "bytes=0-1"}
    forged = {"x_forwarded_for": "1.2.3.4", "x_forwarded_prefix": "/em"}
    assert site.send("GET", "/em/" + "%C3%A9" * 512, **given, **forged) == 200

    headers = only(site.received).headers
    assert "x-forwarded-prefix" not in headers
    assert headers["host"] == site.nginx.host
    assert {name: headers[name] for name in given} == given
    assert (headers["x-forwarded-for"], headers["x-forwarded-proto"]) == ("127.0.0.1", "https")


def test_signed_parts_of_an_s3_request_are_forwarded_unchanged(site: Site) -> None:
    """The target and all signed headers of a boto3 request reach the replica unchanged."""
    sent: list[Any] = []
    client = site.nginx.s3_client()
    client.meta.events.register("before-send.s3", lambda request, **_: sent.append(request))
    client.get_object(Bucket="em", Key="a//b c+é/%2F~", Range="bytes=0-4")

    [[request], received] = sent, only(site.received)
    assert received.target == request.url.removeprefix(site.nginx.url)
    authorization = request.headers["authorization"].decode()
    assert received.headers["authorization"] == authorization
    signed = authorization.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    expected = {name: request.headers[name].decode() for name in signed if name != "host"}
    assert {name: received.headers[name] for name in signed} == expected | {"host": site.nginx.host}


def test_request_for_a_shard_name_has_no_credentials(site: Site) -> None:
    """A request for a shard's name carries no Authorization, cookie, signature or client."""
    site.send("GET", "/em/c/0?X-Amz-Signature=abc", authorization="Bearer x", cookie="y=z")

    asked = only(site.asked)
    assert not asked.headers.keys() & {"authorization", "cookie", "x-forwarded-for"}
    assert "Signature" not in asked.target


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "POST", "OPTIONS"])
def test_requests_of_each_method_go_to_the_replica_of_the_shard(site: Site, method: str) -> None:
    """Requests of each method for one shard go to one replica."""
    for number in range(8):
        assert site.send(method, f"/em/c/{number}") == 200

    assert site.shares == [0, 8]
    assert len(site.asked) == 8


def test_shard_name_is_cached_until_it_expires(site: Site) -> None:
    """A shard's name is cached from its second use, for all tokens, until it expires."""
    site.change(name=b"name\r\nCache-Control: max-age=2")
    for number in range(6):
        assert site.send("GET", f"/~{TOKEN}{number}/em/c/kept") == 200
    assert site.send("GET", "/em/c/once") == 200

    assert len(site.asked) == 3
    assert site.shares == [0, 7]
    files = [each for each in (site.nginx.folder / "shard-names").rglob("*") if each.is_file()]
    assert not any(TOKEN.encode() in each.read_bytes() for each in files)
    assert not any(b"/em/c/once" in each.read_bytes() for each in files)
    assert sum(b"/em/c/kept" in each.read_bytes() for each in files) == 1

    time.sleep(3)
    assert site.send("GET", "/em/c/kept") == 200
    assert len(site.asked) == 4


def test_requests_without_a_shard_name_go_to_all_replicas(site: Site) -> None:
    """Requests for keys without a shard's name are spread over both replicas."""
    site.change(name=b"")
    for _ in range(32):
        assert site.send("POST", "/em?delete") == 200

    assert min(site.shares)


def test_requests_succeed_when_shard_names_are_unavailable(site: Site) -> None:
    """Requests get 200 when the requests for their shards' names fail."""
    site.change(name=None)
    assert [site.send("GET", f"/em/c/{number}") for number in range(4)] == [200] * 4


def test_failed_read_is_retried_at_the_next_replica(site: Site) -> None:
    """A GET whose replica closes the connection gets 200 from the other replica."""
    site.replicas[0].answers = False
    for number in range(16):
        site.change(name=b"%d" % number)
        assert site.send("GET", f"/em/c/{number}") == 200

    assert site.replicas[0].received


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST"])
def test_failed_write_is_not_retried(site: Site, method: str) -> None:
    """A PUT, DELETE or POST whose replica closes the connection gets 503 and is sent once."""
    site.change(answers=False)

    assert site.send(method, "/em/c/0") == 503
    only(site.received)


def test_damage_is_passed_on_unchanged(site: Site) -> None:
    """A 424 of a replica is returned with its body, and not retried at the next one."""
    site.change(response=b"HTTP/1.1 424 Failed Dependency\r\nContent-Length: 7\r\n\r\ndamaged")
    with site.nginx.client() as client:
        answer = client.get("/em/c/0")

    assert (answer.status_code, answer.text) == (424, "damaged")
    only(site.received)


def test_request_without_a_working_replica_gets_503(site: Site) -> None:
    """When no replica answers, clients get a 503 with Retry-After that pages can read."""
    site.change(answers=False)
    with site.nginx.client() as client:
        answer = client.get("/em/c/0")

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == "no replica answered"


@pytest.mark.parametrize("target", ["/auth_info", "/auth_info?a=b"])
def test_sign_in_is_named_without_a_working_replica(site: Site, target: str) -> None:
    """When no replica answers, viewers, which take any JSON for an answer, get the URL to sign in
    at; no other response has it.
    """
    site.change(answers=False)
    with site.nginx.client() as client:
        answer, other = client.get(target), client.get("/auth_info/a")
        forged = client.get(target, headers={"host": 'a"b'})

    assert answer.json()["login_url"] == f"{site.nginx.url}/login"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "login_url" not in other.json()
    assert forged.status_code == 400 or "login_url" not in forged.json()


def test_window_without_a_working_replica_loads_again(site: Site) -> None:
    """When no replica answers, browsers get a page that says so, and loads again by itself."""
    site.change(answers=False)
    with site.nginx.client() as client:
        page = client.get("/login/api/v1/authorize", headers={"accept": "text/html,*/*"})

    assert page.status_code == 503
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert "no replica answered" in page.text
    assert '<meta http-equiv="refresh" content="5">' in page.text


@pytest.mark.parametrize("given", ["of.the-client", "two words", None])
@pytest.mark.parametrize("is_answered", [True, False])
def test_request_id_is_shared_by_response_replica_and_log(
    site: Site, *, is_answered: bool, given: str | None
) -> None:
    """A request's id, the client's if it is valid, is that of replica, log and nginx's own 503."""
    site.change(answers=is_answered)
    before = site.nginx.logged_so_far()
    with site.nginx.client() as client:
        answer = client.get("/em/c/0", headers={"x-request-id": given} if given else {})

    passed = site.received[-1].headers["x-request-id"]
    assert re.fullmatch(given if given == "of.the-client" else "[0-9a-f]{32}", passed)
    assert site.nginx.logged(before, 1)[0]["request_id"] == passed
    assert answer.headers.get("x-request-id") == (None if is_answered else passed)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_request_over_ipv6_is_forwarded(site: Site) -> None:
    """A request over IPv6 gets 200, and the client's address is forwarded."""
    with site.nginx.client() as client:
        answer = client.get(
            f"https://[::1]:{site.nginx.port}/", extensions={"sni_hostname": "localhost"}
        )

    assert answer.status_code == 200
    assert only(site.received).headers["x-forwarded-for"] == "::1"


@pytest.mark.parametrize(
    "target",
    [
        *("/metrics", "/%6detrics", "/em/../metrics", "/readyz", "/_shard/em/c/0", "/_shard"),
        *("/~x/_shard/em/c/0", "/%7ex/_shard/em/c/0", "/_shard/em/%0A"),
    ],
)
def test_operator_paths_are_not_forwarded(site: Site, target: str) -> None:
    """Paths for operators get 404 from nginx, however they are spelled."""
    assert site.send("GET", target) == 404

    assert (site.received, site.asked) == ([], [])


@pytest.mark.parametrize("is_answered", [True, False])
def test_tokens_and_signatures_are_not_logged(site: Site, *, is_answered: bool) -> None:
    """No token or signature appears in the access log or the error log."""
    site.change(answers=is_answered)
    before = site.nginx.logged_so_far()
    targets = [
        f"/~{TOKEN}/em/c/0?x={TOKEN}",
        f"/%7e{TOKEN}/em/c/0",
        *(f"/em/c/0?X-Amz-Security-Token={TOKEN}", f"/~{TOKEN}", f"//~{TOKEN}/em"),
    ]
    for target in targets:
        site.send("GET", target, referer=f"{site.nginx.url}/~{TOKEN}/", authorization=TOKEN)

    lines = site.nginx.logged(before, len(targets))
    assert [line["path"] for line in lines] == ["/~/em/c/0", "/~/em/c/0", "/em/c/0", "/~", "//~/em"]
    assert TOKEN not in site.nginx.output


@pytest.mark.parametrize("http2", [False, True])
def test_request_body_is_streamed_without_a_file(site: Site, *, http2: bool) -> None:
    """A body of 1 MiB is forwarded without a temporary file."""
    body = os.urandom(2**20)
    with site.nginx.client(http2=http2) as client:
        client.put("/em/c/0", content=body).raise_for_status()

    assert only(site.received).body_nbytes == len(body)
    written = [path for path in site.nginx.folder.rglob("nginx-*/**/*") if path.is_file()]
    assert written == []
    assert "buffered to a temporary file" not in site.nginx.output


CONFIGURATION: Final = ROOT / "deploy/nginx/nginx.conf"
CACHE: Final = CONFIGURATION.with_name("cache.conf")
WITH_ONE_PLACE: Final = "limit_conn requests 1;"


def test_concurrent_requests_are_limited(tmp_path: Path) -> None:
    """A request beyond the limit of concurrent ones gets 503, and 200 once another has ended."""
    with recording(Recorder()) as recorder, balancing(tmp_path, [recorder.url]) as balancer:
        path = tmp_path / "nginx.conf"
        path.write_text(path.read_text().replace("limit_conn requests 1024;", WITH_ONE_PLACE))
        balancer.send_to([recorder.url])
        with balancer.client() as client:
            with uploading(balancer):
                refused = until(client, 503)
            until(client, 200)

    assert refused.json()["detail"] == "too many requests are under way"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-request-id"]


@contextmanager
def uploading(balancer: Balancer) -> Generator[None]:
    """Keep a PUT open whose body does not arrive."""
    with balancer.connection() as connection:
        connection.sendall(b"PUT /em/c/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        yield


def until(client: httpx.Client, status: int) -> httpx.Response:
    """Repeat a GET until its status is *status*; return the response."""
    deadline = time.monotonic() + 60
    while (answer := client.get("/em/c/0")).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def test_memory_limit_of_the_chart_covers_the_worst_case() -> None:
    """The chart's memory limit for nginx exceeds the buffers of all requests and connections.

    So does the limit that it names for nginx with its cache.
    """
    needed_mib = memory_mib(text := CONFIGURATION.read_text("utf-8"))
    with_cache_mib = needed_mib + memory_of_cache_mib(text)
    values = (CHART / "values.yaml").read_text()
    limit = yaml.safe_load(values)["balancer"]["resources"]["limits"]["memory"].removesuffix("Mi")
    [limit_with_cache] = re.findall(r"set resources.limits.memory below to (\d+)Mi", values)

    assert f"At worst {needed_mib:.0f} MiB, of {limit}" in text
    assert needed_mib < 0.95 * int(limit)
    assert f"At worst {with_cache_mib:.0f} MiB, of {limit_with_cache}" in CACHE.read_text("utf-8")
    assert with_cache_mib < 0.95 * int(limit_with_cache)


def memory_mib(text: str) -> float:
    """Return the memory of requests, connections and names of shards."""
    buffers = ("large_client_header_buffers", "proxy_buffers")
    request_nbytes = sum(prod(numbers(text, name)) for name in buffers)
    request_nbytes += 2 * numbers(text, "proxy_buffer_size")[0]
    [requests], [workers] = numbers(text, "limit_conn"), numbers(text, "worker_processes")
    connections = workers * numbers(text, "worker_connections")[0]
    [(zone, most)] = re.findall(r"proxy_cache_path .*:(\d+)m max_size=(\d+)m", text)
    return (requests * request_nbytes + connections * 32 * 1024) / 2**20 + int(zone) + int(most)


def memory_of_cache_mib(text: str) -> float:
    """Return the memory of as many requests in the cache, each of which has four connections."""
    cache = CACHE.read_text("utf-8")
    connections = numbers(text, "worker_processes")[0] * numbers(text, "worker_connections")[0]
    request_nbytes = prod(numbers(text, "large_client_header_buffers"))
    request_nbytes += prod(numbers(cache, "proxy_buffers"))
    request_nbytes += 2 * numbers(text, "proxy_buffer_size")[0]
    [zone] = re.findall(r"keys_zone=answers:(\d+)m", cache)
    return connections / 4 * request_nbytes / 2**20 + int(zone)


def numbers(text: str, name: str) -> list[int]:
    """Return the numbers of the directive *name*, in bytes where they have a unit."""
    [values] = re.findall(rf"^ *(?:.*[{{] )?{name} ([^;]*);", text, re.MULTILINE)
    return [int(n) * (1024 if k else 1) for n, k in re.findall(r"\b(\d+)(k?)\b", values)]


SHAPES = list(UNCLEAR.values())
HIDDEN = b"GET /any/hidden-%d HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def before_gateway(
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[tuple[Balancer, set[str]]]:
    """Run nginx before a gateway; yield the keys too that it reads or writes in the store."""
    keys = set[str]()
    folder: Path = tmp_path_factory.mktemp("nginx")
    settings = Settings(datasets={"any": DatasetSettings(url="memory://any", writable=True)})

    def watched(store: ObjectStore) -> ObjectStore:
        return Watched(store, lambda ref: keys.add(ref.key))

    with serving(settings, wrap=watched) as url, balancing(folder, [url]) as running:
        yield running, keys


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=list(UNCLEAR))
def test_request_hidden_in_an_ambiguous_one_is_not_smuggled(
    before_gateway: tuple[Balancer, set[str]], number: int
) -> None:
    """A request behind an ambiguous one reaches the gateway only if nginx forwarded it as one."""
    nginx, keys = before_gateway
    with nginx.connection() as connection, suppress(TimeoutError, ssl.SSLError):
        connection.sendall(SHAPES[number] + HIDDEN % number + LAST)
        assert len(statuses(heard(connection))) <= 3
    if f"hidden-{number}" in keys:
        logged = (nginx.folder / "output").read_bytes()
        assert b"/any/hidden-%d" % number in logged
