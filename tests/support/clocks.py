"""Clocks that tests set, or put forward."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from shardgate.read.metadata_cache import ReadCache
from shardgate.read.resolver import Resolver


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@dataclass
class AdvancedClock:
    """The monotonic clock, put forward by hand."""

    ahead_s: float = 0

    def __call__(self) -> float:
        """Return the time."""
        return time.monotonic() + self.ahead_s

    def forget_damage(self) -> None:
        """Let the second pass for which damage is remembered."""
        self.ahead_s += 1.1


@contextmanager
def advanced_clock() -> Generator[AdvancedClock]:
    """Give services that are built inside the block a clock for the age of cached reads."""
    clock = AdvancedClock()
    with (
        patch("shardgate.main.ReadCache", partial(ReadCache, clock=clock)),
        patch("shardgate.main.Resolver", partial(Resolver, clock=clock)),
    ):
        yield clock
