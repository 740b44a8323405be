"""The chunks that a commit changed, a million of them without a million steps of Python."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from app.formats.icechunk.flatbuffer import U32, Buffer, Table, required
from app.formats.icechunk.gathering import Gather, Places
from app.formats.icechunk.ids import NODE_ID_NBYTES
from app.formats.reading import DecodeError

type Coords = npt.NDArray[np.uint32]
"""Of shape (count, ndim)."""

_CHUNKS: Final = 1
_COORDS_IN_VTABLE: Final = 4
_MEMORY_PER_CHUNK: Final = 96
_MEMORY_PER_COORD: Final = 32


def read_updated_chunks(arrays: Iterator[Table]) -> dict[bytes, tuple[Coords, ...]]:
    """Read tables `ArrayUpdatedChunks`: the coords of the changed chunks by the ids of arrays.

    An array has one batch of coords, or none; more only where a writer took keys of the wrong
    number of dimensions for chunks.

    Raises: `DecodeError`.
    """
    tables = list(arrays)
    if not tables:
        return {}
    vectors = [required(table.vector(_CHUNKS, U32.size), "chunks") for table in tables]
    starts, lengths = np.array(vectors, np.int64).T
    stops = np.cumsum(lengths).tolist()
    tables[0].buffer.spend(stops[-1] * _MEMORY_PER_CHUNK)
    changed = _Batches(tables[0].buffer, _spread(starts, lengths))
    found: dict[bytes, list[Coords]] = {}
    for table, start, stop in zip(tables, [0, *stops], stops, strict=False):
        node_id = required(table.struct(0, NODE_ID_NBYTES), "node_id")
        found.setdefault(node_id, []).extend(changed.between(start, stop))
    return {node_id: tuple(batches) for node_id, batches in found.items()}


class _Batches:
    """The coords of all chunks of all arrays, one after the other."""

    def __init__(self, buffer: Buffer, slots: Places) -> None:
        gather = Gather(buffer.data)
        tables = slots + gather.numbers(slots, "<u4")
        vtables = tables - gather.numbers(tables, "<i4")
        if (gather.numbers(vtables, "<u2") <= _COORDS_IN_VTABLE).any():
            raise DecodeError("it has no coords")
        fields = gather.numbers(vtables + _COORDS_IN_VTABLE, "<u2")
        if not fields.all():
            raise DecodeError("it has no coords")
        vectors = tables + fields
        vectors += gather.numbers(vectors, "<u4")
        ndims = gather.numbers(vectors, "<u4")
        buffer.spend(int(ndims.sum()) * _MEMORY_PER_COORD)
        self._ndims = ndims
        self._offsets = np.concatenate(([0], np.cumsum(ndims)))
        self._turns: list[int] = (np.flatnonzero(np.diff(ndims)) + 1).tolist()
        self._coords = gather.raw(_spread(vectors + U32.size, ndims), "<u4")
        self._coords.flags.writeable = False

    def between(self, start: int, stop: int) -> Iterator[Coords]:
        """Give the coords of the chunks from *start* to *stop*, a batch for each ndim in a row."""
        first = bisect_right(self._turns, start)
        turns = self._turns[first : bisect_left(self._turns, stop, first)]
        for begin, end in zip([start, *turns], [*turns, stop], strict=True):
            if begin < end:
                coords = self._coords[self._offsets[begin] : self._offsets[end]]
                yield coords.reshape(end - begin, int(self._ndims[begin]))


def _spread(starts: Places, lengths: Places) -> Places:
    """Give the places of all items of vectors of 4-byte items, *lengths* items from *starts*."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - 4 * before, lengths) + 4 * np.arange(lengths.sum(), dtype=np.int64)
