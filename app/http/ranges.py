"""The Range header (RFC 9110 §14). Only here are ranges inclusive."""

import re
from typing import Final

from app.errors import BadHeaderError
from app.model import EVERYTHING, ByteRange, ByteRequest, SuffixRange

_SPEC: Final = re.compile(r"([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


class UnsatisfiableError(Exception):
    """No byte of the entity lies in the range."""


def parse_range(header: str) -> ByteRequest | None:
    """Read a Range header; `None` asks for the whole body.

    Other units than bytes, and several ranges at once, are answered with the whole body.

    Raises: `BadHeaderError` for what is no range, `UnsatisfiableError` for the last 0 bytes.
    """
    unit, equals, spec = header.partition("=")
    if unit.strip().lower() != "bytes":
        return None
    if "," in spec:
        return None
    found = _SPEC.fullmatch(spec.strip())
    if not equals or found is None or found.group() == "-":
        raise BadHeaderError("Range is not of the form bytes=a-b, bytes=a- or bytes=-n")
    first, last = found.groups()
    if not first:
        if int(last) == 0:
            raise UnsatisfiableError
        return SuffixRange(int(last))
    start, stop = int(first), int(last) + 1 if last else EVERYTHING.stop
    if stop <= start:
        raise BadHeaderError("Range ends before it begins")
    return ByteRange(start, stop)


def resolve_range(request: ByteRequest, length: int) -> ByteRange:
    """Clamp *request* to an entity of *length* bytes.

    Raises: `UnsatisfiableError` where nothing is left.
    """
    match request:
        case SuffixRange(suffix):
            resolved = ByteRange(max(0, length - suffix), length)
        case ByteRange(start, stop):
            if start >= length:
                raise UnsatisfiableError
            resolved = ByteRange(start, min(stop, length))
    if resolved.length == 0:
        raise UnsatisfiableError
    return resolved


def content_range(byte_range: ByteRange, length: int) -> str:
    """Spell Content-Range."""
    return f"bytes {byte_range.start}-{byte_range.stop - 1}/{length}"
