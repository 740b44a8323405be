"""Clients of S3 store a Content-Type and user metadata beside their bytes."""

from collections.abc import Generator
from typing import Any, Final

import httpx
import pytest
import zarr
from botocore.exceptions import ClientError

from app.settings import DatasetSettings, Settings
from tests.clients.filling import open_boto3
from tests.seaweedfs import SeaweedFS
from tests.serving import serving

_TYPE: Final = "text/plain; charset=utf-8"
_METADATA: Final = {"mtime": "1700000000.5", "who": "a b"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, seaweedfs: SeaweedFS) -> Generator[str]:
    """Serve S3, memory, and a folder, the first and the last with a sharded array."""
    folder = tmp_path_factory.mktemp("metadata")
    zarr.create_array(folder / "array", shape=(4,), shards=(4,), chunks=(2,), dtype="u1")
    seaweedfs.upload_folder(folder, "metadata")
    datasets = {
        "s3": DatasetSettings(url=f"s3://{seaweedfs.bucket}/metadata", store="lab", writable=True),
        "memory": DatasetSettings(url="memory://metadata", writable=True),
        "folder": DatasetSettings(url=str(folder), writable=True),
    }
    with serving(Settings(datasets=datasets, stores={"lab": seaweedfs.settings})) as served:
        yield served


@pytest.fixture(scope="module")
def s3(url: str) -> Any:
    """Open boto3's client."""
    return open_boto3(url)


def _told(s3: Any, bucket: str, key: str) -> tuple[str, dict[str, str]]:
    """Ask for type and metadata, which GET and HEAD tell alike."""
    head = s3.head_object(Bucket=bucket, Key=key)
    found = s3.get_object(Bucket=bucket, Key=key)
    assert (found["ContentType"], found["Metadata"]) == (head["ContentType"], head["Metadata"])
    return head["ContentType"], head["Metadata"]


@pytest.mark.parametrize("bucket", ["s3", "memory"])
def test_what_is_put_is_told(s3: Any, bucket: str) -> None:
    """An object has the headers it was written with last, in one piece or in parts."""
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


def test_copies_keep_or_replace(s3: Any, url: str, seaweedfs: SeaweedFS) -> None:
    """They have what the source has, unless the client says otherwise; ids of writes stay ours."""
    s3.put_object(Bucket="s3", Key="b.json", Body=b"1", ContentType=_TYPE, Metadata=_METADATA)
    copy = {"Bucket": "s3", "Key": "c.json", "CopySource": "s3/b.json"}
    s3.copy_object(**copy)
    assert _told(s3, "s3", "c.json") == (_TYPE, _METADATA)
    stored = seaweedfs.client.head_object(Bucket=seaweedfs.bucket, Key="metadata/c.json")
    assert stored["Metadata"].keys() == {*_METADATA, "shardgate-writes"}

    s3.copy_object(**copy, MetadataDirective="REPLACE", Metadata={"x": "y"})
    assert _told(s3, "s3", "c.json") == ("application/json", {"x": "y"})
    assert "x-amz-meta-x" not in httpx.get(f"{url}/s3/array/zarr.json").headers


@pytest.mark.parametrize(
    ("bucket", "key"), [("folder", "a"), ("folder", "array/c/0"), ("s3", "array/c/0")]
)
def test_metadata_that_cannot_be_kept_is_refused(s3: Any, bucket: str, key: str) -> None:
    """Types, and what tools add to every upload, are left out there; all else is NotImplemented."""
    put = {"Bucket": bucket, "Key": key, "ContentType": _TYPE}
    s3.put_object(**put, Body=b"ab", Metadata={"mtime": "1"})
    assert _told(s3, bucket, key) == ("application/octet-stream", {})

    for begin in (s3.put_object, s3.create_multipart_upload):
        with pytest.raises(ClientError, match=r"NotImplemented.*x-amz-meta-who cannot be kept"):
            begin(**put, Metadata=_METADATA)


@pytest.mark.parametrize("metadata", [{"shardgate-writes": "0123456789abcdef"}, {"a": "b" * 1800}])
def test_metadata_that_s3_would_not_take(s3: Any, metadata: dict[str, str]) -> None:
    """The service's own names and too much of it are refused."""
    with pytest.raises(ClientError, match=r"InvalidArgument.*user metadata is ASCII"):
        s3.put_object(Bucket="s3", Key="d", Body=b"", Metadata=metadata)
