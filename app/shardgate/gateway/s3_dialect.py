"""Dialect of S3: which requests are S3's, which of its operations are served, and its XML."""

import base64
import binascii
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, NamedTuple, Self
from urllib.parse import parse_qsl, quote, unquote_to_bytes
from xml.etree import ElementTree as ET

from shardgate import errors
from shardgate.errors import BadBodyError, BadHeaderError, ShardgateError, UnsupportedError
from shardgate.formats.listing import Window
from shardgate.model import ETag
from shardgate.read.listing import Page
from shardgate.server.conditions import is_http_date
from shardgate.server.problems import Failure, status_headers, status_of
from shardgate.server.request import Request, Response, check_key
from shardgate.server.responses import Explain
from shardgate.write.writer import Outcome

MEDIA_TYPE: Final = b"application/xml"
NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
MAX_DELETED_KEYS: Final = 1000
MAX_DOCUMENT_NBYTES: Final = 4 * 1024**2
"""Longest XML document that a client may send."""
_MAX_ELEMENTS: Final = 100_000  # most elements of it: an upload has up to 10,000 parts
_MAX_KEYS: Final = 1000  # most keys of one page of a listing
_COUNT: Final = re.compile("[0-9]{1,18}")
type Members = Mapping[str, str | "Members" | list["Members"] | None]
"""Content of an XML element: `None` is left out, a list has several elements of one name."""

_CODES: Final = {
    HTTPStatus.UNAUTHORIZED: "AccessDenied",
    HTTPStatus.FORBIDDEN: "AccessDenied",
    HTTPStatus.NOT_FOUND: "NoSuchKey",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowed",
    HTTPStatus.REQUEST_TIMEOUT: "RequestTimeout",
    HTTPStatus.LENGTH_REQUIRED: "MissingContentLength",
    HTTPStatus.PRECONDITION_FAILED: "PreconditionFailed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "EntityTooLarge",
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: "InvalidRange",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplemented",
    HTTPStatus.LOCKED: "AccessDenied",
    HTTPStatus.FAILED_DEPENDENCY: "FailedDependency",
    HTTPStatus.TOO_MANY_REQUESTS: "SlowDown",
    HTTPStatus.SERVICE_UNAVAILABLE: "SlowDown",
}
# Codes that are more specific than that of the status.
_CODES_OF_ERRORS: Final[dict[type[ShardgateError], str]] = {
    errors.BadHeaderError: "InvalidArgument",
    errors.BadParameterError: "InvalidArgument",
    errors.BadPartError: "InvalidPart",
    errors.DigestError: "BadDigest",
    errors.PartOrderError: "InvalidPartOrder",
    errors.PreconditionRequiredError: "PreconditionRequired",
    errors.UnknownDatasetError: "NoSuchBucket",
    errors.UnknownUploadError: "NoSuchUpload",
}
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
_UPLOAD_STEPS: Final = {
    ("POST", b"uploads"): "CreateMultipartUpload",
    ("PUT", b"uploadId"): "UploadPart",
    ("POST", b"uploadId"): "CompleteMultipartUpload",
    ("DELETE", b"uploadId"): "AbortMultipartUpload",
}
_UPLOAD_PARAMETERS: Final = frozenset({b"uploads", b"uploadId", b"partNumber"})
# Parameters that change what a request is about, and with that the meaning of its response.
_SUBRESOURCES: Final = frozenset(
    b"accelerate acl analytics attributes cors encryption intelligent-tiering inventory"
    b" legal-hold lifecycle location logging metadataTable metrics notification object-lock"
    b" ownershipControls partNumber policy policyStatus publicAccessBlock renameObject"
    b" replication requestPayment response-cache-control response-content-disposition"
    b" response-content-encoding response-content-language response-content-type response-expires"
    b" restore retention select session tagging torrent uploadId uploads versionId versioning"
    b" versions website".split()
)
# Subresources that GET and HEAD serve.
_SERVED_OF_BUCKETS: Final = frozenset({b"location", b"versioning"})
_OF_LISTINGS: Final = frozenset(b"list-type delimiter encoding-type marker max-keys prefix".split())
# Headers that change the meaning of a write, so that it must not be done without them.
_UNSERVED_HEADERS: Final = frozenset(
    b"if-unmodified-since x-amz-acl x-amz-grant-full-control x-amz-grant-read"
    b" x-amz-grant-read-acp x-amz-grant-write-acp x-amz-if-match-last-modified-time"
    b" x-amz-if-match-size x-amz-object-lock-legal-hold x-amz-object-lock-mode"
    b" x-amz-server-side-encryption-customer-algorithm x-amz-tagging"
    b" x-amz-website-redirect-location x-amz-write-offset-bytes".split()
)


def speaks_s3(request: Request) -> bool:
    """Return whether *request* comes from an S3 client: signed, ``x-id`` or ``list-type``."""
    return (
        request.headers.get(b"authorization", b"").startswith((b"AWS4-", b"AWS "))
        or b"amz-sdk-invocation-id" in request.headers  # botocore sends it unsigned, too
        or _SIGNED.search(request.query) is not None
    )


def parameter_names(query: bytes) -> frozenset[bytes]:
    """Return the decoded names of the parameters of *query*."""
    names = (each.partition(b"=")[0] for each in query.split(b"&") if each)
    return frozenset(map(unquote_to_bytes, names))


def upload_step(method: str, names: Collection[bytes]) -> str | None:
    """Return the operation of a multipart upload that a request of a key is, if any."""
    for (step_method, parameter), step in _UPLOAD_STEPS.items():
        if method == step_method and parameter in names:
            return step
    return None


def describes_bucket(names: Collection[bytes]) -> bool:
    """Return whether a request of a dataset is GetBucketLocation or GetBucketVersioning."""
    return not _SERVED_OF_BUCKETS.isdisjoint(names)


def lists_objects(method: str, names: Collection[bytes], *, is_s3: bool) -> bool:
    """Return whether a request of a dataset is ListObjects, maybe bare, or ListObjectsV2."""
    is_plain = is_s3 and method == "GET" and not describes_bucket(names)
    return is_plain or not _OF_LISTINGS.isdisjoint(names)


def demand_served(
    method: str,
    names: frozenset[bytes],
    headers: Mapping[bytes, bytes],
    *,
    of_key: bool,
    step: str | None = None,
) -> None:
    """Check that neither parameters nor headers make a request, which may be a *step* of an upload,
    an operation of S3 that is not served. Raises: `UnsupportedError`.
    """
    if step is not None:
        names -= _UPLOAD_PARAMETERS
    elif method in {"GET", "HEAD"}:
        names -= {b"tagging"} if of_key else _SERVED_OF_BUCKETS
    found = names & _SUBRESOURCES
    if step is not None or method in {"PUT", "DELETE"}:
        sent = set(headers)
        # Some clients always send an access list, which grants nothing.
        if headers.get(b"x-amz-acl") in {b"private", b"bucket-owner-full-control"}:
            sent.remove(b"x-amz-acl")
        # Presigned URLs have in the query what others have in headers.
        found |= _UNSERVED_HEADERS & (names | sent)
    if found:
        raise UnsupportedError(f"{method} with {min(found).decode()} is not served")


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
        contents: list[Members] = [
            {
                "Key": spell(key),
                "LastModified": format_time(modified_s or 0),
                "ETag": etag,
                "Size": str(nbytes),
                "StorageClass": "STANDARD",
            }
            for key, nbytes, etag, modified_s in page.entries
            if nbytes is not None
        ]
        folders: list[Members] = [
            {"Prefix": spell(key)} for key, nbytes, _, _ in page.entries if nbytes is None
        ]
        summary = self._summary(bucket, page, spell)
        return to_xml(
            "ListBucketResult", {**summary, "Contents": contents, "CommonPrefixes": folders}
        )

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
    if not is_encoded and any(letter < " " for letter in "".join(parameters.values())):
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
    if error is not None and type(error) in _CODES_OF_ERRORS:
        return _CODES_OF_ERRORS[type(error)]
    is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return _CODES.get(status, "InternalError" if is_ours else "InvalidRequest")


def explain_to_s3(others: Explain) -> Explain:
    """Return a function that explains failures to S3 clients, and by *others* to all others."""

    async def explain(request: Request, failure: Failure) -> Response:
        if not speaks_s3(request):
            return await others(request, failure)
        status = failure.status
        if status is HTTPStatus.UNAUTHORIZED:  # which S3 does not know
            status = HTTPStatus.FORBIDDEN
        return error_document(request, status, error_code(status, failure.error), failure.detail)

    return explain


def error_document(request: Request, status: HTTPStatus, code: str, detail: str) -> Response:
    """Return an S3 error; one of 412 names the condition in *request*."""
    conditions = [_CONDITIONS[name] for name in _CONDITIONS if name in request.headers]
    is_known = status is HTTPStatus.PRECONDITION_FAILED and len(conditions) == 1
    members = {
        "Code": code,
        "Message": detail,
        "Condition": conditions[0] if is_known else None,
        "RequestId": request.id.decode(),
    }
    body = to_xml("Error", members, namespace=None)
    headers = [(b"content-type", MEDIA_TYPE), (b"content-length", b"%d" % len(body))]
    return Response(status, headers + status_headers(status), body)


def bucket_list(names: Iterable[str]) -> bytes:
    """Format the result of ListBuckets."""
    buckets: list[Members] = [{"Name": name, "CreationDate": format_time(0)} for name in names]
    owner = {"ID": "shardgate", "DisplayName": "shardgate"}
    return to_xml("ListAllMyBucketsResult", {"Owner": owner, "Buckets": {"Bucket": buckets}})


def bucket_property(names: frozenset[bytes]) -> bytes:
    """Format the result of GetBucketLocation or GetBucketVersioning: the defaults."""
    return to_xml("LocationConstraint" if b"location" in names else "VersioningConfiguration", {})


def no_tags() -> bytes:
    """Format the result of GetObjectTagging: no object has tags."""
    return to_xml("Tagging", {"TagSet": ""})


def copied(name: str, etag: ETag | None) -> bytes:
    """Format the result of CopyObject or UploadPartCopy, whose root is called *name*."""
    return to_xml(name, {"LastModified": format_time(time.time()), "ETag": etag})


def deleted(keys: Sequence[str], outcomes: Sequence[Outcome], *, is_quiet: bool) -> bytes:
    """Format the result of DeleteObjects."""
    done: list[Members] = []
    failed: list[Members] = []
    for key, outcome in zip(keys, outcomes, strict=True):
        if isinstance(outcome, ShardgateError):
            code = error_code(status_of(outcome), outcome)
            failed.append({"Key": key, "Code": code, "Message": str(outcome)})
        elif not is_quiet:
            done.append({"Key": key})
    return to_xml("DeleteResult", {"Deleted": done, "Error": failed})


def format_time(epoch_s: float) -> str:
    """Format a time in whole seconds, like Last-Modified; as 1970 if it is not an HTTP date."""
    known_s = int(epoch_s) if is_http_date(epoch_s) else 0
    text = datetime.fromtimestamp(known_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def to_xml(name: str, members: Members, namespace: str | None = NAMESPACE) -> bytes:
    """Format an element called *name*; what XML cannot hold becomes a question mark."""
    root = ET.Element(name, {} if namespace is None else {"xmlns": namespace})
    _fill(root, members)
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def _fill(parent: ET.Element, members: Members) -> None:
    for name, value in members.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                _fill(ET.SubElement(parent, name), each)
            elif each is not None:
                ET.SubElement(parent, name).text = _NOT_XML.sub("?", each)


class Deletion(NamedTuple):
    """Body of DeleteObjects: keys, each with the ETag that it must have, if any."""

    keys: list[tuple[str, str | None]]
    is_quiet: bool


def parse_deletion(body: bytes) -> Deletion:
    """Parse the body of DeleteObjects. Raises: `BadBodyError`, `UnsupportedError`."""
    root = parse_xml(body, "Delete", {"Object", "Quiet"})
    keys: list[tuple[str, str | None]] = []
    for texts in map(texts_of, root.findall("Object")):
        if unserved := {"VersionId", "Size", "LastModifiedTime"} & texts.keys():
            raise UnsupportedError(f"DeleteObjects by {min(unserved)} is not served")
        if not texts.get("Key") or texts.keys() - {"Key", "ETag"}:
            raise BadBodyError("an Object of the body has a Key, and maybe an ETag")
        keys.append((texts["Key"], texts.get("ETag")))
    if not 0 < len(keys) <= MAX_DELETED_KEYS:
        raise BadBodyError(f"the body names {len(keys)} keys, not 1 to {MAX_DELETED_KEYS}")
    return Deletion(keys, root.findtext("Quiet", "").strip() == "true")


class _TreeBuilder(ET.TreeBuilder):
    """Builds a bounded tree without namespaces, and refuses a DTD."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def start(self, tag: str, attrs: dict[str, str], /) -> ET.Element:
        self._count += 1
        if self._count > _MAX_ELEMENTS:
            raise BadBodyError(f"the body has more than {_MAX_ELEMENTS} elements")
        return super().start(tag.rpartition("}")[2], attrs)

    def end(self, tag: str, /) -> ET.Element:
        return super().end(tag.rpartition("}")[2])

    def start_ns(self, _: str, uri: str) -> None:
        longest = 256  # the parser writes it in front of the name of each element
        if len(uri) > longest:
            raise BadBodyError("the body has a namespace of a very long name")

    def doctype(self, *_: object) -> None:
        raise BadBodyError("the body has a document type, which is not read")


def parse_xml(body: bytes, name: str, members: Collection[str]) -> ET.Element:
    """Parse an element *name* that has some of *members*. Raises: `BadBodyError`."""
    parser = ET.XMLParser(target=_TreeBuilder(), encoding="utf-8")  # noqa: S314
    nbytes = 16 * 1024  # after an error the parser goes on to the end of what it was fed
    try:
        for at in range(0, len(body), nbytes):
            parser.feed(body[at : at + nbytes])
        root: ET.Element = parser.close()
    except ET.ParseError as error:
        raise BadBodyError(f"the body is no XML: {error}") from None
    if root.tag != name or not {each.tag for each in root} <= set(members):
        raise BadBodyError(f"the body is no {name} of {', '.join(sorted(members))}")
    return root


def texts_of(record: ET.Element) -> Mapping[str, str]:
    """Return the texts of the members of *record* by name. Raises: `BadBodyError`."""
    if any(map(len, record)):
        raise BadBodyError(f"the members of {record.tag} in the body must be texts")
    return {each.tag: each.text or "" for each in record}
