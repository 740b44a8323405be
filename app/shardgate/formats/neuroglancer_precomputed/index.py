"""Shards of format ``neuroglancer_uint64_sharded_v1``: their objects, the two levels of index, and
the manifests of meshes.

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
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from shardgate.errors import DamagedError, VersionChangedError
from shardgate.formats.compression import deflate, inflate, inflate_to_array
from shardgate.formats.documents import as_integer
from shardgate.formats.neuroglancer_precomputed.keys import Ids
from shardgate.formats.reading import BoundDecoder, DecodeError, Fetch, Opaque, Read
from shardgate.model import ByteRange, ETag, ObjectRef, Stored, SuffixRange

ENTRY_NBYTES: Final = 16
"""Of a shard index: start and stop of a minishard index."""
_ENTRY: Final = Struct("<QQ")
_ID_BITS: Final = 64
MAX_WHOLE_INDEX_NBYTES: Final = 64 * 1024
"""A larger shard index is read one entry at a time. Measured with the store on the same machine: 64
KiB take as long as 16 bytes (0.18 ms), 256 KiB 0.21 ms, 1 MiB 0.33 ms, 4 MiB 0.9 ms.
"""

Integer = Annotated[int, Field(strict=True), BeforeValidator(as_integer)]
_Bits = Annotated[Integer, Field(ge=0, le=64)]
type Encoding = Literal["raw", "gzip"]


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding parameters ("Sharding metadata")."""

    preshift_bits: _Bits
    minishard_bits: _Bits
    shard_bits: _Bits
    hash: Literal["identity", "murmurhash3_x86_128"]
    minishard_index_encoding: Encoding = "raw"
    data_encoding: Encoding = "raw"

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
        shard = hashed >> self.minishard_bits & ((1 << self.shard_bits) - 1)
        return shard, hashed & ((1 << self.minishard_bits) - 1)

    def addresses(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the numbers of the shards and of the minishards of *ids*, as `address` does."""
        hashed = ids >> np.uint64(self.preshift_bits)
        if self.hash == "murmurhash3_x86_128":
            hashed = np.array(list(map(murmurhash3_x86_128, hashed.tolist())), np.uint64)
        shards = hashed >> np.uint64(self.minishard_bits) & np.uint64((1 << self.shard_bits) - 1)
        return shards, hashed & np.uint64((1 << self.minishard_bits) - 1)

    def read_index(
        self, ref: ObjectRef, minishard: int | None = None, data_etag: ETag | None = None
    ) -> "Read[MinishardPlaces]":
        """Describe the read of the shard index, or of the entry of *minishard* only.

        *data_etag* is the version of the object that holds the data, where that is another one.
        """
        if minishard is None:
            place = ByteRange(0, self.index_nbytes)
        else:
            start = minishard * ENTRY_NBYTES
            place = ByteRange(start, start + ENTRY_NBYTES)
        # Beside other data the same bytes are another entry of the cache.
        decode = BoundDecoder(decode_shard_index, (place.length, minishard or 0, data_etag))
        kind = "shard-index" if minishard is None else "index-entry"
        return Read(kind, ref, place, decode)

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


def decode_shard_index(data: bytes, nbytes: int, first: int, _: ETag | None) -> MinishardPlaces:
    """Decode *nbytes* of a shard index that begin with minishard *first*."""
    if len(data) != nbytes:
        raise DecodeError(f"{len(data)} bytes of shard index instead of {nbytes}: it is truncated")
    return MinishardPlaces(data, first)


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


def decode_minishard(data: bytes, encoding: Encoding, most_nbytes: int) -> MinishardIndex:
    """Decode a minishard index ("Minishard index format"): undo the deltas, modulo 2^64; a chunk
    that ends past that is refused. Raises: `DecodeError`.
    """
    is_gzip = encoding == "gzip"
    decoded = inflate_to_array(data, most_nbytes) if is_gzip else bytearray(data)
    if len(decoded) % 24:  # a chunk id, a start and a size
        raise DecodeError(f"a minishard index of {len(decoded)} bytes, no multiple of 24")
    rows = np.frombuffer(decoded, "<u8").reshape(3, -1)
    np.cumsum(rows[0], out=rows[0])
    rows[1] += rows[2]  # a start counts from the stop before: with the size it leads to its own
    np.cumsum(rows[1], out=rows[1])
    np.subtract(rows[1], rows[2], out=rows[2])
    ids, stops, starts = rows
    if (wrong := np.flatnonzero(starts > stops)).size:
        raise DecodeError(f"chunk {ids[wrong[0]]} ends past 2^64")
    if (ids[1:] < ids[:-1]).any():
        order = np.argsort(ids, kind="stable")
        ids, starts, stops = ids[order], starts[order], stops[order]
    return MinishardIndex(ids.data, starts.data, stops.data)


def encode_minishard(ids: Ids, starts: Ids, stops: Ids, encoding: Encoding) -> bytes:
    """Encode the chunks of a minishard, in the order of their ids: each row less the one before."""
    zero = np.zeros(1, np.uint64)
    before = np.concatenate([zero, stops])[:-1]
    rows = np.diff(ids, prepend=zero), starts - before, stops - starts
    encoded = np.concatenate(rows, dtype="<u8").tobytes()
    return deflate(encoded) if encoding == "gzip" else encoded


@dataclass(frozen=True, slots=True)
class ShardObject:
    """A shard whose index is read."""

    index: MinishardPlaces
    index_ref: ObjectRef
    region: Stored
    """The shard behind its shard index, which offsets count in."""

    def find(self, minishard: int, most_nbytes: int) -> ByteRange | None:
        """Return the range in *region* of the index of *minishard*, `None` if it is empty."""
        try:
            place = self.index.lookup(minishard)
        except DecodeError as error:
            raise DamagedError(self.index_ref, str(error)) from error
        if place is None:
            return None
        length = self.region.byte_range.length
        if place.stop > length:
            reason = f"minishard index {minishard} at {place} ends past {length} bytes"
            raise DamagedError(self.region.ref, reason)
        if place.length > most_nbytes:
            reason = f"minishard index {minishard} at {place} has over {most_nbytes} bytes"
            raise DamagedError(self.index_ref, reason)
        return place

    async def confirm(self, fetch: Fetch) -> None:
        """Check that separate data still have the version of the index."""
        ref, _, etag = self.region
        if self.index_ref != ref:
            await fetch(Read("shard-end", ref, SuffixRange(1), Opaque, etag))


async def open_shard(
    name: ObjectRef, sharding: Sharding, minishard: int | None, fetch: Fetch
) -> ShardObject | None:
    """Open the shard *name*, which lacks its ending, for one *minishard* or all; `None` if there is
    none.

    It is one object, ``.shard``, or in the old form two: ``.index`` and, without its bytes,
    ``.data``. Of those

    1. the index decides whether there is such a shard;
    2. a read of the end of the data finds their version;
    3. the index is read again, unless it is cached for the same version: nothing else ties the
       two.

    Raises: `DamagedError`.
    """
    shard_ref, index_ref, data_ref = (
        name._replace(key=f"{name.key}.{ending}") for ending in ("shard", "index", "data")
    )
    if (shard := await fetch(sharding.read_index(shard_ref, minishard))) is not None:
        if shard.size < sharding.index_nbytes:
            raise DamagedError(shard_ref, f"{shard.size} bytes are too few for its shard index")
        place = ByteRange(sharding.index_nbytes, shard.size)
        return ShardObject(shard.value, shard_ref, Stored(shard_ref, place, shard.etag))
    if await fetch(sharding.read_index(index_ref, minishard)) is None:
        return None
    data = await fetch(Read("shard-end", data_ref, SuffixRange(1), Opaque))
    if data is None:
        raise DamagedError(data_ref, "does not exist, though its index does")
    if (index := await fetch(sharding.read_index(index_ref, minishard, data.etag))) is None:
        raise VersionChangedError(index_ref)
    region = Stored(data_ref, ByteRange(0, data.size), data.etag)
    return ShardObject(index.value, index_ref, region)


@dataclass(frozen=True, slots=True)
class Minishard:
    """An opened minishard."""

    place: ByteRange
    """Of its index, in *region*."""
    index: MinishardIndex
    region: Stored

    def locate(self, chunk_id: int) -> Stored | None:
        """Return the place of *chunk_id* in the object, if it is stored."""
        ref, region, version = self.region
        try:
            found = self.index.lookup(chunk_id)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error
        if found is None:
            return None
        if found.stop > region.length:
            raise DamagedError(ref, f"chunk {chunk_id} at {found} ends past {region.length} bytes")
        if found.overlaps(self.place):
            raise DamagedError(ref, f"chunk {chunk_id} at {found} overlaps its minishard index")
        return Stored(ref, region.narrow(found), version)


@dataclass(frozen=True, slots=True)
class MeshManifest:
    """Size of the fragment data, which lies right before the manifest in the shard."""

    fragments_nbytes: int
    nbytes: int = 0


def decode_manifest(data: bytes, encoding: Encoding, most_nbytes: int) -> MeshManifest:
    """Decode a manifest ("Encoded manifest format" of the mesh documents)."""
    if encoding == "gzip":
        data = inflate(data, most_nbytes)
    at = 24  # after chunk_shape and grid_origin
    num_lods = int(_uint32s(data, 1, at)[0])
    at += 4 + num_lods * 16  # a scale, and the three coordinates of a vertex offset
    counts = _uint32s(data, num_lods, at)
    if num_lods > 2**10:  # each takes time, and halves the resolution: a few dozen are possible
        raise DecodeError(f"the mesh manifest is of {num_lods} levels of detail")
    at += counts.nbytes
    total = 0
    for count in map(int, counts):
        at += count * 12  # the three coordinates of a position
        sizes = _uint32s(data, count, at)
        total += int(sizes.sum(dtype=np.uint64))
        at += sizes.nbytes
    return MeshManifest(total)


def _uint32s(data: bytes, count: int, at: int) -> NDArray[np.uint32]:
    if len(data) < at + count * 4:
        raise DecodeError(f"the mesh manifest ends after {len(data)} bytes, early")
    return np.frombuffer(data, "<u4", count, at)
