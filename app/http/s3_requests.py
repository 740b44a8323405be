"""Which requests are of S3 clients, and which of theirs are not served."""

import re
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

_SIGNED: Final = re.compile(
    rb"(?i:(?:^|&)(?:X-Amz-(?:Algorithm|Signature|Credential)|AWSAccessKeyId|x-id|list-type)=)"
)
_SIGNATURES: Final = (b"AWS4-", b"AWS ")
_OF_BOTO: Final = b"amz-sdk-invocation-id"
"""It sends this unsigned too."""

_UPLOADING: Final = {
    ("POST", b"uploads"): "CreateMultipartUpload",
    ("PUT", b"uploadId"): "UploadPart",
    ("POST", b"uploadId"): "CompleteMultipartUpload",
    ("DELETE", b"uploadId"): "AbortMultipartUpload",
}
_OF_UPLOADS: Final = frozenset({b"uploads", b"uploadId", b"partNumber"})
_OPERATIONS: Final = _UPLOADING | {
    ("GET", b"uploads"): "ListMultipartUploads",
    ("GET", b"uploadId"): "ListParts",
    ("GET", b"versions"): "ListObjectVersions",
    ("POST", b"select"): "SelectObjectContent",
    ("POST", b"restore"): "RestoreObject",
    ("PUT", b"renameObject"): "RenameObject",
}
_SUBRESOURCES: Final = frozenset(
    b"accelerate acl analytics attributes cors encryption intelligent-tiering inventory"
    b" legal-hold lifecycle location logging metadataTable metrics notification object-lock"
    b" ownershipControls partNumber policy policyStatus publicAccessBlock renameObject"
    b" replication requestPayment restore retention select session tagging torrent uploadId"
    b" uploads versionId versioning versions website".split()
)
_OF_BUCKETS: Final = frozenset({b"location", b"versioning"})
"""Served for GET."""
_OF_KEYS: Final = frozenset({b"tagging"})
"""Served for GET."""
_LISTING: Final = frozenset(b"list-type delimiter encoding-type marker max-keys prefix".split())
_HEADERS: Final = {
    b"x-amz-write-offset-bytes": "Appending to an object",
    b"x-amz-server-side-encryption-customer-algorithm": "Encryption with a client's key",
    b"x-amz-object-lock-mode": "Locking an object",
    b"x-amz-object-lock-legal-hold": "Locking an object",
    b"if-unmodified-since": "If-Unmodified-Since",
    b"x-amz-if-match-last-modified-time": "x-amz-if-match-last-modified-time",
    b"x-amz-if-match-size": "x-amz-if-match-size",
    b"x-amz-tagging": "Tagging an object",
    b"x-amz-acl": "An access list other than private",
    b"x-amz-grant-full-control": "An access list",
    b"x-amz-grant-read": "An access list",
    b"x-amz-grant-read-acp": "An access list",
    b"x-amz-grant-write-acp": "An access list",
    b"x-amz-website-redirect-location": "Redirecting to another object",
}
"""A write that went on without heeding them would not do what its client wants."""
_PRIVATE: Final = (b"private", b"bucket-owner-full-control")
"""Access lists that let nobody in: some clients always send one."""


def speaks_s3(given: Mapping[bytes, bytes], query: bytes) -> bool:
    """Tell whether the request with the headers *given* is of an S3 client."""
    return (
        given.get(b"authorization", b"").startswith(_SIGNATURES)
        or _OF_BOTO in given
        or _SIGNED.search(query) is not None
    )


def names_in(query: bytes) -> frozenset[bytes]:
    """Name the parameters of *query*."""
    return frozenset(unquote_to_bytes(each.partition(b"=")[0]) for each in query.split(b"&"))


def uploading(method: str, names: Collection[bytes]) -> str | None:
    """Name the step of an upload in parts that a request of a key is, if it is one."""
    found = (_UPLOADING[each] for each in _UPLOADING if each[0] == method and each[1] in names)
    return next(found, None)


def lists_objects(method: str, names: Collection[bytes], *, is_s3: bool) -> bool:
    """Return whether a request of a whole dataset is ListObjects or ListObjectsV2.

    ListObjects of an S3 client may have no parameter at all.
    """
    is_plain = is_s3 and method == "GET" and _OF_BUCKETS.isdisjoint(names)
    return is_plain or not _LISTING.isdisjoint(names)


def unserved(
    method: str, names: Collection[bytes], given: Mapping[bytes, bytes], *, of_key: bool
) -> str | None:
    """Name what the request asks for if it is an operation that only S3 has."""
    step = uploading(method, names) if of_key else None
    if step is not None:
        names = frozenset(names) - _OF_UPLOADS
    served = _OF_KEYS if of_key else _OF_BUCKETS
    for name in _SUBRESOURCES.intersection(names):
        if method not in {"GET", "HEAD"} or name not in served:
            return _operation(method, _first(names), of_key=of_key)
    if step is not None or method in {"PUT", "DELETE"}:
        sent = given.keys() | frozenset(names)  # presigned URLs have them in the query
        if given.get(b"x-amz-acl") in _PRIVATE:
            sent -= {b"x-amz-acl"}
        return next((_HEADERS[name] for name in _HEADERS if name in sent), None)
    return None


def _first(names: Collection[bytes]) -> bytes:
    """Take the name that tells most: ``uploadId`` before ``partNumber``."""
    known = sorted(_SUBRESOURCES.intersection(names))
    return next((name for name in (b"uploads", b"uploadId") if name in known), known[0])


def _operation(method: str, name: bytes, *, of_key: bool) -> str:
    if (known := _OPERATIONS.get((method, name))) is not None:
        return known
    noun = "".join(word[:1].upper() + word[1:] for word in name.decode().split("-"))
    return f"{method.capitalize()}{'Object' if of_key else 'Bucket'}{noun}"
