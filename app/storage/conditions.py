"""What must hold of an object whose bytes are read (RFC 9110 §13.1); nothing here waits."""

from calendar import timegm
from collections.abc import Mapping
from email.utils import formatdate, parsedate_to_datetime
from functools import lru_cache

from app.errors import VersionChangedError
from app.model import Condition, ETag, ObjectRef, UnmodifiedSince


def demand(ref: ObjectRef, condition: Condition | None, etag: ETag, modified_s: int | None) -> None:
    """Raise `VersionChangedError` unless *condition* holds of the version that was found.

    *modified_s* are the whole seconds of its time; of an object without one nothing is known.
    """
    if condition is None or condition == etag:
        return
    if not isinstance(condition, UnmodifiedSince) or modified_s is None:
        raise VersionChangedError(ref)
    if modified_s > condition.epoch_s:
        raise VersionChangedError(ref)


def http_date(epoch_s: int) -> str:
    """Write a time as HTTP does (§5.6.7)."""
    return formatdate(epoch_s, usegmt=True)


def last_modified(headers: Mapping[bytes, bytes]) -> int | None:
    """Take the time from ``Last-Modified``, if it is one."""
    text = headers.get(b"last-modified")
    return None if text is None else parse_date(text.decode("latin-1"))


@lru_cache(maxsize=1024)
def parse_date(text: str) -> int | None:
    """Return the time of an HTTP date in seconds since 1970; `None` for no date, or several."""
    try:
        parsed = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if text.count(",") > 1:
        return None
    return timegm(parsed.utctimetuple())
