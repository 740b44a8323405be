"""``GET /`` for browsers: a card for each dataset, code that reads it, figures of the process."""

import json
import logging
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import cachetools
from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.concurrency import SingleFlight, bounded_gather
from app.formats.surveying import Description
from app.http.auth.access import Caller, Datasets, may_write
from app.http.links import PUBLIC_VIEWER, VIEWER, layer_type, link, precomputed_source, zarr_source
from app.http.paths import quote_key
from app.http.responses import page_headers
from app.model import NAMED_REFS
from app.observability.metrics import RequestMetrics
from app.resolve.chunks import ChunkReader
from app.resolve.containers import Dataset
from app.resolve.inspect import (
    CollectionSummary,
    DatasetOverview,
    RepositorySummary,
    summarize,
)
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
_DRAWN: Final = frozenset(
    {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32"}
)
"""Data types of Zarr arrays that Neuroglancer shows."""
_TIMES: Final = " \N{MULTIPLICATION SIGN} "
_MOST_LETTERS: Final = 200
_MOST_SIZES: Final = 12
_VOLUME: Final = ("precomputed", "array")
_log = logging.getLogger(__name__)

type Figures = list[tuple[str, str]]
"""Names and values, as the page shows them."""


class Address(NamedTuple):
    """Address of the page, as the client reached it."""

    base: str
    """URL that the datasets are below, with the token if one is in the path."""
    viewer: str | None
    """Page of the viewer; `None` if none can read from here."""


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
        return await bounded_gather(self._get, datasets, limit=len(datasets))

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


class View(NamedTuple):
    """Link that opens a viewer."""

    name: str
    url: str


class Snippet(NamedTuple):
    """Code to copy and run."""

    title: str
    code: str


type Card = Mapping[str, object]
"""Values of ``start.html``: of a dataset, or of a row or repository in its card."""


def make_card(dataset: Dataset, summary: DatasetOverview, address: Address, caller: Caller) -> Card:
    """Return the card of *dataset* for *caller*, from its *summary*; links are relative."""
    href = f"./{quote_key(dataset.name)}"
    url = f"{address.base}/{quote_key(dataset.name)}"
    return {
        "name": dataset.name,
        "href": f"{href}/",
        "formats": _formats(dataset, summary),
        "is_writable": may_write(caller, dataset),
        "rows": [_row(href, each) for each in summary.collections],
        "is_all": summary.is_all,
        "reason": visible(summary.reason, 500),
        "repositories": [_repository(href, each) for each in summary.repositories],
        "views": list(_views(dataset.name, url, summary, address.viewer)),
        "snippets": make_snippets(url, summary.collections),
    }


def _formats(dataset: Dataset, summary: DatasetOverview) -> str:
    if not dataset.containers.formats:
        return "as it is stored"
    found = {each.found.format for each in summary.collections if each.found.format}
    found |= {"icechunk"} if summary.repositories else set()
    return ", ".join(sorted(found)) or dataset.format


def _row(href: str, summary: CollectionSummary) -> Card:
    found = summary.found
    names = found.dimension_names or ()
    return {
        "path": visible(summary.path) or "/",
        "href": f"{href}/{quote_key(_document_key(summary))}",
        "kind": found.kind,
        "shape": format_shape(found.shape),
        "dimensions": visible(", ".join(name or "-" for name in names)),
        "data_type": visible(found.data_type or ""),
        "inner": format_shape(found.inner_chunk_shape),
        "shard": format_shape(found.shard_shape) or ("by id" if found.sharding else ""),
        "note": visible(found.why_sharded or found.sharding or ""),
    }


def _document_key(summary: CollectionSummary) -> str:
    """Return the key of the metadata document of a collection, or of its container."""
    if summary.node is not None:
        return f"{summary.node}/zarr.json".lstrip("/")
    name = "info" if summary.found.format == "precomputed" else "zarr.json"
    return f"{summary.container}/{name}".lstrip("/")


def _repository(href: str, summary: RepositorySummary) -> Card:
    branch, _ = NAMED_REFS
    refs = [
        {
            "kind": "branch" if tip.ref.startswith(branch) else "tag",
            "name": visible(unquote(tip.ref.partition(".")[2])),
            "href": f"{href}/{quote_key(f'{summary.path}/{tip.ref}'.lstrip('/'))}/",
            "snapshot_id": tip.snapshot_id,
            "message": visible(tip.message),
            "at": tip.flushed_at,
        }
        for tip in summary.tips
    ]
    return {"path": visible(summary.path), "refs": refs, "more": summary.refs - len(refs)}


def _views(name: str, url: str, summary: DatasetOverview, viewer: str | None) -> Iterator[View]:
    """Yield links to a viewer: of images by their groups, of volumes by their containers, once."""
    if viewer is None:
        return
    known = set()
    for each in summary.collections:
        path, source = _source(url, each)
        if source and source not in known:
            known.add(source)
            shown = visible(path) or name
            yield View(shown, link(viewer, layer_type(each.found), shown, source))


def _source(url: str, summary: CollectionSummary) -> tuple[str, str]:
    """Return the path and the data source that a viewer shows; no source if it cannot."""
    found = summary.found
    if summary.group is not None and summary.group.is_image:
        return summary.path.rpartition("/")[0], zarr_source(_join(url, summary.group.key))
    if summary.node is not None and found.data_type in _DRAWN and found.shape:
        return summary.path, zarr_source(_join(url, summary.node))
    if found.format == "precomputed":
        return summary.container, precomputed_source(_join(url, summary.container))
    return summary.path, ""


def _join(url: str, key: str) -> str:
    return f"{url}/{quote_key(key)}".rstrip("/")


def make_snippets(url: str, collections: Sequence[CollectionSummary]) -> list[Snippet]:
    """Return, for each client, code that reads the first of *collections* that it can read."""
    sound = [each for each in collections if each.found.format]
    snippets = [_curl(_join(url, _document_key(each))) for each in sound[:1]]
    arrays = [(each.node, each) for each in sound if each.node is not None]
    for node, _ in arrays[:1]:
        snippets.append(_zarr(_join(url, node)))
        snippets += _xarray(url, [each for _, each in arrays])
        snippets.append(_tensorstore("TensorStore", "zarr3", _join(url, node)))
    volumes = [each for each in sound if (each.found.format, each.found.kind) == _VOLUME]
    for each in volumes[:1]:
        source = _join(url, each.container)
        snippets.append(
            _tensorstore("TensorStore, precomputed", "neuroglancer_precomputed", source)
        )
    return snippets


def _curl(url: str) -> Snippet:
    return Snippet("curl", f"curl -sS {shlex.quote(url)}")


def _zarr(url: str) -> Snippet:
    code = f"""# pip install zarr 'fsspec[http]'
import zarr

array = zarr.open_array("{url}", mode="r")
print(array.info)"""
    return Snippet("zarr-python", code)


def _tensorstore(title: str, driver: str, url: str) -> Snippet:
    code = f"""# pip install tensorstore
import tensorstore

spec = {{"driver": "{driver}", "kvstore": "{url}/"}}
array = tensorstore.open(spec, read=True).result()
print(array)"""
    return Snippet(title, code)


def _xarray(url: str, arrays: Sequence[CollectionSummary]) -> list[Snippet]:
    """Open the group of the first array, without arrays whose dimensions have other sizes."""
    group = arrays[0].group
    members = [each for each in arrays if each.group == group]
    if group is None or not all(_has_dimensions(each.found) for each in members):
        return []
    sizes: dict[str | None, int] = {}
    dropped = []
    for each in members:
        found = each.found
        own = dict(zip(found.dimension_names or (), found.shape or (), strict=False))
        if any(sizes.get(name, size) != size for name, size in own.items()):
            dropped.append(each.path.rpartition("/")[2])
        else:
            sizes |= own
    drop = f", drop_variables={json.dumps(dropped)}" if dropped else ""
    code = f"""# pip install xarray zarr 'fsspec[http]'
import xarray

dataset = xarray.open_zarr("{_join(url, group.key)}", consolidated={group.is_consolidated}{drop})
print(dataset)"""
    return [Snippet("xarray", code)]


def _has_dimensions(description: Description) -> bool:
    names = description.dimension_names or ()
    return len(set(names)) == len(description.shape or ()) and None not in names


def visible(text: str, most: int = _MOST_LETTERS) -> str:
    """Shorten *text* and escape what is not printable, such as marks that reverse a line."""
    shown = "".join(c if c.isprintable() else _escape(c) for c in text[:most])
    return shown if len(text) <= most else f"{shown}…"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def format_shape(shape: Sequence[int] | None) -> str:
    """Format a shape; empty if it is unknown."""
    if shape is None:
        return ""
    sizes = [str(size) for size in shape[:_MOST_SIZES]]
    return _TIMES.join(sizes + ["…"] * (len(shape) > _MOST_SIZES)) or "scalar"
