"""What S3 clients are answered with, listings of keys apart."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Final
from xml.etree import ElementTree as ET

from app import errors
from app.errors import ShardgateError
from app.http.problems import further_headers, status_of
from app.http.s3 import MEDIA_TYPE, NAMESPACE, add, write_time
from app.model import ETag
from app.resolve.write import Outcome

_CODES: Final = {
    HTTPStatus.BAD_REQUEST: "InvalidRequest",
    HTTPStatus.UNAUTHORIZED: "AccessDenied",
    HTTPStatus.FORBIDDEN: "AccessDenied",
    HTTPStatus.NOT_FOUND: "NoSuchKey",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowed",
    HTTPStatus.REQUEST_TIMEOUT: "RequestTimeout",
    HTTPStatus.CONFLICT: "InvalidRequest",
    HTTPStatus.LENGTH_REQUIRED: "MissingContentLength",
    HTTPStatus.PRECONDITION_FAILED: "PreconditionFailed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "EntityTooLarge",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "InvalidRequest",
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: "InvalidRange",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplemented",
    HTTPStatus.MISDIRECTED_REQUEST: "InvalidRequest",
    HTTPStatus.LOCKED: "AccessDenied",
    HTTPStatus.TOO_MANY_REQUESTS: "SlowDown",
    HTTPStatus.SERVICE_UNAVAILABLE: "SlowDown",
}
_OF_ERRORS: Final[dict[type[ShardgateError], str]] = {
    errors.BadHeaderError: "InvalidArgument",
    errors.BadParameterError: "InvalidArgument",
    errors.BadPartError: "InvalidPart",
    errors.DigestError: "BadDigest",
    errors.PartOrderError: "InvalidPartOrder",
    errors.UnknownDatasetError: "NoSuchBucket",
    errors.UnknownUploadError: "NoSuchUpload",
}
"""Where there is a better one than that of the status."""
_CONDITIONS: Final = {
    name.lower().encode(): name
    for name in (
        "If-Match",
        "If-None-Match",
        "If-Unmodified-Since",
        "x-amz-copy-source-If-Match",
        "x-amz-copy-source-If-None-Match",
    )
}
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

type Headers = list[tuple[bytes, bytes]]


def code_of(status: HTTPStatus, error: ShardgateError | None = None) -> str:
    """Name what went wrong as clients of S3 know it."""
    if isinstance(error, errors.SignatureError):
        return error.code
    special = None if error is None else _OF_ERRORS.get(type(error))
    return special or _CODES.get(status, "InternalError")


def error_document(
    status: HTTPStatus, code: str, detail: str, request_id: str, condition: str | None = None
) -> tuple[Headers, bytes]:
    """Write the XML of an error and the headers that go with it; *condition* is what failed."""
    root = ET.Element("Error")
    told = {"Code": code, "Message": _speakable(detail), "Condition": condition}
    add(root, told | {"RequestId": request_id})
    body = _written(root)
    headers = [(b"content-type", MEDIA_TYPE), (b"content-length", b"%d" % len(body))]
    return headers + further_headers(status), body


def failed_condition(status: HTTPStatus, headers: Mapping[bytes, bytes]) -> str | None:
    """Name the condition that a request with *headers* failed, unless it had several."""
    if status is not HTTPStatus.PRECONDITION_FAILED:
        return None
    found = [_CONDITIONS[name] for name in _CONDITIONS if name in headers]
    return found[0] if len(found) == 1 else None


def buckets(names: Iterable[str]) -> bytes:
    """Answer ListBuckets."""
    root = ET.Element("ListAllMyBucketsResult", xmlns=NAMESPACE)
    add(ET.SubElement(root, "Owner"), {"ID": "shardgate", "DisplayName": "shardgate"})
    listed = ET.SubElement(root, "Buckets")
    for name in names:
        add(ET.SubElement(listed, "Bucket"), {"Name": name, "CreationDate": write_time(0)})
    return _written(root)


def told_of_bucket(names: frozenset[bytes]) -> bytes:
    """Answer GetBucketLocation and GetBucketVersioning, with which clients may begin."""
    name = "LocationConstraint" if b"location" in names else "VersioningConfiguration"
    return _written(ET.Element(name, xmlns=NAMESPACE))


def no_tags() -> bytes:
    """Answer GetObjectTagging: no object has tags."""
    root = ET.Element("Tagging", xmlns=NAMESPACE)
    ET.SubElement(root, "TagSet")
    return _written(root)


def upload_created(bucket: str, key: str, upload_id: str) -> bytes:
    """Answer CreateMultipartUpload."""
    root = ET.Element("InitiateMultipartUploadResult", xmlns=NAMESPACE)
    add(root, {"Bucket": bucket, "Key": key, "UploadId": upload_id})
    return _written(root)


def upload_completed(bucket: str, key: str, location: str, etag: str) -> bytes:
    """Answer CompleteMultipartUpload."""
    root = ET.Element("CompleteMultipartUploadResult", xmlns=NAMESPACE)
    add(root, {"Location": location, "Bucket": bucket, "Key": key, "ETag": etag})
    return _written(root)


def deleted(keys: Sequence[str], outcomes: Sequence[Outcome], *, is_quiet: bool) -> bytes:
    """Answer DeleteObjects."""
    root = ET.Element("DeleteResult", xmlns=NAMESPACE)
    for key, outcome in zip(keys, outcomes, strict=True):
        if isinstance(outcome, ShardgateError):
            code = code_of(status_of(outcome), outcome)
            told = {"Key": key, "Code": code, "Message": _speakable(str(outcome))}
            add(ET.SubElement(root, "Error"), told)
        elif not is_quiet:
            add(ET.SubElement(root, "Deleted"), {"Key": key})
    return _written(root)


def copied(name: str, etag: ETag | None) -> bytes:
    """Answer CopyObject or UploadPartCopy, with the element *name*."""
    root = ET.Element(name, xmlns=NAMESPACE)
    add(root, {"LastModified": write_time(time.time())})
    if etag is not None:
        add(root, {"ETag": etag})
    return _written(root)


def _written(root: ET.Element) -> bytes:
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def _speakable(text: str) -> str:
    return _NOT_XML.sub("?", text)
