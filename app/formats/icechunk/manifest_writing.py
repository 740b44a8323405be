"""Manifests written anew after a change of chunks ("Chunk Manifest Files")."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from app.formats.icechunk.columns import U32s
from app.formats.icechunk.envelope import FileType, seal_envelope
from app.formats.icechunk.flatbuffer import U8, Buffer
from app.formats.icechunk.flatbuffer_writing import (
    Block,
    Inlay,
    Items,
    NewTable,
    Number,
    assemble_flatbuffer,
    data_vector,
)
from app.formats.icechunk.gathering import Places
from app.formats.icechunk.ids import NODE_ID_NBYTES
from app.formats.icechunk.index import Manifest
from app.formats.icechunk.manifest_merging import (
    CHANGES,
    ManifestsRewrite,
    Merged,
    Place,
    Plan,
    merge,
    plan_manifests,
)
from app.formats.icechunk.metadata import ManifestRef
from app.formats.icechunk.reference_batches import COMPRESSED_LOCATION, Batches, batch_payloads
from app.formats.icechunk.reference_reading import read_references
from app.formats.icechunk.stored_nodes import ManifestFile
from app.formats.icechunk.table_vectors import write_tables, write_vector

_LEVEL: Final = 3
_NONE: Final = 0
_ZSTD: Final = 1


class NewManifest(NamedTuple):
    """A manifest that is to be stored."""

    ref: ManifestRef
    file: ManifestFile
    data: bytes
    """The whole file."""


class RewrittenManifests(NamedTuple):
    """The manifests of an array after a change."""

    kept: tuple[ManifestRef, ...]
    new: tuple[NewManifest, ...]
    refs: tuple[ManifestRef, ...]
    """Both, in the order in which the array is to name them."""


def needed_manifests(rewrite: ManifestsRewrite) -> frozenset[bytes]:
    """Name the manifests that have to be read for it."""
    return frozenset(ref.object_id for _, ref in plan_manifests(rewrite).opened)


def rewrite_manifests(
    rewrite: ManifestsRewrite,
    manifests: Mapping[bytes, Manifest],
    new_id: Callable[[], bytes],
    level: int = _LEVEL,
) -> RewrittenManifests:
    """Write those manifests anew that do not stay; of the old ones *manifests* has the needed.

    Only boxes of the splits with a change in them are written, and what lay across boxes, or
    outside of the grid.

    Raises: `DecodeError` for a reference that cannot be carried over; `ConflictError` where a
    manifest would get too large.
    """
    plan = plan_manifests(rewrite)
    writer = _Writer(plan, manifests, level)
    placed: list[tuple[Place, ManifestRef]] = list(plan.kept)
    new: list[NewManifest] = []
    for merged in merge(plan, manifests):
        new.append(writer.write(new_id(), merged))
        placed.append((merged.place, new[-1].ref))
    placed.sort(key=lambda each: each[0])
    kept = tuple(ref for _, ref in plan.kept)
    return RewrittenManifests(kept, tuple(new), tuple(ref for _, ref in placed))


class _Writer:
    """Writes the manifests of one array."""

    def __init__(self, plan: Plan, manifests: Mapping[bytes, Manifest], level: int) -> None:
        self._node_id = plan.rewrite.node_id
        self._payloads = plan.rewrite.changes.payloads
        self._level = level
        self._manifests = {number: manifests[ref.object_id] for number, ref in plan.opened}

    def write(self, object_id: bytes, merged: Merged) -> NewManifest:
        """Write the manifest *object_id*."""
        numbers = np.flatnonzero(np.bincount(merged.sources)).tolist()
        sources = [self._manifests[number] for number in numbers if number != CHANGES]
        dictionaries = {source.references.codec.dictionary for source in sources} - {None}
        shared = dictionaries.pop() if len(dictionaries) == 1 else None
        parts = []
        for number in numbers:
            rows = np.flatnonzero(merged.sources == number)
            found = self._read(number, merged.positions[rows], shared)
            parts.append((rows, found))
        tables = [(rows, write_tables(found, merged.coords[rows])) for rows, found in parts]
        if not any(found.has(COMPRESSED_LOCATION) for _, found in parts):
            shared = None
        refs = write_vector(len(merged.coords), tables)
        root = _root(object_id, self._array(refs, sources), shared, _extra_of(sources))
        data = seal_envelope(FileType.MANIFEST, assemble_flatbuffer(root), self._level)
        ref = ManifestRef(object_id, _extents(merged.coords))
        return NewManifest(ref, ManifestFile(object_id, len(data), len(merged.coords)), data)

    def _read(self, number: int, positions: Places, shared: bytes | None) -> Batches:
        """Take references out of a source; their locations stay as they are where all can."""
        if number == CHANGES:
            return batch_payloads(self._payloads.take(positions))
        references = self._manifests[number].references
        stays = shared is not None and references.codec.dictionary == shared
        inflate = None if stays else references.codec.decode
        return read_references(references.data, positions, inflate)

    def _array(self, refs: Block, sources: Sequence[Manifest]) -> NewTable:
        """Make a table `ArrayManifest`, with what the first of *sources* that has it has extra."""
        extras = (_array_extra(source, self._node_id) for source in sources)
        extra = next((extra for extra in extras if extra is not None), None)
        return NewTable([Inlay(self._node_id), refs, data_vector(extra)])


def _root(
    object_id: bytes, array: NewTable, dictionary: bytes | None, extra: bytes | None
) -> NewTable:
    algorithm = Number(U8, _NONE if dictionary is None else _ZSTD)
    return NewTable(
        [Inlay(object_id), Items([array]), data_vector(dictionary), algorithm, data_vector(extra)]
    )


def _extents(coords: U32s) -> tuple[tuple[int, int], ...]:
    """Span the box of *coords*."""
    return tuple((int(column.min()), int(column.max()) + 1) for column in coords.T)


def _extra_of(sources: Sequence[Manifest]) -> bytes | None:
    extras = (Buffer(source.references.data).root.data(4) for source in sources)
    return next((extra for extra in extras if extra is not None), None)


def _array_extra(source: Manifest, node_id: bytes) -> bytes | None:
    for array in Buffer(source.references.data).root.tables(1):
        if array.struct(0, NODE_ID_NBYTES) == node_id and (extra := array.data(2)) is not None:
            return extra
    return None
