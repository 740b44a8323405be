"""Bodies with a content coding: sent as stored to clients that accept it, else inflated.

They are chunks of shards, each compressed, or objects with a ``Content-Encoding``.
"""

import asyncio
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Final

import httpx
import pytest

from shardgate.model import ObjectRef
from shardgate.settings import CacheSettings, DatasetSettings, LimitSettings, Settings
from tests.support.clocks import AdvancedClock, advanced_clock
from tests.support.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    build_meshes,
    encode_manifest,
    volume_info,
)
from tests.support.formats.neuroglancer_precomputed.case import build as build_volume
from tests.support.formats.zarr.building import build as build_array
from tests.support.formats.zarr.building import chunk_bytes
from tests.support.gateway.s3_uploads import S3, complete, create, put
from tests.support.read.stores import WatchedStore
from tests.support.serving import client_of
from tests.support.zipped import ENCODERS, encoded, zipped

KEY, NEIGHBOUR, _, _, BIG = IDS
ROOT: Final = "memory://codings"
CHUNK: Final = b"what a chunk holds " * 20
STORED: Final = zipped(CHUNK)
LARGE: Final = b"".join(number.to_bytes(4, "big") for number in range(5000))
OBJECTS: Final = build_volume({KEY: CHUNK, NEIGHBOUR: b"neighbour", BIG: LARGE}, sharding=GZIP_DATA)
PLAIN: Final = b"chunk of a volume " * 500
CODINGS: Final = list(ENCODERS)
MOST: Final = 2**16
MOST_METADATA: Final = 2**12
GZIP: Final = {"accept_encoding": "gzip"}
PART: Final = {"range": "bytes=3-9"}
_numbers: Final = count()


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
    """The service over a store that records reads."""

    client: httpx.Client
    store: WatchedStore
    clock: AdvancedClock
    folder: str = ""
    """Folder of the volume in the dataset ``em``."""

    def ask(self, key: str = KEY, *, method: str = "GET", **headers: str) -> Got:
        """Request *key* with no header but *headers*, and decode nothing."""
        return ask(self.client, f"/em/{self.folder}/{key}", method, **headers)

    def put(self, objects: dict[str, bytes]) -> None:
        """Store objects of the volume."""
        for key, data in objects.items():
            self.store.place(ObjectRef(ROOT, f"{self.folder}/{key}"), data)

    def anew(self) -> "Service":
        """Write a volume that the service has not read."""
        found = replace(self, folder=str(next(_numbers)))
        found.put(OBJECTS)
        return found

    @contextmanager
    def without_reads(self) -> Generator[None]:
        """Assert that the store receives no request."""
        before = len(self.store.calls)
        yield
        assert self.store.calls[before:] == []


@contextmanager
def _serving(chunk_bytes: int) -> Generator[Service]:
    store = WatchedStore()
    settings = Settings(
        cache=CacheSettings(chunk_bytes=chunk_bytes),
        limits=LimitSettings(stream_bytes=2000, decoded_bytes=MOST, metadata_bytes=MOST_METADATA),
        datasets={
            "raw": DatasetSettings(url=ROOT, view="raw", writable=True),
            "em": DatasetSettings(url=ROOT, writable=True),
        },
    )
    with advanced_clock() as clock, client_of(settings, wrap=lambda _: store) as client:
        yield Service(client, store, clock)


@pytest.fixture(scope="module")
def services() -> Generator[tuple[Service, Service]]:
    """Serve a bucket with a raw view, without a chunk cache and with one."""
    with _serving(0) as without, _serving(2**20) as caching:
        yield without, caching


@pytest.fixture
def service(services: tuple[Service, Service]) -> Service:
    """Return a service without a chunk cache, and a volume whose chunks are gzip."""
    return services[0].anew()


@pytest.fixture
def caching(services: tuple[Service, Service]) -> Service:
    """Return a service with a chunk cache, and a volume whose chunks are gzip."""
    return services[1].anew()


@pytest.fixture
def client(services: tuple[Service, Service]) -> httpx.Client:
    """Return a client of the service with a chunk cache."""
    return services[1].client


def store(client: httpx.Client, key: str, coding: str, data: bytes) -> str:
    """Store *data* with a coding, and return the ETag in quotes that S3 gives it."""
    headers = {"content-encoding": coding}
    assert client.put(f"/raw/{key}", content=data, headers=headers).status_code == 200
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def shown(got: Got) -> tuple[int, bytes, str | None, str | None]:
    """Return what identifies a form: status, body, coding, ETag."""
    return got.status, got.body, got.headers.get("content-encoding"), got.headers.get("etag")


@dataclass
class Coded:
    """A body with a coding, and a function that requests it."""

    ask: Callable[..., Got]
    coding: str
    stored: bytes
    plain: bytes


@pytest.fixture(
    params=["uncached chunk", "unknown chunk", "chunk of a known index", "cached chunk", *CODINGS]
)
def coded(
    request: pytest.FixtureRequest, service: Service, caching: Service, client: httpx.Client
) -> Coded:
    """Return a chunk of a gzip shard, or an object of each coding."""
    if (coding := request.param) in CODINGS:
        stored = encoded(coding, PLAIN)
        store(client, coding, coding, stored)
        return Coded(partial(ask, client, f"/em/{coding}"), coding, stored, PLAIN)
    if request.param == "uncached chunk":
        return Coded(service.ask, "gzip", STORED, CHUNK)
    for known in {"chunk of a known index": [NEIGHBOUR], "cached chunk": [KEY]}.get(coding, []):
        caching.ask(known)
    return Coded(caching.ask, "gzip", STORED, CHUNK)


@pytest.mark.parametrize("is_accepted", [True, False])
def test_stored_bytes_are_sent_to_clients_that_accept_the_coding(
    coded: Coded, *, is_accepted: bool
) -> None:
    """A GET that accepts the coding gets the stored bytes, and any other the inflated ones."""
    accepting = ("{}", "identity;q=0.5, {}", "compress, {}, x")
    others = (None, "identity", "compress", "{};q=0", "*;q=0")
    body = coded.stored if is_accepted else coded.plain
    for accepted in accepting if is_accepted else others:
        headers = {"accept_encoding": accepted.format(coded.coding)} if accepted else {}
        got = coded.ask(**headers)

        assert shown(got)[:3] == (200, body, coded.coding if is_accepted else None), accepted
        assert got.headers["content-length"] == str(len(body))
        assert got.headers["vary"] == "Accept-Encoding"


def test_range_is_of_the_inflated_bytes(coded: Coded) -> None:
    """A range is one of the inflated bytes, also for a client that accepts the coding."""
    size = len(coded.plain)
    for asked, first, last in (
        ("3-9", 3, 9),
        ("-4", size - 4, size - 1),
        ("370-", 370, size - 1),
        ("0-99999", 0, size - 1),
    ):
        got = coded.ask(range=f"bytes={asked}", accept_encoding=coded.coding)

        assert shown(got)[:3] == (206, coded.plain[first : last + 1], None), asked
        assert got.headers["content-range"] == f"bytes {first}-{last}/{size}"
        assert got.headers["content-length"] == str(len(got.body))
        assert got.headers["vary"] == "Accept-Encoding"


def test_head_has_the_inflated_length(coded: Coded) -> None:
    """HEAD has the inflated length and no Content-Encoding, which Neuroglancer needs."""
    etag = coded.ask().headers["etag"]
    for headers in ({}, {"accept_encoding": coded.coding}, PART):
        got = coded.ask(method="HEAD", **headers)

        assert shown(got) == (200, b"", None, etag)
        assert got.headers["content-length"] == str(len(coded.plain))
        assert got.headers["vary"] == "Accept-Encoding"


def test_forms_have_different_strong_etags(coded: Coded) -> None:
    """The stored and the inflated form have different strong ETags, to which If-None-Match of a
    request for that form is compared.
    """
    forms = {each: coded.ask(accept_encoding=each) for each in (coded.coding, "identity")}
    stored, inflated = (got.headers["etag"] for got in forms.values())

    assert re.fullmatch('"[^"]+"', stored)
    assert inflated == f'{stored[:-1]}-identity"'
    for accepted, got in forms.items():
        for etag in (stored, inflated):
            again = coded.ask(accept_encoding=accepted, if_none_match=etag)
            is_same = etag == got.headers["etag"]
            assert again.status == (304 if is_same else 200)
            assert again.headers["etag"] == got.headers["etag"]
            assert again.headers["vary"] == "Accept-Encoding"
            assert again.body == (b"" if is_same else got.body)


def test_conditions_of_heads_and_ranges_are_about_the_inflated_form(coded: Coded) -> None:
    """The conditions of HEAD and of ranges are compared with the inflated form's ETag."""
    accepting = {"accept_encoding": coded.coding}
    inflated, stored = (
        coded.ask(accept_encoding=each).headers["etag"] for each in ("identity", coded.coding)
    )
    got = coded.ask(if_match=inflated, **PART)
    other = coded.ask(if_range=stored, **PART, **accepting)

    assert coded.ask(method="HEAD", if_none_match=inflated, **accepting).status == 304
    assert coded.ask(if_none_match=inflated, **PART, **accepting).status == 304
    assert shown(got) == (206, coded.plain[3:10], None, inflated)
    assert coded.ask(if_match=stored, **PART).status == 412
    assert coded.ask(if_range=inflated, **PART).status == 206
    assert (other.status, other.body) == (200, coded.plain)


def test_conditions_of_a_known_chunk_need_no_read(service: Service) -> None:
    """Conditions of a chunk whose index is known are compared without a read."""
    forms = {each: service.ask(accept_encoding=each) for each in ("gzip", "identity")}
    inflated = forms["identity"].headers["etag"]
    with service.without_reads():
        for accepted, got in forms.items():
            etag = got.headers["etag"]
            assert service.ask(accept_encoding=accepted, if_none_match=etag).status == 304
        assert service.ask(method="HEAD", if_none_match=inflated, **GZIP).status == 304
        assert service.ask(if_none_match=inflated, **PART, **GZIP).status == 304
        assert service.ask(if_match='"other"', **PART).status == 412


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
    before = len(caching.store.calls)
    limits = httpx.Limits(max_connections=60)
    async with (
        httpx.AsyncClient(base_url=caching.client.base_url, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [
            group.create_task(client.get(f"/em/{caching.folder}/{KEY}", headers=asked[at % 3]))
            for at in range(60)
        ]
        await asyncio.gather(*tasks)

    for at, task in enumerate(tasks):
        assert task.result().content == (CHUNK[3:10] if at % 3 == 2 else CHUNK)
    assert len(caching.store.calls) - before == 1


BAD = {"no gzip": b"what was never compressed", "a bomb": zipped(bytes(MOST + 1))}


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
    raw = build_volume({KEY: data}, sharding={**GZIP_DATA, "data_encoding": "raw"})
    return {**raw, "info": OBJECTS["info"]}


@pytest.mark.parametrize("accepted", ["gzip", "identity"])
def test_raw_object_has_no_content_encoding(service: Service, accepted: str) -> None:
    """Chunks of raw shards, documents and other objects have no Content-Encoding and no Vary."""
    service.put(build_volume({KEY: CHUNK}))
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


@pytest.mark.parametrize("coding", [*CODINGS, "compress", "gzip, br"])
def test_s3_client_gets_the_stored_bytes(client: httpx.Client, coding: str) -> None:
    """An S3 client gets the listed size and ETag, and ranges of stored bytes."""
    key, data = f"s3/{coding}", encoded(coding, PLAIN) if coding in CODINGS else b"any bytes"
    etag = store(client, key, coding, data)
    ranged = {"range": "bytes=1-4", "if_match": etag}
    got, head, part = (
        ask(client, f"/em/{key}", method, accept_encoding="identity", **S3, **more)
        for method, more in (("GET", {}), ("HEAD", {}), ("GET", ranged))
    )
    listing = client.get("/em?list-type=2", params={"prefix": key}).text

    assert shown(got) == (200, data, coding, etag)
    assert shown(head) == (200, b"", coding, etag)
    assert shown(part) == (206, data[1:5], coding, etag)
    assert head.headers["content-length"] == str(len(data))
    assert part.headers["content-range"] == f"bytes 1-4/{len(data)}"
    assert re.findall(r"<Size>(\d+)", listing) == [str(len(data))]
    assert etag[1:-1] in listing
    assert "Authorization" in got.headers["vary"]


@pytest.mark.parametrize("coding", [*CODINGS, "compress"])
def test_empty_object_has_no_content_coding(client: httpx.Client, coding: str) -> None:
    """An empty object that was stored with a content coding is empty, and is sent without one."""
    store(client, "empty", coding, b"")
    _copy(client, "empty", "empty-copy")

    for key in ("empty", "empty-copy"):
        for method, more in (("GET", {}), ("GET", {"accept_encoding": coding}), ("HEAD", {})):
            got = ask(client, f"/em/{key}", method, **more)
            assert shown(got)[:3] == (200, b"", None)
            assert got.headers["content-length"] == "0"


@pytest.mark.parametrize(
    ("coding", "accepted", "other", "can_inflate"),
    [
        ("br", "br, gzip", "gzip", True),
        ("compress", "compress", "gzip, br", False),
        ("gzip, br", "br, gzip", "br", False),
        ("br", "br, identity;q=0", "gzip, identity;q=0", False),
    ],
)
def test_coding_is_sent_for_whole_bodies_or_if_it_cannot_be_removed(
    client: httpx.Client, coding: str, accepted: str, other: str, *, can_inflate: bool
) -> None:
    """A HEAD, and a GET with a Range, even one that is ignored, are about the inflated form.

    If that cannot be made, or is not accepted, the coded form is sent whole, or 406 with its name.
    """
    data = encoded("br", PLAIN) if coding == "br" else b"any bytes"
    etag = store(client, "forms", coding, data)
    for method, headers, is_whole in (
        ("GET", {}, True),
        ("GET", {"if_none_match": '"v"', "if_match": "*"}, True),
        ("GET", {"if_range": '"v1"'}, True),
        *(("GET", {"range": asked}, False) for asked in ("bytes=0-", "bytes=0-1,3-4", "lines=1-2")),
        ("HEAD", {}, False),
        ("HEAD", {"range": "bytes=0-"}, False),
    ):
        got = ask(client, "/em/forms", method, accept_encoding=accepted, **headers)
        another = ask(client, "/em/forms", method, accept_encoding=other, **headers)

        if is_whole or not can_inflate:
            assert shown(got) == (200, b"" if method == "HEAD" else data, coding, etag), headers
        else:
            assert shown(got) == shown(another)
        if can_inflate:
            assert another.status in {200, 206}
            assert shown(another)[2:] == (None, f'{etag[:-1]}-identity"')
        else:
            assert (another.status, another.headers["vary"]) == (406, "Accept, Accept-Encoding")
            detail = f"Content-Encoding: {coding}"
            assert method == "HEAD" or detail in json.loads(another.body)["detail"]


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("bad", ["junk", "cut", "bomb"])
def test_body_that_does_not_inflate_is_refused(client: httpx.Client, coding: str, bad: str) -> None:
    """A PUT whose body does not inflate is refused, and nothing is stored."""
    body = {
        "junk": b"what was never compressed",
        "cut": encoded(coding, PLAIN)[:-1],
        "bomb": encoded(coding, bytes(MOST + 1)),
    }[bad]
    answer = client.put("/em/bad", content=body, headers={"content-encoding": coding})

    assert answer.status_code == 400
    assert client.get("/em/bad").status_code == 404


@pytest.mark.parametrize("coding", CODINGS)
def test_metadata_with_a_coding_are_understood(client: httpx.Client, coding: str) -> None:
    """Metadata that are stored with a content coding describe the array below them."""
    for key, data in build_array({"c/0/0": chunk_bytes(1)}).items():
        folder = f"docs/{coding}/array/{key}"
        if key == "zarr.json":
            store(client, folder, coding, encoded(coding, data))
        else:
            client.put(f"/raw/{folder}", content=data)
    group = json.dumps({"zarr_format": 3, "node_type": "group"}).encode()
    etag = store(client, f"docs/{coding}/zarr.json", coding, encoded(coding, group))
    path = f"/em/docs/{coding}"

    assert client.get(f"{path}/array/c/0/0").content == chunk_bytes(1)
    assert "sharding" not in client.get(f"{path}/array/zarr.json").text
    assert shown(ask(client, f"{path}/zarr.json"))[1:3] == (group, None)
    stored = (200, encoded(coding, group), coding, etag)
    assert shown(ask(client, f"{path}/zarr.json", accept_encoding=coding)) == stored
    assert shown(ask(client, f"{path}/zarr.json", **S3)) == stored
    listing = client.get("/em?list-type=2", params={"prefix": f"docs/{coding}/zarr.json"}).text
    assert re.findall(r"<Size>(\d+)", listing) == [str(len(stored[1]))]


def _copy(client: httpx.Client, source: str, key: str, **headers: str) -> None:
    told = {"x-amz-copy-source": f"em/{source}", **S3}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    assert client.put(f"/em/{key}", headers=told).status_code == 200


def _upload_copy(client: httpx.Client, source: str, key: str, coding: str) -> None:
    upload = create(client, f"/em/{key}", {"content-encoding": coding, **S3})
    source_header = {"x-amz-copy-source": f"em/{source}"}
    part = put(client, f"/em/{key}", upload, 1, b"", **source_header)
    etag = re.findall("<ETag>(.*)</ETag>", part.text)[0]
    assert complete(client, f"/em/{key}", upload, (1, etag)).status_code == 200


@pytest.mark.parametrize("coding", CODINGS)
def test_long_document_with_a_coding_is_passed_on(client: httpx.Client, coding: str) -> None:
    """A compressed document whose inflated length exceeds the limit is passed on as an object."""
    names = {"ids": list(map(str, range(1000)))}
    plain = json.dumps({"@type": "neuroglancer_segment_properties", "inline": names}).encode()
    data = encoded(coding, plain)
    store(client, f"long-{coding}/info", coding, data)
    stored = ask(client, f"/em/long-{coding}/info", accept_encoding=coding)

    assert len(plain) > MOST_METADATA > len(data)
    assert (stored.status, stored.body) == (200, data)
    assert ask(client, f"/em/long-{coding}/info", range="bytes=2-9").body == plain[2:10]


@pytest.mark.parametrize("coding", [*CODINGS, "compress"])
def test_copies_keep_the_coding(client: httpx.Client, coding: str) -> None:
    """CopyObject, with either directive, and UploadPartCopy copy the stored bytes."""
    data = encoded(coding, PLAIN) if coding in CODINGS else b"any bytes"
    etag = store(client, f"from/{coding}", coding, data)
    replacing: dict[str, Any] = {"x_amz_metadata_directive": "REPLACE", "x_amz_meta_a": "b"}
    _copy(client, f"from/{coding}", f"to/{coding}")
    _copy(client, f"from/{coding}", f"replaced/{coding}", **replacing)
    _upload_copy(client, f"from/{coding}", f"parts/{coding}", coding)

    for folder in ("to", "replaced", "parts"):
        got = ask(client, f"/em/{folder}/{coding}", **S3)
        assert shown(got) == (200, data, coding, etag)


def test_copy_may_replace_the_coding(client: httpx.Client) -> None:
    """A copy onto itself with REPLACE gives an object the coding that it names."""
    data = encoded("br", PLAIN)
    assert client.put("/em/unnamed", content=data).status_code == 200
    replacing = {"x_amz_metadata_directive": "REPLACE", "content_encoding": "br"}
    _copy(client, "unnamed", "unnamed", **replacing)

    assert client.get("/em/unnamed", headers={"accept-encoding": "identity"}).content == PLAIN
