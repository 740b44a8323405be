"""nginx with the cache of `deploy/nginx/cache.conf`: what it keeps, for how long, and for whom."""

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

import httpx
import pytest

from tests.support.deploy.balancer import (
    BRIEF,
    EXPIRED_S,
    TOKEN,
    Balancer,
    Received,
    Recorder,
    balancing,
    cached,
    configured,
    files_with,
    recording,
    started,
)

ORIGINS: Final = ("https://one.example", "https://two.example")
PUBLIC: Final = "Cache-Control: public, max-age=3600"


def answer_of(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """Return a response with *headers* and *body*."""
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers])
    return head.encode() + b"\r\n\r\n" + body


class Front(NamedTuple):
    """nginx with its cache before a replica that records requests, and a client of it."""

    nginx: Balancer
    replica: Recorder
    client: httpx.Client

    def kept(self, text: bytes) -> int:
        """Return the number of files in the cache that contain *text*."""
        return files_with(self.nginx.folder, text)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    """Start nginx with its cache before a recorder."""
    folder: Path = tmp_path_factory.mktemp("nginx")
    with (
        recording(Recorder()) as replica,
        balancing(folder, [replica.url], cached=True) as nginx,
        nginx.client() as client,
    ):
        yield Front(nginx, replica, client)


@pytest.fixture
def front(running: Front) -> Front:
    """Return the running nginx, with a replica whose answers may be kept for an hour."""
    running.replica.received.clear()
    running.replica.asked.clear()
    running.replica.answers = True
    running.replica.response = answer_of(b"hello", PUBLIC)
    return running


@pytest.fixture
def path() -> str:
    """Return the path of a key that no other test uses."""
    return f"/em/c/{uuid4().hex}"


def test_first_answer_is_a_miss_and_the_second_a_hit(front: Front, path: str) -> None:
    """The first GET of a key is a miss, the second a hit that asks no replica for anything."""
    first, second = (front.client.get(path) for _ in range(2))

    assert (cached(first), cached(second)) == ("miss", "hit")
    assert first.content == second.content == b"hello"
    assert len(front.replica.received) == len(front.replica.asked) == 1


def test_restart_keeps_answers(tmp_path: Path, path: str) -> None:
    """An answer that was kept before nginx was restarted is a hit after it."""
    with recording(Recorder()) as replica:
        replica.response = answer_of(b"hello", PUBLIC)
        port = configured(tmp_path, [replica.url], cached=True)
        for expected in ("miss", "hit"):
            with started(tmp_path, port) as nginx, nginx.client() as client:
                answer = client.get(path)
                assert (cached(answer), answer.content) == (expected, b"hello")

    assert len(replica.received) == 1


@pytest.mark.parametrize(
    "cache_control",
    [
        *("private, max-age=3600", "no-store", "no-cache", "public, max-age=0"),
        *("no-store, max-age=60", None),
    ],
)
def test_answer_that_is_not_to_be_kept_is_not_kept(
    front: Front, path: str, cache_control: str | None
) -> None:
    """An answer without Cache-Control, or with one that forbids it, is not stored."""
    body = uuid4().hex.encode()
    headers = [] if cache_control is None else [f"Cache-Control: {cache_control}"]
    front.replica.response = answer_of(body, *headers)
    answers = [front.client.get(path) for _ in range(2)]

    assert [cached(each) for each in answers] == ["miss", "miss"]
    assert len(front.replica.received) == 2
    assert front.kept(body) == 0


@pytest.mark.parametrize(
    ("method", "change", "headers"),
    [
        ("GET", "{}", {"authorization": "Bearer x"}),
        ("GET", "{}", {"authorization": "AWS4-HMAC-SHA256 Credential=x"}),
        ("GET", "{}", {"amz-sdk-invocation-id": "x"}),
        ("GET", f"/~{TOKEN}{{}}", {}),
        ("GET", f"/%7E{TOKEN}{{}}", {}),
        ("GET", "{}?token=x", {}),
        ("GET", "{}?", {}),
        ("GET", "{}", {"range": "bytes=0-1"}),
        ("GET", "{}", {"range": "bytes=0-1", "if-range": '"x"'}),
        ("GET", "{}", {"if-match": '"x"'}),
        ("GET", "{}", {"if-unmodified-since": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        ("GET", "{}", {"authorization": ":/em/c/0"}),
        ("GET", "{}", {"authorization": "GET /em/c/0 "}),
        ("HEAD", "{}", {}),
        ("PUT", "{}", {}),
        ("GET", "/em/@session.x{}", {}),
        ("GET", "/api{}", {}),
        ("GET", "/viewer{}", {}),
        ("GET", "/login{}", {}),
        ("GET", "/auth_info{}", {}),
        ("GET", "/", {}),
        ("GET", "/em", {}),
        ("GET", "/em/", {}),
    ],
)
def test_other_requests_pass_the_cache(
    front: Front, path: str, method: str, change: str, headers: dict[str, str]
) -> None:
    """Requests with credentials, queries, ranges or preconditions go to a replica unchanged.

    So do HEAD, PUT with its body, requests of sessions, and those that are for no key.
    """
    front.client.get(path)
    target = change.format(path)
    for _ in range(2):
        answer = front.nginx.send(method, target, headers, b"bytes" if method == "PUT" else None)
        assert answer.getheader("x-cache") is None

    sent_headers = {name: value.strip() for name, value in headers.items()}
    for each in (requests := front.replica.received[1:]):
        assert (each.method, each.target) == (method, target)
        assert each.body_nbytes == (5 if method == "PUT" else 0)
        assert {name: each.headers[name] for name in headers} == sent_headers
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (f"/~{TOKEN}{{}}", {}),
        (f"{{}}?token={TOKEN}", {}),
        ("{}", {"authorization": f"Bearer {TOKEN}"}),
    ],
)
def test_token_is_neither_kept_nor_does_it_share_an_answer(
    front: Front, path: str, target: str, headers: dict[str, str]
) -> None:
    """An answer to a request with a token is not stored, even if it says that it is public.

    No file of the cache has the token, and the next caller without it asks a replica.
    """
    body = uuid4().hex.encode()
    front.replica.response = answer_of(body, PUBLIC)
    for _ in range(2):
        assert front.client.get(target.format(path), headers=headers).content == body

    assert front.kept(TOKEN.encode()) == front.kept(body) == 0
    assert cached(front.client.get(path)) == "miss"
    assert len(front.replica.received) == 3


@pytest.mark.parametrize("given", ["of.the-client", None])
def test_request_id_of_a_hit_is_its_own(front: Front, path: str, given: str | None) -> None:
    """A hit has the X-Request-ID of its own request, not of the one that filled the cache."""
    first = front.client.get(path, headers={"x-request-id": "the.first"})
    hit = front.client.get(path, headers={"x-request-id": given} if given else {})

    assert cached(hit) == "hit"
    assert first.headers.get_list("x-request-id") == ["the.first"]
    [own] = hit.headers.get_list("x-request-id")
    assert own == given or (given is None and len(own) == 32)


def test_replica_gets_the_id_and_address_of_the_client(front: Front, path: str) -> None:
    """A miss reaches the replica with the client's request id, address, scheme and host."""
    front.client.get(path, headers={"x-request-id": "an.id", "x-forwarded-for": "1.2.3.4"})

    [request] = front.replica.received
    wanted = {"x-request-id": "an.id", "x-forwarded-for": "127.0.0.1"}
    wanted |= {"x-forwarded-proto": "https", "host": front.nginx.host}
    assert {name: request.headers[name] for name in wanted} == wanted


def test_each_request_has_one_line_in_the_log(front: Front, path: str) -> None:
    """A miss and a hit have a line of the log each; that of the hit names no replica."""
    before = front.nginx.logged_so_far()
    for name in ("a.miss", "a.hit"):
        front.client.get(path, headers={"x-request-id": name})

    lines = front.nginx.logged(before, 2)
    address = front.replica.url.removeprefix("http://")
    assert [(each["request_id"], each["replica"]) for each in lines] == [
        ("a.miss", address), ("a.hit", ""),
    ]  # fmt: skip
    assert [(each["client"], each["bytes"]) for each in lines] == [("127.0.0.1", 5)] * 2


def test_age_of_a_hit_counts_from_the_answer_of_the_replica(front: Front, path: str) -> None:
    """A hit has the Date of the answer that was kept, so that clients count its age from there."""
    first = front.client.get(path)
    time.sleep(1.1)
    hit = front.client.get(path)

    assert cached(hit) == "hit"
    assert hit.headers["date"] == first.headers["date"]


def test_known_version_of_a_hit_is_304(front: Front, path: str) -> None:
    """A hit whose ETag the client names in If-None-Match is 304 without a replica."""
    front.replica.response = answer_of(b"hello", PUBLIC, 'ETag: "one"')
    front.client.get(path)
    known = front.client.get(path, headers={"if-none-match": '"one"'})
    other = front.client.get(path, headers={"if-none-match": '"two"'})

    assert (known.status_code, known.content, cached(known)) == (304, b"", "hit")
    assert (other.status_code, other.content, cached(other)) == (200, b"hello", "hit")
    assert len(front.replica.received) == 1


def test_absence_is_kept_as_long_as_it_says(front: Front, path: str) -> None:
    """A 404 with a lifetime is kept as any other answer."""
    front.replica.response = answer_of(b"none", PUBLIC, status="404 Not Found")
    answers = [front.client.get(path) for _ in range(2)]

    assert [(each.status_code, cached(each)) for each in answers] == [(404, "miss"), (404, "hit")]


def test_expired_answer_is_an_error_when_no_replica_answers(front: Front, path: str) -> None:
    """An expired answer is not served without a replica: clients get 503.

    A 503 of the replica is passed on, and not kept.
    """
    front.replica.response = answer_of(b"hello", f"Cache-Control: {BRIEF}", 'ETag: "one"')
    assert front.client.get(path).content == b"hello"
    time.sleep(EXPIRED_S)
    front.replica.answers = False
    answer = front.client.get(path)

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert b"hello" not in answer.content
    busy = answer_of(b"busy", "Cache-Control: no-store", status="503 Service Unavailable")
    front.replica.answers, front.replica.response = True, busy
    passed = front.client.get(path)
    assert (passed.status_code, passed.content) == (503, b"busy")
    front.replica.response = answer_of(b"again", PUBLIC)
    assert front.client.get(path).content == b"again"


def test_answer_that_breaks_off_is_not_kept(front: Front, path: str) -> None:
    """A body that ends before its Content-Length is not kept."""
    front.replica.response = answer_of(b"hello", PUBLIC, "Connection: close")[:-2]
    with pytest.raises(httpx.RemoteProtocolError), front.nginx.client() as client:
        client.get(path)
    front.replica.response = answer_of(b"hello", PUBLIC)

    assert (answer := front.client.get(path)).content == b"hello"
    assert cached(answer) == "miss"


def test_object_of_100_megabytes_is_not_kept(front: Front, path: str) -> None:
    """An object whose length has nine digits is passed on whole, and not kept."""
    body = bytes(10**8)
    front.replica.response = answer_of(body, PUBLIC)
    assert front.client.get(path).content == body

    files = (front.nginx.folder / "cache").rglob("*")
    assert all(each.stat().st_size < len(body) for each in files)


def test_pages_of_all_origins_share_a_hit(front: Front, path: str) -> None:
    """An answer that every page may read is kept once, with its CORS headers."""
    front.replica.response = answer_of(b"hello", PUBLIC, "Access-Control-Allow-Origin: *")
    answers = [front.client.get(path, headers={"origin": each}) for each in ORIGINS]

    assert [cached(each) for each in answers] == ["miss", "hit"]
    assert {each.headers["access-control-allow-origin"] for each in answers} == {"*"}


def test_content_codings_are_kept_apart(front: Front, path: str) -> None:
    """An answer that varies with Accept-Encoding is kept once for each value of it."""
    front.replica.response = answer_of(
        b"hello", PUBLIC, "Vary: Accept-Encoding", "Access-Control-Allow-Origin: *"
    )
    accepted = ("gzip", "identity") * 2
    answers = [front.client.get(path, headers={"accept-encoding": each}) for each in accepted]

    assert [cached(each) for each in answers] == ["miss", "miss", "hit", "hit"]
    assert [each.headers["accept-encoding"] for each in front.replica.received] == [*accepted[:2]]


@dataclass
class Waiting(Recorder):
    """A replica that answers requests for keys once it may."""

    may_answer: threading.Event = field(default_factory=threading.Event)

    def answer(self, request: Received) -> bytes | None:
        """Wait before the answer."""
        answer = super().answer(request)
        if not request.target.startswith("/_shard/"):
            assert self.may_answer.wait(60)
        return answer


def test_concurrent_misses_make_one_request(tmp_path: Path, path: str) -> None:
    """Eight concurrent misses of one key make one request to the replica; all get its answer."""
    with (
        recording(Waiting(response=answer_of(b"hello", PUBLIC))) as replica,
        ThreadPoolExecutor(8) as threads,
    ):
        port = configured(tmp_path, [replica.url], cached=True)
        configuration = tmp_path / "cache.conf"
        text = configuration.read_text()
        brief = "proxy_cache_lock_timeout 250ms;"
        assert brief in text
        configuration.write_text(
            text.replace(brief, "proxy_cache_lock_timeout 60s; proxy_cache_lock_age 60s;")
        )
        with started(tmp_path, port) as nginx, nginx.client() as client:
            asked = [threads.submit(client.get, path) for _ in range(8)]
            while not replica.received:
                time.sleep(0.01)
            time.sleep(0.3)
            assert len(replica.received) == 1
            replica.may_answer.set()
            answers = [each.result() for each in asked]

    assert [each.content for each in answers] == [b"hello"] * 8
    assert sorted(map(str, map(cached, answers))) == ["hit"] * 7 + ["miss"]
    assert len(replica.received) == 1
