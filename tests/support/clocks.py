"""Clocks that tests set."""

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now
