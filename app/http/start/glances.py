"""Looks at many datasets for a page: all at a time, and seldom."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import cachetools

from app.concurrency import SingleFlight
from app.resolve.inspect import DatasetOverview, summarize
from app.resolve.resolver import Dataset, Resolver

_WITHIN_S: Final = 2.0
_KEPT_S: Final = 20.0
_KEPT: Final = 1024
_log = logging.getLogger(__name__)


class Glances:
    """Shares and keeps what was seen, so that a view of the page costs stores next to nothing."""

    def __init__(
        self,
        resolver: Resolver,
        *,
        within_s: float = _WITHIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver
        self._within_s = within_s
        self._flights = SingleFlight[str]()
        self._kept = cachetools.TTLCache[str, DatasetOverview](_KEPT, _KEPT_S, clock)

    async def look_at(self, datasets: Sequence[Dataset]) -> list[DatasetOverview]:
        """Look at all *datasets* at a time."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._look(dataset)) for dataset in datasets]
        return [task.result() for task in tasks]

    async def _look(self, dataset: Dataset) -> DatasetOverview:
        if (known := self._kept.get(dataset.name)) is not None:
            return known
        return await self._flights.run(dataset.name, lambda: self._see(dataset))

    async def _see(self, dataset: Dataset) -> DatasetOverview:
        try:
            found = await summarize(self._resolver, dataset, self._within_s)
        except Exception:  # noqa: BLE001 - one dataset must not take the page of all
            _log.exception("the dataset %s cannot be shown", dataset.name)
            found = DatasetOverview((), (), is_all=False, reason="a fault of this service")
        self._kept[dataset.name] = found
        return found
