"""The objects of a shard, the two levels of index, and the manifests of meshes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.errors import DamagedError, VersionChangedError
from app.formats.compression import inflate
from app.formats.neuroglancer_precomputed.index import (
    ENTRY_NBYTES,
    MinishardIndex,
    MinishardIndexDecoder,
    MinishardPlaces,
    ShardIndexDecoder,
    Sharding,
)
from app.formats.reading import DecodeError, Fetch, Opaque, Read
from app.model import ByteRange, ETag, ObjectRef, Stored, SuffixRange

MAX_WHOLE_INDEX_NBYTES: Final = 64 * 1024
"""A larger shard index is read one entry at a time. Measured with the store on the same machine: 64
KiB take as long as 16 bytes (0.18 ms), 256 KiB 0.21 ms, 1 MiB 0.33 ms, 4 MiB 0.9 ms.
"""
_UINT32_NBYTES: Final = 4
_NUM_LODS_AT: Final = 24
"""After chunk_shape and grid_origin."""
_LOD_NBYTES: Final = 16
"""A scale and the three coordinates of a vertex offset."""
_POSITION_NBYTES: Final = 12
_MAX_LODS: Final = 1024
"""Each takes time, and halves the resolution: a few dozen are possible."""


type IndexRead = Callable[[ObjectRef, ETag | None], Read[MinishardPlaces]]
"""Describes the read of a shard index, or of an entry; for separate data also their version."""


def read_index(nbytes: int, ref: ObjectRef, data_etag: ETag | None = None) -> Read[MinishardPlaces]:
    """Describe the read of a whole shard index."""
    decode = ShardIndexDecoder(nbytes, data_etag=data_etag)
    return Read("shard-index", ref, ByteRange(0, nbytes), decode)


def read_entry(
    minishard: int, ref: ObjectRef, data_etag: ETag | None = None
) -> Read[MinishardPlaces]:
    """Describe the read of a single entry of a shard index."""
    start = minishard * ENTRY_NBYTES
    decode = ShardIndexDecoder(ENTRY_NBYTES, minishard, data_etag)
    return Read("index-entry", ref, ByteRange(start, start + ENTRY_NBYTES), decode)


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
    name: ObjectRef, index_nbytes: int, read: IndexRead, fetch: Fetch
) -> ShardObject | None:
    """Open the shard *name*, which lacks its ending; `None` if there is none.

    It is one object, ``.shard``, or in the old form two: ``.index`` and, without the
    *index_nbytes*, ``.data``. Of those

    1. the index decides whether there is such a shard;
    2. a read of the end of the data finds their version;
    3. the index is read again, unless it is cached for the same version: nothing else ties the
       two.

    Raises: `DamagedError`.
    """
    one, alone, data_ref = (
        name._replace(key=f"{name.key}.{ending}") for ending in ("shard", "index", "data")
    )
    if (index := await fetch(read(one, None))) is not None:
        if index.size < index_nbytes:
            raise DamagedError(one, f"{index.size} bytes are too few for its shard index")
        place = ByteRange(index_nbytes, index.size)
        return ShardObject(index.value, one, Stored(one, place, index.etag))
    if await fetch(read(alone, None)) is None:
        return None
    data = await fetch(Read("shard-end", data_ref, SuffixRange(1), Opaque))
    if data is None:
        raise DamagedError(data_ref, "does not exist, though its index does")
    if (index := await fetch(read(alone, data.etag))) is None:
        raise VersionChangedError(alone)
    return ShardObject(index.value, alone, Stored(data_ref, ByteRange(0, data.size), data.etag))


@dataclass(frozen=True, slots=True)
class Minishard:
    """An opened minishard."""

    place: ByteRange
    """Of its index, in *region*."""
    index: MinishardIndex
    region: Stored

    def locate(self, chunk_id: int) -> Stored | None:
        """Return the place of *chunk_id* in the object, if it is stored."""
        ref, region = self.region.ref, self.region.byte_range
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
        return Stored(ref, region.narrow(found), self.region.version)


@dataclass(frozen=True, slots=True)
class MinishardReader:
    """Opens minishards of the shards of one directory."""

    directory: ObjectRef
    sharding: Sharding
    fetch: Fetch
    whole_index_nbytes: int
    decoded_nbytes: int

    async def open(self, chunk_id: int) -> Minishard | None:
        """Open the minishard of *chunk_id*; `None` if the shard is absent or it is empty."""
        number, minishard = self.sharding.address(chunk_id)
        name = self.directory.join(self.sharding.shard_name(number))
        index_nbytes = self.sharding.index_nbytes
        is_small = index_nbytes <= min(self.whole_index_nbytes, MAX_WHOLE_INDEX_NBYTES)
        read = partial(read_index, index_nbytes) if is_small else partial(read_entry, minishard)
        if (shard := await open_shard(name, index_nbytes, read, self.fetch)) is None:
            return None
        region, most_nbytes = shard.region, self.decoded_nbytes
        try:
            if (place := shard.find(minishard, most_nbytes)) is None:
                return None
            is_gzip = self.sharding.minishard_index_encoding == "gzip"
            decode = MinishardIndexDecoder(is_gzip, most_nbytes)
            at = region.byte_range.narrow(place)
            found = await self.fetch(
                Read("minishard-index", region.ref, at, decode, region.version)
            )
        except DamagedError:
            await shard.confirm(self.fetch)
            raise
        if found is None:
            raise VersionChangedError(region.ref)
        return Minishard(place, found.value, region)

    async def locate_fragments(self, minishard: Minishard, manifest: Stored) -> Stored:
        """Return the place of the fragment data of a mesh, which ends where *manifest* begins."""
        ref, place, version = manifest
        if place.length > self.decoded_nbytes:
            raise DamagedError(
                ref, f"the manifest at {place} is longer than {self.decoded_nbytes} bytes"
            )
        decode = MeshManifestDecoder(self.sharding.data_encoding == "gzip", self.decoded_nbytes)
        found = await self.fetch(Read("mesh-manifest", ref, place, decode, version))
        if found is None:
            raise VersionChangedError(ref)
        start = place.start - found.value.fragments_nbytes
        if start < minishard.region.byte_range.start:
            raise DamagedError(
                ref,
                f"the manifest at {place} is of {found.value.fragments_nbytes} bytes of fragments,"
                " more than lie before it",
            )
        fragments = ByteRange(start, place.start)
        if fragments.overlaps(minishard.region.byte_range.narrow(minishard.place)):
            raise DamagedError(ref, f"the fragments at {fragments} overlap their minishard index")
        return Stored(ref, fragments, version)


@dataclass(frozen=True, slots=True)
class MeshManifest:
    """Size of the fragment data, which lies right before the manifest in the shard."""

    fragments_nbytes: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MeshManifestDecoder:
    """Decodes a manifest ("Encoded manifest format" of the mesh documents)."""

    is_gzip: bool
    most_nbytes: int

    def __call__(self, data: bytes) -> MeshManifest:
        if self.is_gzip:
            data = inflate(data, self.most_nbytes)
        (num_lods,) = map(int, _uint32s(data, 1, _NUM_LODS_AT))
        at = _NUM_LODS_AT + _UINT32_NBYTES + num_lods * _LOD_NBYTES
        counts = _uint32s(data, num_lods, at)
        if num_lods > _MAX_LODS:
            raise DecodeError(f"the mesh manifest is of {num_lods} levels of detail")
        at += counts.nbytes
        total = 0
        for count in map(int, counts):
            at += count * _POSITION_NBYTES
            sizes = _uint32s(data, count, at)
            total += int(sizes.sum(dtype=np.uint64))
            at += sizes.nbytes
        return MeshManifest(total)


def _uint32s(data: bytes, count: int, at: int) -> NDArray[np.uint32]:
    if len(data) < at + count * _UINT32_NBYTES:
        raise DecodeError(f"the mesh manifest ends after {len(data)} bytes, early")
    return np.frombuffer(data, "<u4", count, at)
