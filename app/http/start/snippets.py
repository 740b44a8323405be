"""Ways to read what was seen, to be copied from the page and run."""

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from app.formats.surveying import Description
from app.http.start.text import spell_path
from app.resolve.inspect import CollectionSummary, GroupSummary


class Snippet(NamedTuple):
    """A few lines to run."""

    title: str
    code: str


class _Array(NamedTuple):
    node: str
    description: Description

    group: GroupSummary | None

    @property
    def name(self) -> str:
        return self.node.rpartition("/")[2]


def document_key(seen: CollectionSummary) -> str:
    """Name the document that describes the collection *seen*, or its container."""
    if seen.node is not None:
        return f"{seen.node}/zarr.json".lstrip("/")
    is_precomputed = isinstance(seen.found, Description) and seen.found.format == "precomputed"
    return f"{seen.container}/{'info' if is_precomputed else 'zarr.json'}".lstrip("/")


def write_snippets(url: str, collections: Sequence[CollectionSummary]) -> list[Snippet]:
    """Write how to read the first of *collections* that each way can read, below *url*."""
    sound = [seen for seen in collections if isinstance(seen.found, Description)]
    snippets = [_curl(f"{url}/{spell_path(document_key(seen))}") for seen in sound[:1]]
    arrays = list(_arrays(sound))
    for array in arrays[:1]:
        snippets.append(_zarr(_url(url, array.node)))
        snippets += _xarray(url, arrays)
        snippets.append(_tensorstore("TensorStore", "zarr3", _url(url, array.node)))
    for seen in [each for each in sound if _is_volume(each)][:1]:
        volume = _url(url, seen.container)
        snippets.append(
            _tensorstore("TensorStore, precomputed", "neuroglancer_precomputed", volume)
        )
    return snippets


def _arrays(sound: Iterable[CollectionSummary]) -> Iterable[_Array]:
    for seen in sound:
        if seen.node is not None and isinstance(seen.found, Description):
            yield _Array(seen.node, seen.found, seen.group)


def _is_volume(seen: CollectionSummary) -> bool:
    found = seen.found
    return (
        isinstance(found, Description) and found.format == "precomputed" and found.kind == "array"
    )


def _url(url: str, path: str) -> str:
    return f"{url}/{spell_path(path)}".rstrip("/")


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
    """Open the group of the first array, if its arrays have names for their dimensions.

    Those whose dimensions have other sizes, as levels of an image have, are left out.
    """
    group = arrays[0].group
    members = [each for each in arrays if each.group == group]
    if group is None or not all(_has_dimensions(each.description) for each in members):
        return []
    sizes: dict[str | None, int] = {}
    dropped = []
    for each in members:
        own = dict(_dimensions(each.description))
        if any(sizes.get(name, size) != size for name, size in own.items()):
            dropped.append(each.name)
        else:
            sizes |= own
    leaving = f", drop_variables={json.dumps(dropped)}" if dropped else ""
    code = f"""# pip install xarray zarr 'fsspec[http]'
import xarray

dataset = xarray.open_zarr("{_url(url, group.key)}", consolidated={group.is_consolidated}{leaving})
print(dataset)"""
    return [Snippet("xarray", code)]


def _dimensions(description: Description) -> list[tuple[str | None, int]]:
    names, shape = description.dimension_names or (), description.shape or ()
    return list(zip(names, shape, strict=False))


def _has_dimensions(description: Description) -> bool:
    names = description.dimension_names or ()
    return len(set(names)) == len(description.shape or ()) and None not in names
