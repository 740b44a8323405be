"""Tables of a shard of format ``neuroglancer_uint64_sharded_v1``: shard and minishard indexes.

All offsets in a shard count from the end of its shard index; all numbers are uint64,
little-endian.
"""

from bisect import bisect_left
from dataclasses import dataclass
from struct import Struct
from typing import Annotated, Final, Literal, Self

import mmh3
import numpy as np
import pydantic.dataclasses
from pydantic import BeforeValidator, Field, model_validator

from app.formats.compression import deflate, inflate_to_array
from app.formats.neuroglancer_precomputed.keys import Ids
from app.formats.reading import DecodeError
from app.model import ByteRange, ETag

ENTRY_NBYTES: Final = 16
"""Of a shard index: start and stop of a minishard index."""
_ROW_NBYTES: Final = 24
"""Of a minishard index: a chunk id, a start and a size, as deltas."""
_ENTRY: Final = Struct("<QQ")
_ID_BITS: Final = 64


def as_integer(value: object) -> object:
    """Return an integer for ``4.0``, as JSON may spell it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, Field(strict=True), BeforeValidator(as_integer)]
_Bits = Annotated[Integer, Field(ge=0, le=64)]
type _Encoding = Literal["raw", "gzip"]


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding parameters ("Sharding metadata")."""

    preshift_bits: _Bits
    minishard_bits: _Bits
    shard_bits: _Bits
    hash: Literal["identity", "murmurhash3_x86_128"]
    minishard_index_encoding: _Encoding = "raw"
    data_encoding: _Encoding = "raw"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (bits := self.minishard_bits + self.shard_bits) > _ID_BITS:
            raise ValueError(f"minishard_bits and shard_bits are {bits} in all, over {_ID_BITS}")
        return self

    @property
    def index_nbytes(self) -> int:
        """Size of the shard index."""
        return ENTRY_NBYTES << self.minishard_bits

    def address(self, chunk_id: int) -> tuple[int, int]:
        """Return the numbers of the shard and of the minishard in it."""
        hashed = chunk_id >> self.preshift_bits
        if self.hash == "murmurhash3_x86_128":
            hashed = murmurhash3_x86_128(hashed)
        minishard = hashed & ((1 << self.minishard_bits) - 1)
        return hashed >> self.minishard_bits & ((1 << self.shard_bits) - 1), minishard

    def addresses(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the numbers of the shards and of the minishards of *ids*, as `address` does."""
        hashed = ids >> np.uint64(self.preshift_bits)
        if self.hash == "murmurhash3_x86_128":
            hashed = np.array(list(map(murmurhash3_x86_128, hashed.tolist())), np.uint64)
        shards = hashed >> np.uint64(self.minishard_bits) & np.uint64((1 << self.shard_bits) - 1)
        return shards, hashed & np.uint64((1 << self.minishard_bits) - 1)

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard file without its ending ("Shard data files")."""
        return f"{shard:x}".zfill(-(-self.shard_bits // 4))


def murmurhash3_x86_128(number: int) -> int:
    """Return the low 8 bytes of the hash of *number*: 8 bytes, little-endian, seed 0."""
    return mmh3.hash64(number.to_bytes(8, "little"), 0, x64arch=False, signed=False)[0]


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
        if len(decoded) % _ROW_NBYTES:
            raise DecodeError(f"a minishard index of {len(decoded)} bytes, no multiple of 24")
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


def encode_minishard(ids: Ids, starts: Ids, stops: Ids, *, is_gzip: bool) -> bytes:
    """Encode the chunks of a minishard, in the order of their ids: each row less the one before."""
    zero = np.zeros(1, np.uint64)
    before = np.concatenate([zero, stops])[:-1]
    rows = np.diff(ids, prepend=zero), starts - before, stops - starts
    encoded = np.concatenate(rows, dtype="<u8").tobytes()
    return deflate(encoded) if is_gzip else encoded
