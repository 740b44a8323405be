"""Clients of S3 copy keys within the service, and are told when they were modified."""

import gzip
import hashlib
import os
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import obstore
import pytest
import s3fs
import zarr
from botocore.exceptions import ClientError

from app.settings import DatasetSettings, LimitSettings, Settings
from tests.clients.filling import KEYS, open_boto3, over_obstore
from tests.serving import serving

_LIMIT = 64 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Store two sharded arrays, of which the first has values, and two objects."""
    for name in ("array", "other"):
        zarr.create_array(tmp_path / name, shape=(8,), shards=(8,), chunks=(2,), dtype="u1")
    zarr.open_array(tmp_path / "array")[:] = np.arange(1, 9)
    (tmp_path / "small").write_bytes(b"abc")
    (tmp_path / "large").write_bytes(bytes(_LIMIT + 1))
    return tmp_path


@pytest.fixture
def url(folder: Path) -> Generator[str]:
    """Serve them, and a part of them as another dataset that takes no writes."""
    datasets = {
        "data": DatasetSettings(url=str(folder), writable=True),
        "fixed": DatasetSettings(url=str(folder / "array")),
        "memory": DatasetSettings(url="memory://copying", writable=True),
    }
    limits = LimitSettings(max_chunk_bytes=_LIMIT)
    with serving(Settings(datasets=datasets, limits=limits)) as served:
        yield served


@pytest.fixture
def s3(url: str) -> Any:
    """Open boto3's client."""
    return open_boto3(url)


def test_boto3_copies_an_object(s3: Any, folder: Path) -> None:
    """What it is told of the copy is what is there then."""
    told = s3.copy_object(Bucket="data", Key="a b/c", CopySource="data/small")["CopyObjectResult"]

    assert (folder / "a b/c").read_bytes() == b"abc"
    assert told["ETag"] == s3.head_object(Bucket="data", Key="a b/c")["ETag"]
    assert abs(told["LastModified"].timestamp() - time.time()) < 60


def test_inner_chunks_are_copied(s3: Any, folder: Path) -> None:
    """From the shards of one array into those of another, and from another dataset."""
    for source, key in (("data/array/c/3", "other/c/0"), ("/fixed/c/0", "other/c/3")):
        s3.copy_object(Bucket="data", Key=key, CopySource=source)

    found = np.asarray(zarr.open_array(folder / "other", mode="r")[:])
    np.testing.assert_array_equal(found, [7, 8, 0, 0, 0, 0, 1, 2])


def test_obstore_and_s3fs_move(url: str, folder: Path) -> None:
    """They copy, and delete what they copied."""
    store = over_obstore(url, "").store
    obstore.rename(store, "small", "moved once")
    files = s3fs.S3FileSystem(key=KEYS, secret=KEYS, endpoint_url=url)
    files.mv("data/moved once", "data/moved twice")

    assert (folder / "moved twice").read_bytes() == b"abc"
    assert not (folder / "small").exists()
    assert not (folder / "moved once").exists()


@pytest.mark.parametrize("source", ["data/small", "data/large", "data/array/c/1", "fixed/c/3"])
@pytest.mark.parametrize("part", [{}, {"CopySourceRange": "bytes=1-2"}])
def test_a_part_is_copied(s3: Any, source: str, part: dict[str, str]) -> None:
    """UploadPartCopy copies the bytes of a GET of the source, or of its range."""
    bucket, _, key = source.partition("/")
    got = s3.get_object(Bucket=bucket, Key=key, Range=part.get("CopySourceRange", "bytes=0-65535"))
    body = got["Body"].read()
    if source == "data/large":
        part = part or {"CopySourceRange": "bytes=0-65535"}
    told = _copy_part(s3, source, **part, CopySourceIfMatch=got["ETag"])

    assert told["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'  # noqa: S324
    assert s3.get_object(Bucket="data", Key="to")["Body"].read() == body


def test_what_is_stored_as_gzip_is_copied_with_the_etag_of_a_head(s3: Any) -> None:
    """CopyObject keeps the gzip, and a part is what that holds."""
    s3.put_object(Bucket="memory", Key="a", Body=gzip.compress(b"abc"), ContentEncoding="gzip")
    condition = {"CopySourceIfMatch": s3.head_object(Bucket="memory", Key="a")["ETag"]}
    s3.copy_object(Bucket="memory", Key="b", CopySource="memory/a", **condition)
    _copy_part(s3, "memory/a", CopySourceRange="bytes=1-2", **condition)

    assert s3.get_object(Bucket="memory", Key="b")["Body"].read() == b"abc"
    assert s3.get_object(Bucket="data", Key="to")["Body"].read() == b"bc"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda s3: _copy_part(s3, "data/none"), "NoSuchKey"),
        (lambda s3: _copy_part(s3, "data/array/c/9"), "NoSuchKey"),
        (lambda s3: _copy_part(s3, "none/small"), "NoSuchBucket"),
        (lambda s3: _copy_part(s3, "data/large"), "EntityTooLarge"),
        (lambda s3: _copy_part(s3, "data/small", CopySourceIfMatch='"x"'), "PreconditionFailed"),
        (lambda s3: _copy_part(s3, "data/small", CopySourceRange="bytes=0-3"), "InvalidArgument"),
        (lambda s3: _copy_part(s3, "data/small", CopySourceRange="bytes=2-1"), "InvalidArgument"),
        (lambda s3: _copy_part(s3, "data/small", CopySourceRange="bytes=-1"), "InvalidArgument"),
        (lambda s3: _copy_part(s3, "data/small", CopySourceRange="0-1"), "InvalidArgument"),
        (lambda s3: _copy_part(s3, "data/small", UploadId="0" * 32), "NoSuchUpload"),
        (lambda s3: _copy(s3, "data/none"), "NoSuchKey"),
        (lambda s3: _copy(s3, "data/array/c/9"), "NoSuchKey"),
        (lambda s3: _copy(s3, "none/small"), "NoSuchBucket"),
        (lambda s3: _copy(s3, "data"), "InvalidArgument"),
        (lambda s3: _copy(s3, "data/small/"), "InvalidArgument"),
        (lambda s3: _copy(s3, "data/large"), "EntityTooLarge"),
        (lambda s3: _copy(s3, "data/small?versionId=1"), "NotImplemented"),
        (lambda s3: _copy(s3, "data/small", CopySourceIfMatch='"x"'), "PreconditionFailed"),
        (lambda s3: _copy(s3, "data/small", CopySourceIfNoneMatch="*"), "PreconditionFailed"),
        (lambda s3: _copy(s3, "data/small", IfMatch='"x"'), "PreconditionFailed"),
        (lambda s3: _copy(s3, "data/small", CopySourceIfModifiedSince=0), "NotImplemented"),
    ],
)
def test_a_copy_that_cannot_be(
    s3: Any, folder: Path, call: Callable[[Any], Any], code: str
) -> None:
    """It is refused, and nothing is written."""
    with pytest.raises(ClientError) as caught:
        call(s3)

    assert caught.value.response["Error"]["Code"] == code
    assert not (folder / "to").exists()


def _copy(s3: Any, source: str, **more: Any) -> None:
    s3.copy_object(Bucket="data", Key="to", CopySource=source, **more)


def _copy_part(s3: Any, source: str, **more: Any) -> Any:
    """Upload one part, which is a copy, and give what the copy was answered with."""
    upload = {"Bucket": "data", "Key": "to"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    told = s3.upload_part_copy(**upload | {"CopySource": source, "PartNumber": 1} | more)
    parts = [{"PartNumber": 1, "ETag": told["CopyPartResult"]["ETag"]}]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    return told["CopyPartResult"]


@pytest.mark.parametrize("quotes", ['"', ""])
def test_copies_of_one_version(s3: Any, quotes: str) -> None:
    """It may be named with quotes or without."""
    etag = s3.head_object(Bucket="data", Key="small")["ETag"].strip('"')
    _copy(s3, "data/small", CopySourceIfMatch=f"{quotes}{etag}{quotes}")


def test_when_objects_were_modified(url: str, s3: Any, folder: Path) -> None:
    """Of an object that is served as it is GET and HEAD tell, after a write too."""
    modified_s = int((folder / "small").stat().st_mtime)
    for method in ("GET", "HEAD"):
        told = httpx.request(method, f"{url}/data/small").headers["last-modified"]
        assert told == httpx.head(f"{url}/data/small").headers["last-modified"]
    assert s3.head_object(Bucket="data", Key="small")["LastModified"].timestamp() == modified_s
    s3.put_object(Bucket="data", Key="new", Body=b"x")

    written = s3.head_object(Bucket="data", Key="new")["LastModified"].timestamp()
    assert written == int((folder / "new").stat().st_mtime)


def test_inner_chunks_have_the_time_of_their_shard(s3: Any, folder: Path) -> None:
    """HEAD, listings and conditions agree on it, also after the shard was rewritten."""
    os.utime(folder / "array/c/0", (10**9, 10**9))
    key = "array/c/3"

    def modified_s() -> float:
        listed = s3.list_objects_v2(Bucket="data", Prefix=key)["Contents"][0]["LastModified"]
        assert listed == s3.head_object(Bucket="data", Key=key)["LastModified"]
        return float(listed.timestamp())

    assert modified_s() == 10**9
    for condition, code in (("IfModifiedSince", "304"), ("IfUnmodifiedSince", "412")):
        with pytest.raises(ClientError) as caught:
            s3.head_object(Bucket="data", Key=key, **{condition: 10**9 - (code == "412")})
        assert caught.value.response["Error"]["Code"] == code
    s3.put_object(Bucket="data", Key="array/c/0", Body=b"zz")

    assert abs(modified_s() - (folder / "array/c/0").stat().st_mtime) <= 1


def test_many_copies_of_large_objects_at_once_all_succeed(tmp_path: Path) -> None:
    """Each of them reserves its body in the reservation that it reads the source with."""
    body = os.urandom(3 * 2**20)
    (tmp_path / "large").write_bytes(body)
    datasets = {"data": DatasetSettings(url=str(tmp_path), writable=True)}
    limits = LimitSettings(stream_bytes=2**20, in_flight_bytes=8 * 2**20)

    with serving(Settings(datasets=datasets, limits=limits)) as served:
        s3 = open_boto3(served)
        with ThreadPoolExecutor(24) as threads:
            copies = threads.map(
                lambda n: s3.copy_object(Bucket="data", Key=f"copy/{n}", CopySource="data/large"),
                range(24),
            )
            assert len(list(copies)) == 24
    assert all((tmp_path / f"copy/{n}").read_bytes() == body for n in range(24))
