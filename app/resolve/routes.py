"""Containers that were found lately, so that requests for their keys search no directories."""

from collections.abc import Iterator
from typing import NamedTuple

from app.model import VirtualKey
from app.resolve.containers import MAX_DEPTH, Container, Dataset
from app.resolve.metadata_cache import OVERHEAD_NBYTES, FreshnessTracker, ReadCache

type _Name = tuple[str, bool, str]
"""Name of a dataset, whether the keys claim their container, and its directory with the slash."""


class _Route(NamedTuple):
    container: Container
    """As found for one key."""
    tracker: FreshnessTracker
    """The reads that led to the container."""

    @property
    def nbytes(self) -> int:
        return OVERHEAD_NBYTES + self.tracker.nbytes


class Routes:
    """Containers by dataset and directory, in the cache of *fetch*.

    A route is good until one of the reads that led to it expires, or anything cached turns out to
    be outdated. It leads only to a container that encloses the key.
    """

    def __init__(self, fetch: ReadCache) -> None:
        self._fetch = fetch

    def recall(
        self, dataset: Dataset, key: VirtualKey, tracker: FreshnessTracker
    ) -> Container | None:
        """Return the container of *key* if a route leads there; *tracker* adopts its reads."""
        for name in _names(dataset, key):
            route: _Route | None = self._fetch.cache.get(name)
            if route is None or not route.tracker.is_current:
                continue
            layout, _, outer = route.container
            rest = VirtualKey(key[len(name[2]) :])
            if layout.encloses(rest) and not (
                outer and any(each.encloses(VirtualKey(key[start:])) for each, start in outer)
            ):
                tracker.adopt(route.tracker)
                return Container(layout, rest)
        return None

    async def find(self, dataset: Dataset, key: VirtualKey, tracker: FreshnessTracker) -> Container:
        """Search the container of *key*, and keep the route; *tracker* has read nothing yet."""
        search = dataset.containers.search
        found = await search(dataset.root, key, tracker, self._fetch.prefetch)
        if found.layout.encloses(found.rest) and tracker.is_current:
            directory = key[: len(key) - len(found.rest)]
            for name in _names(dataset, key):
                if name[2] == directory:
                    self._fetch.cache.put(name, _Route(found, tracker.copy()))
        return found

    def forget(self, dataset: Dataset, key: VirtualKey) -> None:
        """Search anew for *key*, since what led to its container was read again."""
        for name in _names(dataset, key):
            self._fetch.cache.pop(name, None)


def _names(dataset: Dataset, key: VirtualKey) -> Iterator[_Name]:
    """Yield the names of routes that may lead to *key*, outer directories first."""
    claim = dataset.containers.claim(key) if "@" in key else None
    if claim is not None:
        yield dataset.name, True, key[:claim]
        return
    end = 0
    for _ in range(MAX_DEPTH):
        yield dataset.name, False, key[:end]
        if not (end := key.find("/", end) + 1):
            return
