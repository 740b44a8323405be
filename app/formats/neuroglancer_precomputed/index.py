"""Tables of a shard of format ``neuroglancer_uint64_sharded_v1``: shard and minishard indexes.

All offsets in a shard count from the end of its shard index; all numbers are uint64,
little-endian.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import mmh3
import numpy as np
import numpy.typing as npt

from app.formats.compression import deflate, inflate_to_array
from app.formats.neuroglancer_precomputed.keys import Ids
from app.formats.reading import DecodeError
from app.model import ByteRange, ETag

ENTRY_NBYTES: Final = 16
"""Of a shard index: start and stop of a minishard index."""
_ROW_NBYTES: Final = 24
"""Of a minishard index: a chunk id, a start and a size, as deltas."""
_ENTRY: Final = Struct("<QQ")
_C1: Final = np.uint32(0x239B961B)
_C2: Final = np.uint32(0xAB0E9789)
_MIX: Final = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
_ID_NBYTES: Final = np.uint32(8)

type Numbers = npt.NDArray[np.int64]
type _States = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding parameters ("Sharding metadata")."""

    preshift_bits: int
    is_hashed: bool
    """By ``murmurhash3_x86_128``; else the hash is ``identity``."""
    minishard_bits: int
    shard_bits: int
    is_minishard_index_gzip: bool
    is_data_gzip: bool

    @property
    def index_nbytes(self) -> int:
        """Size of the shard index."""
        return ENTRY_NBYTES << self.minishard_bits

    def address(self, chunk_id: int) -> tuple[int, int]:
        """Return the numbers of the shard and of the minishard in it."""
        hashed = chunk_id >> self.preshift_bits
        if self.is_hashed:
            hashed = murmurhash3_x86_128(hashed)
        minishard = hashed & ((1 << self.minishard_bits) - 1)
        return hashed >> self.minishard_bits & ((1 << self.shard_bits) - 1), minishard

    def addresses(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the numbers of the shards and of the minishards of *ids*, as `address` does."""
        hashed = ids >> np.uint64(self.preshift_bits)
        if self.is_hashed:
            hashed = murmurhash3_x86_128_each(hashed)
        shards = hashed >> np.uint64(self.minishard_bits) & np.uint64((1 << self.shard_bits) - 1)
        return shards, hashed & np.uint64((1 << self.minishard_bits) - 1)

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard file without its ending ("Shard data files")."""
        return f"{shard:x}".zfill(-(-self.shard_bits // 4))


def murmurhash3_x86_128(number: int) -> int:
    """Return the low 8 bytes of the hash of *number*: 8 bytes, little-endian, seed 0."""
    return mmh3.hash64(number.to_bytes(8, "little"), 0, x64arch=False, signed=False)[0]


def murmurhash3_x86_128_each(numbers: Ids) -> Ids:
    """Hash each of *numbers*: they are all tail, which enters two of the four states."""
    low, high = numbers.astype(np.uint32), (numbers >> np.uint64(32)).astype(np.uint32)
    first = _rotated(low * _C1, 15) * _C2 ^ _ID_NBYTES
    second = _rotated(high * _C2, 16) * np.uint32(0x38B34AE5) ^ _ID_NBYTES
    first += second + _ID_NBYTES + _ID_NBYTES
    second += first
    other = _finished(first + _ID_NBYTES)
    first, second = _finished(first), _finished(second)
    first += second + other + other
    second += first
    return second.astype(np.uint64) << np.uint64(32) | first


def _rotated(states: _States, bits: int) -> _States:
    return states << np.uint32(bits) | states >> np.uint32(32 - bits)


def _finished(states: _States) -> _States:
    for shift, factor in zip((16, 13), _MIX, strict=True):
        states = (states ^ states >> np.uint32(shift)) * factor
    return states ^ states >> np.uint32(16)


@dataclass(frozen=True, slots=True)
class MinishardPlaces:
    """Decoded shard index, or a part of one: the ranges of minishard indexes."""

    entries: bytes
    first: int = 0
    """The minishard of the first entry."""

    @property
    def nbytes(self) -> int:
        return len(self.entries)

    def lookup(self, minishard: int) -> ByteRange | None:
        """Return the range of the index of *minishard*, or `None` if it is empty."""
        start, stop = _ENTRY.unpack_from(self.entries, (minishard - self.first) * ENTRY_NBYTES)
        if start > stop:
            raise DecodeError(f"minishard index {minishard} ends at {stop}, before {start}")
        return ByteRange(start, stop) if start < stop else None


@dataclass(frozen=True, slots=True)
class ShardIndexDecoder:
    """Decodes *nbytes* of a shard index that begin with minishard *first*."""

    nbytes: int
    first: int = 0
    data_etag: ETag | None = None
    """The version of the object that holds the data, where that is another one."""

    def __call__(self, data: bytes) -> MinishardPlaces:
        if len(data) != self.nbytes:
            raise DecodeError(
                f"{len(data)} bytes of shard index instead of {self.nbytes}: it is truncated"
            )
        return MinishardPlaces(data, self.first)


@dataclass(frozen=True, slots=True)
class MinishardIndex:
    """The chunks of a minishard by rising id, in three columns of uint64."""

    ids: memoryview
    starts: memoryview
    stops: memoryview

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.starts.nbytes + self.stops.nbytes

    def __len__(self) -> int:
        return len(self.ids)

    def lookup(self, chunk_id: int) -> ByteRange | None:
        """Return the range of *chunk_id* in the shard, if it is stored."""
        at = bisect_left(self.ids, chunk_id)
        if at == len(self.ids) or self.ids[at] != chunk_id:
            return None
        if at + 1 < len(self.ids) and self.ids[at + 1] == chunk_id:
            raise DecodeError(f"chunk {chunk_id} is twice in its minishard index")
        return ByteRange(self.starts[at], self.stops[at])


@dataclass(frozen=True, slots=True)
class MinishardIndexDecoder:
    """Decodes a minishard index ("Minishard index format")."""

    is_gzip: bool
    most_nbytes: int

    def __call__(self, data: bytes) -> MinishardIndex:
        """Undo the deltas, modulo 2^64; a chunk that ends past that is refused."""
        decoded = inflate_to_array(data, self.most_nbytes) if self.is_gzip else bytearray(data)
        check_rows(decoded)
        rows = np.frombuffer(decoded, "<u8").reshape(3, -1)
        np.cumsum(rows[0], out=rows[0])
        rows[1] += rows[2]
        np.cumsum(rows[1], out=rows[1])
        np.subtract(rows[1], rows[2], out=rows[2])
        ids, stops, starts = rows
        if (wrong := np.flatnonzero(starts > stops)).size:
            raise DecodeError(f"chunk {ids[wrong[0]]} ends past 2^64")
        if (ids[1:] < ids[:-1]).any():
            order = np.argsort(ids, kind="stable")
            ids, starts, stops = ids[order], starts[order], stops[order]
        return MinishardIndex(ids.data, starts.data, stops.data)


def check_rows(decoded: bytes | bytearray) -> None:
    """Check that an inflated minishard index consists of whole rows. Raises: `DecodeError`."""
    if len(decoded) % _ROW_NBYTES:
        raise DecodeError(f"a minishard index of {len(decoded)} bytes, no multiple of 24")


class Columns(NamedTuple):
    """Chunks of several minishards; each column has shape ``(count,)``."""

    ids: Ids
    starts: Ids
    """Counted from the end of the shard index, as `stops`."""
    stops: Ids
    owners: Ids


def decode_minishards(numbers: Sequence[int], decoded: Sequence[bytes | bytearray]) -> Columns:
    """Undo the deltas of inflated indexes of whole rows, those of the minishards *numbers*. A chunk
    that ends past 2^64 has a start behind its stop.
    """
    counts = np.array([len(data) // _ROW_NBYTES for data in decoded], np.int64)
    filled = np.flatnonzero(counts)
    owners = np.array(numbers, np.uint64)[filled]
    tables = _Tables(counts[filled])
    flat = np.frombuffer(b"".join(decoded), "<u8")
    ids = tables.sums(flat[tables.cells(0)])
    sizes = flat[tables.cells(2)]
    stops = tables.sums(flat[tables.cells(1)] + sizes)
    found = Columns(ids, stops - sizes, stops, np.repeat(owners, tables.counts))
    indexes = np.repeat(np.arange(len(filled)), tables.counts)
    if ((ids[1:] < ids[:-1]) & (indexes[1:] == indexes[:-1])).any():
        order = np.lexsort((ids, indexes))
        return Columns(*(column[order] for column in found))
    return found


class EncodedMinishards(NamedTuple):
    """Minishard indexes, one behind the other."""

    numbers: Numbers
    ends: Numbers
    """End of the index of each, counted from the start of the first."""
    data: bytes


def encode_minishards(chunks: Columns, *, is_gzip: bool) -> EncodedMinishards:
    """Encode *chunks*, which are in the order of their minishards and ids."""
    ids, starts, stops, owners = chunks
    numbers, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
    tables = _Tables(counts)
    flat = np.empty(3 * len(ids), "<u8")
    flat[tables.cells(0)] = _deltas(ids, ids, firsts)
    flat[tables.cells(1)] = _deltas(starts, stops, firsts)
    flat[tables.cells(2)] = stops - starts
    data, ends = flat.tobytes(), _ROW_NBYTES * np.cumsum(counts)
    if is_gzip:
        rows = zip((ends - _ROW_NBYTES * counts).tolist(), ends.tolist(), strict=True)
        packed = [deflate(data[start:end]) for start, end in rows]
        data, ends = b"".join(packed), np.cumsum(list(map(len, packed)), dtype=np.int64)
    return EncodedMinishards(numbers.astype(np.int64), ends, data)


def _deltas(begins: Ids, ends: Ids, firsts: Numbers) -> Ids:
    """Count *begins* from the *ends* before them, the first of each table from zero."""
    deltas = begins.copy()
    deltas[1:] -= ends[:-1]
    deltas[firsts] = begins[firsts]
    return deltas


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Flat tables of three rows and *counts* columns each, none of which is zero."""

    counts: Numbers

    def cells(self, row: int) -> Numbers:
        before = np.cumsum(self.counts) - self.counts
        starts = 2 * before + row * self.counts
        return np.arange(self.counts.sum()) + np.repeat(starts, self.counts)

    def sums(self, deltas: Ids) -> Ids:
        """Sum *deltas* up, for each table from its first; modulo 2^64."""
        sums = np.cumsum(deltas, dtype=np.uint64)
        firsts = np.cumsum(self.counts) - self.counts
        sums -= np.repeat(sums[firsts] - deltas[firsts], self.counts)
        return sums
