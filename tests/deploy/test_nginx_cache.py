"""nginx with the cache of `deploy/nginx/cache.conf`: what it keeps, for how long, and for whom."""

import gzip
import http.client
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

import httpx
import numpy as np
import pytest
import zarr

from shardgate.settings import Settings
from tests.deploy.balancer import (
    TOKEN,
    Balancer,
    Received,
    Recorder,
    balancing,
    configured,
    recording,
    started,
)
from tests.deploy.programs import new_nginx
from tests.support.serving import serving

ORIGINS: Final = ("https://one.example", "https://two.example")
PUBLIC: Final = "Cache-Control: public, max-age=3600"
BRIEF: Final = "public, max-age=1"
EXPIRED_S: Final = 2.1
"""Time after which nginx, which counts whole seconds, takes `BRIEF` for over."""


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


def files_with(folder: Path, text: bytes) -> int:
    """Return the number of files in the cache below *folder* that contain *text*."""
    files = [each for each in (folder / "cache").rglob("*") if each.is_file()]
    return sum(text in each.read_bytes() for each in files)


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


def cached(answer: httpx.Response) -> str | None:
    """Return how nginx's cache answered."""
    status: str | None = answer.headers.get("x-cache")
    return status


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
    ["private, max-age=3600", "no-store", "no-cache", "public, max-age=0", "no-store, max-age=60"],
)
def test_answer_that_is_not_to_be_kept_is_not_kept(
    front: Front, path: str, cache_control: str
) -> None:
    """An answer whose Cache-Control does not allow it is not stored, and asked for each time."""
    body = uuid4().hex.encode()
    front.replica.response = answer_of(body, f"Cache-Control: {cache_control}")
    answers = [front.client.get(path) for _ in range(2)]

    assert [cached(each) for each in answers] == ["miss", "miss"]
    assert len(front.replica.received) == 2
    assert front.kept(body) == 0


def test_answer_without_a_lifetime_is_not_kept(front: Front, path: str) -> None:
    """An answer without Cache-Control is not stored."""
    front.replica.response = answer_of(b"hello")
    for _ in range(2):
        assert cached(front.client.get(path)) == "miss"

    assert len(front.replica.received) == 2


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
        ("GET", "/em/@session.x{}", {}),
        ("GET", "/api{}", {}),
        ("GET", "/viewer{}", {}),
        ("GET", "/", {}),
        ("GET", "/em", {}),
        ("GET", "/em/", {}),
    ],
)
def test_other_requests_pass_the_cache(
    front: Front, path: str, method: str, change: str, headers: dict[str, str]
) -> None:
    """Requests with credentials, queries, ranges or preconditions go to a replica unchanged.

    So do HEAD, requests of sessions, and those that are for no key.
    """
    front.client.get(path)
    target = change.format(path)
    for _ in range(2):
        assert sent(front, method, target, headers).getheader("x-cache") is None

    sent_headers = {name: value.strip() for name, value in headers.items()}
    for each in (requests := front.replica.received[1:]):
        assert (each.method, each.target) == (method, target)
        assert {name: each.headers[name] for name in headers} == sent_headers
    assert len(requests) == 2


def sent(
    front: Front, method: str, target: str, headers: dict[str, str]
) -> http.client.HTTPResponse:
    """Send a request for *target* verbatim, and return the response that was read."""
    context = front.nginx.tls()
    with closing(http.client.HTTPSConnection(front.nginx.host, context=context)) as connection:
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer


def test_write_passes_the_cache(front: Front, path: str) -> None:
    """A PUT reaches a replica with its body each time."""
    for _ in range(2):
        assert cached(front.client.put(path, content=b"bytes")) is None

    assert [(each.method, each.body_nbytes) for each in front.replica.received] == [("PUT", 5)] * 2


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
    """Without a replica an expired answer is not served: clients get 503."""
    front.replica.response = answer_of(b"hello", f"Cache-Control: {BRIEF}", 'ETag: "one"')
    assert front.client.get(path).content == b"hello"
    time.sleep(EXPIRED_S)
    front.replica.answers = False
    answer = front.client.get(path)

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert b"hello" not in answer.content


def test_expired_answer_is_an_error_when_the_replica_fails(front: Front, path: str) -> None:
    """A 503 of the replica is passed on where the kept answer has expired, and not kept."""
    front.replica.response = answer_of(b"hello", f"Cache-Control: {BRIEF}", 'ETag: "one"')
    front.client.get(path)
    time.sleep(EXPIRED_S)
    front.replica.response = answer_of(
        b"busy", "Cache-Control: no-store", status="503 Service Unavailable"
    )
    assert front.client.get(path).status_code == 503
    front.replica.response = answer_of(b"again", PUBLIC)

    assert front.client.get(path).content == b"again"


def test_fresh_answer_needs_no_replica(front: Front, path: str) -> None:
    """A kept answer that has not expired is served while no replica answers."""
    front.client.get(path)
    front.replica.answers = False

    assert cached(front.client.get(path)) == "hit"


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
    for _ in range(2):
        assert front.client.get(path).content == body

    assert len(front.replica.received) == 2
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
    """Of eight concurrent misses of one key one reaches the replica; all get its answer."""
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


class Lab(NamedTuple):
    """nginx with its cache before gateways of one folder, which it sends keys to by shard."""

    nginx: Balancer
    gateways: Sequence[str]
    root: Path
    client: httpx.Client

    def keep_gzip(self, key: str, plain: bytes) -> bytes:
        """Store the object *key* with the content coding gzip; return its stored bytes."""
        path = self.root / f"{key}.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(stored := gzip.compress(plain))
        return stored


def settings(root: Path) -> Settings:
    """Return the settings of gateways of the array below *root*.

    ``brief`` may be kept for a second, ``lasting`` for an hour, ``asked`` never without asking, and
    ``private`` has one reader.
    """
    where: dict[str, Any] = {"url": str(root), "writable": True}
    lasting = {"cache_control": "public, max-age=3600"}
    digest = sha256(TOKEN.encode()).hexdigest()
    return Settings.model_validate({
        "cache": {"ttl_s": 1, "chunk_bytes": 0},
        "server": {"cors_origins": ORIGINS},
        "callers": {"viewer": {"token_sha256": [digest]}},
        "datasets": {
            "brief": where | {"cache_control": BRIEF},
            "lasting": where | lasting,
            "asked": where | {"cache_control": "no-cache"},
            "private": where | {"read": ["viewer"], "write": ["viewer"]},
        },
    })  # fmt: skip


@pytest.fixture(scope="module", params=["installed", "new"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Start the installed nginx, or that of the images, before two gateways."""
    root: Path = tmp_path_factory.mktemp("root")
    zarr.create_array(
        root / "array", shape=(64,), shards=(32,), chunks=(8,), dtype="u1", compressors=None
    )[...] = np.arange(1, 65, dtype="u1")
    folder: Path = tmp_path_factory.mktemp("nginx")
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(settings(root))) for _ in range(2)]
        port = configured(folder, urls, cached=True)
        program = None
        if request.param == "new":
            program = new_nginx(request)
            site = folder / "clients.conf"
            site.write_text(site.read_text().replace(" http2 ", " ") + "http2 on;\n")
        nginx = stack.enter_context(started(folder, port, program))
        yield Lab(nginx, urls, root, stack.enter_context(nginx.client()))


@pytest.fixture
def key() -> str:
    """Return a key of an object that no other test uses."""
    return f"objects/{uuid4().hex}"


def test_expired_chunk_is_revalidated_without_a_body(lab: Lab) -> None:
    """An expired chunk is revalidated by a 304 of the gateway, and served from the cache."""
    first = lab.client.get("/brief/array/c/1")
    time.sleep(EXPIRED_S)
    before = lab.nginx.logged_so_far()
    second = lab.client.get("/brief/array/c/1")

    assert (cached(first), cached(second)) == ("miss", "revalidated")
    assert first.content == second.content == bytes(range(9, 17))
    assert second.headers["etag"] == first.headers["etag"]
    [line] = lab.nginx.logged(before, 1)
    assert (line["status"], line["bytes"]) == (304, 0)


@pytest.mark.parametrize("gateway", [0, 1])
def test_write_through_any_gateway_is_seen_after_max_age(lab: Lab, gateway: int) -> None:
    """A chunk PUT through either gateway is seen once max-age, and the gateways' ttl, are over."""
    path, new = "/brief/array/c/2", bytes([100 + gateway]) * 8
    lab.client.get(path)
    httpx.put(f"{lab.gateways[gateway]}{path}", content=new, timeout=20).raise_for_status()
    time.sleep(EXPIRED_S + 1)

    assert (answer := lab.client.get(path)).content == new
    assert cached(answer) == "miss"


@pytest.mark.parametrize("directive", ["no-cache", "max-age=0", "No-Cache, no-transform"])
def test_request_with_no_cache_sees_a_write_at_once(lab: Lab, key: str, directive: str) -> None:
    """A request with no-cache gets new bytes at once, and others get them after it."""
    path = f"/lasting/{key}"
    lab.client.put(path, content=b"old").raise_for_status()
    lab.client.get(path)
    lab.client.put(path, content=b"new").raise_for_status()
    kept = lab.client.get(path)
    asked = lab.client.get(path, headers={"cache-control": directive})
    after = lab.client.get(path)

    assert [(cached(each), each.content) for each in (kept, asked, after)] == [
        ("hit", b"old"), ("miss", b"new"), ("hit", b"new"),
    ]  # fmt: skip


def test_dataset_with_no_cache_shows_a_write_at_once(lab: Lab, key: str) -> None:
    """A dataset whose cache_control is no-cache shows new bytes at once to every client."""
    path = f"/asked/{key}"
    for body in b"old", b"new":
        lab.client.put(path, content=body).raise_for_status()
        assert lab.client.get(path).content == body


def test_request_with_no_store_is_not_kept(lab: Lab, key: str) -> None:
    """The answer to a request with no-store is not kept."""
    path = f"/lasting/{key}"
    lab.client.put(path, content=b"bytes").raise_for_status()
    lab.client.get(path, headers={"cache-control": "no-store"})

    assert cached(lab.client.get(path)) == "miss"


def test_range_of_a_large_object_is_not_kept(lab: Lab, key: str) -> None:
    """A range of an object of 4 MiB is 206, and neither it nor the object is kept."""
    path, body = f"/lasting/{key}", uuid4().bytes * 2**18
    lab.client.put(path, content=body).raise_for_status()
    answers = [lab.client.get(path, headers={"range": "bytes=16-31"}) for _ in range(2)]

    assert [each.status_code for each in answers] == [206, 206]
    assert {each.content for each in answers} == {body[16:32]}
    assert files_with(lab.nginx.folder, body[:16]) == 0


def test_private_answer_is_for_its_reader_only(lab: Lab, key: str) -> None:
    """A private object is read by its reader, and is 401 for all others after that."""
    path, bearer = f"/private/{key}", {"authorization": f"Bearer {TOKEN}"}
    body = uuid4().bytes
    lab.client.put(path, content=body, headers=bearer).raise_for_status()

    assert lab.client.get(path).status_code == 401
    assert lab.client.get(path, headers=bearer).content == body
    assert lab.client.get(f"/~{TOKEN}{path}").content == body
    assert lab.client.get(path).status_code == 401
    assert files_with(lab.nginx.folder, body) == files_with(lab.nginx.folder, TOKEN.encode()) == 0


def test_pages_of_two_origins_get_their_own_cors_headers(lab: Lab, key: str) -> None:
    """Hits have the CORS headers of the page that asks, where origins are listed."""
    path = f"/lasting/{key}"
    lab.client.put(path, content=b"bytes").raise_for_status()
    asking = (*ORIGINS, "https://other.example", None)
    for expected in "miss", "hit":
        for origin in asking:
            answer = lab.client.get(path, headers={"origin": origin} if origin else {})
            allowed = origin if origin in ORIGINS else None
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert cached(answer) in (expected, "hit")


@pytest.mark.parametrize("origin", [*ORIGINS, None])
def test_content_codings_do_not_mix(lab: Lab, key: str, origin: str | None) -> None:
    """Clients get the stored gzip or the inflated bytes as they accept, for each origin."""
    path, plain = f"/lasting/{key}", b"plain text " * 100
    lab.keep_gzip(key, plain)
    for _ in range(2):
        for accepted, coding in (("gzip", "gzip"), ("identity", None), ("br, gzip", "gzip")):
            headers = {"accept-encoding": accepted} | ({"origin": origin} if origin else {})
            answer = lab.client.get(path, headers=headers)
            assert answer.headers.get("content-encoding") == coding
            assert answer.content == plain
            assert answer.headers.get("access-control-allow-origin") == origin


def test_s3_client_gets_the_stored_form(lab: Lab, key: str) -> None:
    """A signed client gets a coded object as it is stored after another one got it inflated."""
    stored = lab.keep_gzip(key, b"plain text")
    for _ in range(2):
        lab.client.get(f"/lasting/{key}", headers={"accept-encoding": "identity"})
        answer = lab.nginx.s3_client().get_object(Bucket="lasting", Key=key)
        assert answer["Body"].read() == stored


def test_listing_is_as_new_as_the_store(lab: Lab, key: str) -> None:
    """A listing of S3 has a key at once after its PUT."""
    names = []
    for number in range(2):
        lab.client.put(f"/lasting/{key}/{number}", content=b"bytes").raise_for_status()
        answer = lab.client.get(f"/lasting?list-type=2&prefix={key}/")
        names.append(answer.text.count("<Key>"))

    assert names == [1, 2]


def test_hit_over_http_2_equals_the_miss(lab: Lab) -> None:
    """Status, body and headers of a hit over HTTP/2 equal those of the miss."""
    headers = {"x-request-id": "fixed"}
    with lab.nginx.client(http2=True) as client:
        miss, hit = (client.get("/lasting/array/c/0", headers=headers) for _ in range(2))

    assert (miss.http_version, cached(miss), cached(hit)) == ("HTTP/2", "miss", "hit")
    assert {*miss.headers.items()} ^ {*hit.headers.items()} == {
        ("x-cache", "miss"), ("x-cache", "hit"),
    }  # fmt: skip
    assert miss.content == hit.content
