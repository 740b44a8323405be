"""A histogram that costs little to add to."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

SECONDS: Final = (0.0005, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""Upper bounds of the buckets of times."""


class Histogram:
    """Sorts values into buckets, without the lock of `prometheus_client`: one thread adds."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Tell how many values each bound is not exceeded by, the last one being infinite."""
        names = [*(f"{float(bound)}" for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))
