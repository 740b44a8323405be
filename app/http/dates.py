"""Times as HTTP writes them (RFC 9110 §5.6.7)."""

from email.utils import formatdate
from functools import lru_cache
from typing import Final

_YEAR_10000_S: Final = 253_402_300_800


def is_date(epoch_s: float) -> bool:
    """Return whether a date of four digits of the year can be written for *epoch_s*."""
    return 0 <= epoch_s < _YEAR_10000_S


@lru_cache(maxsize=4096)
def last_modified(epoch_s: int | None) -> list[tuple[bytes, bytes]]:
    """Tell when something was last modified, if that is known and can be written."""
    if epoch_s is None or not is_date(epoch_s):
        return []
    return [(b"last-modified", formatdate(epoch_s, usegmt=True).encode())]
