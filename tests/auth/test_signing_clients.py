"""Requests that real S3 clients sign, for a key with special characters."""

import io
import random
import subprocess
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import obstore
import pytest
import tensorstore as ts
from botocore.exceptions import ClientError
from obstore.store import S3Store

from tests.support.auth.people import KEY_ID, SECRET, Served, signing_service
from tests.support.clients import filling
from tests.support.lacking import need
from tests.support.processes import environ

KEY: Final = "a b/c  d/\u00fc\u65e5+/x=1/y&z;w/(z)!~*'$,:@/a%2Fb/%20"
DATA: Final = bytes(range(256)) * 3
PART: Final = 5 * 1024**2
LARGE: Final = random.Random(7).randbytes(PART + 70_000)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """Serve an empty folder."""
    with signing_service(tmp_path_factory.mktemp("data")) as served:
        yield served


@pytest.fixture
def url(served: Served) -> str:
    """Return the URL of the service."""
    return served.url


def open_boto3(url: str, signature_version: str = "s3v4", **options: Any) -> Any:
    """Open boto3's client."""
    options["signature_version"] = signature_version
    return filling.open_boto3(url, KEY_ID, SECRET, **options)


def open_obstore(url: str) -> S3Store:
    """Open obstore's client."""
    return filling.open_obstore(url, "lab", key_id=KEY_ID, key=SECRET)


def open_minio(url: str) -> Any:
    """Open MinIO's client."""
    from minio import Minio  # noqa: PLC0415 - slow to import

    return Minio(urlsplit(url).netloc, KEY_ID, SECRET, secure=False, region="us-east-1")


def test_boto3_requests_are_accepted(url: str) -> None:
    """boto3 writes, reads, lists, copies and deletes keys with special characters."""
    client, name = open_boto3(url), f"boto3/{KEY}"

    etag = client.put_object(Bucket="lab", Key=name, Body=DATA, Metadata={"mtime": "b  c"})["ETag"]
    read = client.get_object(Bucket="lab", Key=name, Range="bytes=3-9", IfMatch=etag)
    assert read["Body"].read() == DATA[3:10]
    client.copy_object(Bucket="lab", Key=f"{name}.copy", CopySource={"Bucket": "lab", "Key": name})
    listed = client.list_objects_v2(Bucket="lab", Prefix=name, Delimiter="", StartAfter=name)
    assert [each["Key"] for each in listed["Contents"]] == [f"{name}.copy"]
    objects = [{"Key": each} for each in (name, f"{name}.copy")]
    client.delete_objects(Bucket="lab", Delete={"Objects": objects})
    assert client.list_objects_v2(Bucket="lab", Prefix=name)["KeyCount"] == 0


def test_presigned_url_of_boto3_is_accepted(url: str) -> None:
    """A URL that boto3 presigns is accepted for its method and key only, and 403 if changed."""
    client = open_boto3(url)
    asked = {"Bucket": "lab", "Key": f"presigned/{KEY}"}

    put = client.generate_presigned_url("put_object", Params=asked)
    assert httpx.put(put, content=DATA).status_code == 200
    get = client.generate_presigned_url("get_object", Params=asked, ExpiresIn=60)
    assert httpx.get(get).content == DATA
    assert httpx.get(get, headers={"range": "bytes=1-2"}).content == DATA[1:3]
    assert "%40/a%252Fb/%2520?" in get
    assert httpx.get(get.replace("%40", "@")).status_code == 403
    assert httpx.delete(get).status_code == 403
    assert httpx.get(get.replace("Expires=60", "Expires=61")).status_code == 403


def test_signature_version_2_is_refused(url: str) -> None:
    """A request with signature version 2 fails, with an error that names AWS4-HMAC-SHA256."""
    with pytest.raises(ClientError, match="AWS4-HMAC-SHA256"):
        open_boto3(url, signature_version="s3").get_object(Bucket="lab", Key="a")


def test_unsigned_stream_of_boto3_is_accepted(url: str) -> None:
    """boto3 streams a body whose payload it does not sign."""
    client = open_boto3(url, s3={"payload_signing_enabled": False})
    client.put_object(Bucket="lab", Key="unsigned", Body=io.BytesIO(DATA))

    assert client.get_object(Bucket="lab", Key="unsigned")["Body"].read() == DATA


def test_stream_of_minio_without_a_length_is_accepted(url: str) -> None:
    """MinIO's client uploads a stream of unknown length in signed parts."""
    client = open_minio(url)
    client.put_object("lab", "large", io.BytesIO(LARGE), -1, part_size=PART)

    with client.get_object("lab", "large") as read:
        assert read.read() == LARGE


def test_obstore_requests_are_accepted(url: str) -> None:
    """`obstore` writes, reads, lists, copies, presigns and deletes keys with special characters."""
    store, name = open_obstore(url), f"obstore/{KEY}/x"

    obstore.put(store, name, DATA, attributes={"Content-Type": "a/b"})
    assert obstore.get_range(store, name, start=2, end=7).to_bytes() == DATA[2:7]
    found = obstore.list(store, prefix=f"obstore/{KEY}").collect()
    assert [each["path"] for each in found] == [name]
    assert httpx.get(obstore.sign(store, "GET", name, timedelta(minutes=1))).content == DATA
    obstore.copy(store, name, f"{name}.copy")
    obstore.delete(store, [name, f"{name}.copy"])
    assert obstore.list(store, prefix=f"obstore/{KEY}").collect() == []


def test_tensorstore_requests_are_accepted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore's s3 driver writes, reads, lists and deletes keys with special characters."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    spec = {"driver": "s3", "bucket": "lab", "endpoint": url, "aws_region": "us-east-1"}
    credentials = {"aws_credentials": {"type": "environment"}}
    store = ts.KvStore.open(spec | credentials | {"path": f"tensorstore/{KEY}/"}).result()

    store.write(b"x y", DATA).result()
    assert store.read(b"x y").result().value == DATA
    assert store.list().result() == [b"x y"]
    store.write(b"x y", None).result()
    assert store.list().result() == []


def test_minio_requests_are_accepted(url: str) -> None:
    """MinIO's client writes, reads, lists, presigns and deletes keys with special characters."""
    client, name = open_minio(url), f"minio/{KEY}"

    client.put_object("lab", name, io.BytesIO(DATA), len(DATA), metadata={"mtime": "b"})
    with client.get_object("lab", name, offset=2, length=5) as read:
        assert read.data == DATA[2:7]
    listed = client.list_objects("lab", prefix=name, recursive=True)
    assert [each.object_name for each in listed] == [name]
    assert httpx.get(client.presigned_get_object("lab", name)).content == DATA
    client.remove_object("lab", name)


def test_curl_requests_are_accepted(url: str) -> None:
    """`curl --aws-sigv4` writes and reads a key with special characters."""
    signing = ["--aws-sigv4", "aws:amz:us-east-1:s3", "-u", f"{KEY_ID}:{SECRET}"]
    unsigned = ["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
    command = [need("curl"), "-sS", "--fail-with-body", *signing, *unsigned]
    target = f"{url}/lab/@branch.a%2Fb/(c)%20d"

    subprocess.run([*command, "--data-binary", "@-", "-X", "PUT", target], input=DATA, check=True)
    read = subprocess.run([*command, f"{target}"], capture_output=True, check=True)
    assert read.stdout == DATA


def test_restic_backup_is_restored(served: Served, tmp_path: Path) -> None:
    """restic, which signs each frame of a body, backs up and restores a file."""
    (tmp_path / "data").write_bytes(LARGE)
    settings = environ(
        AWS_ACCESS_KEY_ID=KEY_ID,
        AWS_SECRET_ACCESS_KEY=SECRET,
        NO_PROXY="*",
        RESTIC_REPOSITORY=f"s3:{served.url}/lab/backup",
        RESTIC_PASSWORD="any",
        RESTIC_CACHE_DIR=str(tmp_path / "cache"),
    )
    command = [need("restic"), "-q"]
    served.payloads.clear()
    for words in ("init", "backup data", "restore latest --target restored"):
        whole = [*command, *words.split()]
        subprocess.run(whole, env=settings, cwd=tmp_path, check=True, timeout=60)

    assert b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD" in served.payloads
    restored = list((tmp_path / "restored").rglob("data"))
    assert [file.read_bytes() for file in restored] == [LARGE]
