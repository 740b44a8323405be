"""HTTP behaviour that real clients depend on, checked on raw headers."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urljoin

import httpx
import pytest

from shardgate.errors import StorageDeniedError
from shardgate.model import ObjectRef
from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.support.attacks.raw import exchange
from tests.support.clients.arrays import IN_GROUPS, VALUES, member
from tests.support.clients.services import ARRAY, HOLES, KINDS, Watched, ask, connect
from tests.support.files import read_files
from tests.support.resolving import ROOT
from tests.support.serving import serving

ABSENT: Final = {
    "empty inner chunk": f"{HOLES}/c/2/2",
    "inner chunk of an absent shard": f"{HOLES}/c/0/2",
    "outside of the grid": f"{HOLES}/c/0/99",
    "not canonical": f"{ARRAY}/c/00/0/0",
    "chunk of an array that is not sharded": "/bucket/plain/v3/c/9/9/9",
    "node": "/bucket/index/nothing/zarr.json",
    "dataset": "/nothing/zarr.json",
    "probe .zgroup": f"{ARRAY}/.zgroup",
    "probe .zattrs": f"{ARRAY}/.zattrs",
    "probe .zarray": f"{ARRAY}/.zarray",
    "probe .zmetadata": "/bucket/groups/listed/.zmetadata",
    "probe .zgroup of the root": "/bucket/.zgroup",
    "array without the final slash": ARRAY,
    "folder of no container": "/bucket/index",
}


@contextmanager
def serving_bucket(bucket: Path, on_read: Callable[[ObjectRef], Any]) -> Iterator[httpx.Client]:
    """Serve *bucket*, calling *on_read* before each read of the store."""
    settings = Settings(datasets={"bucket": DatasetSettings(url=str(bucket))})
    with (
        serving(settings, wrap=lambda store: Watched(store, on_read)) as url,
        connect(url) as opened,
    ):
        yield opened


@pytest.mark.parametrize("kind", ABSENT)
def test_absent_key_gets_404(client: httpx.Client, kind: str) -> None:
    """GET and HEAD of an absent key get 404, with or without a range.

    Clients understand no other status as absence; TensorStore probes folders by ranges.
    """
    for headers in ({}, {"Range": "bytes=-4144"}, {"Range": "bytes=0-31"}):
        for method in ("GET", "HEAD"):
            assert ask(client, ABSENT[kind], method, **headers).status_code == 404


@pytest.mark.parametrize("error", [StorageDeniedError(ROOT, "denied"), RuntimeError("a bug")])
def test_store_failure_is_never_404(
    bucket: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure of the store gets 403 or 500, with CORS headers and `no-store`, never 404."""

    def fail(ref: ObjectRef) -> None:
        if "/c/" in ref.key:
            raise error

    with serving_bucket(bucket, fail) as client:
        for name in ("c/0/0/0", "c/2/1/2"):
            answer = ask(client, f"{ARRAY}/{name}", Origin="https://viewer.example")
            assert answer.status_code == (500 if isinstance(error, RuntimeError) else 403)
            assert answer.headers["cache-control"] == "no-store"
            _assert_cors(answer)


ANSWERS: Final[dict[str, tuple[int, str, str, dict[str, str]]]] = {
    "200": (200, "GET", KINDS["chunk"], {}),
    "HEAD": (200, "HEAD", KINDS["chunk"], {}),
    "206": (206, "GET", KINDS["chunk"], {"Range": "bytes=0-3"}),
    "304": (304, "GET", KINDS["chunk"], {"If_None_Match": "*"}),
    "400 key": (400, "GET", "/bucket/a%00b", {}),
    "400 traversal": (400, "GET", "/bucket/%2e%2e/%2e%2e/etc/passwd", {}),
    "400 listing": (400, "GET", "/bucket?list-type=2&max-keys=x", {}),
    "400 header": (400, "GET", KINDS["chunk"], {"Range": "bytes=z-"}),
    "404 key": (404, "GET", ABSENT["empty inner chunk"], {}),
    "404 dataset": (404, "GET", "/nothing/x", {}),
    "404 of ours": (404, "GET", "/api/nothing", {}),
    "405": (405, "POST", KINDS["chunk"], {}),
    "405 of any method": (405, "PATCH", KINDS["chunk"], {}),
    "405 of ours": (405, "DELETE", "/api/datasets", {}),
    "412": (412, "GET", KINDS["chunk"], {"If_Match": '"other"'}),
    "416": (416, "GET", KINDS["chunk"], {"Range": "bytes=9999-"}),
    "preflight": (204, "OPTIONS", KINDS["chunk"], {}),
    "preflight of ours": (204, "OPTIONS", "/api/datasets", {}),
    "listing": (200, "GET", "/bucket/groups/listed/", {}),
    "listing of S3": (200, "GET", "/bucket?list-type=2&max-keys=9", {}),
    "documentation": (200, "GET", "/docs", {}),
    "datasets": (200, "GET", "/", {}),
    "api": (200, "GET", "/api/datasets", {}),
    "alive": (200, "GET", "/healthz", {}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_response_has_cors_and_cache_control(client: httpx.Client, name: str) -> None:
    """Every response has CORS headers, Cache-Control and `X-Content-Type-Options: nosniff`.

    Neuroglancer shows zeros for a response without CORS, and Chromium caches one without
    Cache-Control by a heuristic.
    """
    status, method, path, headers = ANSWERS[name]

    answer = ask(client, path, method, Origin="https://viewer.example", **headers)

    assert answer.status_code == status
    assert answer.headers["cache-control"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    _assert_cors(answer)


def _assert_cors(answer: httpx.Response) -> None:
    assert answer.headers["access-control-allow-origin"] in {"*", "https://viewer.example"}
    exposed = re.split(r",\s*", answer.headers["access-control-expose-headers"].lower())
    expected = {"etag", "content-range", "content-length", "content-encoding", "retry-after"}
    assert expected <= set(exposed)


def test_preflight_allows_the_headers_of_viewers(client: httpx.Client) -> None:
    """A preflight allows GET with ranges, conditions, Authorization and Cache-Control."""
    asked = {"range", "if-match", "if-none-match", "authorization", "cache-control"}
    headers = {"Origin": "https://viewer.example", "Access_Control_Request_Method": "GET"}
    headers["Access_Control_Request_Headers"] = ",".join(asked)
    answer = ask(client, KINDS["chunk"], "OPTIONS", **headers)

    assert 200 <= answer.status_code < 300
    assert asked <= set(re.split(r",\s*", answer.headers["access-control-allow-headers"].lower()))
    assert "GET" in re.split(r",\s*", answer.headers["access-control-allow-methods"])


SIZED: Final = KINDS | {
    "listing": "/bucket/groups/listed/",
    "404": ABSENT["empty inner chunk"],
    "400": "/bucket/a%00b",
}


@pytest.mark.parametrize("kind", SIZED)
def test_head_and_get_have_the_same_content_length(client: httpx.Client, kind: str) -> None:
    """HEAD and GET have the same Content-Length and validators, and no chunked coding."""
    head, get = (ask(client, SIZED[kind], method) for method in ("HEAD", "GET"))

    assert head.content == b""
    for answer in (head, get):
        assert int(answer.headers["content-length"]) == len(get.content)
        assert "transfer-encoding" not in answer.headers
    if kind in KINDS:
        same = ("content-type", "etag", "cache-control", "accept-ranges")
        assert [head.headers[n] for n in same] == [get.headers[n] for n in same]


@pytest.mark.parametrize("headers", [{}, {"Range": "bytes=100-"}, {"Range": "bytes=-299900"}])
def test_streamed_body_has_a_content_length(tmp_path: Path, headers: dict[str, str]) -> None:
    """A body above the streaming limit, whole or a range, has a Content-Length."""
    data = bytes(range(250)) * 1200
    (tmp_path / "large").write_bytes(data)
    settings = Settings(
        datasets={"d": DatasetSettings(url=str(tmp_path))},
        limits=LimitSettings(stream_bytes=64 * 1024),
    )
    with serving(settings) as url, connect(url) as client:
        answer = ask(client, "/d/large", **headers)

    expected = data[100:] if headers else data
    assert answer.content == expected
    assert answer.headers["content-length"] == str(len(expected))
    assert "transfer-encoding" not in answer.headers


CONTROLS: Final = {
    "public, max-age=7": "public, max-age=7, must-revalidate",
    "public, max-age=7, S-MaxAge=70,stale-while-revalidate=9, stale-if-error=9, immutable": (
        "public, max-age=7, must-revalidate"
    ),
    "public, s-maxage=70": "public, max-age=0, must-revalidate",
    "no-cache": "no-cache, must-revalidate",
    "must-understand, No-Store, s-maxage=9": "must-understand, No-Store, must-revalidate",
}
"""Cache-Control of a dataset, and that of an absent key in it."""


def test_cache_control_of_the_dataset_is_sent(bucket: Path) -> None:
    """Responses with 200, 206 and 304 carry the Cache-Control of the dataset.

    A 404 and a listing lack `s-maxage`, `stale-…` and `immutable`: they are never stale.
    """
    datasets = {
        f"d{number}": DatasetSettings(url=str(bucket), cache_control=control)
        for number, control in enumerate(CONTROLS)
    }
    with serving(Settings(datasets=datasets)) as url, connect(url) as client:
        for number, (control, of_absence) in enumerate(CONTROLS.items()):
            expected = {"200": control, "206": control, "304": control, "404 key": of_absence}
            for name, told in expected.items():
                status, method, path, headers = ANSWERS[name]
                answer = ask(client, path.replace("bucket", f"d{number}", 1), method, **headers)
                assert (answer.status_code, answer.headers["cache-control"]) == (status, told)
            listing = ask(client, f"/d{number}?list-type=2&max-keys=9")
            assert listing.headers["cache-control"] == of_absence


REQUESTS: Final[dict[str, tuple[dict[str, str], int, slice]]] = {
    "all": ({}, 200, slice(None)),
    "first bytes": ({"Range": "bytes=0-3"}, 206, slice(0, 4)),
    "all but some": ({"Range": "bytes=4-"}, 206, slice(4, None)),
    "last bytes": ({"Range": "bytes=-7"}, 206, slice(-7, None)),
    "several ranges": ({"Range": "bytes=0-1,4-5"}, 200, slice(None)),
    "behind the end": ({"Range": "bytes=9999999-"}, 416, slice(0)),
    "If-Match holds": ({"If_Match": "TAG", "Range": "bytes=1-4"}, 206, slice(1, 5)),
    "If-Match fails": ({"If_Match": '"x"', "Range": "bytes=1-4"}, 412, slice(0)),
    "If-None-Match fails": ({"If_None_Match": "TAG", "Range": "bytes=1-4"}, 304, slice(0)),
    "If-None-Match fails weakly": ({"If_None_Match": "W/TAG"}, 304, slice(0)),
    "If-Range holds": ({"If_Range": "TAG", "Range": "bytes=1-4"}, 206, slice(1, 5)),
    "If-Range fails": ({"If_Range": '"x"', "Range": "bytes=1-4"}, 200, slice(None)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_and_conditions_follow_rfc_9110(client: httpx.Client, kind: str) -> None:
    """Each kind of object answers ranges and conditions with one strong ETag, not encoded.

    Every client that was given an encoded range failed.
    """
    path, encodings = KINDS[kind], {"Accept_Encoding": "gzip, deflate, br, zstd"}
    whole = ask(client, path)
    tag = whole.headers["etag"]
    assert re.fullmatch(r'"[\x21\x23-\x7e]+"', tag)
    for name, (headers, status, part) in REQUESTS.items():
        filled = {key: value.replace("TAG", tag) for key, value in headers.items()}
        answer = ask(client, path, **filled, **encodings)

        assert answer.status_code == status, name
        assert "content-encoding" not in answer.headers
        if status in {200, 206, 304}:
            assert (answer.content, answer.headers["etag"]) == (whole.content[part], tag), name
        if status == 206:
            start, stop, _ = part.indices(len(whole.content))
            told = f"bytes {start}-{stop - 1}/{len(whole.content)}"
            assert answer.headers["content-range"] == told, name
        if status == 416:
            assert answer.headers["content-range"] == f"bytes */{len(whole.content)}"


def test_no_cache_request_is_answered_from_the_cache(bucket: Path) -> None:
    """A request with `no-cache`, as TensorStore sends, for a cached key reads no object."""
    reads: list[ObjectRef] = []
    with serving_bucket(bucket, reads.append) as client:
        for path in (KINDS["chunk"], KINDS["metadata"], ABSENT["empty inner chunk"]):
            ask(client, path)
            reads.clear()
            for control in ("no-cache", "no-cache, no-store, max-age=0"):
                ask(client, path, Cache_Control=control, Pragma="no-cache")
            assert reads == []


def test_page_of_a_group_links_to_its_members(client: httpx.Client) -> None:
    """The page of a group or folder links to its members and metadata."""
    answer, folder = (ask(client, path) for path in ("/bucket/groups/listed/", "/bucket/"))

    assert answer.headers["content-type"].startswith("text/html")
    links = re.findall(r'<a href="([^"]+)"', answer.text)
    base = str(answer.url)
    members = {urljoin(base, f"{member(case)}/") for case in IN_GROUPS}
    expected = members | {urljoin(base, "below/"), urljoin(base, "zarr.json")}
    assert {urljoin(base, link) for link in links} == expected
    assert 'href="./groups/"' in folder.text or 'href="groups/"' in folder.text


def test_page_of_an_array_links_to_its_inner_chunks(client: httpx.Client) -> None:
    """Pages of a sharded array lead to its inner chunks, which all get 200 and an own ETag."""
    page = f"{ARRAY}/"
    while links := re.findall('href="./([^"]*/)"', ask(client, page).text):
        page += links[0]
    found = re.findall('href="./([^"]*)"', ask(client, page).text)

    assert page.removeprefix(f"{ARRAY}/").startswith("c/")
    assert len(found) > 1
    answers = [ask(client, page + name) for name in found]
    assert {answer.status_code for answer in answers} == {httpx.codes.OK}
    assert len({answer.headers["etag"] for answer in answers}) == len(found)


@pytest.mark.parametrize("name", ["after/gzip", "after/crc_then_zstd", "plain/v3"])
def test_array_that_cannot_be_unsharded_is_served_as_stored(
    client: httpx.Client, bucket: Path, name: str
) -> None:
    """An array with compression around its shards is served as stored, byte for byte."""
    for key, data in read_files(bucket / name).items():
        assert ask(client, f"/bucket/{name}/{key}").content == data


def test_120_concurrent_connections_are_all_answered(local: str) -> None:
    """All of 120 connections opened at once, as zarrita does, get 200."""

    def get(number: int) -> bytes:
        path = f"{ARRAY}/c/{number % 3}/{number % 2}/{number % 3}"
        head = f"GET {path} HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n"
        return exchange(local, head.encode())

    with ThreadPoolExecutor(120) as pool:
        answers = list(pool.map(get, range(120)))

    assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}
    first = answers[0].partition(b"\r\n\r\n")[2]
    assert first == VALUES[:2, :3, :4].astype("<u2").tobytes()
