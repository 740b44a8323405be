"""Dialect of S3: which requests are S3's, which of its operations are served, and its XML."""

import base64
import binascii
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, Self
from urllib.parse import parse_qsl, quote, unquote_to_bytes
from xml.etree import ElementTree as ET
from xml.parsers import expat

from app import errors
from app.errors import BadBodyError, BadHeaderError, ShardgateError, UnsupportedError
from app.formats.listing import Window
from app.http.conditions import is_http_date
from app.http.paths import check_key
from app.http.problems import Headers, status_headers, status_of
from app.model import ETag
from app.resolve.listing import Page
from app.resolve.write import Outcome

MEDIA_TYPE: Final = b"application/xml"
NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
MAX_DELETED_KEYS: Final = 1000
MAX_DOCUMENT_NBYTES: Final = 4 * 1024**2
"""Longest XML document that a client may send."""
_MAX_KEYS: Final = 1000
"""Most keys of one page of a listing."""
_COUNT: Final = re.compile("[0-9]{1,18}")
_SPACE: Final = 32

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
_CODES_OF_ERRORS: Final[dict[type[ShardgateError], str]] = {
    errors.BadHeaderError: "InvalidArgument",
    errors.BadParameterError: "InvalidArgument",
    errors.BadPartError: "InvalidPart",
    errors.DigestError: "BadDigest",
    errors.PartOrderError: "InvalidPartOrder",
    errors.UnknownDatasetError: "NoSuchBucket",
    errors.UnknownUploadError: "NoSuchUpload",
}
"""Codes that are more specific than that of the status."""
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

_SIGNED: Final = re.compile(
    rb"(?i:(?:^|&)(?:X-Amz-(?:Algorithm|Signature|Credential)|AWSAccessKeyId|x-id|list-type)=)"
)
_SIGNATURES: Final = (b"AWS4-", b"AWS ")
_BOTO_HEADER: Final = b"amz-sdk-invocation-id"
"""botocore sends it with unsigned requests too."""

_UPLOAD_STEPS: Final = {
    ("POST", b"uploads"): "CreateMultipartUpload",
    ("PUT", b"uploadId"): "UploadPart",
    ("POST", b"uploadId"): "CompleteMultipartUpload",
    ("DELETE", b"uploadId"): "AbortMultipartUpload",
}
_UPLOAD_PARAMETERS: Final = frozenset({b"uploads", b"uploadId", b"partNumber"})
_OPERATIONS: Final = _UPLOAD_STEPS | {
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
_SERVED_OF_BUCKETS: Final = frozenset({b"location", b"versioning"})
_SERVED_OF_KEYS: Final = frozenset({b"tagging"})
"""Subresources that GET and HEAD serve."""
_LIST_PARAMETERS: Final = frozenset(
    b"list-type delimiter encoding-type marker max-keys prefix".split()
)
_UNSERVED_HEADERS: Final = {
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
"""Headers that change the meaning of a write, so that it must not be done without them."""
_PRIVATE_ACLS: Final = (b"private", b"bucket-owner-full-control")
"""Access lists that grant nothing; some clients always send one."""


def speaks_s3(headers: Mapping[bytes, bytes], query: bytes) -> bool:
    """Return whether a request comes from an S3 client: signed, ``x-id`` or ``list-type``."""
    return (
        headers.get(b"authorization", b"").startswith(_SIGNATURES)
        or _BOTO_HEADER in headers
        or _SIGNED.search(query) is not None
    )


def parameter_names(query: bytes) -> frozenset[bytes]:
    """Return the decoded names of the parameters of *query*."""
    return frozenset(unquote_to_bytes(each.partition(b"=")[0]) for each in query.split(b"&"))


def upload_step(method: str, names: Collection[bytes]) -> str | None:
    """Return the operation of a multipart upload that a request of a key is, if any."""
    steps = (
        _UPLOAD_STEPS[each] for each in _UPLOAD_STEPS if each[0] == method and each[1] in names
    )
    return next(steps, None)


def lists_objects(method: str, names: Collection[bytes], *, is_s3: bool) -> bool:
    """Return whether a request of a dataset is ListObjects, maybe bare, or ListObjectsV2."""
    is_plain = is_s3 and method == "GET" and _SERVED_OF_BUCKETS.isdisjoint(names)
    return is_plain or not _LIST_PARAMETERS.isdisjoint(names)


def unserved_operation(
    method: str, names: Collection[bytes], headers: Mapping[bytes, bytes], *, of_key: bool
) -> str | None:
    """Return the name of the S3 operation that a request is, if that is not served here."""
    step = upload_step(method, names) if of_key else None
    if step is not None:
        names = frozenset(names) - _UPLOAD_PARAMETERS
    served = _SERVED_OF_KEYS if of_key else _SERVED_OF_BUCKETS
    for name in _SUBRESOURCES.intersection(names):
        if method not in {"GET", "HEAD"} or name not in served:
            return _operation(method, names, of_key=of_key)
    if step is not None or method in {"PUT", "DELETE"}:
        sent = headers.keys() | frozenset(names)  # presigned URLs have them in the query
        if headers.get(b"x-amz-acl") in _PRIVATE_ACLS:
            sent -= {b"x-amz-acl"}
        return next((_UNSERVED_HEADERS[name] for name in _UNSERVED_HEADERS if name in sent), None)
    return None


def _operation(method: str, names: Collection[bytes], *, of_key: bool) -> str:
    """Name an operation by its subresource; ``uploadId`` says more than ``partNumber``."""
    known = sorted(_SUBRESOURCES.intersection(names))
    name = next((name for name in (b"uploads", b"uploadId") if name in known), known[0])
    if (operation := _OPERATIONS.get((method, name))) is not None:
        return operation
    noun = "".join(word[:1].upper() + word[1:] for word in name.decode().split("-"))
    return f"{method.capitalize()}{'Object' if of_key else 'Bucket'}{noun}"


@dataclass(frozen=True, slots=True)
class ListRequest:
    """Query of ListObjectsV2, or of ListObjects, which has no list-type."""

    window: Window
    limit: int
    parameters: Mapping[str, str]

    @classmethod
    def parse(cls, query_string: bytes) -> Self:
        """Parse a query. Raises: `BadHeaderError`, or `BadKeyError` for an invalid prefix."""
        parameters = _parse_query(query_string)
        if (delimiter := parameters.get("delimiter", "")) not in ("", "/"):
            raise BadHeaderError("keys can be folded at '/' only")
        limit = parameters.get("max-keys", str(_MAX_KEYS))
        if not _COUNT.fullmatch(limit):
            raise BadHeaderError("max-keys is no number")
        if "list-type" not in parameters:
            after = parameters.get("marker", "")
        elif (token := parameters.get("continuation-token")) is None:
            after = parameters.get("start-after", "")
        else:
            after = _decode_token(token)
        prefix = parameters.get("prefix", "")
        check_key(prefix[: prefix.rfind("/") + 1])
        window = Window(prefix, after, delimiter)
        return cls(window, min(int(limit), _MAX_KEYS), parameters)

    def format(self, bucket: str, page: Page) -> bytes:
        """Format *page* as XML."""
        spell = quote if self.parameters.get("encoding-type") == "url" else str
        root = ET.Element("ListBucketResult", xmlns=NAMESPACE)
        _add(root, self._summary(bucket, page, spell))
        for key, nbytes, etag, modified_s in page.entries:
            if nbytes is None:
                _add(ET.SubElement(root, "CommonPrefixes"), {"Prefix": spell(key)})
                continue
            contents = {
                "Key": spell(key),
                "LastModified": format_time(modified_s or 0),
                "ETag": etag,
                "Size": str(nbytes),
                "StorageClass": "STANDARD",
            }
            _add(ET.SubElement(root, "Contents"), contents)
        return _serialize(root)

    def _summary(
        self, bucket: str, page: Page, spell: Callable[[str], str]
    ) -> Mapping[str, str | None]:
        parameters = self.parameters
        summary = {
            "Name": bucket,
            "Prefix": spell(self.window.prefix),
            "Delimiter": self.window.delimiter or None,
            "EncodingType": parameters.get("encoding-type"),
            "MaxKeys": str(self.limit),
            "IsTruncated": "false" if page.after is None else "true",
        }
        if "list-type" in parameters:
            token = page.after and base64.urlsafe_b64encode(page.after.encode()).decode()
            return summary | {
                "StartAfter": spell(parameters.get("start-after", "")) or None,
                "ContinuationToken": parameters.get("continuation-token"),
                "KeyCount": str(len(page.entries)),
                "NextContinuationToken": token,
            }
        # S3 has NextMarker with a delimiter only, but a page may end behind its last key.
        return summary | {
            "Marker": spell(parameters.get("marker", "")),
            "NextMarker": page.after and spell(page.after),
        }


def _parse_query(query_string: bytes) -> dict[str, str]:
    try:
        text = query_string.decode("ascii")
        parameters = dict(parse_qsl(text, keep_blank_values=True, errors="strict"))
    except ValueError:
        raise BadHeaderError("the query is not percent-encoded UTF-8") from None
    if parameters.get("list-type", "2") != "2":
        raise BadHeaderError("list-type is 2 for ListObjectsV2, and absent for ListObjects")
    is_encoded = parameters.get("encoding-type") == "url"
    if not is_encoded and any(ord(letter) < _SPACE for letter in "".join(parameters.values())):
        raise BadHeaderError("control characters go with encoding-type=url only")
    return parameters


def _decode_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise BadHeaderError("the continuation-token was not made by this service") from None


def error_code(status: HTTPStatus, error: ShardgateError | None = None) -> str:
    """Return S3's code of an error."""
    if isinstance(error, errors.SignatureError):
        return error.code
    special = None if error is None else _CODES_OF_ERRORS.get(type(error))
    return special or _CODES.get(status, "InternalError")


def error_document(
    status: HTTPStatus, code: str, detail: str, request_id: str, request: Mapping[bytes, bytes]
) -> tuple[Headers, bytes]:
    """Return the headers and body of an S3 error; of 412 it names the condition in *request*."""
    conditions = [_CONDITIONS[name] for name in _CONDITIONS if name in request]
    is_known = status is HTTPStatus.PRECONDITION_FAILED and len(conditions) == 1
    body = _document(
        "Error",
        {
            "Code": code,
            "Message": _printable(detail),
            "Condition": conditions[0] if is_known else None,
            "RequestId": request_id,
        },
        namespace=None,
    )
    headers = [(b"content-type", MEDIA_TYPE), (b"content-length", b"%d" % len(body))]
    return headers + status_headers(status), body


def bucket_list(names: Iterable[str]) -> bytes:
    """Format the result of ListBuckets."""
    root = ET.Element("ListAllMyBucketsResult", xmlns=NAMESPACE)
    _add(ET.SubElement(root, "Owner"), {"ID": "shardgate", "DisplayName": "shardgate"})
    buckets = ET.SubElement(root, "Buckets")
    for name in names:
        _add(ET.SubElement(buckets, "Bucket"), {"Name": name, "CreationDate": format_time(0)})
    return _serialize(root)


def bucket_property(names: frozenset[bytes]) -> bytes:
    """Format the result of GetBucketLocation or GetBucketVersioning: the defaults."""
    name = "LocationConstraint" if b"location" in names else "VersioningConfiguration"
    return _document(name, {})


def no_tags() -> bytes:
    """Format the result of GetObjectTagging: no object has tags."""
    return _document("Tagging", {"TagSet": ""})


def upload_created(bucket: str, key: str, upload_id: str) -> bytes:
    """Format the result of CreateMultipartUpload."""
    texts = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    return _document("InitiateMultipartUploadResult", texts)


def upload_completed(bucket: str, key: str, location: str, etag: str) -> bytes:
    """Format the result of CompleteMultipartUpload."""
    texts = {"Location": location, "Bucket": bucket, "Key": key, "ETag": etag}
    return _document("CompleteMultipartUploadResult", texts)


def copied(name: str, etag: ETag | None) -> bytes:
    """Format the result of CopyObject or UploadPartCopy, whose root is called *name*."""
    return _document(name, {"LastModified": format_time(time.time()), "ETag": etag})


def deleted(keys: Sequence[str], outcomes: Sequence[Outcome], *, is_quiet: bool) -> bytes:
    """Format the result of DeleteObjects."""
    root = ET.Element("DeleteResult", xmlns=NAMESPACE)
    for key, outcome in zip(keys, outcomes, strict=True):
        if isinstance(outcome, ShardgateError):
            code = error_code(status_of(outcome), outcome)
            texts = {"Key": key, "Code": code, "Message": _printable(str(outcome))}
            _add(ET.SubElement(root, "Error"), texts)
        elif not is_quiet:
            _add(ET.SubElement(root, "Deleted"), {"Key": key})
    return _serialize(root)


def format_time(epoch_s: float) -> str:
    """Format a time in whole seconds, like Last-Modified; what is no HTTP date as 1970."""
    known_s = int(epoch_s) if is_http_date(epoch_s) else 0
    text = datetime.fromtimestamp(known_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _document(
    name: str, texts: Mapping[str, str | None], namespace: str | None = NAMESPACE
) -> bytes:
    root = ET.Element(name, {} if namespace is None else {"xmlns": namespace})
    _add(root, texts)
    return _serialize(root)


def _add(parent: ET.Element, texts: Mapping[str, str | None]) -> None:
    """Add an element for each of *texts* that is not `None`."""
    for name, text in texts.items():
        if text is not None:
            ET.SubElement(parent, name).text = text


def _serialize(root: ET.Element) -> bytes:
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def _printable(text: str) -> str:
    return _NOT_XML.sub("?", text)


@dataclass
class Deletion:
    """Body of DeleteObjects: keys, each with the ETag that it must have, if any."""

    keys: list[tuple[str, str | None]] = field(default_factory=list)
    is_quiet: bool = False


def parse_deletion(body: bytes) -> Deletion:
    """Parse the body of DeleteObjects. Raises: `BadBodyError`, `UnsupportedError`."""
    deletion = Deletion()

    def add(texts: Mapping[str, str]) -> None:
        if unserved := _UNSERVED_OF_DELETION & texts.keys():
            raise UnsupportedError(f"DeleteObjects by {min(unserved)} is not served")
        if not texts.get("Key"):
            raise BadBodyError("an Object of the body has no Key")
        deletion.keys.append((texts["Key"], texts.get("ETag")))
        if len(deletion.keys) > MAX_DELETED_KEYS:
            raise BadBodyError(f"the body names more than {MAX_DELETED_KEYS} keys")

    members = {"Key", "ETag", *_UNSERVED_OF_DELETION}
    texts = read_records(body, ("Delete", "Object"), members, add, others={"Quiet"})
    deletion.is_quiet = texts.get("Quiet", "").strip() == "true"
    if not deletion.keys:
        raise BadBodyError("the body names no key")
    return deletion


_UNSERVED_OF_DELETION: Final = frozenset({"VersionId", "Size", "LastModifiedTime"})


def read_records(
    body: bytes,
    path: tuple[str, str],
    members: Collection[str] | None,
    add: Callable[[Mapping[str, str]], None],
    *,
    others: Collection[str] = (),
) -> Mapping[str, str]:
    """Parse an XML list of records, without a tree and without a DTD.

    *path* names the root and the element of a record. A record has text elements called as
    *members*, or anyhow if that is `None`; each is passed to *add* when it ends. Returns the texts
    of *others*, elements of the root.

    Raises: `BadBodyError`, and what *add* raises.
    """
    reader = _RecordReader(path, members, add, others)
    parser = expat.ParserCreate("utf-8", namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = reader.refuse
    parser.StartElementHandler = reader.begin
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.read
    try:
        parser.Parse(body, True)  # noqa: FBT003  it takes no keyword
    except expat.ExpatError as error:
        raise BadBodyError(f"the body is no XML: {error}") from None
    return reader.others


class _RecordReader:
    """Callbacks of expat for `read_records`."""

    def __init__(
        self,
        path: tuple[str, str],
        members: Collection[str] | None,
        add: Callable[[Mapping[str, str]], None],
        others: Collection[str],
    ) -> None:
        self.others: dict[str, str] = {}
        self._record_path = path
        self._members = members
        self._add = add
        self._other_names = others
        self._path: tuple[str, ...] = ()
        self._text = ""
        self._record: dict[str, str] = {}

    def refuse(self, *_: object) -> None:
        raise BadBodyError("the body has a document type, which is not read")

    def begin(self, name: str, _: object) -> None:
        self._path = (*self._path, name.rpartition(" ")[2])
        self._text = ""
        if not self._is_known():
            raise BadBodyError(f"the body has an element {self._path[-1]} where none belongs")
        if self._path == self._record_path:
            self._record = {}

    def read(self, text: str) -> None:
        self._text += text

    def end(self, _: str) -> None:
        *parent, name = self._path
        if self._path == self._record_path:
            self._add(self._record)
        elif tuple(parent) == self._record_path:
            self._record[name] = self._text
        elif parent:
            self.others[name] = self._text
        self._path = tuple(parent)

    def _is_known(self) -> bool:
        *parent, name = self._path
        if tuple(parent) == self._record_path:
            return self._members is None or name in self._members
        is_other = tuple(parent) == self._record_path[:1] and name in self._other_names
        return is_other or self._path == self._record_path[: len(self._path)]
