"""Clients of S3 write, copy, delete and describe objects."""

import gzip
import hashlib
import io
import os
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import obstore
import pytest
import s3fs
import zarr
from botocore import UNSIGNED
from botocore.exceptions import ClientError
from obstore.exceptions import AlreadyExistsError, PreconditionError

from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.support.clients.filling import (
    open_boto3,
    open_obstore,
    over_obstore,
    read_object,
    s3fs_options,
)
from tests.support.deferred import Deferred
from tests.support.seaweedfs import SeaweedFS
from tests.support.serving import serving

cloudfiles: Any = Deferred("cloudfiles")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store empty arrays of two shards and of one."""
    folder = tmp_path_factory.mktemp("bucket")
    zarr.create_array(folder / "array", shape=(8, 8), shards=(8, 4), chunks=(2, 2), dtype="u2")
    zarr.create_array(folder / "line", shape=(4,), shards=(4,), chunks=(2,), dtype="u1")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path, seaweedfs: SeaweedFS) -> Generator[str]:
    """Serve the arrays from the folder and from S3, and an empty memory store."""
    seaweedfs.upload_folder(folder, "writing")
    datasets = {
        "bucket": DatasetSettings(url=folder.as_uri(), writable=True),
        "fixed": DatasetSettings(url=folder.as_uri()),
        "memory": DatasetSettings(url="memory://writing", writable=True),
        "s3": DatasetSettings(url=f"s3://{seaweedfs.bucket}/writing", store="lab", writable=True),
    }
    stores = {"lab": seaweedfs.settings}
    with serving(Settings(datasets=datasets, stores=stores)) as served:
        yield served


@pytest.fixture(scope="module")
def s3(url: str) -> Any:
    """Open boto3's client."""
    return open_boto3(url)


@pytest.mark.parametrize(
    ("body", "algorithm"),
    [(b"abc", "CRC32"), (io.BytesIO(b"abc"), "SHA1"), (b"abc", "SHA256")],
    ids=["CRC32", "stream-SHA1", "SHA256"],
)
def test_boto3_puts_and_deletes(s3: Any, body: Any, algorithm: str) -> None:
    """boto3 puts, reads and deletes an object with each checksum, from bytes or a stream."""
    put = s3.put_object(Bucket="bucket", Key="a b/c+d", Body=body, ChecksumAlgorithm=algorithm)

    assert s3.head_object(Bucket="bucket", Key="a b/c+d")["ETag"] == put["ETag"]
    assert read_object(s3, "a b/c+d", "bucket") == b"abc"
    s3.delete_object(Bucket="bucket", Key="a b/c+d")
    assert read_object(s3, "a b/c+d", "bucket") is None


def test_unsigned_boto3_request_gets_an_s3_error(url: str) -> None:
    """An unsigned request of boto3 for an unknown bucket gets NoSuchBucket."""
    with pytest.raises(ClientError, match=r"\(NoSuchBucket\)"):
        open_boto3(url, signature_version=UNSIGNED).get_object(Bucket="nothing", Key="a")


def test_boto3_deletes_many_objects(s3: Any) -> None:
    """DeleteObjects deletes existing keys, and ignores absent ones.

    Keys that no object can have, and failed conditions, are reported.
    """
    for key in ("many/1", "many/2", "many/3"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"x")
    keys = [{"Key": key} for key in ("many/1", "many/none", "many/", "a//b", "../a")]
    told = s3.delete_objects(Bucket="bucket", Delete={"Objects": keys})
    others = [{"Key": "many/2"}, {"Key": "many/3", "ETag": '"x"'}]
    quiet = s3.delete_objects(Bucket="bucket", Delete={"Objects": others, "Quiet": True})

    assert told["Deleted"] == keys[:3]
    assert [(each["Key"], each["Code"]) for each in told["Errors"]] == [
        ("a//b", "InvalidRequest"),
        ("../a", "InvalidRequest"),
    ]
    assert "Deleted" not in quiet
    assert [(e["Key"], e["Code"]) for e in quiet["Errors"]] == [("many/3", "PreconditionFailed")]
    assert [read_object(s3, f"many/{name}", "bucket") for name in (1, 2, 3)] == [None, None, b"x"]


def test_boto3_reads_buckets_and_tags(s3: Any) -> None:
    """boto3 lists buckets, their region and versioning, and the empty tags of an object."""
    s3.put_object(Bucket="bucket", Key="untagged", Body=b"1")
    listed = [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]

    assert listed == ["bucket", "fixed", "memory", "s3"]
    assert s3.head_bucket(Bucket="bucket")["BucketRegion"] == "us-east-1"
    assert s3.get_bucket_location(Bucket="bucket")["LocationConstraint"] is None
    assert "Status" not in s3.get_bucket_versioning(Bucket="bucket")
    assert s3.get_object_tagging(Bucket="bucket", Key="untagged")["TagSet"] == []


_A: Final = {"Bucket": "bucket", "Key": "a"}


@pytest.mark.parametrize(
    ("operation", "parameters", "status", "code"),
    [
        ("get_object", {"Key": "none"}, 404, "NoSuchKey"),
        ("put_object", {"Bucket": "none", "Body": b""}, 404, "NoSuchBucket"),
        ("put_object", {"Bucket": "fixed", "Body": b""}, 405, "MethodNotAllowed"),
        ("put_object", {"Body": b"", "IfMatch": '"x"'}, 412, "PreconditionFailed"),
        ("put_object", {"Body": b"a", "ContentMD5": "x"}, 400, "BadDigest"),
        ("put_object", {"Body": b"a", "ChecksumCRC32": "AAAAAA=="}, 400, "BadDigest"),
        ("put_object", {"Body": bytes(65 * 1024**2)}, 413, "EntityTooLarge"),
        ("get_object_tagging", {"Key": "none"}, 404, "NoSuchKey"),
        ("get_object_acl", {}, 501, "NotImplemented"),
        ("list_parts", {"UploadId": "u"}, 501, "NotImplemented"),
        ("create_bucket", {"Key": None}, 409, "BucketAlreadyOwnedByYou"),
        ("get_object", {"Key": "line/zarr.json", "Range": "bytes=99999-"}, 416, "InvalidRange"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_boto3_gets_the_s3_error_code(
    s3: Any, operation: str, parameters: dict[str, Any], status: int, code: str
) -> None:
    """A failed request of boto3 gets its status and S3 error code, and writes nothing."""
    with pytest.raises(ClientError) as caught:
        getattr(s3, operation)(**{k: v for k, v in (_A | parameters).items() if v is not None})
    response = caught.value.response

    assert response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert response["Error"]["Code"] == code
    assert read_object(s3, "a", "bucket") is None


def test_presigned_url_is_answered_as_s3(s3: Any) -> None:
    """A presigned URL gets S3's XML errors for GET, and writes by PUT."""
    url = s3.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "none"})
    answer = httpx.get(url)

    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/xml")
    put = s3.generate_presigned_url("put_object", {"Bucket": "bucket", "Key": "signed"})
    assert httpx.put(put, content=b"abc").status_code == 200
    assert read_object(s3, "signed", "bucket") == b"abc"


def test_s3fs_creates_an_object_exclusively(url: str) -> None:
    """s3fs creates an absent object; a second creation raises FileExistsError."""
    files = s3fs.S3FileSystem(**s3fs_options(url), skip_instance_cache=True)
    files.pipe("bucket/created", b"1", mode="create")

    with pytest.raises(FileExistsError):
        files.pipe("bucket/created", b"2", mode="create")
    assert files.cat("bucket/created") == b"1"


def test_obstore_puts_and_deletes(url: str) -> None:
    """Obstore puts objects with and without conditions, and deletes many at once."""
    store = open_obstore(url, "bucket")
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


_TYPE: Final = "text/plain; charset=utf-8"
_METADATA: Final = {"mtime": "1700000000.5", "who": "a b"}


def _told(s3: Any, bucket: str, key: str) -> tuple[str, dict[str, str]]:
    """Return content type and metadata, and assert that GET and HEAD agree."""
    head = s3.head_object(Bucket=bucket, Key=key)
    found = s3.get_object(Bucket=bucket, Key=key)
    assert (found["ContentType"], found["Metadata"]) == (head["ContentType"], head["Metadata"])
    return head["ContentType"], head["Metadata"]


@pytest.mark.parametrize("bucket", ["s3", "memory"])
def test_content_type_and_metadata_of_a_put_are_kept(s3: Any, bucket: str) -> None:
    """An object has the content type and metadata of its last write, in one piece or in parts."""
    headers = {"Bucket": bucket, "Key": "a", "ContentType": _TYPE, "Metadata": _METADATA}
    s3.put_object(**headers, Body=b"1")
    assert _told(s3, bucket, "a") == (_TYPE, _METADATA)

    s3.put_object(Bucket=bucket, Key="a", Body=b"2")
    assert _told(s3, bucket, "a") == ("application/octet-stream", {})

    upload = s3.create_multipart_upload(**headers)["UploadId"]
    part = {"Bucket": bucket, "Key": "a", "UploadId": upload}
    etag = s3.upload_part(**part, PartNumber=1, Body=b"3")["ETag"]
    s3.complete_multipart_upload(
        **part, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]}
    )
    assert _told(s3, bucket, "a") == (_TYPE, _METADATA)


def test_copy_keeps_or_replaces_metadata(s3: Any, url: str, seaweedfs: SeaweedFS) -> None:
    """A copy keeps the source's metadata, or has that of the request with REPLACE."""
    s3.put_object(Bucket="s3", Key="b.json", Body=b"1", ContentType=_TYPE, Metadata=_METADATA)
    copy = {"Bucket": "s3", "Key": "c.json", "CopySource": "s3/b.json"}
    s3.copy_object(**copy)
    assert _told(s3, "s3", "c.json") == (_TYPE, _METADATA)
    stored = seaweedfs.client.head_object(Bucket=seaweedfs.bucket, Key="writing/c.json")
    assert stored["Metadata"].keys() == {*_METADATA, "shardgate-writes"}

    s3.copy_object(**copy, MetadataDirective="REPLACE", Metadata={"x": "y"})
    assert _told(s3, "s3", "c.json") == ("application/json", {"x": "y"})
    assert "x-amz-meta-x" not in httpx.get(f"{url}/s3/line/zarr.json").headers


@pytest.mark.parametrize(
    ("bucket", "key"), [("bucket", "a"), ("bucket", "line/c/0"), ("s3", "line/c/0")]
)
def test_metadata_that_cannot_be_kept_is_refused(s3: Any, bucket: str, key: str) -> None:
    """User metadata that cannot be stored fails with NotImplemented.

    Content types, and metadata that tools add to every upload, are dropped. Reserved names and too
    much metadata fail with InvalidArgument.
    """
    put = {"Bucket": bucket, "Key": key, "ContentType": _TYPE}
    s3.put_object(**put, Body=b"ab", Metadata={"mtime": "1"})
    assert _told(s3, bucket, key) == ("application/octet-stream", {})

    for begin in (s3.put_object, s3.create_multipart_upload):
        with pytest.raises(ClientError, match=r"NotImplemented.*x-amz-meta-who cannot be kept"):
            begin(**put, Metadata=_METADATA)
    for metadata in ({"shardgate-writes": "0123456789abcdef"}, {"a": "b" * 1800}):
        with pytest.raises(ClientError, match=r"InvalidArgument.*user metadata is ASCII"):
            s3.put_object(Bucket="s3", Key="d", Body=b"", Metadata=metadata)


_LIMIT: Final = 64 * 1024


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store sharded arrays, two of them filled, and objects."""
    folder = tmp_path_factory.mktemp("copied")
    for name in ("array", "other", "timed"):
        zarr.create_array(folder / name, shape=(8,), shards=(8,), chunks=(2,), dtype="u1")
    for name in ("array", "timed"):
        zarr.open_array(folder / name)[:] = np.arange(1, 9)
    for name in ("small", "moved"):
        (folder / name).write_bytes(b"abc")
    (folder / "large").write_bytes(bytes(_LIMIT + 1))
    return folder


@pytest.fixture(scope="module")
def copying(copied: Path) -> Generator[str]:
    """Serve the folder writable, and one of its arrays as a read-only dataset."""
    datasets = {
        "data": DatasetSettings(url=str(copied), writable=True),
        "fixed": DatasetSettings(url=str(copied / "array")),
        "memory": DatasetSettings(url="memory://copying", writable=True),
    }
    limits = LimitSettings(max_chunk_bytes=_LIMIT)
    with serving(Settings(datasets=datasets, limits=limits)) as served:
        yield served


@pytest.fixture(scope="module")
def copier(copying: str) -> Any:
    """Open boto3's client."""
    return open_boto3(copying)


def test_boto3_copies_an_object(copier: Any, copied: Path) -> None:
    """boto3 copies an object conditionally; the result's ETag is that of the copy."""
    etag = copier.head_object(Bucket="data", Key="small")["ETag"]
    for condition in (etag, etag.strip('"')):
        target = {"Bucket": "data", "Key": f"a b/{len(condition)}"}
        made = copier.copy_object(**target, CopySource="data/small", CopySourceIfMatch=condition)
        told = made["CopyObjectResult"]

        assert (copied / target["Key"]).read_bytes() == b"abc"
        assert told["ETag"] == copier.head_object(**target)["ETag"]
        assert abs(told["LastModified"].timestamp() - time.time()) < 60


def test_inner_chunks_are_copied(copier: Any, copied: Path) -> None:
    """Inner chunks are copied into shards of another array, also from another dataset."""
    for source, key in (("data/array/c/3", "other/c/0"), ("/fixed/c/0", "other/c/3")):
        copier.copy_object(Bucket="data", Key=key, CopySource=source)

    found = np.asarray(zarr.open_array(copied / "other", mode="r")[:])
    np.testing.assert_array_equal(found, [7, 8, 0, 0, 0, 0, 1, 2])


def test_obstore_and_s3fs_move_objects(copying: str, copied: Path) -> None:
    """Obstore and s3fs move an object, and the source is gone."""
    store = over_obstore(copying, "").store
    obstore.rename(store, "moved", "moved once")
    files = s3fs.S3FileSystem(**s3fs_options(copying), skip_instance_cache=True)
    files.mv("data/moved once", "data/moved twice")

    assert (copied / "moved twice").read_bytes() == b"abc"
    assert not (copied / "moved").exists()
    assert not (copied / "moved once").exists()


def test_upload_part_copy_copies_the_source_or_its_range(copier: Any) -> None:
    """UploadPartCopy copies the source's bytes, or a range of them, with their MD5 as ETag.

    Those of an object that is stored as gzip are its stored bytes.
    """
    whole = {"CopySourceRange": "bytes=0-65535"}
    data = gzip.compress(b"abc")
    copier.put_object(Bucket="memory", Key="a", Body=data, ContentEncoding="gzip")
    for source in ("data/small", "data/large", "data/array/c/1", "fixed/c/3", "memory/a"):
        bucket, _, key = source.partition("/")
        for part in (whole if source == "data/large" else {}, {"CopySourceRange": "bytes=1-2"}):
            asked = (part or whole)["CopySourceRange"]
            got = copier.get_object(Bucket=bucket, Key=key, Range=asked)
            body = got["Body"].read()
            told = _copy_part(copier, source, "to", **part, CopySourceIfMatch=got["ETag"])

            assert told["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'  # noqa: S324
            assert read_object(copier, "to") == body
    assert body == data[1:3]


@pytest.mark.parametrize(
    ("bucket", "compress"),
    [("memory", "gzip"), ("s3", "br"), pytest.param("memory", "zstd", marks=pytest.mark.soak)],
)
def test_cloud_files_reads_its_own_objects(url: str, bucket: str, compress: str) -> None:
    """cloud-files reads its own compressed objects, ranges of others, and deletes them.

    Plain clients get compressed objects decoded.
    """
    cloudfiles.paths.add_alias("written", f"s3://{url}/")
    secrets = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    files = cloudfiles.CloudFiles(f"written://{bucket}/{compress}", secrets=secrets)
    files.put("a", b"abc" * 1000, compress=compress)
    files.put("plain", b"abc")

    assert files.get("a") == b"abc" * 1000
    assert httpx.get(f"{url}/{bucket}/{compress}/a").content == b"abc" * 1000
    assert files["plain", 1:3] == b"bc"
    files.delete("plain")
    assert not files.exists("plain")
    cloudfiles.interfaces.reset_connection_pools()


_REFUSED: Final[list[tuple[bool, str, dict[str, Any], str]]] = [
    (True, "data/none", {}, "NoSuchKey"),
    (True, "data/array/c/9", {}, "NoSuchKey"),
    (True, "none/small", {}, "NoSuchBucket"),
    (True, "data/large", {}, "EntityTooLarge"),
    (True, "data/small", {"CopySourceIfMatch": '"x"'}, "PreconditionFailed"),
    (True, "data/small", {"CopySourceRange": "bytes=0-3"}, "InvalidArgument"),
    (True, "data/small", {"CopySourceRange": "bytes=2-1"}, "InvalidArgument"),
    (True, "data/small", {"CopySourceRange": "bytes=-1"}, "InvalidArgument"),
    (True, "data/small", {"CopySourceRange": "0-1"}, "InvalidArgument"),
    (True, "data/small", {"UploadId": "0" * 32}, "NoSuchUpload"),
    (False, "data/none", {}, "NoSuchKey"),
    (False, "data/array/c/9", {}, "NoSuchKey"),
    (False, "none/small", {}, "NoSuchBucket"),
    (False, "data", {}, "InvalidArgument"),
    (False, "data/small/", {}, "InvalidArgument"),
    (False, "data/large", {}, "EntityTooLarge"),
    (False, "data/small?versionId=1", {}, "NotImplemented"),
    (False, "data/small", {"CopySourceIfMatch": '"x"'}, "PreconditionFailed"),
    (False, "data/small", {"CopySourceIfNoneMatch": "*"}, "PreconditionFailed"),
    (False, "data/small", {"IfMatch": '"x"'}, "PreconditionFailed"),
    (False, "data/small", {"CopySourceIfModifiedSince": 0}, "NotImplemented"),
]
"""Whether a part is copied, the source, the options, and the expected error code."""


def test_invalid_copy_is_refused(copier: Any, copied: Path) -> None:
    """An invalid copy, of a part or a whole object, fails with its code and writes nothing."""
    for is_part, source, options, code in _REFUSED:
        with pytest.raises(ClientError, match=rf"\({code}\)"):
            (_copy_part if is_part else _copy)(copier, source, "refused", **options)
        assert not (copied / "refused").exists()


def _copy(s3: Any, source: str, to: str, **more: Any) -> None:
    s3.copy_object(Bucket="data", Key=to, CopySource=source, **more)


def _copy_part(s3: Any, source: str, to: str, **more: Any) -> Any:
    """Upload a single part as a copy; return the result of the copy."""
    upload = {"Bucket": "data", "Key": to}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    told = s3.upload_part_copy(**upload | {"CopySource": source, "PartNumber": 1} | more)
    parts = [{"PartNumber": 1, "ETag": told["CopyPartResult"]["ETag"]}]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    return told["CopyPartResult"]


def test_last_modified_is_that_of_the_stored_object(
    copying: str, copier: Any, copied: Path
) -> None:
    """GET and HEAD have the stored object's Last-Modified, also after a write."""
    modified_s = int((copied / "small").stat().st_mtime)
    for method in ("GET", "HEAD"):
        told = httpx.request(method, f"{copying}/data/small").headers["last-modified"]
        assert told == httpx.head(f"{copying}/data/small").headers["last-modified"]
    assert copier.head_object(Bucket="data", Key="small")["LastModified"].timestamp() == modified_s
    copier.put_object(Bucket="data", Key="new", Body=b"x")

    written = copier.head_object(Bucket="data", Key="new")["LastModified"].timestamp()
    assert written == int((copied / "new").stat().st_mtime)


def test_inner_chunks_have_the_time_of_their_shard(copier: Any, copied: Path) -> None:
    """HEAD, listings and conditions of an inner chunk use its shard's modification time."""
    os.utime(copied / "timed/c/0", (10**9, 10**9))
    key = "timed/c/3"

    def modified_s() -> float:
        listed = copier.list_objects_v2(Bucket="data", Prefix=key)["Contents"][0]["LastModified"]
        assert listed == copier.head_object(Bucket="data", Key=key)["LastModified"]
        return float(listed.timestamp())

    assert modified_s() == 10**9
    for condition, code in (("IfModifiedSince", "304"), ("IfUnmodifiedSince", "412")):
        with pytest.raises(ClientError, match=rf"\({code}\)"):
            copier.head_object(Bucket="data", Key=key, **{condition: 10**9 - (code == "412")})
    copier.put_object(Bucket="data", Key="timed/c/0", Body=b"zz")

    assert abs(modified_s() - (copied / "timed/c/0").stat().st_mtime) <= 1


def test_concurrent_copies_of_a_large_object_all_succeed(tmp_path: Path) -> None:
    """All of 12 concurrent copies of a large object succeed within 8 MiB in flight."""
    body = os.urandom(3 * 2**20)
    (tmp_path / "large").write_bytes(body)
    datasets = {"data": DatasetSettings(url=str(tmp_path), writable=True)}
    limits = LimitSettings(stream_bytes=2**20, in_flight_bytes=8 * 2**20)

    with serving(Settings(datasets=datasets, limits=limits)) as served:
        s3 = open_boto3(served)
        with ThreadPoolExecutor(12) as threads:
            copies = threads.map(
                lambda n: s3.copy_object(Bucket="data", Key=f"copy/{n}", CopySource="data/large"),
                range(12),
            )
            assert len(list(copies)) == 12
    assert all((tmp_path / f"copy/{n}").read_bytes() == body for n in range(12))
