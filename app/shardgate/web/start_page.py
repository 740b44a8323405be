"""``GET /`` for browsers: a line for each dataset."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import cachetools
from fastapi import Request, Response

from shardgate.auth.access import Caller, Datasets, ServedDataset, may_write
from shardgate.concurrency import SingleFlight, bounded_gather
from shardgate.errors import install_command
from shardgate.formats.surveying import Description
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.address import address_of
from shardgate.server.request import quote_key
from shardgate.settings import LoginSettings
from shardgate.survey.inspect import FolderOverview, summarize
from shardgate.web.rendering import PageTemplate
from shardgate.web.viewer import viewer_folder, viewer_of
from shardgate.web.viewer_state import is_drawn

_WAIT_S: Final = 0.2
"""Longest wait for the overviews of a page; those that take longer are filled in later."""
_AT_ONCE: Final = 8
_CACHED_S: Final = 20.0
_CACHED_DATASETS: Final = 1024
_BITS: Final = re.compile("(?:u?int|b?float|complex)([0-9]{1,3})")
_log = logging.getLogger(__name__)


class StartPage:
    """Shows the datasets that the caller may read."""

    def __init__(
        self,
        datasets: Datasets,
        overviews: "OverviewCache",
        login: LoginSettings = LoginSettings(),  # noqa: B008 - it is frozen
    ) -> None:
        self._datasets = datasets
        self._overviews = overviews
        self._login = login
        self._page = PageTemplate("start.html")

    async def __call__(self, request: Request) -> Response:
        """Answer a browser."""
        caller = request.scope["caller"]
        known = sorted(self._datasets.readable_by(caller), key=lambda dataset: dataset.name)
        address, has_viewer = address_of(request), viewer_folder() is not None
        overviews = await self._overviews.read(known)
        viewer = viewer_of(address, is_installed=has_viewer)
        # A proxy may strip the final slash as well, below which relative links lead.
        base = address.base.removeprefix(address.origin) if address.root_path else "."
        return await self._page.respond(
            base=base,
            lines=[_make_line(each, overviews.get(each.name), caller) for each in known],
            has_viewer=viewer is not None,
            has_login=self._login.issuer is not None,
            caller_name=caller.name,
            has_previews=has_viewer,
            viewer_command=install_command("viewer"),
            has_metrics=self._datasets.may_watch(caller),
            is_below_token=address.token is not None,
        )


class OverviewCache:
    """Looks at datasets, and shares and caches the results: a view of the page costs few reads."""

    def __init__(
        self,
        resolver: Resolver,
        *,
        within_s: float = _WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver
        self._within_s = within_s
        self._flights = SingleFlight[str](outlasts=True)
        self.aclose = self._flights.aclose
        self._cached = cachetools.TTLCache[str, FolderOverview](_CACHED_DATASETS, _CACHED_S, clock)

    async def read(self, datasets: Sequence[Dataset]) -> dict[str, FolderOverview]:
        """Return, by name, the overviews of *datasets* that are there in time."""
        found: dict[str, FolderOverview] = {}

        async def look(dataset: Dataset) -> None:
            found[dataset.name] = await self._get(dataset)

        with suppress(TimeoutError):
            async with asyncio.timeout(self._within_s):
                await bounded_gather(look, datasets, limit=_AT_ONCE)
        return found

    async def _get(self, dataset: Dataset) -> FolderOverview:
        if (known := self._cached.get(dataset.name)) is not None:
            return known
        return await self._flights.run(dataset.name, lambda: self._look(dataset))

    async def _look(self, dataset: Dataset) -> FolderOverview:
        try:
            found = await summarize(self._resolver, dataset)
            is_read_only = await self._resolver.is_read_only(dataset)
            found = replace(found, is_read_only=is_read_only)
        except Exception:  # noqa: BLE001 - one dataset must not take the page of all
            _log.exception("the dataset %s cannot be shown", dataset.name)
            found = FolderOverview((), (), is_all=False, reason="a fault of this service")
        self._cached[dataset.name] = found
        return found


def _make_line(
    dataset: ServedDataset, overview: FolderOverview | None, caller: Caller
) -> Mapping[str, object]:
    """Return values for ``start.html``."""
    collections = [] if overview is None else overview.collections
    sound = [each.found for each in collections if each.found.format]
    largest = max(sound, key=_nbytes_of, default=None)
    return {
        "name": dataset.name,
        "path": f"{quote_key(dataset.name)}/",
        "formats": _formats(dataset, overview),
        "is_pending": overview is None,
        "is_writable": overview and not overview.is_read_only and may_write(caller, dataset),
        "largest": largest,
        "others": len(sound) - 1,
        "has_more": overview is not None and not overview.is_all,
        "is_viewable": any(each.kind != "array" or is_drawn(each) for each in sound),
        "nbytes": sum(map(_nbytes_of, sound)),
        "reason": "" if overview is None else overview.reason,
    }


def _nbytes_of(found: Description) -> int:
    """Return the bytes of all elements of an array; 0 where the size of one is not known."""
    bits = _BITS.fullmatch(found.data_type or "")
    nbytes = int(bits[1]) // 8 if bits else int(found.data_type == "bool")
    return math.prod(found.shape or (0,)) * nbytes


def _formats(dataset: Dataset, overview: FolderOverview | None) -> str:
    if not dataset.containers.formats:
        return "as it is stored"
    if overview is None:
        return dataset.format
    found = {each.found.format for each in overview.collections if each.found.format}
    found |= {"icechunk"} if overview.repositories else set()
    return ", ".join(sorted(found)) or dataset.format
