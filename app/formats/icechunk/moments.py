"""When operations and snapshots were: each later than the one before, by microseconds."""

from datetime import timedelta
from typing import Final

from app.formats.icechunk.fields import EPOCH

_AHEAD_US: Final = 10_000_000
"""So far a clock may be behind that of who wrote last."""


class FutureError(ValueError):
    """What is stored was written at a time that has not come."""


def moment_after(newest_us: int, now_us: int) -> int:
    """Give the time, or the first one after *newest_us* if our clock is not there yet.

    A time far ahead would keep all others from writing, who hold against it that it has not come.

    Raises: `FutureError`.
    """
    if newest_us > now_us + _AHEAD_US:
        ahead_s = (newest_us - now_us) // 1_000_000
        raise FutureError(
            f"it was written at {_spell(newest_us)}, and it is {_spell(now_us)} here: "
            f"{ahead_s} s earlier, so one of the clocks is wrong"
        )
    return max(now_us, newest_us + 1)


def _spell(moment_us: int) -> str:
    try:
        moment = EPOCH + timedelta(microseconds=moment_us)
    except OverflowError:
        return f"{moment_us} µs after 1970"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
