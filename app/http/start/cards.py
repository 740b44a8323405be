"""What was seen of a dataset, as the page shows it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple
from urllib.parse import unquote

from app.errors import DamagedError
from app.formats.surveying import Description
from app.http.credentials.access import may_write
from app.http.credentials.caller import Caller
from app.http.neuroglancer import kind_of, link, precomputed_source, zarr_source
from app.http.start.address import Address
from app.http.start.snippets import Snippet, document_key, write_snippets
from app.http.start.text import spell_path, spell_shape, visible
from app.model import NAMED_REFS
from app.resolve.inspect import CollectionSummary, DatasetOverview, RepositorySummary
from app.resolve.resolver import Dataset

_DRAWN: Final = frozenset(
    {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32"}
)
"""Data types of Zarr arrays that Neuroglancer shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """An array or the like."""

    path: str
    href: str
    kind: str
    shape: str
    dimensions: str
    data_type: str
    inner: str
    shard: str
    note: str


class View(NamedTuple):
    """Something that a viewer shows."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class RefRow:
    """A branch or a tag."""

    kind: str
    name: str
    href: str
    snapshot_id: str
    message: str
    at: datetime | None


@dataclass(frozen=True, slots=True)
class RepositoryCard:
    """A repository in a dataset."""

    path: str
    refs: Sequence[RefRow]
    more: int
    """How many refs are not told."""


@dataclass(frozen=True, slots=True)
class Card:
    """A dataset."""

    name: str
    href: str
    formats: str
    is_writable: bool
    rows: Sequence[Row]
    is_all: bool
    reason: str
    repositories: Sequence[RepositoryCard]
    views: Sequence[View]
    snippets: Sequence[Snippet]


def make_card(dataset: Dataset, seen: DatasetOverview, address: Address, caller: Caller) -> Card:
    """Show what was *seen* of *dataset*, and what *caller* may do; links are relative."""
    href = f"./{spell_path(dataset.name)}"
    url = f"{address.base}/{spell_path(dataset.name)}"
    return Card(
        name=dataset.name,
        href=f"{href}/",
        formats=_formats(dataset, seen),
        is_writable=may_write(caller, dataset),
        rows=[_row(href, each) for each in seen.collections],
        is_all=seen.is_all,
        reason=visible(seen.reason, 500),
        repositories=[_repository(href, each) for each in seen.repositories],
        views=list(_views(dataset.name, url, seen, address.viewer)),
        snippets=write_snippets(url, seen.collections),
    )


def _formats(dataset: Dataset, seen: DatasetOverview) -> str:
    if not dataset.containers.formats:
        return "as it is stored"
    found = {each.found.format for each in seen.collections if isinstance(each.found, Description)}
    found |= {"icechunk"} if seen.repositories else set()
    return ", ".join(sorted(found)) or dataset.format


def _row(href: str, seen: CollectionSummary) -> Row:
    found = seen.found
    if isinstance(found, DamagedError):
        found = Description(seen.path, "", "damaged", why_sharded=found.reason)
    names = found.dimension_names or ()
    return Row(
        path=visible(seen.path) or "/",
        href=f"{href}/{spell_path(document_key(seen))}",
        kind=found.kind,
        shape=spell_shape(found.shape),
        dimensions=visible(", ".join(name or "-" for name in names)),
        data_type=visible(found.data_type or ""),
        inner=spell_shape(found.inner_chunk_shape),
        shard=spell_shape(found.shard_shape) or ("by id" if found.sharding else ""),
        note=visible(found.why_sharded or found.sharding or ""),
    )


def _repository(href: str, seen: RepositorySummary) -> RepositoryCard:
    branch, _ = NAMED_REFS
    refs = [
        RefRow(
            kind="branch" if tip.ref.startswith(branch) else "tag",
            name=visible(unquote(tip.ref.partition(".")[2])),
            href=f"{href}/{spell_path(f'{seen.path}/{tip.ref}'.lstrip('/'))}/",
            snapshot_id=tip.snapshot_id,
            message=visible(tip.message),
            at=tip.flushed_at,
        )
        for tip in seen.tips
    ]
    return RepositoryCard(visible(seen.path), refs, seen.refs - len(refs))


def _views(name: str, url: str, seen: DatasetOverview, page: str | None) -> Iterator[View]:
    """Name what a viewer shows: images by their groups, volumes by their containers, once."""
    if page is None:
        return
    told = set()
    for each in seen.collections:
        if isinstance(each.found, DamagedError):
            continue
        path, source = _source(url, each, each.found)
        if source and source not in told:
            told.add(source)
            shown = visible(path) or name
            yield View(shown, link(page, kind_of(each.found), shown, source))


def _source(url: str, seen: CollectionSummary, found: Description) -> tuple[str, str]:
    """Give the path and the source of what a viewer shows *seen* in; no source if in nothing."""
    if seen.group is not None and seen.group.is_image:
        return seen.path.rpartition("/")[0], zarr_source(_join(url, seen.group.key))
    if seen.node is not None and found.data_type in _DRAWN and found.shape:
        return seen.path, zarr_source(_join(url, seen.node))
    if found.format == "precomputed":
        return seen.container, precomputed_source(_join(url, seen.container))
    return seen.path, ""


def _join(url: str, key: str) -> str:
    return f"{url}/{spell_path(key)}".rstrip("/")
