"""The shard index: offset and nbytes of every inner chunk ("Binary shard format"), by entry."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import floordiv
from struct import Struct
from typing import Any, Final, Literal, NamedTuple

import crc32c
import numpy as np
from numpy.typing import NDArray

from shardgate.errors import DamagedError
from shardgate.formats.reading import DecodeError, Read, Versioned
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

    entry_count: int
    location: IndexLocation
    big_endian: bool
    has_checksum: bool | None
    """`None` where only the shard tells; a new one has a checksum."""
    trailer_nbytes: int = 0
    """Checksums of the codecs after this one, at the very end of the shard."""
    nbytes: int = field(init=False, compare=False)
    """The encoded size, which is the same in every shard."""
    request: ByteRange | SuffixRange = field(init=False, compare=False)
    """The bytes to read of a shard of any size; an index at the end comes with the trailer."""

    def __post_init__(self) -> None:
        checksum_nbytes = 0 if self.has_checksum is False else CHECKSUM_NBYTES
        nbytes = self.entry_count * ENTRY_NBYTES + checksum_nbytes
        object.__setattr__(self, "nbytes", nbytes)
        request: ByteRange | SuffixRange = SuffixRange(nbytes + self.trailer_nbytes)
        if self.location == "start":
            request = ByteRange(0, nbytes)
        object.__setattr__(self, "request", request)

    def place(self, shard_nbytes: int) -> ByteRange:
        """Return the range of the index in a shard of *shard_nbytes*, if it is long enough."""
        stop = shard_nbytes - self.trailer_nbytes
        nbytes = self.nbytes if self.has_checksum is not None else self.nbytes - CHECKSUM_NBYTES
        if stop < nbytes:
            raise DecodeError(f"{shard_nbytes} bytes are too few for a shard: it is truncated")
        if self.location == "start":
            return ByteRange(0, nbytes)
        return ByteRange(stop - nbytes, stop)

    def find(self, index: ShardIndex, entry: int, shard_nbytes: int) -> ByteRange | None:
        """Return the range of inner chunk *entry* of a shard of *shard_nbytes*, if it is stored.
        Raises: `DecodeError` for a range past the shard or on its index, and for a shard without
        index.
        """
        place = self.place(shard_nbytes)
        found = index.lookup(entry)
        if found is None:
            return None
        if found.stop > shard_nbytes - self.trailer_nbytes:
            raise DecodeError(f"inner chunk {entry} at {found} ends past {shard_nbytes} bytes")
        if found.overlaps(place):
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
        place, stop = self.place(shard_nbytes), np.uint64(shard_nbytes - self.trailer_nbytes)
        is_outside = (offsets > stop) | (nbytes > stop - offsets)
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
        """Describe the read of one *entry*, without the checksum, as an index of length one."""
        place = shard.byte_range.narrow(self.place_in(shard))
        place = place.narrow(ByteRange(entry * ENTRY_NBYTES, (entry + 1) * ENTRY_NBYTES))
        decode = IndexCodec(1, self.location, self.big_endian, has_checksum=False)
        return Read("index-entry", shard.ref, place, decode, shard.version)

    def encode(self, index: ShardIndex) -> bytes:
        """Encode *index*, which has `entry_count` entries in the byte order of this codec."""
        if self.has_checksum is False:
            return index.entries
        checksum: int = crc32c.crc32c(index.entries)
        return index.entries + checksum.to_bytes(CHECKSUM_NBYTES, "little")

    def __call__(self, data: bytes) -> ShardIndex:
        if self.has_checksum is None:
            return self._decode_either(data)
        if len(data) not in {self.nbytes, self.nbytes + self.trailer_nbytes}:
            raise DecodeError(f"the shard index has {len(data)} bytes instead of {self.nbytes}")
        entries = data[: self.entry_count * ENTRY_NBYTES]
        checksum = data[len(entries) : self.nbytes]
        if self.has_checksum and crc32c.crc32c(entries) != int.from_bytes(checksum, "little"):
            raise DecodeError("the checksum of the shard index does not match")
        return ShardIndex(entries, self.big_endian)

    def _decode_either(self, data: bytes) -> ShardIndex:
        """Decode an index with a checksum that matches, or one without."""
        with suppress(DecodeError):
            return replace(self, has_checksum=True)(data)
        bare = replace(self, has_checksum=False)
        is_first = self.location == "start"
        return bare(data[: bare.nbytes] if is_first else data[-bare.nbytes - self.trailer_nbytes :])


@dataclass(frozen=True, slots=True)
class ShardingLevel:
    """One sharding codec; all members have one element per axis of the array."""

    inner_chunk_shape: tuple[int, ...]
    """Of the chunks inside the shards of this codec, in array elements."""
    chunks_per_shard: tuple[int, ...]
    strides: tuple[int, ...]
    """Distance of neighbours along each axis, in index entries."""
    index: IndexCodec

    def entry(self, origin: tuple[int, ...]) -> int:
        """Return the index entry of the inner chunk that holds the array element *origin*."""
        axes = zip(origin, self.inner_chunk_shape, self.chunks_per_shard, self.strides, strict=True)
        return sum([at // chunk % count * stride for at, chunk, count, stride in axes])

    @lru_cache(maxsize=1024)  # noqa: B019  small values, and each look-up needs one
    def resized(self, shard_shape: tuple[int, ...]) -> "ShardingLevel":
        """Return the codec of shards of *shard_shape*, which is nowhere larger than before."""
        counts = tuple(map(floordiv, shard_shape, self.inner_chunk_shape))
        strides, stride = [0] * len(counts), 1
        # Of axes with equal strides all but one have one chunk, and their order does not matter.
        for axis in sorted(range(len(counts)), key=self.strides.__getitem__):
            strides[axis] = stride
            stride *= counts[axis]
        index = replace(self.index, entry_count=stride)
        return ShardingLevel(self.inner_chunk_shape, counts, tuple(strides), index)


def shard_of(shard: Whole | Stored | Part, found: Versioned[Any] | None) -> Stored | None:
    """Return *shard* in the version that was *found* when a part of it was read; `None` for an
    object that does not exist. Raises: `DamagedError` for a reference to more than there is.
    """
    match shard:
        case Whole(ref):
            return found and Stored(ref, ByteRange(0, found.size), found.etag)
        case Stored(ref, place) | Part(ref, place):
            if found is None:
                raise DamagedError(ref, "does not exist, though it is referred to")
            if found.size < place.stop:
                reason = f"{place} is referred to, and it has {found.size} bytes"
                raise DamagedError(ref, reason)
            return shard if isinstance(shard, Stored) else Stored(ref, place, found.etag)
