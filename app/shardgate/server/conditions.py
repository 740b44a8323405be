"""Conditional requests and ranges (RFC 9110 §13, §14): preconditions first, then Range (§13.2.2).

Only here are ranges inclusive.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final, NamedTuple

from shardgate.errors import BadHeaderError
from shardgate.formats.compression import CODINGS, announced_nbytes, is_sendable
from shardgate.model import EVERYTHING, ByteRange, ByteRequest, ETag, SuffixRange
from shardgate.read.bodies import Demand, Entity, Selection
from shardgate.storage.http_headers import CODING_ALIASES, parse_date

_RANGE: Final = re.compile(r"([0-9]{0,18})-([0-9]{0,18})", re.ASCII)
_QUOTED_TAG: Final = re.compile(r'(W/)?("[\x21\x23-\x7e\x80-\xff]*")')
# Clients of S3 may leave the quotes out.
_TAG: Final = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"|[^\s",*][^\s",]*'
_TAG_LIST: Final = re.compile(rf"[\s,]*(?:{_TAG})(?:\s*,[\s,]*(?:{_TAG}))*[\s,]*")
_EACH_TAG: Final = re.compile(_TAG)
_NO_WEIGHT: Final = re.compile(r"\s*q=0(?:\.0*)?\s*")
_YEAR_10000_S: Final = 253_402_300_800
_HEADERS: Final = "range if-match if-none-match if-range if-modified-since if-unmodified-since"
_FIELDS: Final = {name.encode(): name.replace("-", "_") for name in _HEADERS.split()}
_NAMES: Final = frozenset(_FIELDS)


class UnsatisfiableError(Exception):
    """No byte of the entity lies in the range."""


def parse_range(header: str) -> ByteRequest | None:
    """Parse Range; `None` asks for the whole body, as do other units and several ranges.

    Raises: `BadHeaderError` for a malformed range, `UnsatisfiableError` for the last 0 bytes.
    """
    unit, equals, spec = header.partition("=")
    if unit.strip().lower() != "bytes" or "," in spec:
        return None
    found = _RANGE.fullmatch(spec.strip())
    if not equals or found is None or found.group() == "-":
        raise BadHeaderError("Range is not of the form bytes=a-b, bytes=a- or bytes=-n")
    first, last = found.groups()
    if not first:
        if int(last) == 0:
            raise UnsatisfiableError
        return SuffixRange(int(last))
    start = int(first)
    stop = int(last) + 1 if last else EVERYTHING.stop
    if stop <= start:
        raise BadHeaderError("Range ends before it begins")
    return ByteRange(start, stop)


def resolve_range(request: ByteRequest, length: int) -> ByteRange:
    """Clamp *request* to *length* bytes. Raises: `UnsatisfiableError` if no byte is left."""
    if isinstance(request, SuffixRange):
        resolved = ByteRange(max(0, length - request.length), length)
    elif request.start >= length:
        raise UnsatisfiableError
    else:
        resolved = ByteRange(request.start, min(request.stop, length))
    if resolved.length == 0:
        raise UnsatisfiableError
    return resolved


def content_range(byte_range: ByteRange, length: int) -> bytes:
    """Format Content-Range."""
    return b"bytes %d-%d/%d" % (byte_range.start, byte_range.stop - 1, length)


def is_http_date(epoch_s: float) -> bool:
    """Return whether the year of *epoch_s* has four digits (RFC 9110 §5.6.7)."""
    return 0 <= epoch_s < _YEAR_10000_S


@lru_cache(maxsize=4096)
def last_modified(epoch_s: int | None) -> list[tuple[bytes, bytes]]:
    """Return the header Last-Modified; none for a time that is unknown or no HTTP date."""
    if epoch_s is None or not is_http_date(epoch_s):
        return []
    return [(b"last-modified", formatdate(epoch_s, usegmt=True).encode())]


def parse_demand(if_match: str | None, if_none_match: str | None) -> Demand | None:
    """Parse the preconditions of a write (§13.1); `None` if there are none.

    Raises: `BadHeaderError` for a list that cannot be parsed: it must not pass for fulfilled.
    """
    if if_match is None and if_none_match is None:
        return None
    is_wanted = None if if_match is None else _parse_tags("If-Match", if_match)
    is_unwanted = None if if_none_match is None else _parse_tags("If-None-Match", if_none_match)

    def demand(current: Sequence[ETag]) -> str | None:
        found = current[0] if current else "no object"
        if is_wanted is not None and not is_wanted(current):
            return f"precondition failed: If-Match does not match {if_match:.200}: found {found}"
        if is_unwanted is not None and is_unwanted(current):
            return f"precondition failed: If-None-Match matches {if_none_match:.200}: found {found}"
        return None

    return demand


def _parse_tags(name: str, value: str) -> Callable[[Sequence[ETag]], bool]:
    """Parse a list of entity tags; only If-None-Match compares weakly (§13.1.2)."""
    if value.strip() == "*":
        return bool  # any version matches
    if not _TAG_LIST.fullmatch(value):
        raise BadHeaderError(f"{name} is no list of entity tags")
    tags = {tag if tag.endswith('"') else f'"{tag}"' for tag in _EACH_TAG.findall(value)}
    if name == "If-None-Match":
        tags = {tag.removeprefix("W/") for tag in tags}
    return lambda current: not tags.isdisjoint(current)


class Conditions(NamedTuple):
    """Conditional headers and Range of a GET or HEAD."""

    is_head: bool = False
    range: str | None = None
    if_match: str | None = None
    if_none_match: str | None = None
    if_range: str | None = None
    """A date never matches: versions that are replaced within a second share it (§8.8.2.2)."""
    if_modified_since: str | None = None
    if_unmodified_since: str | None = None
    is_unconditional: bool = False
    """True for a GET with neither preconditions nor Range."""
    reading: ByteRequest | None = None
    """Range to read whatever the entity is; `None` if it depends on that."""

    @staticmethod
    def parse(method: str, headers: Mapping[bytes, bytes]) -> "Conditions":
        """Pick the headers that matter. Raises: `BadHeaderError`."""
        if method == "GET" and _NAMES.isdisjoint(headers):
            return _PLAIN_GET
        fields = {
            field: headers[name].decode("latin-1")
            for name, field in _FIELDS.items()
            if name in headers
        }
        is_head = method == "HEAD"
        if is_head:
            fields.pop("range", None)  # it has a meaning for GET only (§14.2)
        has_range_only = not is_head and fields.keys() == {"range"}
        reading = _reading(fields["range"]) if has_range_only else None
        return Conditions(is_head, **fields, is_unconditional=False, reading=reading)

    @property
    def is_plain_get(self) -> bool:
        """Return whether the whole body is asked for."""
        return not self.is_head and self.range is None

    def precondition(self, etag: ETag, modified_s: int | None) -> HTTPStatus | None:
        """Return the status of a failed precondition; dates count only without tags (§13.2.2)."""
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
        """Select a part of *length* bytes of version *etag*. Raises: `BadHeaderError`."""
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


_PLAIN_GET: Final = Conditions(is_unconditional=True, reading=EVERYTHING)


def _reading(header: str) -> ByteRequest | None:
    try:
        return parse_range(header) or EVERYTHING
    except UnsatisfiableError:
        return None


@lru_cache(maxsize=4096)
def whole_of(length: int) -> Selection:
    """Select the whole body; cached because many chunks have one length."""
    whole = ByteRange(0, length)
    return Selection(HTTPStatus.OK, whole, whole)


class Negotiation(NamedTuple):
    """The content codings that a client takes."""

    accepted: bytes | None
    """Accept-Encoding (§12.5.3)."""
    is_s3: bool
    """Clients of S3 get objects as they are stored, whatever they accept."""


def choose(
    conditions: Conditions, negotiate: Callable[[], Negotiation], entity: Entity
) -> Selection | None:
    """Select a part of *entity*; `None` if that needs the length of its inflated form.

    Ranges count inflated bytes: clients cannot decode a part. HEAD has no Content-Encoding: viewers
    take its Content-Length for that of the decoded body. With other codings the body is sent whole.
    """
    coding = entity.coding
    length = entity.length
    if not coding:
        is_plain = conditions.is_unconditional  # as nearly all requests for chunks are
        return (
            whole_of(length)
            if is_plain
            else conditions.choose(entity.etag, length, entity.modified_s)
        )
    if not is_sendable(coding):
        if conditions.is_head:
            # Such a coding has the length in its name: no byte is read for HEAD.
            nbytes = announced_nbytes(coding, b"")
            return conditions.choose(entity.inflated_etag, nbytes, entity.modified_s)
        return _choose_unread(conditions, entity)
    accepted, is_s3 = negotiate()
    if not is_s3:
        is_accepted = accepts(coding, accepted)
        # `identity;q=0` refuses the inflated form; `*;q=0` alone refuses codings only.
        refuses_identity = _parse_accepted(accepted).get("identity", False)
        can_inflate = coding in CODINGS and not refuses_identity
        if can_inflate and not (is_accepted and conditions.is_plain_get):
            return _choose_unread(conditions, entity)
        if not is_accepted:
            return Selection(HTTPStatus.NOT_ACCEPTABLE)
        conditions = conditions._replace(range=None)
    chosen = conditions.choose(entity.etag, length, entity.modified_s)
    return chosen._replace(coding=coding, is_s3=is_s3)


def _choose_unread(conditions: Conditions, entity: Entity) -> Selection | None:
    """Select nothing of the inflated form of *entity* if a precondition says so; else `None`."""
    status = conditions.precondition(entity.inflated_etag, entity.modified_s)
    return None if status is None else Selection(status)


def etag_of_selected(entity: Entity, selection: Selection) -> ETag:
    """Return the ETag of the representation that is sent: the inflated one has one of its own."""
    is_stored = selection.coding or not entity.coding
    return entity.etag if is_stored else entity.inflated_etag


def accepts(coding: str, header: bytes | None) -> bool:
    """Return whether Accept-Encoding names all parts of *coding*, or ``*``.

    Without the header none is accepted (§12.5.3 permits any; obstore cannot decode them).
    """
    refused = _parse_accepted(header)
    refuses_others = refused.get("*", True)
    return not any(refused.get(name, refuses_others) for name in coding.split(", "))


@lru_cache(maxsize=256)
def _parse_accepted(header: bytes | None) -> Mapping[str, bool]:
    """Return for each name of Accept-Encoding whether its weight is zero."""
    if header is None:
        return {}
    listed = (each.partition(";") for each in header.decode("latin-1").lower().split(","))
    named = ((name.strip(), _NO_WEIGHT.fullmatch(weight)) for name, _, weight in listed)
    return {CODING_ALIASES.get(name, name): weight is not None for name, weight in named}


def _is_later(modified_s: int | None, header: str | None) -> bool | None:
    """Return whether *modified_s* is after the date *header*; `None` if either is unknown."""
    since_s = None if header is None else parse_date(header)
    return None if modified_s is None or since_s is None else modified_s > since_s


def _matches(header: str, etag: ETag, *, weakly: bool) -> bool:
    if header.strip() in (etag, "*", etag[1:-1]):  # clients of S3 may leave the quotes out
        return True
    return any(tag == etag and (weakly or not weak) for weak, tag in _QUOTED_TAG.findall(header))
