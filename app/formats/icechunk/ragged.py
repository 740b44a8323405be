"""Many tables of a FlatBuffer at a time, and stretches of bytes of many lengths, by numpy."""

from struct import Struct
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.flatbuffer import Buffer
from app.formats.reading import DecodeError

type Bytes = NDArray[np.uint8]
type Places = NDArray[np.int64]

_MEMORY_PER_TABLE: Final = 384
"""Of all columns that are made of a table, and of what it takes to make them."""
_MEMORY_PER_BYTE: Final = 24
"""Of a vector: it is copied by an array of the positions of its bytes."""
_U32: Final = Struct("<I")


class Spans(NamedTuple):
    """Stretches of bytes; what is absent begins at 0 and is empty."""

    starts: Places
    nbytes: Places

    def take(self, rows: Places) -> Self:
        """Choose *rows*, in their order."""
        return self._replace(starts=self.starts[rows], nbytes=self.nbytes[rows])


class Tables:
    """Tables of one kind, whose offsets lie at *slots* in *buffer*."""

    def __init__(self, buffer: Buffer, slots: Places) -> None:
        """Follow the offsets.

        Raises: `DecodeError`, also where the tables would take more memory than *buffer* may.
        """
        buffer.spend(len(slots) * _MEMORY_PER_TABLE)
        self._buffer = buffer
        self._data = data = np.frombuffer(buffer.data, np.uint8)
        self._places = places = follow(data, slots)
        self._vtables = places - numbers_at(data, places, "<i4")
        self._vtable_nbytes = numbers_at(data, self._vtables, "<u2").astype(np.int64)

    def fields(self, slot: int) -> Places:
        """Find where the field *slot* lies in each; 0 where it is absent."""
        offset = 4 + 2 * slot
        found = np.zeros(len(self._places), np.int64)
        rows = np.flatnonzero(self._vtable_nbytes >= offset + 2)
        offsets = numbers_at(self._data, self._vtables[rows] + offset, "<u2")
        found[rows] = np.where(offsets > 0, self._places[rows] + offsets, 0)
        return found

    def demand_known(self, slots: int) -> None:
        """Return if no table has fields behind the first *slots*.

        Raises: `DecodeError`: what is not known of cannot be copied.
        """
        most = int(self._vtable_nbytes.max(initial=0))
        if any(self.fields(slot).any() for slot in range(slots, max(slots, (most - 4) // 2))):
            raise DecodeError("it has fields that only a newer specification knows")

    def numbers(self, slot: int, kind: str) -> NDArray[Any]:
        """Read a number of each, 0 where it is absent."""
        fields = self.fields(slot)
        found = np.zeros(len(fields), kind)
        rows = np.flatnonzero(fields)
        found[rows] = numbers_at(self._data, fields[rows], kind)
        return found

    def structs(self, slot: int, nbytes: int) -> Bytes:
        """Read a struct of each, a row for each.

        Raises: `DecodeError` where one is absent.
        """
        return rows_at(self._data, self.required(slot), nbytes)

    def vectors(self, slot: int, item_nbytes: int, *, is_required: bool = False) -> Spans:
        """Find the items of a vector of each."""
        fields = self.required(slot) if is_required else self.fields(slot)
        starts, counts = np.zeros_like(fields), np.zeros_like(fields)
        rows = np.flatnonzero(fields)
        vectors = follow(self._data, fields[rows])
        counts[rows] = numbers_at(self._data, vectors, "<u4")
        starts[rows] = vectors + 4
        nbytes = counts * item_nbytes
        if int((starts + nbytes).max(initial=0)) > len(self._data):
            raise DecodeError("damaged FlatBuffer: a vector reaches out of it")
        self._buffer.spend(int(nbytes.sum()) * _MEMORY_PER_BYTE)
        return Spans(starts, nbytes)

    def required(self, slot: int) -> Places:
        """Find where the field *slot* lies in each, as `fields` does.

        Raises: `DecodeError` where it is absent.
        """
        fields = self.fields(slot)
        if not fields.all():
            raise DecodeError("a required field is absent")
        return fields


def numbers_at(data: Bytes, places: Places, kind: str) -> NDArray[Any]:
    """Read the number at each of *places*, which need not be aligned."""
    rows = rows_at(data, places, np.dtype(kind).itemsize)
    return rows.reshape(-1).view(kind)


def rows_at(data: Bytes, places: Places, nbytes: int) -> Bytes:
    """Read *nbytes* at each of *places*, a row for each.

    Raises: `DecodeError` where one is outside of *data*.
    """
    if not len(places):
        return np.empty((0, nbytes), np.uint8)
    if int(places.min()) < 0 or int(places.max()) > len(data) - nbytes:
        raise DecodeError("damaged FlatBuffer: an offset leads out of it")
    rows: Bytes = data[places[:, None] + np.arange(nbytes)]
    return rows


def follow(data: Bytes, places: Places) -> Places:
    """Find what the offset at each of *places* leads to."""
    found: Places = places + numbers_at(data, places, "<u4")
    return found


def each_of(starts: Places, counts: Places, step: int = 1) -> Places:
    """Count up from each of *starts*, so many times each."""
    before = np.cumsum(counts) - counts
    total = int(counts.sum())
    return np.repeat(starts, counts) + step * (np.arange(total) - np.repeat(before, counts))


def padded(nbytes: Places) -> Places:
    """Round up to multiples of four."""
    return nbytes + -nbytes % 4


def ends_of(nbytes: Places) -> tuple[Places, int]:
    """Lay things of such sizes one behind the other: where each begins, and where all end."""
    ends = np.cumsum(nbytes)
    return ends - nbytes, int(ends[-1]) if len(ends) else 0


def write_vectors(
    source: Bytes, spans: Spans, item_nbytes: int, *, tail: int
) -> tuple[Bytes, Places]:
    """Write a vector of each span with *tail* zeros behind it; tell where each begins."""
    places, total = ends_of(padded(4 + spans.nbytes + tail))
    out = np.zeros(total, np.uint8)
    out.view("<u4")[places // 4] = spans.nbytes // item_nbytes
    out[each_of(places + 4, spans.nbytes)] = source[each_of(spans.starts, spans.nbytes)]
    return out, places
