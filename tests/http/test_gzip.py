"""Chunks stored as gzip: stored bytes for clients that accept it, else inflated."""

import asyncio
import gzip
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import httpx
import pytest

from shardgate.settings import CacheSettings, DatasetSettings, LimitSettings, Settings
from tests.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    build,
    build_meshes,
    encode_manifest,
    volume_info,
)
from tests.storage.faulty import LONGEST_S, FaultyServer
from tests.support.clocks import AdvancedClock, advanced_clock
from tests.support.serving import client_of
from tests.support.zipped import zipped

KEY, NEIGHBOUR, _, _, BIG = IDS
CHUNK = b"what a chunk holds " * 20
STORED = zipped(CHUNK)
LARGE = b"".join(number.to_bytes(4, "big") for number in range(5000))
_numbers: Final = count()
OBJECTS = build({KEY: CHUNK, NEIGHBOUR: b"neighbour", BIG: LARGE}, sharding=GZIP_DATA)


@dataclass
class Got:
    """A response with its raw body."""

    status: int
    headers: httpx.Headers
    body: bytes


def ask(client: httpx.Client, path: str, method: str = "GET", **headers: str) -> Got:
    """Send a request with no header but *headers*, and decode nothing."""
    request = client.build_request(method, path)
    del request.headers["accept-encoding"]
    request.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
    answer = client.send(request, stream=True)
    try:
        return Got(answer.status_code, answer.headers, b"".join(answer.iter_raw()))
    finally:
        answer.close()


@dataclass
class Service:
    """The service over an object server."""

    client: httpx.Client
    store: FaultyServer
    clock: AdvancedClock
    folder: str = "em"
    """Path of the volume: the dataset of that name, or a folder in it."""

    def ask(self, key: str = KEY, *, method: str = "GET", **headers: str) -> Got:
        """Request *key* with no header but *headers*, and decode nothing."""
        return ask(self.client, f"/{self.folder}/{key}", method, **headers)

    def put(self, objects: dict[str, bytes]) -> None:
        """Store objects of the volume."""
        for key, data in objects.items():
            self.store.put("bucket", f"{self.folder}/{key}", data)

    def anew(self) -> "Service":
        """Write a volume that the service has not read."""
        found = replace(self, folder=f"em/{next(_numbers)}")
        found.put(OBJECTS)
        return found

    @contextmanager
    def without_reads(self) -> Generator[None]:
        """Assert that the store receives no request."""
        before = len(self.store.seen)
        yield
        assert [seen.path for seen in self.store.seen[before:]] == []


@contextmanager
def _serving(chunk_bytes: int) -> Generator[Service]:
    with FaultyServer().running() as faulty:
        limits = LimitSettings(timeout_s=LONGEST_S, stream_bytes=2000, decoded_bytes=2**16)
        settings = Settings(
            cache=CacheSettings(chunk_bytes=chunk_bytes),
            limits=limits,
            datasets={"em": DatasetSettings(url=f"{faulty.url}/bucket/em")},
        )
        with advanced_clock() as clock, client_of(settings) as client:
            yield Service(client, faulty, clock)


@pytest.fixture(scope="module")
def services() -> Generator[tuple[Service, Service]]:
    """Serve volumes whose chunks are gzip, without a chunk cache and with one."""
    with _serving(0) as without, _serving(2**20) as caching:
        yield without, caching


@pytest.fixture
def service(services: tuple[Service, Service]) -> Service:
    """Serve a volume without a chunk cache."""
    return services[0].anew()


@pytest.fixture
def caching(services: tuple[Service, Service]) -> Service:
    """Serve a volume with a chunk cache."""
    return services[1].anew()


GZIP = {"accept_encoding": "gzip"}
PART = {"range": "bytes=3-9"}


@pytest.mark.parametrize("known", [(), (NEIGHBOUR,), (KEY,)])
@pytest.mark.parametrize(
    ("headers", "body", "start"),
    [
        ({"accept_encoding": "gzip, deflate, br"}, STORED, 0),
        ({}, CHUNK, 0),
        *(
            ({"accept_encoding": accepted}, CHUNK, 0)
            for accepted in ("identity", "br", "gzip;q=0", "*;q=0", "deflate, br")
        ),
        (GZIP | {"range": "bytes=3-9"}, CHUNK[3:10], 3),
        (GZIP | {"range": "bytes=-4"}, CHUNK[376:], 376),
        (GZIP | {"range": "bytes=370-"}, CHUNK[370:], 370),
        (GZIP | {"range": "bytes=0-999"}, CHUNK, 0),
    ],
)
def test_gzip_chunk_is_sent_by_accept_encoding(
    caching: Service, known: tuple[str, ...], headers: dict[str, str], body: bytes, start: int
) -> None:
    """A client that accepts gzip gets the stored bytes; others, and ranges, the inflated ones."""
    for key in known:
        caching.ask(key, **headers if body is STORED else {})
    got = caching.ask(**headers)

    assert (got.status, got.body) == (206 if "range" in headers else 200, body)
    assert got.headers["content-length"] == str(len(body))
    assert got.headers["vary"] == "Accept-Encoding"
    assert got.headers.get("content-encoding") == ("gzip" if body is STORED else None)
    assert got.headers["etag"].endswith('-identity"') is (body is not STORED)
    if "range" in headers:
        last = start + len(body) - 1
        assert got.headers["content-range"] == f"bytes {start}-{last}/{len(CHUNK)}"


@pytest.mark.parametrize("headers", [{}, GZIP, PART])
def test_head_has_the_inflated_length(service: Service, headers: dict[str, str]) -> None:
    """HEAD has the inflated length and no Content-Encoding, which Neuroglancer needs."""
    got = service.ask(method="HEAD", **headers)

    assert (got.status, got.body) == (200, b"")
    assert got.headers["content-length"] == str(len(CHUNK))
    assert got.headers["etag"] == service.ask().headers["etag"]
    assert "content-encoding" not in got.headers


@pytest.mark.parametrize(("accepted", "other"), [("gzip", "identity"), ("identity", "gzip")])
def test_forms_have_different_strong_etags(service: Service, accepted: str, other: str) -> None:
    """The stored and the inflated form have different strong ETags.

    If-None-Match with that of the requested form is 304 without a read.
    """
    etag = service.ask(accept_encoding=accepted).headers["etag"]
    another = service.ask(accept_encoding=other).headers["etag"]
    with service.without_reads():
        got = service.ask(accept_encoding=accepted, if_none_match=etag)
    changed = service.ask(accept_encoding=accepted, if_none_match=another)

    assert etag != another
    assert (etag[0], etag[-1]) == ('"', '"')
    assert (got.status, got.body, got.headers["etag"]) == (304, b"", etag)
    assert got.headers["vary"] == "Accept-Encoding"
    assert (changed.status, changed.body) == (200, STORED if accepted == "gzip" else CHUNK)


def test_head_and_range_are_conditional_without_a_read(service: Service) -> None:
    """HEAD and ranges compare conditions with the inflated form's ETag, without a read."""
    etag, compressed = (
        service.ask(accept_encoding=each).headers["etag"] for each in ("identity", "gzip")
    )
    with service.without_reads():
        head = service.ask(method="HEAD", if_none_match=etag, **GZIP)
        part = service.ask(if_none_match=etag, **PART, **GZIP)
        failed = service.ask(if_match='"other"', **PART)
    assert [head.status, part.status, failed.status] == [304, 304, 412]

    got = service.ask(if_match=etag, **PART)
    assert (got.body, got.headers["etag"]) == (CHUNK[3:10], etag)
    assert service.ask(if_match=compressed, **PART).status == 412
    assert service.ask(if_range=etag, **PART).status == 206
    other = service.ask(if_range=compressed, **PART, **GZIP)
    assert (other.status, other.body) == (200, CHUNK)


def test_a_cached_chunk_is_inflated_without_a_read(caching: Service) -> None:
    """A cached chunk is sent in either form, and in part, without a read."""
    caching.ask()
    with caching.without_reads():
        assert caching.ask().body == CHUNK
        assert caching.ask(range="bytes=3-9").body == CHUNK[3:10]
        assert caching.ask(accept_encoding="gzip").body == STORED
        assert caching.ask(method="HEAD").headers["content-length"] == str(len(CHUNK))


@pytest.mark.parametrize("accepted", ["gzip", "identity"])
def test_streamed_chunk_is_sent_in_either_form(service: Service, accepted: str) -> None:
    """A chunk larger than `stream_bytes` is streamed in either form."""
    got = service.ask(BIG, accept_encoding=accepted)
    stored = zipped(LARGE)

    assert len(stored) > 2000
    assert got.body == (stored if accepted == "gzip" else LARGE)
    assert got.headers["content-length"] == str(len(got.body))
    assert service.ask(BIG, range="bytes=9999-10003").body == LARGE[9999:10004]


async def test_concurrent_forms_share_a_read(caching: Service) -> None:
    """Concurrent requests for the stored form, the inflated form and a range share one read."""
    asked = [{"accept-encoding": "gzip"}, {"accept-encoding": "br"}, {"range": "bytes=3-9"}]
    caching.ask(NEIGHBOUR)
    before = len(caching.store.seen)
    limits = httpx.Limits(max_connections=60)
    async with (
        httpx.AsyncClient(base_url=caching.client.base_url, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [
            group.create_task(client.get(f"/{caching.folder}/{KEY}", headers=asked[at % 3]))
            for at in range(60)
        ]
        await asyncio.gather(*tasks)

    for at, task in enumerate(tasks):
        assert task.result().content == (CHUNK[3:10] if at % 3 == 2 else CHUNK)
    assert len(caching.store.seen) - before == 1


BAD = {"no gzip": b"what was never compressed", "a bomb": zipped(bytes(2**16 + 1))}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("headers", [{}, PART, {"method": "HEAD"}])
def test_invalid_gzip_chunk_is_damage(service: Service, name: str, headers: dict[str, str]) -> None:
    """A chunk that does not inflate is 424, and is sent as stored to clients that accept gzip."""
    service.put(_with_stored(BAD[name]))
    got = service.ask(**headers)

    assert (got.status, got.headers["cache-control"]) == (424, "no-store")
    if "method" not in headers:
        assert f"{service.folder}/s0/0.shard: " in json.loads(got.body)["detail"]
    compressed = service.ask(accept_encoding="gzip")
    assert (compressed.status, compressed.body) == (200, BAD[name])

    service.put(OBJECTS)
    service.clock.forget_damage()
    assert service.ask().body == CHUNK


def _with_stored(data: bytes) -> dict[str, bytes]:
    """Write the volume with *data* in the place of the gzip."""
    raw = build({KEY: data}, sharding={**GZIP_DATA, "data_encoding": "raw"})
    return {**raw, "info": OBJECTS["info"]}


@pytest.mark.parametrize("accepted", ["gzip", "identity"])
def test_raw_object_has_no_content_encoding(service: Service, accepted: str) -> None:
    """Chunks of raw shards, documents and other objects have no Content-Encoding and no Vary."""
    service.put(build({KEY: CHUNK}))
    service.put({"notes.gz": STORED})
    for key, body in ((KEY, CHUNK), ("notes.gz", STORED), ("info", None)):
        got = service.ask(key, accept_encoding=accepted)
        assert got.status == 200
        assert got.body == body or json.loads(got.body) == volume_info(None)
        assert not {"vary", "content-encoding"} & set(got.headers)


def test_absent_gzip_chunk_is_not_found(service: Service) -> None:
    """An absent chunk is 404 in any form. A range past the end is 416 with the inflated length."""
    for headers in ({}, GZIP, PART, {"method": "HEAD"}):
        got = service.ask("s0/-1-2_8-10_0-1", **headers)
        assert (got.status, "content-encoding" in got.headers) == (404, False)
    got = service.ask(range="bytes=380-", accept_encoding="gzip")
    assert (got.status, got.headers["content-range"]) == (416, f"bytes */{len(CHUNK)}")


def test_mesh_fragments_are_not_gzip(service: Service) -> None:
    """Mesh fragments answer ranges and have no Content-Encoding, though their manifest is gzip."""
    objects = build_meshes({"7": b"fragments"}, sharding=GZIP_DATA)
    service.put({f"mesh/{key}": data for key, data in objects.items()})
    manifest = encode_manifest([[2], [7]])

    part = service.ask("mesh/7", range="bytes=2-5", accept_encoding="gzip")
    assert (part.status, part.body) == (206, b"agme")
    whole = service.ask("mesh/7", accept_encoding="gzip")
    assert (whole.body, "content-encoding" in whole.headers) == (b"fragments", False)
    assert service.ask("mesh/7.index").body == manifest
    compressed = service.ask("mesh/7.index", accept_encoding="gzip")
    assert gzip.decompress(compressed.body) == manifest
    assert compressed.headers["content-encoding"] == "gzip"
