"""Many minishard indexes at once, column by column ("Minishard index format")."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from app.formats.compression import deflate
from app.formats.neuroglancer_precomputed.keys import Ids

type Numbers = npt.NDArray[np.int64]


class Columns(NamedTuple):
    """Of each chunk the id, where it begins and ends behind the shard index, and whose it is."""

    ids: Ids
    starts: Ids
    stops: Ids
    owners: Ids
    """The minishards."""


def decode_minishards(numbers: Sequence[int], decoded: Sequence[bytes | bytearray]) -> Columns:
    """Undo the deltas of inflated indexes, which hold whole rows; *numbers* are their minishards.

    Chunks are in the order of the indexes, and by their ids in each. One that ends past 2^64
    begins behind its end.
    """
    counts = np.array([len(data) // 24 for data in decoded], np.int64)
    filled = np.flatnonzero(counts)
    owners = np.array(numbers, np.uint64)[filled]
    table = _Table(counts[filled])
    flat = np.frombuffer(b"".join(decoded), "<u8")
    ids = table.sums(flat[table.cells(0)])
    sizes = flat[table.cells(2)]
    stops = table.sums(flat[table.cells(1)] + sizes)
    found = Columns(ids, stops - sizes, stops, np.repeat(owners, table.counts))
    indexes = np.repeat(np.arange(len(filled)), table.counts)
    if ((ids[1:] < ids[:-1]) & (indexes[1:] == indexes[:-1])).any():
        order = np.lexsort((ids, indexes))
        return Columns(*(column[order] for column in found))
    return found


class Encoded(NamedTuple):
    """Minishard indexes, one behind the other."""

    numbers: Numbers
    """The minishards that are not empty."""
    ends: Numbers
    """Where the index of each ends, counted from the first."""
    data: bytes


def encode_minishards(chunks: Columns, *, is_gzip: bool) -> Encoded:
    """Encode *chunks*, which are in the order of their minishards and ids."""
    ids, starts, stops, owners = chunks
    numbers, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
    table = _Table(counts)
    flat = np.empty(3 * len(ids), "<u8")
    flat[table.cells(0)] = _steps(ids, ids, firsts)
    flat[table.cells(1)] = _steps(starts, stops, firsts)
    flat[table.cells(2)] = stops - starts
    data, ends = flat.tobytes(), 24 * np.cumsum(counts)
    if is_gzip:
        rows = zip((ends - 24 * counts).tolist(), ends.tolist(), strict=True)
        packed = [deflate(data[start:end]) for start, end in rows]
        data, ends = b"".join(packed), np.cumsum(list(map(len, packed)), dtype=np.int64)
    return Encoded(numbers.astype(np.int64), ends, data)


def _steps(begins: Ids, ends: Ids, firsts: Numbers) -> Ids:
    """Count *begins* from the *ends* before them, and the first ones from zero."""
    steps = begins.copy()
    steps[1:] -= ends[:-1]
    steps[firsts] = begins[firsts]
    return steps


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Tables of three rows and *counts* columns, none of which is zero, behind each other."""

    counts: Numbers

    def cells(self, row: int) -> Numbers:
        """Tell where the cells of a row of each are in the flat array."""
        before = np.cumsum(self.counts) - self.counts
        starts = 2 * before + row * self.counts
        return np.arange(self.counts.sum()) + np.repeat(starts, self.counts)

    def sums(self, steps: Ids) -> Ids:
        """Sum *steps* up, from the beginning of each table anew; modulo 2^64."""
        sums = np.cumsum(steps, dtype=np.uint64)
        firsts = np.cumsum(self.counts) - self.counts
        sums -= np.repeat(sums[firsts] - steps[firsts], self.counts)
        return sums
