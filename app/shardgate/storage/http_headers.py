"""Ranges, versions, dates and object headers as HTTP writes them (RFC 9110 §5.6.7, §8.8, §14)."""

import hashlib
import re
import time
from calendar import timegm
from collections.abc import Mapping
from email.utils import formatdate, parsedate_to_datetime
from functools import lru_cache
from typing import Final

from cachetools import LRUCache

from shardgate.model import (
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    ObjectRef,
    SuffixRange,
    UnmodifiedSince,
)
from shardgate.settings import Validator
from shardgate.storage.contract import ObjectHeaders

METADATA: Final = b"x-amz-meta-"
_CONTENT_RANGE: Final = re.compile(rb"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
_UNSATISFIED: Final = re.compile(rb"bytes \*/([0-9]{1,19})")
_STRONG: Final = re.compile(rb'"[\x21\x23-\x7e\x80-\xff]+"')
_DERIVED: Final = '"~'
_DATED: Final = re.compile(r'"~([0-9]{1,11})-[0-9]+"')  # modification time, to the year 5138; size
_USER_METADATA: Final = re.compile(METADATA + rb"(?!shardgate-)[a-z0-9!#$%&'*+.^_`|~-]+")
_VALUE: Final = re.compile(rb"[\t\x20-\x7e]*")
_DEFAULT_TYPES: Final = frozenset(
    {b"binary/octet-stream", b"application/octet-stream", b"application/x-www-form-urlencoded"}
)
CODING_ALIASES: Final = {"x-gzip": "gzip", "x-compress": "compress"}
# ``aws-chunked`` is a framing, and ``utf-8`` a charset, which some tools name in this place.
_NO_CODINGS: Final = frozenset({"", "identity", "none", "aws-chunked", "utf-8", "utf8"})
_STRONG_DATE_S: Final = 60


def read_headers(
    request: ByteRequest | None, if_match: Condition | None, if_none_match: ETag | None
) -> bytes:
    """Return the header lines of a conditional range request; *request* is not empty."""
    lines = ""
    if isinstance(request, SuffixRange):
        lines = f"Range: bytes=-{request.length}\r\n"
    elif request is not None:
        lines = f"Range: bytes={request.start}-{request.stop - 1}\r\n"
    if isinstance(if_match, UnmodifiedSince):
        lines += _unmodified_since(if_match.epoch_s)
    elif if_match is not None and not if_match.startswith(_DERIVED):
        lines += f"If-Match: {if_match}\r\n"
    # A derived version is unknown to the server; its time, if it has one, is not.
    elif if_match is not None and (dated := _DATED.fullmatch(if_match)):
        lines += _unmodified_since(int(dated[1]))
    if if_none_match is not None and not if_none_match.startswith(_DERIVED):
        lines += f"If-None-Match: {if_none_match}\r\n"
    return lines.encode("latin-1")


def _unmodified_since(epoch_s: int) -> str:
    return f"If-Unmodified-Since: {formatdate(epoch_s, usegmt=True)}\r\n"


def parse_content_range(text: bytes) -> tuple[ByteRange, int | None] | None:
    """Parse a ``Content-Range`` into the range and the size of the whole object, if it is told."""
    if (match := _CONTENT_RANGE.fullmatch(text)) is None:
        return None
    first, last = int(match[1]), int(match[2])
    size = None if match[3] == b"*" else int(match[3])
    is_valid = first <= last and (size is None or last < size)
    return (ByteRange(first, last + 1), size) if is_valid else None


def parse_unsatisfied(text: bytes) -> int | None:
    """Parse the size of the whole object from the ``Content-Range`` of a 416."""
    match = _UNSATISFIED.fullmatch(text)
    return int(match[1]) if match else None


def version_of(headers: Mapping[bytes, bytes], size: int, validator: Validator = "etag") -> ETag:
    """Return the strong ETag, or one derived from weak ETag, ``Last-Modified`` and size.

    With the *validator* ``last-modified`` it is made of that and the size, whatever the ETag is.
    """
    if validator == "last-modified" and (modified_s := last_modified(headers)) is not None:
        return ETag(f'{_DERIVED}{modified_s}-{size}"')
    # If-Match compares strongly: a weak ETag never matches (RFC 9110 §13.1.1).
    etag = headers.get(b"etag", b"")
    if _STRONG.fullmatch(etag):
        return ETag(etag.decode("latin-1"))
    return derive_etag(b"%b\n%b\n%d" % (etag, headers.get(b"last-modified", b""), size))


class VersionWatch:
    """Notices servers that give one version of an object several ETags.

    A modification time of a minute ago names a version as surely as an ETag (RFC 9110 §8.8.2.2).
    """

    def __init__(self) -> None:
        # Last version by time and size, its ETag, and whether it had another one before.
        self._versions: LRUCache[ObjectRef, tuple[tuple[int, int], ETag, bool]] = LRUCache(8192)

    def note(self, ref: ObjectRef, headers: Mapping[bytes, bytes], size: int, etag: ETag) -> None:
        modified_s = last_modified(headers)
        now_s = date_of(headers)
        if modified_s is None or now_s is None or now_s - modified_s < _STRONG_DATE_S:
            return
        version = (modified_s, size)
        known_version, known_etag, had_several = self._versions.get(ref, (version, etag, False))
        has_several = known_version == version and (had_several or known_etag != etag)
        self._versions[ref] = version, etag, has_several

    def alternates(self, ref: ObjectRef) -> bool:
        """Return whether the last version of *ref* had several ETags."""
        return ref in self._versions and self._versions[ref][2]


def derive_etag(facts: bytes) -> ETag:
    """Return an ETag that no server sends, made of *facts*."""
    return ETag(f'{_DERIVED}{hashlib.sha256(facts).hexdigest()[:32]}"')


def is_derived(etag: ETag) -> bool:
    """Return whether *etag* was made by `derive_etag`, and means nothing to the server."""
    return etag.startswith(_DERIVED)


def is_strong(etag: str) -> bool:
    """Return whether *etag* is a strong one that `version_of` returns unchanged."""
    return _STRONG.fullmatch(etag.encode()) is not None


def content_coding(headers: Mapping[bytes, bytes]) -> str:
    """Return ``Content-Encoding`` as a list of registered names, in the order of their use."""
    if (listed := headers.get(b"content-encoding")) is None:
        return ""
    names = (each.strip() for each in listed.decode("latin-1").lower().split(","))
    return ", ".join(CODING_ALIASES.get(name, name) for name in names if name not in _NO_CODINGS)


def last_modified(headers: Mapping[bytes, bytes]) -> int | None:
    """Return ``Last-Modified`` in seconds since the Unix epoch, `None` if it is no date."""
    return parse_date(headers.get(b"last-modified", b"").decode("latin-1"))


def skew_of(headers: Mapping[bytes, bytes]) -> int:
    """Return by how many seconds the clock of the server is ahead of ours, 0 if unknown."""
    return 0 if (date_s := date_of(headers)) is None else date_s - int(time.time())


def date_of(headers: Mapping[bytes, bytes]) -> int | None:
    """Return ``Date`` in seconds since the Unix epoch, `None` if it is no date."""
    return parse_date(headers.get(b"date", b"").decode("latin-1"))


@lru_cache(maxsize=1024)
def parse_date(text: str) -> int | None:
    """Parse an HTTP date into seconds since the Unix epoch; `None` for no date, or several."""
    try:
        epoch_s = timegm(parsedate_to_datetime(text).utctimetuple())
    except (ValueError, OverflowError):
        return None
    return None if text.count(",") > 1 else epoch_s


def object_headers(headers: Mapping[bytes, bytes]) -> ObjectHeaders:
    """Return the headers of a request or response that belong to the stored object.

    Content types that clients and servers fill in by default are dropped, and so is user metadata
    that is the service's own, is not ASCII, or is more than any S3 server keeps.
    """
    content_type = headers.get(b"content-type", b"")
    if content_type in _DEFAULT_TYPES or not _VALUE.fullmatch(content_type):
        content_type = b""
    metadata = [
        (name.removeprefix(METADATA).decode(), value.decode())
        for name, value in headers.items()
        if _USER_METADATA.fullmatch(name) and _VALUE.fullmatch(value)
    ]
    kept = ObjectHeaders(content_coding(headers), content_type.decode(), tuple(metadata))
    return kept if kept.nbytes <= 8 * 1024 else ObjectHeaders(kept.coding)
