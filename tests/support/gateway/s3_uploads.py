"""Requests of multipart uploads."""

# ruff: noqa: S314  what is parsed here we wrote

from collections.abc import Mapping
from xml.etree import ElementTree as ET

import httpx

from tests.support.server.taking import NEW

NS = "{http://s3.amazonaws.com/doc/2006-03-01/}"
S3 = {"authorization": "AWS4-HMAC-SHA256 any"}


def create(client: httpx.Client, path: str, headers: Mapping[str, str] | None = None) -> str:
    """Begin an upload."""
    answer = client.post(f"{path}?uploads", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/xml")
    return ET.fromstring(answer.content).findtext(f"{NS}UploadId") or ""


def put(
    client: httpx.Client, path: str, upload: str, number: object, body: bytes, **headers: str
) -> httpx.Response:
    """Upload a part."""
    params = {"partNumber": str(number), "uploadId": upload}
    return client.put(path, params=params, content=body, headers=S3 | headers)


def begin(client: httpx.Client, path: str) -> tuple[str, tuple[int, str]]:
    """Begin an upload, and upload all of it as one part."""
    upload = create(client, path)
    return upload, (1, put(client, path, upload, 1, NEW).headers["etag"])


def complete(
    client: httpx.Client, path: str, upload: str, *parts: tuple[int, str], **headers: str
) -> httpx.Response:
    """Complete an upload of *parts*."""
    listed = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
        for number, etag in parts
    )
    body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>"
    params = {"uploadId": upload}
    return client.post(path, params=params, content=body, headers=S3 | headers)
