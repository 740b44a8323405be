"""Which part of an entity a request gets: preconditions first, then Range (RFC 9110 §13.2.2)."""

import re
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Final, NamedTuple

from app.http.ranges import UnsatisfiableError, parse_range, resolve_range
from app.model import EVERYTHING, ByteRange, ByteRequest, ETag
from app.resolve.bodies import Coding, Entity
from app.storage.http_headers import parse_date

_TAG: Final = re.compile(r'(W/)?("[\x21\x23-\x7e\x80-\xff]*")')
_NO_WEIGHT: Final = re.compile(rb"\s*q=0(?:\.0*)?\s*")
_FIELDS: Final = {
    b"range": "range",
    b"if-match": "if_match",
    b"if-none-match": "if_none_match",
    b"if-range": "if_range",
    b"if-modified-since": "if_modified_since",
    b"if-unmodified-since": "if_unmodified_since",
}


class Selection(NamedTuple):
    """The status of an answer, and the part of the entity that is its body."""

    status: HTTPStatus
    part: ByteRange | None = None
    """What the headers describe; `None` for answers without a representation."""
    reads: ByteRange | None = None
    """What is sent: *part*, or nothing for HEAD."""
    is_gzip: bool = False
    """Whether the entity is sent as the gzip that is stored."""


class Conditions(NamedTuple):
    """What the method and headers of a request ask of an entity."""

    is_head: bool = False
    range: str | None = None
    if_match: str | None = None
    if_none_match: str | None = None
    if_range: str | None = None
    """A date never matches: it does not tell apart what was replaced within a second (§8.8.2.2)."""
    if_modified_since: str | None = None
    if_unmodified_since: str | None = None
    takes_gzip: bool = False
    """Whether a body, and all of it, may come as gzip."""

    @staticmethod
    def parse(method: str, headers: Mapping[bytes, bytes]) -> "Conditions":
        """Pick the headers that matter; Range means something for GET only (§14.2)."""
        takes_gzip = method == "GET" and accepts_gzip(headers.get(b"accept-encoding"))
        if method == "GET" and _FIELDS.keys().isdisjoint(headers):
            return _GZIP_GET if takes_gzip else _PLAIN_GET
        given = {
            field: headers[name].decode("latin-1")
            for name, field in _FIELDS.items()
            if name in headers
        }
        is_head = method == "HEAD"
        if is_head:
            given.pop("range", None)
        return Conditions(is_head, **given, takes_gzip=takes_gzip and "range" not in given)

    @property
    def is_plain_get(self) -> bool:
        """Whether a body is asked for, and all of it."""
        return not self.is_head and self.range is None

    @property
    def reading(self) -> ByteRequest | None:
        """What will be read whatever the entity is; `None` if that depends on it.

        Raises: `BadHeaderError`.
        """
        dates = self.if_modified_since or self.if_unmodified_since
        if self.is_head or self.if_match or self.if_none_match or self.if_range or dates:
            return None
        try:
            return (self.range and parse_range(self.range)) or EVERYTHING
        except UnsatisfiableError:
            return None

    def precondition(self, etag: ETag, modified_s: int | None) -> HTTPStatus | None:
        """Return the status that a precondition demands for a version, if one does (§13.2.2).

        Dates count only beside no tags, and for what has a time.
        """
        if self.if_match is not None:
            if not _matches(self.if_match, etag, weakly=False):
                return HTTPStatus.PRECONDITION_FAILED
        elif _is_later(modified_s, self.if_unmodified_since) is True:
            return HTTPStatus.PRECONDITION_FAILED
        if self.if_none_match is not None:
            is_known = _matches(self.if_none_match, etag, weakly=True)
        else:
            is_known = _is_later(modified_s, self.if_modified_since) is False
        return HTTPStatus.NOT_MODIFIED if is_known else None

    def choose(self, etag: ETag, length: int, modified_s: int | None) -> Selection:
        """Select of an entity of *length* bytes and version *etag*.

        Raises: `BadHeaderError`.
        """
        if self is _PLAIN_GET or self is _GZIP_GET:
            return _all_of(length)
        if (status := self.precondition(etag, modified_s)) is not None:
            return Selection(status)
        whole = ByteRange(0, length)
        if self.range is None or (self.if_range is not None and self.if_range != etag):
            return Selection(HTTPStatus.OK, whole, None if self.is_head else whole)
        try:
            request = parse_range(self.range)
            if request is None:
                return Selection(HTTPStatus.OK, whole, whole)
            part = resolve_range(request, length)
        except UnsatisfiableError:
            return Selection(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        return Selection(HTTPStatus.PARTIAL_CONTENT, part, part)


_PLAIN_GET: Final = Conditions()
_GZIP_GET: Final = Conditions(takes_gzip=True)


@lru_cache(maxsize=4096)
def _all_of(length: int) -> Selection:
    """Select all that there is; many chunks have one length."""
    whole = ByteRange(0, length)
    return Selection(HTTPStatus.OK, whole, whole)


def choose(conditions: Conditions, entity: Entity) -> Selection | None:
    """Select of *entity*; `None` if that takes the length of what its gzip holds.

    Clients take the length that HEAD tells for that of what they will see, so HEAD never speaks
    of gzip (notes of clients: Neuroglancer ignores a length beside Content-Encoding).
    """
    if entity.coding is not Coding.GZIP:
        return conditions.choose(entity.etag, entity.length, entity.modified_s)
    if conditions.takes_gzip:
        chosen = conditions.choose(entity.gzip_etag, entity.length, entity.modified_s)
        return chosen._replace(is_gzip=True)
    status = conditions.precondition(entity.etag, entity.modified_s)
    return None if status is None else Selection(status)


def etag_of_selected(entity: Entity, selection: Selection) -> ETag:
    """Name what is sent, in the form in which it is."""
    return entity.gzip_etag if selection.is_gzip else entity.etag


@lru_cache(maxsize=256)
def accepts_gzip(header: bytes | None) -> bool:
    """Read Accept-Encoding; without it gzip is not asked for (§12.5.3, and obstore)."""
    codings = (each.partition(b";") for each in (header or b"").lower().split(b","))
    refused = {
        name.strip(): _NO_WEIGHT.fullmatch(weight) is not None for name, _, weight in codings
    }
    named = next((name for name in (b"gzip", b"x-gzip", b"*") if name in refused), None)
    return named is not None and not refused[named]


def _is_later(modified_s: int | None, header: str | None) -> bool | None:
    """Return whether *modified_s* is after the date *header*; `None` where either is unknown."""
    since_s = None if header is None else parse_date(header)
    return None if modified_s is None or since_s is None else modified_s > since_s


def _matches(header: str, etag: ETag, *, weakly: bool) -> bool:
    if header.strip() in (etag, "*", etag[1:-1]):  # clients of S3 may leave the quotes out
        return True
    return any(tag == etag and (weakly or not weak) for weak, tag in _TAG.findall(header))
