"""``GET /`` for browsers: the datasets, how to read them, and figures of the process."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import cachetools
from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.concurrency import SingleFlight
from app.http.auth.access import Datasets
from app.http.dataset_cards import Address, make_card
from app.http.links import PUBLIC_VIEWER, VIEWER
from app.http.responses import page_headers
from app.observability.metrics import RequestMetrics
from app.resolve.chunks import ChunkReader
from app.resolve.containers import Dataset
from app.resolve.inspect import DatasetOverview, summarize
from app.resolve.metadata_cache import MetadataCache, SizedLRUCache
from app.resolve.resolver import Resolver

_TEMPLATES: Final = Path(__file__).parent / "templates"
_PAGES: Final = Environment(
    loader=FileSystemLoader(_TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_MOST_DATASETS: Final = 100
_LOOK_S: Final = 2.0
"""Longest look at a dataset."""
_CACHED_S: Final = 20.0
_CACHED_DATASETS: Final = 1024
_HOST: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_THIS_MACHINE: Final = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?")
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_log = logging.getLogger(__name__)

type Figures = list[tuple[str, str]]
"""Names and values, as the page shows them."""


class StartPage:
    """Shows the readable datasets, or with the query ``figures`` the live figures alone."""

    def __init__(
        self,
        datasets: Datasets,
        overviews: "OverviewCache",
        figures: Callable[[], Figures],
        *,
        has_viewer: bool,
    ) -> None:
        self._datasets = datasets
        self._glances = overviews
        self._read_figures = figures
        self._has_viewer = has_viewer
        self._style = (_TEMPLATES / "start.css").read_text("utf-8")
        self._script = (_TEMPLATES / "start.js").read_text("utf-8")
        self._page = _PAGES.get_template("start.html")
        self._figures = _PAGES.get_template("figures.html")
        headers = page_headers(style=self._style, script=self._script)
        self._headers = {name.decode(): value.decode() for name, value in headers}

    async def __call__(self, request: Request) -> Response:
        """Answer a browser."""
        caller = request.scope["caller"]
        figures = self._read_figures() if self._datasets.may_watch(caller) else []
        if "figures" in request.query_params:
            return self._respond(self._figures.render(figures=figures))
        known = sorted(self._datasets.readable_by(caller), key=lambda dataset: dataset.name)
        shown = known[:_MOST_DATASETS]
        address = address_of(request, has_viewer=self._has_viewer)
        overviews = await self._glances.read_all(shown)
        content = self._page.render(
            cards=[
                make_card(dataset, summary, address, caller)
                for dataset, summary in zip(shown, overviews, strict=True)
            ],
            more=len(known) - len(shown),
            has_viewer=address.viewer is not None,
            figures=figures,
            is_below_token="token" in request.scope,
            style=self._style,
            script=self._script,
        )
        return self._respond(content)

    def _respond(self, content: str) -> Response:
        return Response(content, media_type="text/html", headers=self._headers)


def address_of(request: Request, *, has_viewer: bool) -> Address:
    """Return the address that *request* came to, of a service that *has_viewer* or not.

    Forged headers deceive only their sender: the page is not cached. A proxy reports ``https`` in
    ``X-Forwarded-Proto``.
    """
    token = request.scope.get("token")
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        host = ":".join(map(str, request.scope["server"] or ("localhost",)))
    forwarded = request.headers.get("x-forwarded-proto", "")
    scheme = forwarded if forwarded in ("http", "https") else request.scope["scheme"]
    below = "" if token is None else f"/~{quote(token, safe='%')}"
    above = "./" if token is None else "../"
    is_readable = scheme == "https" or _THIS_MACHINE.fullmatch(host)
    public = PUBLIC_VIEWER if is_readable else None
    return Address(f"{scheme}://{host}{below}", f"{above}{VIEWER}" if has_viewer else public)


class OverviewCache:
    """Looks at datasets, and shares and caches the results: a view of the page costs few reads."""

    def __init__(
        self,
        resolver: Resolver,
        *,
        within_s: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver
        self._within_s = within_s
        self._flights = SingleFlight[str]()
        self._cached = cachetools.TTLCache[str, DatasetOverview](_CACHED_DATASETS, _CACHED_S, clock)

    async def read_all(self, datasets: Sequence[Dataset]) -> list[DatasetOverview]:
        """Look at all *datasets* concurrently."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._get(dataset)) for dataset in datasets]
        return [task.result() for task in tasks]

    async def _get(self, dataset: Dataset) -> DatasetOverview:
        if (known := self._cached.get(dataset.name)) is not None:
            return known
        return await self._flights.run(dataset.name, lambda: self._look(dataset))

    async def _look(self, dataset: Dataset) -> DatasetOverview:
        try:
            found = await summarize(self._resolver, dataset, self._within_s)
        except Exception:  # noqa: BLE001 - one dataset must not take the page of all
            _log.exception("the dataset %s cannot be shown", dataset.name)
            found = DatasetOverview((), (), is_all=False, reason="a fault of this service")
        self._cached[dataset.name] = found
        return found


def figures_of(
    memory: MetadataCache, chunks: ChunkReader, requests: RequestMetrics
) -> Callable[[], Figures]:
    """Return a function that reads the figures of the process, which starts now."""
    started_at = time.monotonic()

    def read() -> Figures:
        tally, (answered, sent_nbytes) = chunks.counters, requests.totals()
        lookups = tally.hits + tally.misses + tally.joins
        share = f"{tally.hits / lookups:.0%}" if lookups else "none"
        return [
            ("Running for", format_seconds(time.monotonic() - started_at)),
            ("Requests", f"{answered:,}"),
            ("Sent", format_nbytes(sent_nbytes)),
            ("Chunks from memory", f"{share} of {lookups:,}"),
            ("Indexes and metadata in memory", _format_cache(memory)),
            ("Chunks in memory", _format_cache(chunks.cache)),
        ]

    return read


def _format_cache(cache: SizedLRUCache[Any, Any]) -> str:
    held = f"{format_nbytes(int(cache.currsize))} of {format_nbytes(int(cache.maxsize))}"
    return f"{len(cache):,} · {held}"


def format_nbytes(nbytes: int) -> str:
    """Format a number of bytes in the largest unit that leaves at least 1."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:  # noqa: PLR2004 - the units' definition
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{nbytes} {_UNITS[0]}"


def format_seconds(seconds: float) -> str:
    """Format a time in its two largest units."""
    minutes, hours, days = (int(seconds // per) for per in (60, 3600, 86400))
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{int(seconds)} s"
