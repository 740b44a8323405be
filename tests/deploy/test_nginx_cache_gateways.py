"""Gateways behind the cache of nginx: freshness, private data, CORS, content codings and S3."""

import gzip
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

import httpx
import numpy as np
import pytest
import zarr

from shardgate.settings import Settings
from tests.support.deploy.balancer import (
    BRIEF,
    EXPIRED_S,
    TOKEN,
    Balancer,
    cached,
    configured,
    files_with,
    started,
)
from tests.support.deploy.programs import new_nginx
from tests.support.serving import serving

ORIGINS: Final = ("https://one.example", "https://two.example")


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


@pytest.fixture(scope="module", params=["installed", pytest.param("new", marks=pytest.mark.soak)])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Start the installed nginx, or that of the images, before two gateways."""
    root: Path = tmp_path_factory.mktemp("root")
    values = np.arange(1, 65, dtype="u1")
    zarr.create_array(root / "array", data=values, shards=(32,), chunks=(8,), compressors=None)
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
