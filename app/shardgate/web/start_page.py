"""``GET /`` for browsers: a line for each dataset."""

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from starlette.responses import StreamingResponse

from shardgate.auth.access import Caller, Datasets, ServedDataset, may_write
from shardgate.concurrency import SingleFlight
from shardgate.errors import install_command
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.address import address_of
from shardgate.server.request import quote_key
from shardgate.settings import LoginSettings
from shardgate.survey.arrays import ArrayView
from shardgate.survey.inspect import FolderOverview, summarize
from shardgate.web.rendering import PageTemplate, template
from shardgate.web.viewer import viewer_folder, viewer_of

_log = logging.getLogger(__name__)


class StartPage:
    """Shows the datasets that the caller may read."""

    def __init__(
        self, datasets: Datasets, overviews: "OverviewCache", login: LoginSettings
    ) -> None:
        self._datasets = datasets
        self._overviews = overviews
        self._login = login
        self._page = PageTemplate("start.html")
        self._row = template("start_row.html")

    async def __call__(self, request: Request) -> Response:
        """Answer a browser: with the page, or with ``?rows`` its rows as they become known."""
        caller = request.scope["caller"]
        known = sorted(self._datasets.readable_by(caller), key=lambda dataset: dataset.name)
        address = address_of(request)
        is_installed = viewer_folder() is not None
        common: dict[str, Any] = {
            # A proxy may strip the final slash as well, below which relative links lead.
            "base": address.base.removeprefix(address.origin) if address.root_path else ".",
            "has_viewer": viewer_of(address, is_installed=is_installed) is not None,
            "has_previews": is_installed,
        }
        if "rows" in request.query_params:
            rows = self._follow(known, caller, common)
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(rows, media_type="application/x-ndjson", headers=headers)
        overviews = await self._overviews.read(known)
        lines = [_make_line(each, overviews.get(each.name), caller) for each in known]
        return await self._page.respond(
            **common,
            home=f"{common['base']}/",
            has_api=address.token is None,
            lines=lines,
            is_pending=len(overviews) < len(lines),
            has_login=self._login.issuer is not None,
            caller_name=caller.name,
            viewer_command=install_command("viewer"),
            has_metrics=self._datasets.may_watch(caller),
        )

    async def _follow(
        self, datasets: Sequence[ServedDataset], caller: Caller, common: Mapping[str, object]
    ) -> AsyncGenerator[str]:
        """Yield a line of JSON for each row, in the order in which datasets are known."""
        async with aclosing(self._overviews.follow(datasets)) as followed:
            async for dataset, overview in followed:
                row = self._row.render(common, line=_make_line(dataset, overview, caller))
                yield f"{json.dumps({'name': dataset.name, 'html': row})}\n"


class OverviewCache:
    """Looks at datasets, and keeps the last overview of each.

    One that is older than 20 s is returned once more, and renewed after that.
    """

    def __init__(
        self,
        resolver: Resolver,
        *,
        within_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver
        self._within_s = within_s
        self._clock = clock
        self._looks = SingleFlight[str](outlasts=True)
        self.aclose = self._looks.aclose
        self._turns = asyncio.Semaphore(64)  # stores that hang hold theirs until they time out
        self._known: dict[str, tuple[FolderOverview, float]] = {}
        self._pending: set[str] = set()  # `_looks` drops a name only after `_renewed` is set
        self._renewed = asyncio.Event()

    async def read(self, datasets: Sequence[Dataset]) -> dict[str, FolderOverview]:
        """Return, by name, the overviews of *datasets* that are known, or are within a moment."""
        self._renew(datasets)
        unknown = [dataset for dataset in datasets if dataset.name not in self._known]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._within_s), aclosing(self.follow(unknown)) as followed:
                async for _ in followed:
                    pass
        names = (dataset.name for dataset in datasets)
        return {name: self._known[name][0] for name in names if name in self._known}

    async def follow[D: Dataset](
        self, datasets: Sequence[D]
    ) -> AsyncGenerator[tuple[D, FolderOverview]]:
        """Yield each of *datasets* with its overview, as soon as that is renewed."""
        self._renew(datasets)
        left = list(datasets)
        while left:
            renewed = self._renewed
            ready = [dataset for dataset in left if dataset.name not in self._pending]
            left = [dataset for dataset in left if dataset.name in self._pending]
            for dataset in ready:
                yield dataset, self._known[dataset.name][0]
            if not ready:
                await renewed.wait()

    def _renew(self, datasets: Sequence[Dataset]) -> None:
        oldest_s = self._clock() - 20
        for dataset in datasets:
            _, looked_s = self._known.get(dataset.name, (None, -math.inf))
            if looked_s <= oldest_s and dataset.name not in self._pending:
                self._pending.add(dataset.name)
                self._looks.start(dataset.name, partial(self._look, dataset))

    async def _look(self, dataset: Dataset) -> None:
        async with self._turns:
            try:
                found = await summarize(self._resolver, dataset)
                is_read_only = await self._resolver.is_read_only(dataset)
                # Shards lead to their archives and sets, which caches may want to drop.
                kept = [replace(each, shards=None) for each in found.collections]
                found = replace(found, collections=kept, is_read_only=is_read_only)
            except Exception:  # noqa: BLE001 - one dataset must not take the page of all
                _log.exception("the dataset %s cannot be shown", dataset.name)
                found = FolderOverview((), (), is_all=False, reason="a fault of this service")
        self._known[dataset.name] = found, self._clock()
        self._pending.discard(dataset.name)
        self._renewed.set()
        self._renewed = asyncio.Event()


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
        # Neuroglancer shows arrays, and meshes and the like.
        "is_viewable": any(
            each.is_drawn or (each.format == "precomputed" and each.kind != "array")
            for each in sound
        ),
        "nbytes": sum(map(_nbytes_of, sound)),
        "reason": "" if overview is None else overview.reason,
    }


def _nbytes_of(found: ArrayView) -> int:
    """Return the bytes of all elements of an array; 0 where the size of one is not known."""
    bits = re.fullmatch("(?:u?int|b?float|complex)([0-9]{1,3})", found.data_type or "")
    nbytes = int(bits[1]) // 8 if bits else int(found.data_type == "bool")
    return math.prod(found.shape or (0,)) * nbytes


def _formats(dataset: Dataset, overview: FolderOverview | None) -> str:
    if not dataset.containers.formats:
        return "as it is stored"
    if overview is None:
        return dataset.format
    found = {each.found.format for each in overview.collections if each.found.format}
    if overview.repositories:
        found.add("icechunk")
    return ", ".join(sorted(found)) or dataset.format
