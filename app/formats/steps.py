"""Numbers in the order of their texts, which is that of the keys they stand in."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

type Rows = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class Steps:
    """Places below *stop*, those of whole runs of *size*, and the number that stands for each.

    What follows a number in a key sorts before the digits: ``/``, ``.``, ``-``.
    """

    runs: Rows
    """Counts the runs, rising."""
    size: int
    stop: int
    first: int = 0
    """The number of place 0."""
    step: int = 1
    """How far apart the numbers of neighbours are."""

    def walk(self, after: str) -> Iterator[int]:
        """Give the places by the texts of their numbers, from where these may begin *after*."""
        if self.first < 0:
            for digit in range(1, 10):
                yield from self._below(f"-{digit}", -digit, after)
        for digit in range(10):
            yield from self._below(str(digit), digit, after)

    def _below(self, text: str, number: int, after: str) -> Iterator[int]:
        """Give the place of *number*, which *text* spells, and of those that begin with that."""
        if text < after and not after.startswith(text):
            return
        if self._any(number, number + 1):
            yield (number - self.first) // self.step
        if number and self._any_longer(number):
            for digit in range(10):
                longer = number * 10 + (digit if number > 0 else -digit)
                yield from self._below(f"{text}{digit}", longer, after)

    def _any_longer(self, number: int) -> bool:
        """Tell whether there is a number whose text is longer, and begins with that of *number*."""
        if number < 0:
            low, high = number * 10 - 9, number * 10 + 1
            while high > self.first:
                if self._any(low, high):
                    return True
                low, high = low * 10 - 9, high * 10 - 9
            return False
        low, high = number * 10, number * 10 + 10
        while low < self.first + self.step * self.stop:
            if self._any(low, high):
                return True
            low, high = low * 10, high * 10
        return False

    def _any(self, low: int, high: int) -> bool:
        """Tell whether there is a number from *low* up to but not *high*."""
        start = max(0, -((self.first - low) // self.step))
        stop = min(self.stop, -((self.first - high) // self.step))
        if start >= stop:
            return False
        at = int(np.searchsorted(self.runs, np.uint64(start // self.size)))
        return at < len(self.runs) and max(start, int(self.runs[at]) * self.size) < stop
