"""The references of a manifest taken out of its payload, many at once, to be written again."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.gathering import Gather, Places
from app.formats.icechunk.reference_batches import (
    COMPRESSED_LOCATION,
    EXTRA,
    INLINE,
    LOCATION,
    NUMBERS,
    TEXTS,
    Batch,
    Batches,
)
from app.formats.icechunk.vector_pool import VectorPool

type Inflate = Callable[[bytes], str]

_SLOTS: Final = np.arange(INLINE, EXTRA + 1)


class _Layout(NamedTuple):
    """Tables that have the same fields, though perhaps not at the same places."""

    rows: NDArray[np.int64]
    fields: Mapping[int, Places]
    """Where each field lies in each table, by its slot."""


def read_references(data: bytes, tables: Places, inflate: Inflate | None) -> Batches:
    """Read the references at *tables* in *data*, the payload of a manifest.

    Fields stay as they are, but that *inflate*, where given, turns compressed locations into plain.

    Raises: `DecodeError` where a field lies outside, or leads there.
    """
    gather, pool = Gather(data), VectorPool()
    batches = [
        Batch(rows, dict(_read_columns(gather, pool, fields, inflate)))
        for rows, fields in _layouts(gather, tables)
    ]
    return Batches(batches, pool.words)


def _layouts(gather: Gather, tables: Places) -> Iterator[_Layout]:
    """Part *tables* by the fields they have."""
    vtables = tables - gather.numbers(tables, "<i4")
    distinct = np.unique(vtables)
    inverse = np.searchsorted(distinct, vtables)
    sizes = gather.numbers(distinct, "<u2")
    at = 4 + 2 * _SLOTS[:, None]
    told = at + 2 <= sizes
    places = np.zeros(told.shape, np.int64)
    places[told] = gather.numbers((distinct + at)[told], "<u2")
    sets = (places > 0).T @ (1 << _SLOTS)
    for fields in np.unique(sets).tolist():
        rows = np.flatnonzero((sets == fields)[inverse])
        kinds = inverse[rows]
        yield _Layout(
            rows,
            {
                slot: tables[rows] + row[kinds]
                for slot, row in zip(_SLOTS.tolist(), places, strict=True)
                if fields >> slot & 1
            },
        )


def _read_columns(
    gather: Gather, pool: VectorPool, fields: Mapping[int, Places], inflate: Inflate | None
) -> Iterator[tuple[int, NDArray[Any]]]:
    for slot, places in fields.items():
        if slot in NUMBERS:
            yield slot, gather.raw(places, NUMBERS[slot])
            continue
        starts = places + gather.numbers(places, "<u4")
        if slot == COMPRESSED_LOCATION and inflate is not None:
            yield LOCATION, _inflate(gather, pool, starts, inflate)
        elif slot != LOCATION or inflate is None or COMPRESSED_LOCATION not in fields:
            yield slot, pool.copy(gather, starts, are_texts=slot in TEXTS)


def _inflate(gather: Gather, pool: VectorPool, starts: Places, inflate: Inflate) -> Places:
    """Add what the vectors at *starts* say once inflated; each is inflated once."""
    found: dict[bytes, int] = {}
    places: list[int] = []
    counts = gather.numbers(starts, "<u4")
    gather.raw(starts + counts, "<u4")
    for start, stop in zip((starts + 4).tolist(), (starts + 4 + counts).tolist(), strict=True):
        data = gather.data[start:stop]
        if (place := found.get(data)) is None:
            place = found[data] = pool.add_text(inflate(data))
        places.append(place)
    return np.array(places, np.int64)
