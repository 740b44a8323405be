"""Clients of S3 write through the service, as into a bucket of their own."""

import io
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import obstore
import pytest
import s3fs
import zarr
from botocore import UNSIGNED
from botocore.exceptions import ClientError
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store
from zarr.storage import ObjectStore

from app.settings import DatasetSettings, Settings
from tests.clients.filling import open_boto3, open_obstore
from tests.serving import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store an array of two shards without any chunk."""
    folder = tmp_path_factory.mktemp("bucket")
    zarr.create_array(folder / "array", shape=(8, 8), shards=(8, 4), chunks=(2, 2), dtype="u2")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Generator[str]:
    """Serve it."""
    datasets = {
        "bucket": DatasetSettings(url=folder.as_uri(), writable=True),
        "fixed": DatasetSettings(url=folder.as_uri()),
    }
    with serving(Settings(datasets=datasets)) as served:
        yield served


@pytest.fixture(scope="module")
def s3(url: str) -> Any:
    """Open boto3's client."""
    return open_boto3(url)


@pytest.fixture(scope="module")
def store(url: str) -> S3Store:
    """Open obstore's."""
    return open_obstore(url, "bucket")


def read(s3: Any, key: str) -> bytes | None:
    """Read what is there now."""
    try:
        body: bytes = s3.get_object(Bucket="bucket", Key=key)["Body"].read()
    except s3.exceptions.NoSuchKey:
        return None
    return body


@pytest.mark.parametrize("body", [b"abc", io.BytesIO(b"abc")])
@pytest.mark.parametrize("algorithm", ["CRC32", "SHA1", "SHA256"])
def test_boto3_puts_and_deletes(s3: Any, body: Any, algorithm: str) -> None:
    """With its checksums, from memory or from a stream."""
    put = s3.put_object(Bucket="bucket", Key="a b/c+d", Body=body, ChecksumAlgorithm=algorithm)

    assert s3.head_object(Bucket="bucket", Key="a b/c+d")["ETag"] == put["ETag"]
    assert read(s3, "a b/c+d") == b"abc"
    s3.delete_object(Bucket="bucket", Key="a b/c+d")
    assert read(s3, "a b/c+d") is None
    if not isinstance(body, bytes):
        body.seek(0)


def test_boto3_without_a_signature_reads_errors(url: str) -> None:
    """What it sends tells that it speaks S3."""
    with pytest.raises(ClientError) as caught:
        open_boto3(url, signature_version=UNSIGNED).get_object(Bucket="nothing", Key="a")

    assert caught.value.response["Error"]["Code"] == "NoSuchBucket"


def test_boto3_deletes_many(s3: Any) -> None:
    """What is there, what is not, what is a folder; quietly or not."""
    for key in ("many/1", "many/2", "many/3"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"x")
    keys = [{"Key": key} for key in ("many/1", "many/none", "many/")]
    told = s3.delete_objects(Bucket="bucket", Delete={"Objects": keys})
    quiet = s3.delete_objects(
        Bucket="bucket",
        Delete={
            "Objects": [{"Key": "many/2"}, {"Key": "many/3", "ETag": '"x"'}],
            "Quiet": True,
        },
    )

    assert told["Deleted"] == keys
    assert "Errors" not in told
    assert "Deleted" not in quiet
    assert [(e["Key"], e["Code"]) for e in quiet["Errors"]] == [("many/3", "PreconditionFailed")]
    assert [read(s3, f"many/{name}") for name in (1, 2, 3)] == [None, None, b"x"]


def test_boto3_looks_at_buckets(s3: Any) -> None:
    """They are there, in no region of note, without versions."""
    listed = [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]

    assert listed == ["bucket", "fixed"]
    assert s3.head_bucket(Bucket="bucket")["BucketRegion"] == "us-east-1"
    assert s3.get_bucket_location(Bucket="bucket")["LocationConstraint"] is None
    assert "Status" not in s3.get_bucket_versioning(Bucket="bucket")


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        (lambda s3: s3.get_object(Bucket="bucket", Key="none"), 404, "NoSuchKey"),
        (lambda s3: s3.put_object(Bucket="none", Key="a", Body=b""), 404, "NoSuchBucket"),
        (lambda s3: s3.put_object(Bucket="fixed", Key="a", Body=b""), 405, "MethodNotAllowed"),
        (
            lambda s3: s3.put_object(Bucket="bucket", Key="a", Body=b"", IfMatch='"x"'),
            412,
            "PreconditionFailed",
        ),
        (
            lambda s3: s3.put_object(Bucket="bucket", Key="a", Body=b"a", ContentMD5="x"),
            400,
            "BadDigest",
        ),
        (
            lambda s3: s3.put_object(Bucket="bucket", Key="a", Body=b"a", ChecksumCRC32="AAAAAA=="),
            400,
            "BadDigest",
        ),
        (
            lambda s3: s3.put_object(Bucket="bucket", Key="a", Body=bytes(65 * 1024**2)),
            413,
            "EntityTooLarge",
        ),
        (lambda s3: s3.get_object_acl(Bucket="bucket", Key="a"), 501, "NotImplemented"),
        (
            lambda s3: s3.list_parts(Bucket="bucket", Key="a", UploadId="u"),
            501,
            "NotImplemented",
        ),
        (lambda s3: s3.create_bucket(Bucket="bucket"), 409, "BucketAlreadyOwnedByYou"),
        (
            lambda s3: s3.get_object(Bucket="bucket", Key="array/zarr.json", Range="bytes=99999-"),
            416,
            "InvalidRange",
        ),
    ],
)
def test_boto3_is_told_what_went_wrong(
    s3: Any, call: Callable[[Any], Any], status: int, code: str
) -> None:
    """In codes that it knows."""
    with pytest.raises(ClientError) as caught:
        call(s3)
    response = caught.value.response

    assert response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert response["Error"]["Code"] == code
    assert read(s3, "a") is None


def test_a_signed_url_is_answered_as_s3(s3: Any) -> None:
    """Though nothing but the query says so."""
    url = s3.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "none"})
    answer = httpx.get(url)

    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/xml")
    put = s3.generate_presigned_url("put_object", {"Bucket": "bucket", "Key": "signed"})
    assert httpx.put(put, content=b"abc").status_code == 200
    assert read(s3, "signed") == b"abc"


def test_s3fs_creates_what_is_not_there(url: str) -> None:
    """It raises FileExistsError where the answer names the condition, and else OSError."""
    files = s3fs.S3FileSystem(key="any", secret="any", endpoint_url=url)
    files.pipe("bucket/created", b"1", mode="create")

    with pytest.raises(FileExistsError):
        files.pipe("bucket/created", b"2", mode="create")
    assert files.cat("bucket/created") == b"1"


def test_boto3_finds_no_tags(s3: Any) -> None:
    """The AWS CLI asks for tags before it copies what is large."""
    s3.put_object(Bucket="bucket", Key="untagged", Body=b"1")

    assert s3.get_object_tagging(Bucket="bucket", Key="untagged")["TagSet"] == []
    with pytest.raises(ClientError) as caught:
        s3.get_object_tagging(Bucket="bucket", Key="none")
    assert caught.value.response["Error"]["Code"] == "NoSuchKey"


def test_obstore_puts_and_deletes(store: S3Store) -> None:
    """With conditions, one by one and many at once."""
    etag = obstore.put(store, "o/a", b"1", mode="create")["e_tag"]
    assert etag is not None
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "o/a", b"2", mode="create")
    obstore.put(store, "o/a", b"3", mode={"e_tag": etag})
    with pytest.raises(PreconditionError):
        obstore.put(store, "o/a", b"4", mode={"e_tag": etag})
    obstore.put(store, "o/b", b"5")

    assert bytes(obstore.get(store, "o/a").bytes()) == b"3"
    obstore.delete(store, ["o/a", "o/b", "o/none"])
    for key in ("o/a", "o/b"):
        with pytest.raises(FileNotFoundError):
            obstore.head(store, key)


def test_zarr_python_writes_through_obstore(store: S3Store, folder: Path) -> None:
    """It sees no shards; who opens what is stored does, and finds what was written."""
    array = zarr.open_array(ObjectStore(store), path="array", mode="r+")
    values = np.arange(64, dtype="u2").reshape(8, 8)
    array[:6] = values[:6]
    stored = zarr.open_array(folder / "array", mode="r")

    assert (array.chunks, array.shards, stored.shards) == ((2, 2), None, (8, 4))
    assert np.array_equal(np.asarray(stored[:6]), values[:6])
    assert not np.asarray(stored[6:]).any()
    assert sorted(path.name for path in (folder / "array/c/0").iterdir()) == ["0", "1"]
