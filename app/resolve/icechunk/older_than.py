"""The age from which something is old, as people say it."""

import re
from datetime import datetime, timedelta
from typing import Final

from app.errors import ConfigurationError
from app.formats.icechunk.fields import EPOCH

_DURATION: Final = re.compile(r"(\d{1,9})(s|m|h|d|w)", re.ASCII)
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_US: Final = 1_000_000


def parse_older_than(text: str, now_us: int) -> int:
    """Read a time of RFC 3339, or how long ago: ``30d``; in microseconds since 1970 began.

    Raises: `ConfigurationError`, also for a time that has not come yet.
    """
    if found := _DURATION.fullmatch(text):
        return now_us - int(found[1]) * _UNITS[found[2]] * _US
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        what = "is neither a time such as 2026-01-31T12:00:00Z nor a duration such as 30d"
        raise ConfigurationError(f"--older-than: {text[:80]!r} {what}")
    limit_us = (moment - EPOCH) // timedelta(microseconds=1)
    if limit_us > now_us:
        raise ConfigurationError(f"--older-than: {text} has not come yet")
    return limit_us


def spell_moment(at_us: int) -> str:
    """Spell a time as RFC 3339 does."""
    try:
        moment = EPOCH + timedelta(microseconds=at_us)
    except OverflowError:
        return "0001-01-01T00:00:00Z"
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
