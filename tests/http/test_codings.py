"""Objects with a content coding: stored bytes for clients that accept it, else inflated ones."""

import hashlib
import json
import re
from collections.abc import Generator
from typing import Any, Final

import httpx
import pytest

from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.formats.zarr.building import build, chunk_bytes
from tests.http.test_gzip import Got, ask
from tests.support.http.s3.uploads import complete, create, put
from tests.support.serving import client_of
from tests.support.zipped import ENCODERS, encoded

PLAIN: Final = b"chunk of a volume " * 500
MOST: Final = 2**16
MOST_METADATA: Final = 2**12
S3: Final = {"authorization": "AWS4-HMAC-SHA256 any"}
CODINGS: Final = list(ENCODERS)


@pytest.fixture(scope="module")
def client() -> Generator[httpx.Client]:
    """Serve one bucket with a raw view and as arrays."""
    root = "memory://codings"
    datasets = {
        "raw": DatasetSettings(url=root, view="raw", writable=True),
        "em": DatasetSettings(url=root, writable=True),
    }
    limits = LimitSettings(decoded_bytes=MOST, metadata_bytes=MOST_METADATA)
    with client_of(Settings(datasets=datasets, limits=limits)) as opened:
        yield opened


def store(client: httpx.Client, key: str, coding: str, data: bytes) -> str:
    """Store *data* with a coding, and return the ETag in quotes that S3 gives it."""
    headers = {"content-encoding": coding}
    assert client.put(f"/raw/{key}", content=data, headers=headers).status_code == 200
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def shown(got: Got) -> tuple[int, bytes, str | None, str | None]:
    """Return what identifies a form: status, body, coding, ETag."""
    return got.status, got.body, got.headers.get("content-encoding"), got.headers.get("etag")


@pytest.mark.parametrize("coding", CODINGS)
def test_stored_bytes_are_sent_to_clients_that_accept_the_coding(
    client: httpx.Client, coding: str
) -> None:
    """A GET that accepts the coding gets the stored bytes, and any other the inflated ones."""
    data = encoded(coding, PLAIN)
    etag = store(client, coding, coding, data)
    inflated = f'{etag[:-1]}-identity"'
    path, accepting = f"/em/{coding}", {"accept_encoding": f"identity;q=0.5, {coding}"}
    stored, other = ask(client, path, **accepting), ask(client, path, accept_encoding="identity")
    head, part = ask(client, path, "HEAD", **accepting), ask(client, path, range="bytes=2-9")

    assert shown(stored) == (200, data, coding, etag)
    assert shown(other) == (200, PLAIN, None, inflated)
    assert shown(head) == (200, b"", None, inflated)
    assert shown(part) == (206, PLAIN[2:10], None, inflated)
    assert head.headers["content-length"] == str(len(PLAIN))
    assert part.headers["content-range"] == f"bytes 2-9/{len(PLAIN)}"
    assert {each.headers["vary"] for each in (stored, other, head, part)} == {"Accept-Encoding"}
    assert ask(client, path, if_none_match=etag, **accepting).status == 304
    assert ask(client, path, if_none_match=inflated).status == 304
    assert ask(client, path, if_none_match=etag).status == 200


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
            assert (another.status, another.headers["vary"]) == (406, "Accept-Encoding")
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
    for key, data in build({"c/0/0": chunk_bytes(1)}).items():
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
