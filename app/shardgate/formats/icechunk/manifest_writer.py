"""Manifests of an array rewritten after a change of chunks ("Chunk Manifest Files").

1. `_plan` decides which manifests stay; the others are read.
2. `_merge` sorts the references of changes and old manifests into the boxes of the split.
3. `_write_manifest` writes the references of a box, all from columns.
"""

from collections.abc import Buffer as Bytes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardgate.formats.icechunk.changes import ChunkChanges
from shardgate.formats.icechunk.chunk_tables import (
    Vectors,
    gather_numbers,
    new_tables,
    vector_at,
    write_table_vector,
)
from shardgate.formats.icechunk.coords import Coords, Places, distinct_rows, inside, sort_columns
from shardgate.formats.icechunk.flatbuffers import FileType, FlatBufferWriter, seal_envelope
from shardgate.formats.icechunk.manifest import (
    MANIFEST,
    LocationCodec,
    Manifest,
    PayloadKind,
    ReferenceReader,
)
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import ManifestFile, ManifestRef

type _Cell = tuple[int, ...]
"""Number of a box of the split grid along each dimension."""
type _Rank = tuple[_Cell, int]
"""Sort key of a manifest among those of its array: its box, and the number of its source."""

_ZSTD: Final = 1
_CHANGES: Final = 0  # number of the source of new references; old manifests count from 1

_COLUMNS: Final = (
    ("start", "offset", "<u8"),
    ("length", "length", "<u8"),
    ("chunk_id", "chunk_id", "V12"),
    ("value", "inline", ""),
    ("value", "location", ""),
    ("value", "compressed_location", ""),
    ("etag", "etag", ""),
    ("modified", "last_modified", "<u4"),
)
"""Columns of `Payloads`, the fields of `ChunkRef` that they have, and types of those that are no
offsets of vectors.
"""
_VTABLE_NBYTES: Final = 24
_SLOTS: Final = 10
_CHECK_SLOTS: Final = {"etag": 6, "modified": 7}
"""Slots of `ChunkRef` after the index for a checksum."""


@dataclass(frozen=True, slots=True)
class ArrayRewrite:
    """An array whose manifests are to be rewritten."""

    node_id: bytes
    grid: tuple[int, ...]
    """Chunks along each dimension after the change: references outside are dropped."""
    manifests: tuple[ManifestRef, ...]
    """Manifests before the commit; none if the number of dimensions was another."""
    changes: ChunkChanges
    """All inside of *grid*."""
    splits: tuple[int, ...]
    """Chunks that a manifest spans, by dimension; `WHOLE` for all."""
    path: str = ""
    leaving: tuple[ManifestRef, ...] = ()
    """Manifests that may have chunks outside of *grid*, which belong into the log."""

    def dropped(self, manifests: Mapping[bytes, Manifest]) -> tuple[Coords, ...]:
        """Return the chunks outside of *grid* in *manifests*, by id, that are *leaving*."""
        found: list[Coords] = []
        for object_id, extents in self.leaving:
            coords = manifests[object_id].coords(self.node_id, len(extents))
            start = tuple(low for low, _ in extents)
            stop = tuple(high for _, high in extents)
            found.append(coords[inside(coords, stop, start) & ~inside(coords, self.grid)])
        return tuple(coords for coords in found if len(coords))

    def cells(self, coords: Coords) -> Coords:
        """Return the box of the split grid that each of *coords* lies in."""
        return coords // np.array(self.splits, np.uint32)


class Rewritten(NamedTuple):
    """The manifests of an array after its rewrite."""

    manifests: tuple[ManifestRef, ...]
    """Those that are kept and those that are new, in the order in which the array lists them."""
    dropped: tuple[Coords, ...]
    """Chunks that lie outside of the grid now."""
    files: tuple[ManifestFile, ...]
    """Those of *manifests* that are new."""


class _ManifestPlan(NamedTuple):
    kept: list[tuple[_Rank, ManifestRef]]
    opened: list[tuple[int, ManifestRef]]
    """Manifests that have to be read, with their numbers as sources."""


class _Source(NamedTuple):
    """References that are merged: the changes, or those of an old manifest."""

    number: int
    coords: Coords
    payloads: Payloads
    locations: LocationCodec | None = None
    """Decompresses the locations of an old manifest."""


class _Merged(NamedTuple):
    """References of one manifest to write, sorted by their coordinates."""

    rank: _Rank
    coords: Coords
    rows: NDArray[Any]
    sources: Places
    """Position of the source of each."""

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        return tuple((int(axis.min()), int(axis.max()) + 1) for axis in self.coords.T)


def needed_manifests(rewrite: ArrayRewrite) -> frozenset[bytes]:
    """Return the ids of the manifests that have to be read for *rewrite*."""
    opened = (ref for _, ref in _plan(rewrite).opened)
    return frozenset(ref.object_id for ref in (*opened, *rewrite.leaving))


def rewrite_manifests(
    rewrite: ArrayRewrite,
    manifests: Mapping[bytes, Manifest],
    new_id: Callable[[], bytes],
    level: int = 3,
) -> tuple[Rewritten, Mapping[bytes, bytes]]:
    """Write the boxes of the split that change; *manifests* has the `needed_manifests`. Returns
    also the contents of the new files, by id. Raises: `DecodeError` for a reference that cannot be
    copied; `ConflictError` where a manifest would exceed the limit of the library.
    """
    plan = _plan(rewrite)
    changes = rewrite.changes
    rows = np.flatnonzero(inside(changes.coords, rewrite.grid))
    sources = [_Source(_CHANGES, changes.coords[rows], changes.payloads.take(rows))]
    for number, ref in plan.opened:
        sources.append(_read_source(rewrite, number, ref, manifests[ref.object_id]))
    ranked = plan.kept
    files: list[ManifestFile] = []
    contents: dict[bytes, bytes] = {}
    for merged in _merge(rewrite, sources):
        object_id = new_id()
        data = _write_manifest(object_id, rewrite.node_id, merged, sources, level)
        files.append(ManifestFile(object_id, len(data), len(merged.coords)))
        contents[object_id] = data
        ranked.append((merged.rank, ManifestRef(object_id, merged.extents)))
    ranked.sort(key=lambda each: each[0])
    refs = tuple(ref for _, ref in ranked)
    return Rewritten(refs, rewrite.dropped(manifests), tuple(files)), contents


def _plan(rewrite: ArrayRewrite) -> _ManifestPlan:
    """Keep manifests that lie in one box of the grid without changes, as the library does."""
    grid = rewrite.grid
    coords = rewrite.changes.coords
    cells = distinct_rows(rewrite.cells(coords[inside(coords, grid)]))
    changed = set(map(tuple, cells.tolist()))
    plan = _ManifestPlan([], [])
    for number, ref in enumerate(rewrite.manifests, 1):
        extents = _visible(ref, len(grid))
        if extents is None or any(
            start >= min(stop, count) for (start, stop), count in zip(extents, grid, strict=True)
        ):
            continue
        corners = np.array([(start, stop - 1) for start, stop in extents], np.uint32)
        first, last = map(tuple, rewrite.cells(corners.reshape(-1, 2).T).tolist())
        is_inside = all(stop <= count for (_, stop), count in zip(extents, grid, strict=True))
        if is_inside and first == last and first not in changed:
            plan.kept.append(((first, number), ref))
        else:
            plan.opened.append((number, ref))
    return plan


def _visible(ref: ManifestRef, ndim: int) -> tuple[tuple[int, int], ...] | None:
    """Return the extents of *ref*, if readers use it; early writers gave scalars a dimension."""
    if len(ref.extents) == ndim:
        return ref.extents
    return () if not ndim and ref.extents == ((0, 1),) else None


def _read_source(
    rewrite: ArrayRewrite, number: int, ref: ManifestRef, manifest: Manifest
) -> _Source:
    """Read the references of *manifest* that readers find."""
    grid = rewrite.grid
    node_id = rewrite.node_id
    coords = manifest.coords(node_id, len(grid))
    extents = _visible(ref, len(grid)) or ()
    low = tuple(start for start, _ in extents)
    high = tuple(min(stop, count) for (_, stop), count in zip(extents, grid, strict=True))
    within = inside(coords, high, low)
    tables = manifest.positions(node_id, len(grid))[within].astype(np.int64)
    references = manifest.references
    return _Source(number, coords[within], copy_payloads(references, tables), references.locations)


def copy_payloads(references: ReferenceReader, tables: Places) -> Payloads:
    """Read the references at *tables* into columns. Raises: `DecodeError`."""
    data = references.data
    vtables = tables - gather_numbers(data, tables, "<i4")
    distinct = np.unique(vtables)
    numbers = np.searchsorted(distinct, vtables)
    layouts = [references.layout(vtable) for vtable in distinct.tolist()]
    rows = Payloads.gone(len(tables)).rows
    rows["kind"] = np.array([layout.kind for layout in layouts], np.uint8)[numbers]
    for column, field, dtype in _COLUMNS:
        offsets = np.array([getattr(layout, field) for layout in layouts], np.int64)
        if offsets.any():
            present = np.flatnonzero(offsets[numbers])
            places = tables[present] + offsets[numbers[present]]
            found = gather_numbers(data, places, dtype or "<u4")
            rows[column][present] = found if dtype else places + found
    return Payloads(rows, data)


def _merge(rewrite: ArrayRewrite, parts: list[_Source]) -> Iterator[_Merged]:
    """Merge changes and old references; a change wins, then the first reference to a chunk. A box
    without changes keeps the references of each old manifest apart.
    """
    coords = np.concatenate([part.coords for part in parts])
    rows = np.concatenate([part.payloads.rows for part in parts])
    sources = np.repeat(np.arange(len(parts)), [len(part.coords) for part in parts])
    cells = rewrite.cells(coords)
    # Sorted by box, then within it; stable, so that changes come before old references.
    columns = np.concatenate((cells.T, coords.T))
    order, first = sort_columns(columns)
    ordered = columns[: len(rewrite.grid), order]
    turns = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
    for here, is_first in zip(np.split(order, turns), np.split(first, turns), strict=True):
        cell = tuple(cells[here[:1]].ravel().tolist())
        numbers = _numbers(sources[here])
        pieces = [(number, here[sources[here] == number]) for number in numbers]
        # A box without changes keeps its manifests apart, as the library does: no extents grow.
        if _CHANGES in numbers:
            pieces = [(_CHANGES, here[is_first])]
        for number, chosen in pieces:
            left = chosen[rows["kind"][chosen] != PayloadKind.GONE]
            if len(left):
                rank = cell, parts[number].number
                yield _Merged(rank, coords[left], rows[left], sources[left])


def _numbers(sources: Places) -> list[int]:
    """Return the distinct *sources*, in order."""
    found: list[int] = np.flatnonzero(np.bincount(sources)).tolist()
    return found


def _write_manifest(
    object_id: bytes, node_id: bytes, merged: _Merged, sources: list[_Source], level: int
) -> bytes:
    """Write *merged*; locations with the one dictionary of all sources stay compressed."""
    numbers = _numbers(merged.sources)
    codecs = [codec for number in numbers if (codec := sources[number].locations) is not None]
    dictionaries = {codec.dictionary for codec in codecs} - {None}
    dictionary = dictionaries.pop() if len(dictionaries) == 1 else None
    vectors = Vectors()
    rows = merged.rows
    for number in numbers:
        _copy_vectors(sources[number], rows, merged.sources == number, dictionary, vectors)
    is_compressed = (rows["kind"] == PayloadKind.COMPRESSED).any()
    row = (
        object_id,
        [(node_id, write_references(merged.coords, rows, vectors))],
        dictionary if is_compressed else None,
        _ZSTD if is_compressed else 0,
    )
    return seal_envelope(FileType.MANIFEST, FlatBufferWriter().finish(MANIFEST, row), level)


def _copy_vectors(
    source: _Source,
    rows: NDArray[Any],
    chosen: NDArray[np.bool_],
    dictionary: bytes | None,
    vectors: Vectors,
) -> None:
    """Copy to *vectors* what the *chosen* of *rows* lead to in *source*."""
    data = source.payloads.data
    codec = source.locations
    etags = np.flatnonzero(chosen & (rows["etag"] > 0))
    rows["etag"][etags] = vectors.copy(data, rows["etag"][etags])
    if codec is not None and (dictionary is None or codec.dictionary != dictionary):
        compressed = np.flatnonzero(chosen & (rows["kind"] == PayloadKind.COMPRESSED))
        texts = [codec.decode(vector_at(data, at)) for at in rows["value"][compressed].tolist()]
        rows["value"][compressed] = [vectors.add(text.encode()) for text in texts]
        # Several dictionaries cannot be in one manifest: such locations are written plainly.
        rows["kind"][compressed] = PayloadKind.LOCATION
        chosen[compressed] = False
    values = np.flatnonzero(chosen & (rows["value"] > 0))
    rows["value"][values] = vectors.copy(data, rows["value"][values])


def write_references(coords: Coords, rows: NDArray[Any], vectors: Vectors) -> list[Bytes]:
    """Write tables `ChunkRef` of *coords*, and *rows* that lead to *vectors* behind them."""
    has_ids = (rows["kind"] == PayloadKind.NATIVE).any()
    has_checks = rows["etag"].any() or rows["modified"].any()
    fields = [("start", "<u8"), ("length", "<u8"), ("value", "V12" if has_ids else "V4")]
    tables = new_tables(coords, [*fields, *([("check", "<u4")] if has_checks else [])])
    offsets = {name: at for name, (_, at, *_) in (tables.dtype.fields or {}).items()}

    def offsets_to(column: str, field: str, chosen: Places) -> NDArray[np.uint32]:
        fields_at = tables.itemsize * chosen + offsets[field]
        found: NDArray[np.uint32] = tables.nbytes - fields_at + rows[column][chosen]
        return found.astype(np.uint32)

    tables["start"] = rows["start"]
    tables["length"] = rows["length"]
    tables["value"] = rows["chunk_id"]
    leading = np.flatnonzero(rows["value"])
    tables["value"][leading] = offsets_to("value", "value", leading).view("V4")
    forms = rows["kind"] * _SLOTS
    if has_checks:
        tagged = np.flatnonzero(rows["etag"])
        tables["check"] = rows["modified"]
        tables["check"][tagged] = offsets_to("etag", "check", tagged)
        forms += _CHECK_SLOTS["modified"] * (rows["modified"] > 0)
        forms[tagged] = rows["kind"][tagged] * _SLOTS + _CHECK_SLOTS["etag"]
    found = np.unique(forms)
    tables["vtable"] = _VTABLE_NBYTES * np.searchsorted(found, forms)
    vtables = np.zeros((len(found), _VTABLE_NBYTES // 2), "<u2")
    every = np.arange(len(found))
    vtables[every, 2 + found % _SLOTS] = offsets.get("check", 0)
    vtables[every, 2 + found // _SLOTS] = offsets["value"]
    vtables[:, :3] = _VTABLE_NBYTES, offsets["ndim"], offsets["index"]
    vtables[:, 4:6] = offsets["start"], offsets["length"]
    return write_table_vector([(vtables.tobytes(), tables)], vectors.joined())
