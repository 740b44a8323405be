"""The shard index: offset and nbytes of every inner chunk ("Binary shard format"), by entry."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from operator import floordiv
from struct import Struct
from typing import Any, Final, Literal, NamedTuple, Self

import crc32c
import numpy as np
from numpy.typing import NDArray

from shardgate.errors import DamagedError
from shardgate.formats.reading import DecodeError, Read, Versioned
from shardgate.formats.surveying import ABSENT_SOURCE, MissingBytes
from shardgate.model import ByteRange, Part, Stored, SuffixRange, Whole

ENTRY_NBYTES: Final = 16
CHECKSUM_NBYTES: Final = 4
EMPTY: Final = 2**64 - 1
"""Offset and nbytes of an inner chunk that is not stored."""
_LITTLE: Final = Struct("<QQ")
_BIG: Final = Struct(">QQ")


type IndexLocation = Literal["start", "end"]
"""The end of the shard at which the index lies."""


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Decoded index: one entry ``(offset, nbytes)`` of two uint64 per inner chunk, in C order."""

    entries: bytes
    big_endian: bool

    @property
    def nbytes(self) -> int:
        return len(self.entries)

    def lookup(self, entry: int) -> ByteRange | None:
        """Return the range of inner chunk *entry* in the shard, or `None` if it is empty."""
        packed = _BIG if self.big_endian else _LITTLE
        offset, nbytes = packed.unpack_from(self.entries, entry * ENTRY_NBYTES)
        if offset == EMPTY and nbytes == EMPTY:
            return None
        if EMPTY in (offset, nbytes):
            raise DecodeError(f"index entry {entry} is half an empty marker")
        if offset + nbytes > EMPTY:
            raise DecodeError(f"index entry {entry} ends past 2^64")
        return ByteRange(offset, offset + nbytes)


class IndexColumns(NamedTuple):
    """All entries of an index; each column has shape ``(count,)``."""

    offsets: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    is_empty: NDArray[np.bool_]
    is_damaged: NDArray[np.bool_]
    """True for entries that `IndexCodec.find` refuses."""


@dataclass(frozen=True, slots=True)
class IndexCodec:
    """``index_codecs`` and ``index_location`` of one sharding codec, which decode an index."""

    shape: tuple[int, ...]
    """Inner chunks along each axis of the codec."""
    location: IndexLocation
    big_endian: bool
    checksum_count: int | None
    """CRC-32Cs behind the entries, each of all bytes before it. `None` where only the shard tells
    whether there is one; a new one has it.
    """
    trailer_nbytes: int = 0
    """Checksums of the codecs after this one, at the very end of the shard."""
    order: tuple[int, ...] = ()
    """Encoded axis *i* is axis ``order[i]`` of ``(*shape, 2)``; empty without a transpose."""
    entry_count: int = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)
    """The encoded size, which is the same in every shard."""
    request: ByteRange | SuffixRange = field(init=False, compare=False)
    """The bytes to read of a shard of any size; an index at the end comes with the trailer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry_count", prod(self.shape))
        count = 1 if self.checksum_count is None else self.checksum_count
        nbytes = self.entry_count * ENTRY_NBYTES + count * CHECKSUM_NBYTES
        object.__setattr__(self, "nbytes", nbytes)
        is_first = self.location == "start"
        end = SuffixRange(nbytes + self.trailer_nbytes)
        object.__setattr__(self, "request", ByteRange(0, nbytes) if is_first else end)

    @property
    def is_read_whole(self) -> bool:
        """True if entries cannot be read alone: of unknown place, or with their numbers apart."""
        return self.checksum_count is None or bool(self.order)

    def place(self, shard_nbytes: int) -> ByteRange:
        """Return the range of the index in a shard of *shard_nbytes*, if it is long enough."""
        return ByteRange(*self._bounds(shard_nbytes))

    def _bounds(self, shard_nbytes: int) -> tuple[int, int]:
        stop = shard_nbytes - self.trailer_nbytes
        nbytes = self.nbytes if self.checksum_count is not None else self.nbytes - CHECKSUM_NBYTES
        if stop < nbytes:
            raise DecodeError(f"{shard_nbytes} bytes are too few for a shard: it is truncated")
        return (0, nbytes) if self.location == "start" else (stop - nbytes, stop)

    def find(self, index: ShardIndex, entry: int, shard_nbytes: int) -> ByteRange | None:
        """Return the range of inner chunk *entry* of a shard of *shard_nbytes*, if it is stored.
        Raises: `DecodeError` for a range past the shard or on its index, and for a shard without
        index.
        """
        index_start, index_stop = self._bounds(shard_nbytes)
        found = index.lookup(entry)
        if found is None:
            return None
        if found.stop > shard_nbytes - self.trailer_nbytes:
            raise DecodeError(f"inner chunk {entry} at {found} ends past {shard_nbytes} bytes")
        if max(found.start, index_start) < min(found.stop, index_stop):
            raise DecodeError(f"inner chunk {entry} at {found} overlaps the shard index")
        return found

    def narrow(self, shard: Stored, index: ShardIndex, entry: int) -> Stored | None:
        """Return inner chunk *entry* of *shard*, if it is stored. Raises: `DamagedError`."""
        ref, place, version = shard
        try:
            found = self.find(index, entry, place.stop - place.start)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error
        return None if found is None else Stored(ref, place.narrow(found), version)

    def columns(self, index: ShardIndex, shard_nbytes: int) -> IndexColumns:
        """Check all entries of a shard of *shard_nbytes*, as `find` checks one."""
        packed = np.frombuffer(index.entries, ">u8" if index.big_endian else "<u8")
        offsets, nbytes = packed.astype(np.uint64).reshape(-1, 2).T
        is_empty = (offsets == EMPTY) & (nbytes == EMPTY)
        place = self.place(shard_nbytes)
        stop = np.uint64(shard_nbytes - self.trailer_nbytes)
        is_outside = (offsets > stop) | (nbytes > stop - offsets)  # the sum of both could overflow
        is_on_index = (offsets < place.stop) & (offsets + nbytes > place.start) & (nbytes > 0)
        return IndexColumns(offsets, nbytes, is_empty, (is_outside | is_on_index) & ~is_empty)

    def place_in(self, shard: Stored | Part) -> ByteRange:
        """Return the range of the index in *shard*. Raises: `DamagedError` for a truncated one."""
        try:
            return self.place(shard.byte_range.length)
        except DecodeError as error:
            raise DamagedError(shard.ref, str(error)) from error

    def read(self, shard: Whole | Stored | Part) -> Read[ShardIndex]:
        """Describe the read of the index of *shard*. Raises: `DamagedError` for a truncated one."""
        if isinstance(shard, Whole):
            return Read("shard-index", shard.ref, self.request, self)
        place = shard.byte_range.narrow(self.place_in(shard))
        return Read("shard-index", shard.ref, place, self, shard.version)

    def read_entry(self, shard: Stored | Part, entry: int) -> Read[ShardIndex]:
        """Describe the read of one *entry* as an index of its own; there must be no transpose."""
        index = shard.byte_range.narrow(self.place_in(shard))
        place = index.narrow(ByteRange(entry * ENTRY_NBYTES, (entry + 1) * ENTRY_NBYTES))
        decode = IndexCodec((), self.location, self.big_endian, checksum_count=0)
        return Read("index-entry", shard.ref, place, decode, shard.version)

    def encode(self, index: ShardIndex) -> bytes:
        """Encode *index*, which has `entry_count` entries in the byte order of this codec."""
        entries = index.entries
        if self.order:
            entries = _transpose(entries, (*self.shape, 2), self.order)
        return entries + self._checksums(entries)

    def _checksums(self, entries: bytes) -> bytes:
        checksums = b""
        crc = crc32c.crc32c(entries)
        for _ in range(1 if self.checksum_count is None else self.checksum_count):
            checksum = crc.to_bytes(CHECKSUM_NBYTES, "little")
            checksums += checksum
            crc = crc32c.crc32c(checksum, crc)
        return checksums

    def __call__(self, data: bytes) -> ShardIndex:
        if self.checksum_count is None:
            return self._decode_either(data)
        if len(data) not in {self.nbytes, self.nbytes + self.trailer_nbytes}:
            raise DecodeError(f"the shard index has {len(data)} bytes instead of {self.nbytes}")
        entries = data[: self.entry_count * ENTRY_NBYTES]
        if self.checksum_count and data[len(entries) : self.nbytes] != self._checksums(entries):
            raise DecodeError("the checksum of the shard index does not match")
        if self.order:
            lengths = (*self.shape, 2)  # the last axis is that of offset and nbytes
            encoded_shape = [lengths[axis] for axis in self.order]
            back = [self.order.index(axis) for axis in range(len(lengths))]
            entries = _transpose(entries, encoded_shape, back)
        return ShardIndex(entries, self.big_endian)

    def _decode_either(self, data: bytes) -> ShardIndex:
        """Decode an index with a checksum that matches, or one without."""
        with suppress(DecodeError):
            return replace(self, checksum_count=1)(data)
        bare = replace(self, checksum_count=0)
        is_first = self.location == "start"
        return bare(data[: bare.nbytes] if is_first else data[-bare.nbytes - self.trailer_nbytes :])


def _transpose(numbers: bytes, shape: Sequence[int], order: Sequence[int]) -> bytes:
    """Transpose an array of 8-byte *numbers* to the axes *order*."""
    # numpy takes 64 axes, and the index of an array of 64 has one more: ones do not count.
    axes = [axis for axis in order if shape[axis] > 1]
    lengths = [length for length in shape if length > 1]
    ranks = [sorted(axes).index(axis) for axis in axes]
    return np.frombuffer(numbers, "V8").reshape(lengths).transpose(ranks).tobytes()


@dataclass(frozen=True, slots=True)
class ShardingLevel:
    """One sharding codec; all members have one element per axis of the array."""

    inner_chunk_shape: tuple[int, ...]
    """Of the chunks inside the shards of this codec, in array elements."""
    chunks_per_shard: tuple[int, ...]
    strides: tuple[int, ...]
    """Distance of neighbours along each axis, in index entries."""
    index: IndexCodec
    axes: tuple[int, ...]
    """The axes of the array in the order of the codec, by which *strides* and *index* count."""

    @classmethod
    def of(
        cls,
        inner_chunk_shape: tuple[int, ...],
        chunks_per_shard: tuple[int, ...],
        index: IndexCodec,
        axes: tuple[int, ...],
    ) -> Self:
        """Make a codec that counts along *axes*, and give *index* its shape."""
        shape = tuple(chunks_per_shard[axis] for axis in axes)
        strides = [0] * len(axes)
        for place, axis in enumerate(axes):
            strides[axis] = prod(shape[place + 1 :])
        index = replace(index, shape=shape)
        return cls(inner_chunk_shape, chunks_per_shard, tuple(strides), index, axes)

    def entry(self, origin: tuple[int, ...]) -> int:
        """Return the index entry of the inner chunk that holds the array element *origin*."""
        axes = zip(origin, self.inner_chunk_shape, self.chunks_per_shard, self.strides, strict=True)
        return sum([at // chunk % count * stride for at, chunk, count, stride in axes])

    @lru_cache(maxsize=1024)  # noqa: B019  small values, and each look-up needs one
    def resized(self, shard_shape: tuple[int, ...]) -> "ShardingLevel":
        """Return the codec of shards of *shard_shape*, which is nowhere larger than before."""
        counts = tuple(map(floordiv, shard_shape, self.inner_chunk_shape))
        return ShardingLevel.of(self.inner_chunk_shape, counts, self.index, self.axes)


def shard_of(shard: Whole | Stored | Part, found: Versioned[Any] | None) -> Stored | None:
    """Return *shard* in the version that was *found* when a part of it was read; `None` for an
    object that does not exist. Raises: `DamagedError` for a reference to more than there is.
    """
    match shard:
        case Whole(ref):
            if found is None:
                return None
            return Stored(ref, ByteRange(0, found.size), found.etag)
        case Stored(ref, place) | Part(ref, place):
            if found is None:
                raise DamagedError(ref, ABSENT_SOURCE)
            if found.size < place.stop:
                reason = MissingBytes(f"{place} is referred to, and it has {found.size} bytes")
                raise DamagedError(ref, reason)
            return shard if isinstance(shard, Stored) else Stored(ref, place, found.etag)
