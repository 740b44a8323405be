"""Clients of S3, and stores of zarr-python over them."""

from typing import Any, Final

import boto3
from botocore.config import Config
from obstore.store import S3Store
from zarr.storage import FsspecStore, ObjectStore

KEYS: Final = "any"
"""Access key and secret, which S3 clients require and the service ignores."""


def open_obstore(
    url: str, dataset: str = "data", prefix: str | None = None, key_id: str = KEYS, key: str = KEYS
) -> S3Store:
    """Open obstore's client of a dataset."""
    return S3Store(
        dataset,
        prefix=prefix,
        endpoint=url,
        region="us-east-1",
        access_key_id=key_id,
        secret_access_key=key,
        client_options={"allow_http": True},
    )


def open_boto3(
    url: str, key_id: str = KEYS, key: str = KEYS, *, verify: str | None = None, **config: Any
) -> Any:
    """Open boto3's client, without retries."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=key,
        verify=verify,
        config=Config(retries={"total_max_attempts": 1}, **config),
    )


def read_object(s3: Any, key: str, bucket: str = "data") -> bytes | None:
    """Read an object by boto3; return None if it is absent."""
    try:
        body: bytes = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    except s3.exceptions.NoSuchKey:
        return None
    return body


def over_obstore(url: str, path: str, dataset: str = "data") -> Any:
    """Open the prefix *path* of *dataset* as a store of zarr-python, over obstore."""
    return ObjectStore(open_obstore(url, dataset, path))


def s3fs_options(url: str) -> dict[str, Any]:
    """Return options of s3fs; its cache of listings is off, since it may lack folders."""
    return {"key": KEYS, "secret": KEYS, "endpoint_url": url, "use_listings_cache": False}


def over_s3fs(url: str, path: str) -> Any:
    """Open the prefix *path* of ``data`` as a store of zarr-python, over s3fs."""
    options = s3fs_options(url)
    return FsspecStore.from_url(f"s3://data/{path}", storage_options=options)


CLIENTS: Final = {"obstore": over_obstore, "s3fs": over_s3fs}
