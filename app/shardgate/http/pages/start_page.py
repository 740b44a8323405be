"""``GET /`` for browsers: a card for each dataset, and code that reads it."""

import json
import logging
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

import cachetools
from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardgate.concurrency import SingleFlight, bounded_gather
from shardgate.errors import install_command
from shardgate.formats.surveying import Description
from shardgate.http.auth.access import Datasets, may_write
from shardgate.http.pages.links import (
    PUBLIC_VIEWER,
    VIEWER,
    layer_type,
    link,
    precomputed_source,
    zarr_source,
)
from shardgate.http.request import quote_key
from shardgate.http.responses import page_headers
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.survey.inspect import CollectionSummary, DatasetOverview, summarize

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
_DRAWN: Final = frozenset(
    {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32"}
)
"""Data types of Zarr arrays that Neuroglancer shows."""
_TIMES: Final = " \N{MULTIPLICATION SIGN} "
_MOST_LETTERS: Final = 200
_MOST_SIZES: Final = 12
_VOLUME: Final = ("precomputed", "array")
_log = logging.getLogger(__name__)


class Address(NamedTuple):
    """Address of the page, as the client reached it."""

    base: str
    """URL that the datasets are below, with the token if one is in the path."""
    viewer: str | None
    """Page of the viewer; `None` if none can read from here."""


class StartPage:
    """Shows the readable datasets."""

    def __init__(self, datasets: Datasets, overviews: "OverviewCache", *, has_viewer: bool) -> None:
        self._datasets = datasets
        self._overviews = overviews
        self._has_viewer = has_viewer
        self._style = (_TEMPLATES / "start.css").read_text("utf-8")
        self._page = _PAGES.get_template("start.html")
        headers = page_headers(style=self._style)
        self._headers = {name.decode(): value.decode() for name, value in headers}

    async def __call__(self, request: Request) -> Response:
        """Answer a browser."""
        caller = request.scope["caller"]
        known = sorted(self._datasets.readable_by(caller), key=lambda dataset: dataset.name)
        shown = known[:_MOST_DATASETS]
        address = address_of(request, has_viewer=self._has_viewer)
        overviews = await self._overviews.read_all(shown)
        content = self._page.render(
            cards=[
                _make_card(dataset, overview, address, is_writable=may_write(caller, dataset))
                for dataset, overview in zip(shown, overviews, strict=True)
            ],
            more=len(known) - len(shown),
            has_viewer=address.viewer is not None,
            viewer_command=install_command("viewer"),
            has_metrics=self._datasets.may_watch(caller),
            is_below_token=request.scope["token"] is not None,
            style=self._style,
        )
        return Response(content, media_type="text/html", headers=self._headers)


def address_of(request: Request, *, has_viewer: bool) -> Address:
    """Return the address that *request* came to, of a service that *has_viewer* or not.

    Forged headers deceive only their sender: the page is not cached. A proxy reports ``https`` in
    ``X-Forwarded-Proto``.
    """
    token = request.scope["token"]
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        host = ":".join(map(str, request.scope.get("server") or ("localhost",)))
    forwarded = request.headers.get("x-forwarded-proto", "")
    scheme = forwarded if forwarded in ("http", "https") else request.scope["scheme"]
    below = "" if token is None else f"/~{quote(token, safe='%')}"
    above = "./" if token is None else "../"
    is_readable = scheme == "https" or _THIS_MACHINE.fullmatch(host)
    public = PUBLIC_VIEWER if is_readable else None
    base = f"{scheme}://{host}{quote(request.scope['root_path'])}{below}"
    return Address(base, f"{above}{VIEWER}" if has_viewer else public)


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


def _make_card(
    dataset: Dataset, overview: DatasetOverview, address: Address, *, is_writable: bool
) -> Mapping[str, object]:
    """Return values for ``start.html``; links to the dataset are relative."""
    url = f"{address.base}/{quote_key(dataset.name)}"
    return {
        "name": dataset.name,
        "href": f"./{quote_key(dataset.name)}",
        "formats": _formats(dataset, overview),
        "is_writable": is_writable,
        "overview": overview,
        "views": list(_views(dataset.name, url, overview, address.viewer)),
        "snippets": make_snippets(url, overview.collections),
    }


def _formats(dataset: Dataset, summary: DatasetOverview) -> str:
    if not dataset.containers.formats:
        return "as it is stored"
    found = {each.found.format for each in summary.collections if each.found.format}
    found |= {"icechunk"} if summary.repositories else set()
    return ", ".join(sorted(found)) or dataset.format


def _document_key(summary: CollectionSummary) -> str:
    """Return the key of the metadata document of a collection, or of its container."""
    if summary.node is not None:
        return f"{summary.node}/zarr.json".lstrip("/")
    name = "info" if summary.found.format == "precomputed" else "zarr.json"
    return f"{summary.container}/{name}".lstrip("/")


def _views(
    name: str, url: str, summary: DatasetOverview, viewer: str | None
) -> Iterator[tuple[str, str]]:
    """Yield names and links: of images by their groups, of volumes by their containers, once."""
    if viewer is None:
        return
    known = set()
    for each in summary.collections:
        path, source = _source(url, each)
        if source and source not in known:
            known.add(source)
            shown = visible(path) or name
            yield (shown, link(viewer, layer_type(each.found), shown, source))


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


def make_snippets(url: str, collections: Sequence[CollectionSummary]) -> dict[str, str]:
    """Return, by client, code that reads the first of *collections* that it can read."""
    sound = [each for each in collections if each.found.format]
    arrays = [each for each in sound if each.node is not None]
    volumes = [each for each in sound if (each.found.format, each.found.kind) == _VOLUME]
    snippets = {}
    if sound:
        snippets["curl"] = f"curl -sS {shlex.quote(_join(url, _document_key(sound[0])))}"
    if arrays:
        source = _join(url, arrays[0].node or "")
        snippets["zarr-python"] = _ZARR.format(url=source)
        snippets |= _xarray(url, arrays)
        snippets["TensorStore"] = _TENSORSTORE.format(driver="zarr3", url=source)
    if volumes:
        source, driver = _join(url, volumes[0].container), "neuroglancer_precomputed"
        snippets["TensorStore, precomputed"] = _TENSORSTORE.format(driver=driver, url=source)
    return snippets


_ZARR: Final = """# pip install zarr 'fsspec[http]'
import zarr

array = zarr.open_array("{url}", mode="r")
print(array.info)"""
_TENSORSTORE: Final = """# pip install tensorstore
import tensorstore

spec = {{"driver": "{driver}", "kvstore": "{url}/"}}
array = tensorstore.open(spec, read=True).result()
print(array)"""
_XARRAY: Final = """# pip install xarray zarr 'fsspec[http]'
import xarray

dataset = xarray.open_zarr("{url}", consolidated={is_consolidated}{drop})
print(dataset)"""


def _xarray(url: str, arrays: Sequence[CollectionSummary]) -> dict[str, str]:
    """Open the group of the first array, without arrays whose dimensions have other sizes."""
    group = arrays[0].group
    members = [each for each in arrays if each.group == group]
    if group is None or not all(_has_dimensions(each.found) for each in members):
        return {}
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
    source = _join(url, group.key)
    code = _XARRAY.format(url=source, is_consolidated=group.is_consolidated, drop=drop)
    return {"xarray": code}


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


_PAGES.filters |= {
    "visible": visible,
    "shape": format_shape,
    "quote_key": quote_key,
    "document_key": _document_key,
    "ref_name": lambda ref: unquote(ref.partition(".")[2]),
}
