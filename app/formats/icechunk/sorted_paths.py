"""The paths of nodes in an order in which those below a group follow one another."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

_AFTER_SLASH: Final = chr(ord("/") + 1)


class SortedPaths:
    """Paths that come and go, a hundred thousand of them in one request."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._sorted = sorted(paths)

    def add(self, path: str) -> None:
        """Add *path*, which is none of them."""
        insort(self._sorted, path)

    def take(self, path: str) -> list[str]:
        """Take *path*, which is one of them, and all below it away, and list them."""
        prefix = path.rstrip("/")
        start = bisect_left(self._sorted, prefix + "/")
        stop = bisect_left(self._sorted, prefix + _AFTER_SLASH)
        below = [each for each in self._sorted[start:stop] if each != path]
        del self._sorted[start:stop]
        if path != "/":
            del self._sorted[bisect_left(self._sorted, path)]
        return [path, *below]
