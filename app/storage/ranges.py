"""Ranges and versions as HTTP writes them (RFC 9110 §8.8, §14); nothing here waits."""

import hashlib
import re
from collections.abc import Mapping
from typing import Final

from app.errors import RangeNotSatisfiedError, VersionChangedError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, SuffixRange
from app.storage.contract import ObjectHeaders

_CONTENT_RANGE: Final = re.compile(rb"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_UNSATISFIED: Final = re.compile(rb"bytes \*/([0-9]{1,19})")
_STRONG: Final = re.compile(rb'"[\x21\x23-\x7e\x80-\xff]+"')
_DERIVED: Final = '"~'
METADATA: Final = b"x-amz-meta-"
_OF_USERS: Final = re.compile(METADATA + rb"(?!shardgate-)[a-z0-9!#$%&'*+.^_`|~-]+")
_VALUE: Final = re.compile(rb"[\t\x20-\x7e]*")
_FILLED_IN: Final = frozenset(
    {b"binary/octet-stream", b"application/octet-stream", b"application/x-www-form-urlencoded"}
)
_MAX_NBYTES: Final = 8192


def clamp(
    ref: ObjectRef, request: ByteRequest | None, size: int, if_match: Condition | None
) -> ByteRange:
    """Say which of the *size* bytes of *ref* answer *request*.

    Only an empty range may begin at the end. Who has a condition has seen the size, so that a
    range outside means another version.
    """
    if isinstance(request, SuffixRange):
        start, stop = max(0, size - request.length), size
    elif request is None:
        return ByteRange(0, size)
    else:
        start, stop = request.start, min(request.stop, size)
        if request.start == request.stop <= size:
            return request
    if start >= stop:
        raise RangeNotSatisfiedError(ref, size) if if_match is None else VersionChangedError(ref)
    return ByteRange(start, stop)


def range_header(request: ByteRequest) -> str:
    """Write *request*, which must not be empty, as the value of ``Range``."""
    if isinstance(request, SuffixRange):
        return f"bytes=-{request.length}"
    return f"bytes={request.start}-{request.stop - 1}"


def parse_content_range(text: bytes) -> tuple[ByteRange, int] | None:
    """Parse a ``Content-Range`` that tells the range and the size of the whole."""
    if (match := _CONTENT_RANGE.fullmatch(text)) is None:
        return None
    first, last, size = map(int, match.groups())
    return (ByteRange(first, last + 1), size) if first <= last < size else None


def parse_unsatisfied(text: bytes) -> int | None:
    """Parse the size of the whole from the ``Content-Range`` of a 416."""
    match = _UNSATISFIED.fullmatch(text)
    return int(match[1]) if match else None


def version(headers: Mapping[bytes, bytes], size: int) -> ETag:
    """Take the strong ETag, or derive one from what else changes with the object."""
    etag = headers.get(b"etag", b"")
    if _STRONG.fullmatch(etag):
        return ETag(etag.decode("latin-1"))
    return derived(b"%b\n%b\n%d" % (etag, headers.get(b"last-modified", b""), size))


def derived(facts: bytes) -> ETag:
    """Make a version of *facts* which no server tells; no object is in one that is of no facts."""
    return ETag(f'{_DERIVED}{hashlib.sha256(facts).hexdigest()[:32]}"')


def is_strong(etag: str) -> bool:
    """Tell whether *etag* is one that `version` takes as it is."""
    return _STRONG.fullmatch(etag.encode()) is not None


def is_gzip(headers: Mapping[bytes, bytes]) -> bool:
    """Tell whether the object was stored with gzip, and nothing else, as its content coding.

    ``aws-chunked`` is how an upload was framed; some servers keep it.
    """
    if (coding := headers.get(b"content-encoding")) is None:
        return False
    return [c for c in coding.lower().replace(b" ", b"").split(b",") if c != b"aws-chunked"] in (
        [b"gzip"],
        [b"x-gzip"],
    )


def is_derived(etag: ETag) -> bool:
    """Tell whether *etag* is ours and means nothing to the server."""
    return etag.startswith(_DERIVED)


def object_headers(headers: Mapping[bytes, bytes]) -> ObjectHeaders:
    """Take what an object is, or is to be, stored with from the headers of a message.

    Types that clients and servers fill in by themselves are none. User metadata is left out that is
    the service's own, is not ASCII, or is more than any server of S3 keeps.
    """
    content_type = headers.get(b"content-type", b"")
    if content_type in _FILLED_IN or not _VALUE.fullmatch(content_type):
        content_type = b""
    metadata = tuple(
        (name.removeprefix(METADATA).decode(), value.decode())
        for name, value in headers.items()
        if _OF_USERS.fullmatch(name) and _VALUE.fullmatch(value)
    )
    kept = ObjectHeaders(is_gzip(headers), content_type.decode(), metadata)
    return kept if kept.nbytes <= _MAX_NBYTES else ObjectHeaders(kept.is_gzip)
