"""Objects that were uploaded with ``Content-Encoding: gzip``, as cloud-volume does."""

import gzip
import json
from collections.abc import Generator

import httpx
import pytest

from app.settings import DatasetSettings, Settings
from tests.seaweedfs import SeaweedFS
from tests.serving import serving
from tests.zipped import zipped

CHUNK = b"chunk of a volume " * 500
INFO = {"@type": "neuroglancer_multiscale_volume", "scales": []}
KEY = "/v/8_8_8/0-64_0-64_0-64"


@pytest.fixture(scope="module")
def client(seaweedfs: SeaweedFS) -> Generator[httpx.Client]:
    """Serve a volume whose ``info`` and only chunk are stored as gzip."""
    objects = {"info": json.dumps(INFO).encode(), "8_8_8/0-64_0-64_0-64": CHUNK}
    for key, data in objects.items():
        seaweedfs.client.put_object(
            Bucket=seaweedfs.bucket,
            Key=f"uploaded-gzip/{key}",
            Body=zipped(data),
            ContentEncoding="gzip",
        )
    dataset = DatasetSettings(url=f"s3://{seaweedfs.bucket}/uploaded-gzip", store="lab")
    settings = Settings(stores={"lab": seaweedfs.settings}, datasets={"v": dataset})
    with serving(settings) as url, httpx.Client(base_url=url) as opened:
        opened.headers.clear()
        yield opened


def raw(client: httpx.Client, **headers: str) -> httpx.Response:
    """Get the chunk, and do not decode it."""
    with client.stream("GET", KEY, headers=headers) as answer:
        answer.extensions["raw"] = b"".join(answer.iter_raw())
    return answer


def test_a_client_that_accepts_gzip_gets_what_is_stored(client: httpx.Client) -> None:
    """The bytes go out as they were uploaded, and say what they are."""
    answer = raw(client, **{"accept-encoding": "gzip"})

    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(answer.extensions["raw"]) == CHUNK
    assert int(answer.headers["content-length"]) == len(answer.extensions["raw"]) < len(CHUNK)


@pytest.mark.parametrize("coding", ["", "br", "gzip;q=0"])
def test_another_client_gets_what_that_holds(client: httpx.Client, coding: str) -> None:
    """A client that does not ask for gzip could not read it."""
    answer = raw(client, **{"accept-encoding": coding})

    assert (answer.extensions["raw"], answer.headers["vary"]) == (CHUNK, "Accept-Encoding")
    assert "content-encoding" not in answer.headers


def test_a_range_is_one_of_what_that_holds(client: httpx.Client) -> None:
    """Offsets count in the chunk, not in its gzip."""
    answer = raw(client, **{"accept-encoding": "gzip", "range": "bytes=100-199"})

    assert (answer.status_code, answer.extensions["raw"]) == (206, CHUNK[100:200])
    assert answer.headers["content-range"] == f"bytes 100-199/{len(CHUNK)}"


def test_metadata_are_understood(client: httpx.Client) -> None:
    """An ``info`` that was uploaded so marks a volume, and is served as it reads."""
    assert client.get("/v/info").json() == INFO
