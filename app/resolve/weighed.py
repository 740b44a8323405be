"""A least-recently-used cache that is bounded by the memory its entries hold."""

from collections.abc import Callable, Hashable

import cachetools


class WeighedCache[K: Hashable, V]:
    """Holds values up to *max_bytes* in all, by what *weigh* says of each."""

    def __init__(self, max_bytes: int, weigh: Callable[[V], int]) -> None:
        self._weigh = weigh
        self._entries: cachetools.LRUCache[K, V] = cachetools.LRUCache(max_bytes, weigh)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """What all entries weigh."""
        return int(self._entries.currsize)

    def get(self, key: K) -> V | None:
        """Find the value of *key* and make it the most recent."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep *value*, unless it is heavier than everything together may be."""
        if self._weigh(value) <= self._entries.maxsize:
            self._entries[key] = value
        else:
            self.discard(key)

    def discard(self, key: K) -> None:
        """Forget *key* if it is there."""
        self._entries.pop(key, None)
