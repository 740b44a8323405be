"""`app.http.s3_requests`: whom to answer as S3, and what of S3 is not served."""

import pytest

from app.http.s3_requests import lists_objects, names_in, speaks_s3, unserved, uploading


@pytest.mark.parametrize(
    ("headers", "query", "is_s3"),
    [
        ({}, b"", False),
        ({b"authorization": b"AWS4-HMAC-SHA256 Credential=a"}, b"", True),
        ({b"authorization": b"AWS key:signature"}, b"", True),
        ({b"authorization": b"Bearer AWS4-HMAC-SHA256"}, b"", False),
        ({b"amz-sdk-invocation-id": b"1"}, b"", True),
        ({}, b"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=0", True),
        ({}, b"x-amz-signature=0", True),
        ({}, b"a=1&x-id=GetObject", True),
        ({}, b"list-type=2", True),
        ({}, b"a=list-type=2", False),
    ],
)
def test_who_speaks_s3(headers: dict[bytes, bytes], query: bytes, is_s3: bool) -> None:  # noqa: FBT001
    """Who signs, in a header or in the query, and who asks as only S3 clients do."""
    assert speaks_s3(headers, query) is is_s3


@pytest.mark.parametrize(
    ("method", "of_key", "query", "operation"),
    [
        ("PUT", True, b"", None),
        ("PUT", True, b"x-id=PutObject", None),
        ("PUT", True, b"acl", "PutObjectAcl"),
        ("PUT", True, b"%61cl", "PutObjectAcl"),
        ("PUT", True, b"tagging", "PutObjectTagging"),
        ("PUT", True, b"legal-hold", "PutObjectLegalHold"),
        ("PUT", True, b"partNumber=1", "PutObjectPartNumber"),
        ("PUT", True, b"partNumber=1&uploadId=u", None),
        ("PUT", True, b"partNumber=1&uploadId=u&acl", "PutObjectAcl"),
        ("PUT", False, b"partNumber=1&uploadId=u", "UploadPart"),
        ("POST", True, b"uploads", None),
        ("POST", True, b"uploads=", None),
        ("POST", False, b"uploads", "CreateMultipartUpload"),
        ("POST", True, b"uploadId=u", None),
        ("DELETE", True, b"uploadId=u", None),
        ("GET", True, b"uploadId=u", "ListParts"),
        ("GET", True, b"tagging", None),
        ("GET", False, b"tagging", "GetBucketTagging"),
        ("DELETE", True, b"versionId=v", "DeleteObjectVersionId"),
        ("GET", False, b"location", None),
        ("GET", False, b"versioning", None),
        ("PUT", False, b"versioning", "PutBucketVersioning"),
        ("GET", True, b"versioning", "GetObjectVersioning"),
        ("GET", False, b"versions", "ListObjectVersions"),
        ("GET", False, b"uploads", "ListMultipartUploads"),
        ("GET", False, b"policy", "GetBucketPolicy"),
        ("POST", False, b"delete", None),
        ("GET", False, b"list-type=2&prefix=acl", None),
    ],
)
def test_operations(method: str, of_key: bool, query: bytes, operation: str | None) -> None:  # noqa: FBT001
    """What S3 does about a part of a bucket or object is named, and taken for nothing else."""
    assert unserved(method, names_in(query), {}, of_key=of_key) == operation


@pytest.mark.parametrize(
    "header",
    [
        b"x-amz-write-offset-bytes",
        b"x-amz-server-side-encryption-customer-algorithm",
        b"x-amz-object-lock-mode",
        b"if-unmodified-since",
        b"x-amz-if-match-size",
        b"x-amz-tagging",
        b"x-amz-acl",
        b"x-amz-grant-read",
    ],
)
def test_headers_that_make_another_operation(header: bytes) -> None:
    """A part of an object is no PUT of all, and a condition is heeded or refused."""
    assert unserved("PUT", frozenset(), {header: b"x"}, of_key=True) is not None
    assert unserved("GET", frozenset(), {header: b"x"}, of_key=True) is None


@pytest.mark.parametrize(
    ("method", "query", "step"),
    [
        ("POST", b"uploads", "CreateMultipartUpload"),
        ("POST", b"uploads=&x-id=CreateMultipartUpload", "CreateMultipartUpload"),
        ("PUT", b"partNumber=1&uploadId=u", "UploadPart"),
        ("POST", b"uploadId=u", "CompleteMultipartUpload"),
        ("DELETE", b"uploadId=u", "AbortMultipartUpload"),
        ("GET", b"uploadId=u", None),
        ("PUT", b"partNumber=1", None),
        ("PUT", b"uploads", None),
        ("POST", b"", None),
    ],
)
def test_steps_of_uploads(method: str, query: bytes, step: str | None) -> None:
    """They are served, of keys."""
    assert uploading(method, names_in(query)) == step


@pytest.mark.parametrize("acl", [b"private", b"bucket-owner-full-control"])
def test_access_lists_that_let_nobody_in_are_accepted(acl: bytes) -> None:
    """Clients such as rclone 1.60 send one with each object."""
    assert unserved("PUT", frozenset(), {b"x-amz-acl": acl}, of_key=True) is None


@pytest.mark.parametrize(
    ("method", "query", "is_s3", "is_listing"),
    [
        ("GET", b"", True, True),
        ("GET", b"", False, False),
        ("HEAD", b"", True, False),
        ("GET", b"location", True, False),
        ("GET", b"delimiter=%2F&prefix=", False, True),
        ("GET", b"list-type=2", False, True),
    ],
)
def test_listings(method: str, query: bytes, is_s3: bool, is_listing: bool) -> None:  # noqa: FBT001
    """Any GET of a bucket that asks for nothing else; of unsigned clients one with parameters."""
    assert lists_objects(method, names_in(query), is_s3=is_s3) is is_listing
