"""Manifests of an array rewritten after a change of chunks ("Chunk Manifest Files").

1. `plan_manifests` decides which manifests stay; the others are read.
2. `_merge` sorts the references of changes and old manifests into the boxes of the split.
3. References are copied in bulk, as columns by field, and written as FlatBuffer tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.changes import ChunkChanges
from app.formats.icechunk.chunk_tables import (
    NUMBER_FIELDS,
    TableBatch,
    check_nbytes,
    gather_numbers,
    write_table_vector,
    write_tables,
)
from app.formats.icechunk.config import WHOLE
from app.formats.icechunk.coords import Coords, Places, U32s, inside, number_rows, sort_columns
from app.formats.icechunk.flatbuffers import (
    U32,
    FileType,
    FlatBufferReader,
    FlatBufferWriter,
    seal_envelope,
)
from app.formats.icechunk.manifest import MANIFEST, Manifest
from app.formats.icechunk.payloads import PayloadKind, Payloads
from app.formats.icechunk.snapshot import ManifestFile, ManifestRef
from app.formats.reading import DecodeError
from app.model import UnmodifiedSince

type _Cell = tuple[int, ...]
"""Number of a box of the split grid along each dimension."""
type _Rank = tuple[int, ...]
"""Sort key of a manifest among those of its array."""
type _Decompress = Callable[[bytes], str]

_LEVEL: Final = 3
_ZSTD: Final = 1
_CHANGES: Final = 0
"""Number of the source of new references; old manifests count from 1."""

_INLINE, _OFFSET, _LENGTH, _CHUNK_ID, _LOCATION, _CHECKSUM_ETAG = range(1, 7)
_CHECKSUM_LAST_MODIFIED, _COMPRESSED_LOCATION, _EXTRA = range(7, 10)
_FIELDS: Final = np.arange(_INLINE, _EXTRA + 1)
_TEXTS: Final = frozenset({_LOCATION, _CHECKSUM_ETAG})
_CHECKSUMS: Final = (type(None), UnmodifiedSince, str)

_BLOCK: Final = 2**18
_BYTES_MASKS: Final = np.array([0xFFFFFFFF, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
_TEXT_MASKS: Final = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
"""Bytes of the last word of a vector that belong to it, by its length modulo 4."""


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
    splits: tuple[int, ...] | None = None
    """Chunks that a manifest spans, by dimension; `None` keeps all in one manifest."""
    path: str = ""
    leaving: tuple[ManifestRef, ...] = ()
    """Manifests that may have chunks outside of *grid*, which belong into the log."""

    def dropped(self, manifests: Mapping[bytes, Manifest]) -> tuple[Coords, ...]:
        """Return the chunks outside of *grid* in *manifests*, by id, that are *leaving*."""
        found: list[Coords] = []
        for object_id, extents in self.leaving:
            coords = manifests[object_id].coords(self.node_id, len(extents))
            start, stop = tuple(low for low, _ in extents), tuple(high for _, high in extents)
            found.append(coords[inside(coords, stop, start) & ~inside(coords, self.grid)])
        return tuple(coords for coords in found if len(coords))


class NewManifest(NamedTuple):
    """A manifest that is to be stored."""

    ref: ManifestRef
    file: ManifestFile
    data: bytes


class RewrittenManifests(NamedTuple):
    """The manifests of an array after a change."""

    kept: tuple[ManifestRef, ...]
    new: tuple[NewManifest, ...]
    refs: tuple[ManifestRef, ...]
    """Both, in the order in which the array has to list them."""


class _ManifestPlan(NamedTuple):
    rewrite: ArrayRewrite
    sizes: tuple[int, ...]
    changed: frozenset[_Cell]
    kept: tuple[tuple[_Rank, ManifestRef], ...]
    opened: tuple[tuple[int, ManifestRef], ...]
    """Manifests that have to be read, with their numbers as sources."""


class _MergedRows(NamedTuple):
    """References of one manifest to write, sorted by their coordinates."""

    rank: _Rank
    coords: Coords
    sources: Places
    positions: Places
    """Position of each in its source: number of a change, or position of a table."""


class _SourceRows(NamedTuple):
    source: int
    coords: Coords
    positions: Places
    ranks: Sequence[_Rank]
    numbers: Places


class _ReferenceBatches(NamedTuple):
    batches: Sequence[TableBatch]
    vectors: U32s


def needed_manifests(rewrite: ArrayRewrite) -> frozenset[bytes]:
    """Return the ids of the manifests that have to be read for *rewrite*."""
    opened = (ref for _, ref in _plan(rewrite).opened)
    return frozenset(ref.object_id for ref in (*opened, *rewrite.leaving))


def rewrite_manifests(
    rewrite: ArrayRewrite,
    manifests: Mapping[bytes, Manifest],
    new_id: Callable[[], bytes],
    level: int = _LEVEL,
) -> RewrittenManifests:
    """Write the boxes of the split that change; *manifests* has the `needed_manifests`. Raises:
    `DecodeError` for a reference that cannot be copied; `ConflictError` where a manifest would
    exceed the limit of the library.
    """
    plan = _plan(rewrite)
    sources = {number: manifests[ref.object_id] for number, ref in plan.opened}
    ranked: list[tuple[_Rank, ManifestRef]] = list(plan.kept)
    new: list[NewManifest] = []
    for merged in _merge(plan, manifests):
        new.append(_write_manifest(new_id(), merged, rewrite, sources, level))
        ranked.append((merged.rank, new[-1].ref))
    ranked.sort(key=lambda each: each[0])
    kept = tuple(ref for _, ref in plan.kept)
    return RewrittenManifests(kept, tuple(new), tuple(ref for _, ref in ranked))


def _plan(rewrite: ArrayRewrite) -> _ManifestPlan:
    """Keep manifests that lie in one box of the grid without changes, as the library does."""
    grid, coords = rewrite.grid, rewrite.changes.coords
    sizes = rewrite.splits or (WHOLE,) * len(grid)
    changed = frozenset(number_rows(_cells(coords[inside(coords, grid)], sizes))[0])
    kept: list[tuple[_Rank, ManifestRef]] = []
    opened: list[tuple[int, ManifestRef]] = []
    for number, ref in enumerate(rewrite.manifests, 1):
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
    return _ManifestPlan(rewrite, sizes, changed, tuple(kept), tuple(opened))


def _merge(plan: _ManifestPlan, manifests: Mapping[bytes, Manifest]) -> Iterator[_MergedRows]:
    """Merge changes and old references; a change wins, then the first reference to a chunk."""
    changes = plan.rewrite.changes
    rows = np.flatnonzero(inside(changes.coords, plan.rewrite.grid))
    parts = [_source_rows(plan, _CHANGES, changes.coords[rows], rows)]
    for number, ref in plan.opened:
        parts.append(_old_rows(plan, number, ref, manifests[ref.object_id]))
    ranks = sorted({rank for part in parts for rank in part.ranks})
    coords = np.concatenate([part.coords for part in parts])
    sources = np.repeat([part.source for part in parts], [len(part.coords) for part in parts])
    positions = np.concatenate([part.positions for part in parts])
    numbers = {rank: number for number, rank in enumerate(ranks)}
    groups = np.concatenate(
        [
            np.array([numbers[rank] for rank in part.ranks], np.uint32)[part.numbers]
            for part in parts
        ]
    )
    order, first = sort_columns(np.concatenate((groups[None], coords.T)))
    order = order[first]
    gone = changes.payloads.of_kind(PayloadKind.GONE)
    if len(gone):
        order = order[(sources[order] != _CHANGES) | ~np.isin(positions[order], gone)]
    ordered = groups[order]
    for rows in np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1):
        if len(rows):
            rank = ranks[groups[rows[0]]]
            yield _MergedRows(rank, coords[rows], sources[rows], positions[rows])


def _old_rows(
    plan: _ManifestPlan, number: int, ref: ManifestRef, manifest: Manifest
) -> _SourceRows:
    grid, node_id = plan.rewrite.grid, plan.rewrite.node_id
    coords = manifest.coords(node_id, len(grid))
    positions = manifest.positions(node_id, len(grid))
    extents = _visible(ref, len(grid)) or ()
    low = tuple(start for start, _ in extents)
    high = tuple(min(stop, count) for (_, stop), count in zip(extents, grid, strict=True))
    within = inside(coords, high, low)
    if not within.all():
        coords, positions = coords[within], positions[within]
    return _source_rows(plan, number, coords, positions.astype(np.int64))


def _source_rows(
    plan: _ManifestPlan, number: int, coords: Coords, positions: Places
) -> _SourceRows:
    cells, numbers = number_rows(_cells(coords, plan.sizes))
    ranks = [(*cell, _CHANGES if cell in plan.changed else number) for cell in cells]
    return _SourceRows(number, coords, positions, ranks, numbers)


def _visible(ref: ManifestRef, ndim: int) -> tuple[tuple[int, int], ...] | None:
    """Return the extents of *ref*, if readers use it; early writers gave scalars a dimension."""
    if len(ref.extents) == ndim:
        return ref.extents
    return () if not ndim and ref.extents == ((0, 1),) else None


def _cells(coords: Coords, sizes: tuple[int, ...]) -> U32s:
    cells = np.zeros(coords.shape, np.uint32)
    for axis, size in enumerate(sizes):
        if size < WHOLE:
            cells[:, axis] = coords[:, axis] // np.uint32(size)
    return cells


def _write_manifest(
    object_id: bytes,
    merged: _MergedRows,
    rewrite: ArrayRewrite,
    manifests: Mapping[int, Manifest],
    level: int,
) -> NewManifest:
    """Write the *merged* rows; locations with the one dictionary of all sources stay compressed."""
    numbers = np.flatnonzero(np.bincount(merged.sources)).tolist()
    sources = [manifests[number] for number in numbers if number != _CHANGES]
    dictionaries = {source.references.locations.dictionary for source in sources} - {None}
    shared = dictionaries.pop() if len(dictionaries) == 1 else None
    parts = []
    is_compressed = False
    for number in numbers:
        rows = np.flatnonzero(merged.sources == number)
        positions = merged.positions[rows]
        if number == _CHANGES:
            found = batch_payloads(rewrite.changes.payloads.take(positions))
        else:
            references = manifests[number].references
            stays = shared is not None and references.locations.dictionary == shared
            decompress = None if stays else references.locations.decode
            found = batch_references(references.data, positions, decompress)
        is_compressed |= any(_COMPRESSED_LOCATION in batch.columns for batch in found.batches)
        parts.append((rows, write_tables(found.batches, found.vectors, merged.coords[rows])))
    refs = write_table_vector(len(merged.coords), parts)
    roots = [FlatBufferReader(source.references.data).root(MANIFEST) for source in sources]
    node_id = rewrite.node_id
    extras = (extra for root in roots for each, _, extra in root[1] if each == node_id)
    row = (
        object_id,
        [(node_id, refs, _first(extras))],
        shared if is_compressed else None,
        _ZSTD if is_compressed else 0,
        _first(root[-1] for root in roots),
    )
    data = seal_envelope(FileType.MANIFEST, FlatBufferWriter().finish(MANIFEST, row), level)
    extents = tuple((int(axis.min()), int(axis.max()) + 1) for axis in merged.coords.T)
    file = ManifestFile(object_id, len(data), len(merged.coords))
    return NewManifest(ManifestRef(object_id, extents), file, data)


def _first(extras: Iterator[bytes | None]) -> bytes | None:
    return next((extra for extra in extras if extra is not None), None)


def batch_payloads(payloads: Payloads) -> _ReferenceBatches:
    """Convert *payloads*, none of which is gone, to columns of `ChunkRef`."""
    pool = _VectorPool()
    made = [_batch_native(payloads), _batch_inlaid(payloads, pool), *_batch_virtual(payloads, pool)]
    return _ReferenceBatches([batch for batch in made if len(batch.rows)], pool.words)


def _batch_native(payloads: Payloads) -> TableBatch:
    found = payloads.of_kind(PayloadKind.NATIVE)
    rows = payloads.rows[found]
    ids = b"".join([payloads.values[at] for at in rows["value"].tolist()])
    return TableBatch(found, {**_range(rows), _CHUNK_ID: np.frombuffer(ids, "V12")})


def _batch_inlaid(payloads: Payloads, pool: "_VectorPool") -> TableBatch:
    found = payloads.of_kind(PayloadKind.INLAID)
    numbers = payloads.rows["value"][found]
    return TableBatch(
        found, {_INLINE: _map_distinct(numbers, lambda at: pool.add(payloads.values[at]))}
    )


def _batch_virtual(payloads: Payloads, pool: "_VectorPool") -> Iterator[TableBatch]:
    found = payloads.of_kind(PayloadKind.VIRTUAL)
    values, checksums = payloads.values, payloads.checksums
    kinds = np.array([_CHECKSUMS.index(type(each)) for each in checksums], np.int64)
    kind_of = kinds[payloads.rows["checksum"][found]] if len(found) else found
    for number, kind in enumerate(_CHECKSUMS):
        some = found[kind_of == number]
        rows = payloads.rows[some]
        columns = _range(rows)
        columns[_LOCATION] = _map_distinct(
            rows["value"], lambda at: pool.add_text(values[at].decode())
        )
        if kind is UnmodifiedSince:
            times = [each.epoch_s if isinstance(each, UnmodifiedSince) else 0 for each in checksums]
            columns[_CHECKSUM_LAST_MODIFIED] = np.array(times, np.int64)[rows["checksum"]]
        elif kind is str:
            columns[_CHECKSUM_ETAG] = _map_distinct(
                rows["checksum"], lambda at: pool.add_text(str(checksums[at]))
            )
        yield TableBatch(some, columns)


def _range(rows: NDArray[Any]) -> dict[int, NDArray[Any]]:
    return {_OFFSET: rows["start"], _LENGTH: rows["stop"] - rows["start"]}


def _map_distinct(numbers: Places, make: Callable[[int], int]) -> Places:
    distinct, inverse = np.unique(numbers, return_inverse=True)
    return np.array([make(number) for number in distinct.tolist()], np.int64)[inverse]


def batch_references(
    data: bytes, tables: Places, decompress: _Decompress | None
) -> _ReferenceBatches:
    """Copy the fields of the references at *tables* in *data*, the payload of a manifest.
    *decompress* turns compressed locations into plain ones.
    """
    pool = _VectorPool()
    batches = [
        TableBatch(rows, dict(_copy_fields(data, pool, fields, decompress)))
        for rows, fields in _split_by_fields(data, tables)
    ]
    return _ReferenceBatches(batches, pool.words)


def _split_by_fields(data: bytes, tables: Places) -> Iterator[tuple[Places, dict[int, Places]]]:
    """Group *tables* by their set of fields; yields row numbers, and field positions by field."""
    vtables = tables - gather_numbers(data, tables, "<i4")
    distinct = np.unique(vtables)
    inverse = np.searchsorted(distinct, vtables)
    sizes = gather_numbers(data, distinct, "<u2")
    at = 4 + 2 * _FIELDS[:, None]
    is_listed = at + 2 <= sizes
    offsets = np.zeros(is_listed.shape, np.int64)
    offsets[is_listed] = gather_numbers(data, (distinct + at)[is_listed], "<u2")
    sets = (offsets > 0).T @ (1 << _FIELDS)
    for fields in np.unique(sets).tolist():
        rows = np.flatnonzero((sets == fields)[inverse])
        kinds = inverse[rows]
        places = {
            field: tables[rows] + row[kinds]
            for field, row in zip(_FIELDS.tolist(), offsets, strict=True)
            if fields >> field & 1
        }
        yield rows, places


def _copy_fields(
    data: bytes, pool: "_VectorPool", fields: Mapping[int, Places], decompress: _Decompress | None
) -> Iterator[tuple[int, NDArray[Any]]]:
    for field, places in fields.items():
        if field in NUMBER_FIELDS:
            yield field, gather_numbers(data, places, NUMBER_FIELDS[field])
            continue
        starts = places + gather_numbers(data, places, "<u4")
        if field == _COMPRESSED_LOCATION and decompress is not None:
            yield _LOCATION, _decompress_all(data, pool, starts, decompress)
        elif field != _LOCATION or decompress is None or _COMPRESSED_LOCATION not in fields:
            yield field, pool.copy(data, starts, are_texts=field in _TEXTS)


def _decompress_all(
    data: bytes, pool: "_VectorPool", starts: Places, decompress: _Decompress
) -> Places:
    found: dict[bytes, int] = {}
    places: list[int] = []
    counts = gather_numbers(data, starts, "<u4").astype(np.int64)
    gather_numbers(data, starts + counts, "<u4")  # checks that all of them end in the data
    for start, stop in zip((starts + 4).tolist(), (starts + 4 + counts).tolist(), strict=True):
        text = data[start:stop]
        if (place := found.get(text)) is None:
            place = found[text] = pool.add_text(decompress(text))
        places.append(place)
    return np.array(places, np.int64)


class _VectorPool:
    """Vectors to be written behind the tables that lead to them, in whole words of 4 bytes."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._texts: dict[bytes, int] = {}

    @property
    def words(self) -> U32s:
        return np.frombuffer(b"".join(self._pieces), "<u4")

    def add(self, data: bytes) -> int:
        return self._append(U32.pack(len(data)) + data + bytes(-len(data) % 4))

    def add_text(self, text: str) -> int:
        data = text.encode()
        if (place := self._texts.get(data)) is None:
            padded = U32.pack(len(data)) + data + bytes(4 - len(data) % 4)
            place = self._texts[data] = self._append(padded)
        return place

    def copy(self, data: bytes, starts: Places, *, are_texts: bool) -> Places:
        distinct, inverse = starts, None
        if not ((starts[1:] > starts[:-1]).all() or (starts[1:] < starts[:-1]).all()):
            distinct, inverse = np.unique(starts, return_inverse=True)
        counts = gather_numbers(data, distinct, "<u4").astype(np.int64)
        if (distinct & 3).any():
            raise DecodeError("damaged FlatBuffer: an offset is not aligned")
        if (distinct + counts + U32.size > len(data)).any():
            raise DecodeError("damaged FlatBuffer: a vector reaches out of it")
        lengths = counts // 4 + 2 if are_texts else (counts + 3) // 4 + 1
        stops = np.cumsum(lengths)
        check_nbytes(self._nbytes + (4 * int(stops[-1]) if len(stops) else 0))
        words = _copy_words(data, distinct >> 2, lengths, stops)
        words[stops - 1] &= (_TEXT_MASKS if are_texts else _BYTES_MASKS)[counts & 3]
        places = self._append(words.tobytes()) + 4 * (stops - lengths)
        return places if inverse is None else places[inverse]

    def _append(self, data: bytes) -> int:
        place = self._nbytes
        check_nbytes(place + len(data))
        self._pieces.append(data)
        self._nbytes += len(data)
        return place


def _copy_words(data: bytes, starts: Places, lengths: Places, stops: Places) -> U32s:
    words = np.frombuffer(data + bytes(-len(data) % 4) if len(data) % 4 else data, "<u4")
    copied = np.empty(int(stops[-1]) if len(stops) else 0, np.uint32)
    turns = np.searchsorted(stops, np.arange(_BLOCK, len(copied), _BLOCK))
    edges = np.unique(np.concatenate(([0], turns, [len(stops)])))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        begin, end = int(stops[first] - lengths[first]), int(stops[last - 1])
        shifts = starts[first:last] - (stops[first:last] - lengths[first:last])
        at = np.repeat(shifts, lengths[first:last]) + np.arange(begin, end)
        copied[begin:end] = words.take(at, mode="clip")
    return copied
