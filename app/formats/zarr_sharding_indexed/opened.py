"""The indexes of a shard that are read to write it."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.errors import DamagedError, VersionChangedError
from app.formats.reading import DecodeError, Fetch, Read
from app.formats.writing import Entry
from app.formats.zarr_sharding_indexed.index import IndexCodec, ShardIndex
from app.model import ByteRange, ETag, ObjectRef

type Numbers = NDArray[np.int64]

EMPTY: Final = -1
"""Stands where an entry names nothing."""
_MARKER: Final = np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True)
class OpenZarrShard:
    """The index of a shard, and the indexes of those inside of it that are to be changed."""

    ref: ObjectRef
    etag: ETag
    """The version of the object."""
    size: int
    """Of the object, in bytes."""
    place: ByteRange
    """Where in the object the shard lies."""
    codec: IndexCodec
    index: ShardIndex
    inner: Mapping[int, "OpenZarrShard"]
    """By their entries in the index."""

    def lookup(self, entry: Entry) -> ByteRange | None:
        """Find the inner chunk *entry* in the object.

        Raises: `DamagedError`.
        """
        number, *deeper = entry
        found = self.find(number)
        return found if found is None or not deeper else self.inner[number].lookup(tuple(deeper))

    def find(self, number: int) -> ByteRange | None:
        """Find in the object what entry *number* of the index names.

        Raises: `DamagedError`.
        """
        try:
            found = self.codec.find(self.index, number, self.place.length)
        except DecodeError as error:
            raise DamagedError(self.ref, str(error)) from error
        return None if found is None else self.place.narrow(found)

    def table(self) -> tuple[Numbers, Numbers]:
        """Tell of each entry where in the object it begins, and its bytes; `EMPTY` of others.

        Raises: `DamagedError` where any entry cannot be right.
        """
        packed = np.frombuffer(self.index.entries, ">u8" if self.index.big_endian else "<u8")
        offset, nbytes = packed.astype(np.uint64).reshape(-1, 2).T
        is_empty = (offset == _MARKER) & (nbytes == _MARKER)
        damaged = np.flatnonzero(self._cannot_be(offset, nbytes) & ~is_empty)
        if len(damaged):
            self.find(int(damaged[0]))
        starts = offset.astype(np.int64) + self.place.start
        return np.where(is_empty, EMPTY, starts), np.where(is_empty, EMPTY, nbytes.astype(np.int64))

    def _cannot_be(
        self, offset: NDArray[np.uint64], nbytes: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Find the entries for which `find` raises, or that are empty."""
        try:
            index = self.codec.place(self.place.length)
        except DecodeError as error:
            raise DamagedError(self.ref, str(error)) from error
        stop = np.uint64(self.place.length - self.codec.trailer_nbytes)
        is_past = (offset > stop) | (nbytes > stop - offset)
        is_on_index = (offset < index.stop) & (offset + nbytes > index.start) & (nbytes > 0)
        found: NDArray[np.bool_] = is_past | is_on_index
        return found


def grouped(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """Put *entries* together that are in the same shard, or are the same; give what is behind."""
    groups: dict[int, list[Entry]] = {}
    for number, *deeper in entries:
        groups.setdefault(number, []).append(tuple(deeper))
    return groups


async def open_shard(
    ref: ObjectRef, codecs: tuple[IndexCodec, ...], entries: Collection[Entry], fetch: Fetch
) -> OpenZarrShard | None:
    """Read the index of the shard *ref*, and of those inside that hold *entries*.

    Raises: `DamagedError`, and what *fetch* does.
    """
    codec = codecs[0]
    found = await fetch(Read("shard-index", ref, codec.request, codec))
    if found is None:
        return None
    whole = ByteRange(0, found.size)
    shard = OpenZarrShard(ref, found.etag, found.size, whole, codec, found.value, {})
    return await _with_inner(shard, codecs[1:], entries, fetch)


async def _with_inner(
    shard: OpenZarrShard, codecs: tuple[IndexCodec, ...], entries: Collection[Entry], fetch: Fetch
) -> OpenZarrShard:
    if not codecs:
        return shard
    inner = {}
    for number, below in grouped(entries).items():
        if (place := shard.find(number)) is not None:
            inner[number] = await _open_inner(shard, place, codecs, below, fetch)
    return replace(shard, inner=inner)


async def _open_inner(
    outer: OpenZarrShard,
    place: ByteRange,
    codecs: tuple[IndexCodec, ...],
    entries: Collection[Entry],
    fetch: Fetch,
) -> OpenZarrShard:
    codec = codecs[0]
    try:
        at = place.narrow(codec.place(place.length))
    except DecodeError as error:
        raise DamagedError(outer.ref, str(error)) from error
    found = await fetch(Read("shard-index", outer.ref, at, codec, outer.etag))
    if found is None:
        raise VersionChangedError(outer.ref)
    shard = OpenZarrShard(outer.ref, outer.etag, outer.size, place, codec, found.value, {})
    return await _with_inner(shard, codecs[1:], entries, fetch)
