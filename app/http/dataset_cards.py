"""Cards of the start page: the contents of a dataset, and snippets of code that read it."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

from app.errors import DamagedError
from app.formats.surveying import Description
from app.http.auth.access import Caller, may_write
from app.http.links import layer_type, link, precomputed_source, zarr_source
from app.http.paths import quote_key
from app.model import NAMED_REFS
from app.resolve.containers import Dataset
from app.resolve.inspect import CollectionSummary, DatasetOverview, GroupSummary, RepositorySummary

_DRAWN: Final = frozenset(
    {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32"}
)
"""Data types of Zarr arrays that Neuroglancer shows."""
_TIMES: Final = " \N{MULTIPLICATION SIGN} "
_MOST_LETTERS: Final = 200
_MOST_SIZES: Final = 12


class Address(NamedTuple):
    """Address of the page, as the client reached it."""

    base: str
    """URL that the datasets are below, with the token if one is in the path."""
    viewer: str | None
    """Page of the viewer; `None` if none can read from here."""


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
    found = {
        each.found.format for each in summary.collections if isinstance(each.found, Description)
    }
    found |= {"icechunk"} if summary.repositories else set()
    return ", ".join(sorted(found)) or dataset.format


def _row(href: str, summary: CollectionSummary) -> Card:
    found = summary.found
    if isinstance(found, DamagedError):
        found = Description(summary.path, "", "damaged", why_sharded=found.reason)
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
    is_precomputed = (
        isinstance(summary.found, Description) and summary.found.format == "precomputed"
    )
    return f"{summary.container}/{'info' if is_precomputed else 'zarr.json'}".lstrip("/")


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
        if isinstance(each.found, DamagedError):
            continue
        path, source = _source(url, each, each.found)
        if source and source not in known:
            known.add(source)
            shown = visible(path) or name
            yield View(shown, link(viewer, layer_type(each.found), shown, source))


def _source(url: str, summary: CollectionSummary, found: Description) -> tuple[str, str]:
    """Return the path and the data source that a viewer shows; no source if it cannot."""
    if summary.group is not None and summary.group.is_image:
        return summary.path.rpartition("/")[0], zarr_source(_join(url, summary.group.key))
    if summary.node is not None and found.data_type in _DRAWN and found.shape:
        return summary.path, zarr_source(_join(url, summary.node))
    if found.format == "precomputed":
        return summary.container, precomputed_source(_join(url, summary.container))
    return summary.path, ""


def _join(url: str, key: str) -> str:
    return f"{url}/{quote_key(key)}".rstrip("/")


class _Array(NamedTuple):
    node: str
    description: Description
    group: GroupSummary | None


def make_snippets(url: str, collections: Sequence[CollectionSummary]) -> list[Snippet]:
    """Return, for each client, code that reads the first of *collections* that it can read."""
    found = [
        (summary, summary.found)
        for summary in collections
        if isinstance(summary.found, Description)
    ]
    snippets = [_curl(_join(url, _document_key(summary))) for summary, _ in found[:1]]
    arrays = [
        _Array(summary.node, each, summary.group)
        for summary, each in found
        if summary.node is not None
    ]
    for array in arrays[:1]:
        snippets.append(_zarr(_join(url, array.node)))
        snippets += _xarray(url, arrays)
        snippets.append(_tensorstore("TensorStore", "zarr3", _join(url, array.node)))
    volumes = [
        summary for summary, each in found if (each.format, each.kind) == ("precomputed", "array")
    ]
    for summary in volumes[:1]:
        source = _join(url, summary.container)
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


def _xarray(url: str, arrays: Sequence[_Array]) -> list[Snippet]:
    """Open the group of the first array, without arrays whose dimensions have other sizes."""
    group = arrays[0].group
    members = [each for each in arrays if each.group == group]
    if group is None or not all(_has_dimensions(each.description) for each in members):
        return []
    sizes: dict[str | None, int] = {}
    dropped = []
    for each in members:
        found = each.description
        own = dict(zip(found.dimension_names or (), found.shape or (), strict=False))
        if any(sizes.get(name, size) != size for name, size in own.items()):
            dropped.append(each.node.rpartition("/")[2])
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
