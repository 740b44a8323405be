"""Checks of reads and writes that all stores share."""

from collections.abc import Sequence

from app.errors import BadKeyError, RangeNotSatisfiedError, VersionChangedError
from app.model import (
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    ObjectRef,
    Piece,
    SuffixRange,
    UnmodifiedSince,
)
from app.storage.contract import ABSENT, TEMPORARY, UPLOADS, Expected


def check_condition(
    ref: ObjectRef, condition: Condition | None, etag: ETag, modified_s: int | None
) -> None:
    """Raise `VersionChangedError` unless *condition* holds for the version that was read.

    *modified_s* is its modification time in whole seconds, `None` if unknown (RFC 9110 §13.1).
    """
    if condition is None or condition == etag:
        return
    if not isinstance(condition, UnmodifiedSince) or modified_s is None:
        raise VersionChangedError(ref)
    if modified_s > condition.epoch_s:
        raise VersionChangedError(ref)


def clamp(
    ref: ObjectRef, request: ByteRequest | None, size: int, if_match: Condition | None
) -> ByteRange:
    """Return the range of an object of *size* bytes that satisfies *request* (RFC 9110 §14).

    Only an empty range may begin at the end. With a condition, a range outside the object means
    that the object has changed, since the caller knew the size.
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


def check_write(ref: ObjectRef, pieces: Sequence[Piece], expected: Expected) -> None:
    """Raise `BadKeyError` for keys of no object, `ValueError` for ranges without a version."""
    name = f"/{ref.key}".replace(f"/{UPLOADS}", "/", 1)
    if name.endswith("/") or TEMPORARY in name:
        raise BadKeyError(f"{ref.key!r} cannot be the key of an object")
    if not isinstance(expected, str) and any(isinstance(piece, ByteRange) for piece in pieces):
        raise ValueError(f"{ref}: byte ranges need the version that they are taken from")


def is_as_expected(etag: ETag | None, expected: Expected) -> bool:
    """Return whether an object in the version *etag*, `None` if absent, may be replaced."""
    if expected is None:
        return True
    return etag == (None if expected == ABSENT else expected)


def is_unfinished(prefix: ObjectRef, ref: ObjectRef) -> bool:
    """Return whether *ref*, listed below *prefix*, is an unfinished object of a writer."""
    return TEMPORARY in ref.key[prefix.key.rfind("/") + 1 :]
