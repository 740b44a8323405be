"""The two levels of index in a shard of format ``neuroglancer_uint64_sharded_v1``.

All offsets in a shard count from the end of its shard index; all numbers are uint64,
little-endian.
"""

from bisect import bisect_left
from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np

from app.formats.compression import inflate_to_array
from app.formats.neuroglancer_precomputed.keys import Ids
from app.formats.neuroglancer_precomputed.murmur import (
    murmurhash3_x86_128,
    murmurhash3_x86_128_each,
)
from app.formats.reading import DecodeError
from app.model import ByteRange, ETag

ENTRY_NBYTES: Final = 16
_ROW_NBYTES: Final = 24
_ENTRY: Final = Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Where the chunk of an id is ("Sharding metadata")."""

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
        """Give the numbers of the shard and of the minishard in it."""
        hashed = chunk_id >> self.preshift_bits
        if self.is_hashed:
            hashed = murmurhash3_x86_128(hashed)
        minishard = hashed & ((1 << self.minishard_bits) - 1)
        return hashed >> self.minishard_bits & ((1 << self.shard_bits) - 1), minishard

    def addresses(self, ids: Ids) -> tuple[Ids, Ids]:
        """Give the numbers of the shards and of the minishards in them, as `address` does."""
        hashed = ids >> np.uint64(self.preshift_bits)
        if self.is_hashed:
            hashed = murmurhash3_x86_128_each(hashed)
        shards = hashed >> np.uint64(self.minishard_bits) & np.uint64((1 << self.shard_bits) - 1)
        return shards, hashed & np.uint64((1 << self.minishard_bits) - 1)

    def shard_name(self, shard: int) -> str:
        """Spell the name of a shard file without its ending ("Shard data files")."""
        return f"{shard:x}".zfill(-(-self.shard_bits // 4))


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A decoded shard index, or a part of one: where minishard indexes lie."""

    entries: bytes
    first: int = 0
    """The minishard of the first entry."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the entries hold."""
        return len(self.entries)

    def __len__(self) -> int:
        return len(self.entries) // ENTRY_NBYTES

    def lookup(self, minishard: int) -> ByteRange | None:
        """Find the minishard index number *minishard*; `None` is an empty minishard.

        Raises: `DecodeError` if it ends before it begins.
        """
        start, stop = _ENTRY.unpack_from(self.entries, (minishard - self.first) * ENTRY_NBYTES)
        if start > stop:
            raise DecodeError(f"minishard index {minishard} ends at {stop}, before {start}")
        return ByteRange(start, stop) if start < stop else None


@dataclass(frozen=True, slots=True)
class ShardIndexDecoder:
    """Decodes a shard index, or a part of one that begins with minishard *first*, of *nbytes*."""

    nbytes: int
    first: int = 0
    beside: ETag | None = None
    """The version of the object that the index is about, where that is another one."""

    def __call__(self, data: bytes) -> ShardIndex:
        """Wrap *data*.

        Raises: `DecodeError` for a wrong size.
        """
        if len(data) != self.nbytes:
            raise DecodeError(
                f"{len(data)} bytes of shard index instead of {self.nbytes}: it is truncated"
            )
        return ShardIndex(data, self.first)


@dataclass(frozen=True, slots=True)
class MinishardIndex:
    """The chunks of a minishard by rising id: 24 bytes each, in three columns of uint64."""

    ids: memoryview
    starts: memoryview
    stops: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the columns hold."""
        return self.ids.nbytes + self.starts.nbytes + self.stops.nbytes

    def __len__(self) -> int:
        return len(self.ids)

    def lookup(self, chunk_id: int) -> ByteRange | None:
        """Find *chunk_id* in the shard.

        Raises: `DecodeError` for an id that stands there twice.
        """
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
    """A larger one is refused."""

    def __call__(self, data: bytes) -> MinishardIndex:
        """Undo the deltas, which wrap at 2^64: chunks need not lie in the order of their ids.

        Nor must the ids rise in the file; here they do.

        Raises: `DecodeError`, also for a chunk that ends past 2^64: what follows it counts from
        there, and nothing that is absent is proven to be.
        """
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
    """Return if an inflated minishard index can be cut into rows.

    Raises: `DecodeError`.
    """
    if len(decoded) % _ROW_NBYTES:
        raise DecodeError(f"a minishard index of {len(decoded)} bytes, no multiple of 24")
