"""Calls that may not take long, whatever they are given."""

import time
from collections.abc import Callable
from typing import Final

_TRIES: Final = 3


def soon[T](call: Callable[[], T], most_s: float) -> T:
    """Give what *call* gives, which takes less than *most_s* of the processor's time.

    It is tried again where it took more: what holds a whole machine up counts as work, and what
    Python clears away meanwhile may be that of others.
    """
    for _ in range(_TRIES):
        began = time.process_time()
        given = call()
        if time.process_time() - began < most_s:
            return given
    raise AssertionError(f"it took more than {most_s} s of the processor each time")
