"""Which references the manifests of an array have after a change, and which stay as they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.change_set import ChunkChanges
from app.formats.icechunk.columns import U32s
from app.formats.icechunk.index import Manifest
from app.formats.icechunk.metadata import ManifestRef
from app.formats.icechunk.payloads import Kind
from app.formats.icechunk.row_numbers import number_rows, sort_columns
from app.formats.icechunk.splitting import WHOLE, Splits

type _Cell = tuple[int, ...]
"""Which of the boxes, into which the grid is split, by their numbers along each dimension."""
type Place = tuple[int, ...]
"""Before and after which other manifests of its array one comes."""
type Extents = tuple[tuple[int, int], ...]

CHANGES: Final = 0
"""The source of references that are new; old manifests follow."""
_SHARED: Final = 0
"""Of all that comes into the one manifest of a box that has changes."""


class Merged(NamedTuple):
    """The references of a manifest that is to be written, sorted by their coords."""

    place: Place
    coords: U32s
    sources: NDArray[np.int64]
    """Whence each comes: 0 for a change, 1 for the first old manifest."""
    positions: NDArray[np.int64]
    """Of each in its source: the number of a change, the position of a table."""


@dataclass(frozen=True, slots=True)
class ManifestsRewrite:
    """An array whose manifests are to follow a change."""

    node_id: bytes
    grid: tuple[int, ...]
    """How many chunks there are from now on: references outside are dropped."""
    refs: tuple[ManifestRef, ...]
    """The manifests it has had."""
    changes: ChunkChanges
    splits: Splits | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of the old manifests of an array."""

    rewrite: ManifestsRewrite
    sizes: tuple[int, ...]
    changed: frozenset[_Cell]
    """The boxes in which there are changes."""
    kept: tuple[tuple[Place, ManifestRef], ...]
    """Manifests that stay."""
    opened: tuple[tuple[int, ManifestRef], ...]
    """Those that have to be read, and their numbers."""


class _Rows(NamedTuple):
    """References from one source."""

    source: int
    coords: U32s
    positions: NDArray[np.int64]
    places: Sequence[Place]
    """Where those manifests come that references go to."""
    numbers: NDArray[np.int64]
    """Which of the *places* each goes to."""


def plan_manifests(rewrite: ManifestsRewrite) -> Plan:
    """Find out which manifests stay.

    One stays that lies in one box of the grid where nothing changes: whatever split it was made
    for, as in the library.
    """
    grid, coords = rewrite.grid, rewrite.changes.coords
    sizes = (rewrite.splits or Splits.whole(len(grid))).sizes
    changed = frozenset(number_rows(_cells(coords[_inside(coords, grid)], sizes))[0])
    kept: list[tuple[Place, ManifestRef]] = []
    opened: list[tuple[int, ManifestRef]] = []
    for number, ref in enumerate(rewrite.refs, 1):
        extents = _visible(ref, len(grid))
        if extents is None or any(
            start >= min(stop, count) for (start, stop), count in zip(extents, grid, strict=True)
        ):
            continue
        cell = tuple(start // size for (start, _), size in zip(extents, sizes, strict=True))
        last = tuple((stop - 1) // size for (_, stop), size in zip(extents, sizes, strict=True))
        is_inside = all(stop <= count for (_, stop), count in zip(extents, grid, strict=True))
        if is_inside and cell == last and cell not in changed:
            kept.append(((*cell, number), ref))
        else:
            opened.append((number, ref))
    return Plan(rewrite, sizes, changed, tuple(kept), tuple(opened))


def merge(plan: Plan, manifests: Mapping[bytes, Manifest]) -> Iterator[Merged]:
    """Put the changes together with the references of the *manifests* that the *plan* opened.

    Of two references to a chunk the first counts, and a change before all.
    """
    changes = plan.rewrite.changes
    parts = [_changes(plan, changes.coords)]
    for number, ref in plan.opened:
        parts.append(_references(plan, number, ref, manifests[ref.object_id]))
    places = sorted({place for part in parts for place in part.places})
    coords = np.concatenate([part.coords for part in parts])
    sources = np.repeat([part.source for part in parts], [len(part.coords) for part in parts])
    positions = np.concatenate([part.positions for part in parts])
    groups = _groups(parts, places)
    order, first = sort_columns(np.concatenate((groups[None], coords.T)))
    order = order[first]
    gone = changes.payloads.of_kind(Kind.GONE)
    if len(gone):
        order = order[(sources[order] != CHANGES) | ~np.isin(positions[order], gone)]
    ordered = groups[order]
    for rows in np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1):
        if len(rows):
            place = places[groups[rows[0]]]
            yield Merged(place, coords[rows], sources[rows], positions[rows])


def _groups(parts: Sequence[_Rows], places: Sequence[Place]) -> U32s:
    """Tell by its number in *places* which manifest each reference of *parts* goes to."""
    ranks = {place: rank for rank, place in enumerate(places)}
    groups = [
        np.array([ranks[place] for place in part.places], np.uint32)[part.numbers] for part in parts
    ]
    return np.concatenate(groups)


def _changes(plan: Plan, coords: U32s) -> _Rows:
    rows = np.flatnonzero(_inside(coords, plan.rewrite.grid))
    coords = coords[rows]
    cells, numbers = number_rows(_cells(coords, plan.sizes))
    return _Rows(CHANGES, coords, rows, [(*cell, _SHARED) for cell in cells], numbers)


def _references(plan: Plan, number: int, ref: ManifestRef, manifest: Manifest) -> _Rows:
    """Give those references of *manifest* that lie in its extents and in the grid."""
    grid, node_id = plan.rewrite.grid, plan.rewrite.node_id
    coords = manifest.coords(node_id, len(grid))
    positions = manifest.positions(node_id, len(grid))
    extents = _visible(ref, len(grid)) or ()
    low = tuple(start for start, _ in extents)
    high = tuple(min(stop, count) for (_, stop), count in zip(extents, grid, strict=True))
    inside = _inside(coords, high, low)
    if not inside.all():
        coords, positions = coords[inside], positions[inside]
    cells, numbers = number_rows(_cells(coords, plan.sizes))
    places = [(*cell, _SHARED if cell in plan.changed else number) for cell in cells]
    return _Rows(number, coords, positions.astype(np.int64), places, numbers)


def _visible(ref: ManifestRef, ndim: int) -> Extents | None:
    """Give the extents of *ref*; `None` where readers find nothing in it.

    Early writers gave a dimension to arrays that have none.
    """
    if len(ref.extents) == ndim:
        return ref.extents
    return () if not ndim and ref.extents == ((0, 1),) else None


def _cells(coords: U32s, sizes: tuple[int, ...]) -> U32s:
    """Tell in which boxes *coords* lie."""
    cells = np.zeros(coords.shape, np.uint32)
    for axis, size in enumerate(sizes):
        if size < WHOLE:
            cells[:, axis] = coords[:, axis] // np.uint32(size)
    return cells


def _inside(
    coords: U32s, high: tuple[int, ...], low: tuple[int, ...] | None = None
) -> NDArray[np.bool_]:
    """Mark the coords from *low*, or zeros, to *high*."""
    inside = np.ones(len(coords), np.bool_)
    for axis, stop in enumerate(high):
        inside &= coords[:, axis] < stop
        if low and low[axis]:
            inside &= coords[:, axis] >= low[axis]
    return inside
