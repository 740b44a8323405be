"""Shards of an array, written anew: the old indexes, the changed chunks, the new object.

Of shards inside of the shard only those are rewritten that hold a changed chunk. Each is laid
out by its own size, see `LARGE_NBYTES`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardgate.errors import BadBodyError, ConflictError, UnknownCodingError
from shardgate.formats.contract import LARGE_NBYTES, Checksummed, Entry, NewShard
from shardgate.formats.reading import Fetch
from shardgate.formats.zarr.codecs import ChunkForm
from shardgate.formats.zarr.index import CHECKSUM_NBYTES, IndexCodec, ShardIndex, shard_of
from shardgate.model import ByteRange, ETag, ObjectRef, Piece, Stored, Whole

_ABSENT: Final = -1  # start and size of empty entries; as int64 the marker of the index

type Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OpenZarrShard:
    """The index of a shard, and the indexes of those inside of it that are to be changed."""

    place: Stored
    """The shard: an object, or a range of one."""
    etag: ETag
    codec: IndexCodec
    index: ShardIndex
    inner: Mapping[int, "OpenZarrShard"]
    """Shards inside, by their entries in the index."""

    @property
    def size(self) -> int:
        return self.place.byte_range.stop

    def lookup(self, entry: Entry) -> ByteRange | None:
        number, *deeper = entry
        found = self.find(number)
        return found if found is None or not deeper else self.inner[number].lookup(tuple(deeper))

    def find(self, number: int) -> ByteRange | None:
        """Return the range in the object of entry *number* of the index, if it is not empty."""
        found = self.codec.narrow(self.place, self.index, number)
        return None if found is None else found.byte_range

    def columns(self) -> tuple[Numbers, Numbers]:
        """Return for each entry its start in the object and its size; both -1 if it is empty."""
        place = self.place.byte_range
        self.codec.place_in(self.place)
        columns = self.codec.columns(self.index, place.length)
        if columns.is_damaged.any():
            self.find(int(columns.is_damaged.argmax()))
        starts = columns.offsets.astype(np.int64) + place.start
        nbytes = columns.nbytes.astype(np.int64)
        is_empty = columns.is_empty
        return np.where(is_empty, _ABSENT, starts), np.where(is_empty, _ABSENT, nbytes)


async def _open(
    shard: Whole | Stored, codecs: tuple[IndexCodec, ...], entries: Iterable[Entry], fetch: Fetch
) -> OpenZarrShard | None:
    """Read the index of *shard*, and those of the shards inside that hold *entries*."""
    codec, *deeper = codecs
    found = await fetch(codec.read(shard))
    if (place := shard_of(shard, found)) is None or found is None:
        return None
    inner = {}
    for number, below in _grouped(entries).items() if deeper else ():
        part = codec.narrow(place, found.value, number)
        if part and (opened := await _open(part, tuple(deeper), below, fetch)):
            inner[number] = opened
    return OpenZarrShard(place, found.etag, codec, found.value, inner)


def _grouped(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    groups: dict[int, list[Entry]] = {}
    for number, *deeper in entries:
        groups.setdefault(number, []).append(tuple(deeper))
    return groups


@dataclass(frozen=True, slots=True)
class ZarrRewriter:
    """Rewrites the shard *ref*."""

    ref: ObjectRef
    codecs: tuple[IndexCodec, ...]
    """Of the index, then of the indexes of the shards inside."""
    chunk: ChunkForm

    def encode(self, _: Entry, body: bytes, *, coding: str) -> bytes:
        if coding:
            raise UnknownCodingError("inner chunks have no content coding, only codecs")
        if (fault := self.chunk.fault(body)) is not None:
            raise BadBodyError(fault)
        return body

    async def open(self, entries: Collection[Entry], fetch: Fetch) -> OpenZarrShard | None:
        return await _open(Whole(self.ref), self.codecs, entries, fetch)

    def plan(
        self, old: OpenZarrShard | None, changes: Mapping[Entry, bytes | None]
    ) -> NewShard | None:
        shard = _rewrite(self.codecs, old, changes)
        return self._new_shard(shard) if shard.chunk_count else None

    def plan_empty(self) -> NewShard:
        return self._new_shard(_arrange(self.codecs[0], None, {}))

    def _new_shard(self, shard: "_Content") -> NewShard:
        read = self.codecs[0].read(Whole(self.ref))
        return NewShard(shard.pieces, shard.places, (read, shard.index))


@dataclass(frozen=True, slots=True)
class _Content:
    """New content of an entry: an encoded chunk, or a shard inside; or a new object."""

    pieces: Sequence[Piece | Checksummed]
    nbytes: int
    places: Mapping[Entry, ByteRange]
    """Ranges of the written chunks, counted from the beginning of the content."""
    index: ShardIndex | None = None
    """Of a shard."""
    chunk_count: int = 1


def _rewrite(
    codecs: tuple[IndexCodec, ...], old: OpenZarrShard | None, changes: Mapping[Entry, bytes | None]
) -> _Content:
    contents: dict[int, _Content | None] = {}
    for number, below in _grouped(changes).items():
        if len(codecs) == 1:
            contents[number] = None
            if (body := changes[(number,)]) is not None:
                contents[number] = _Content((body,), len(body), {(): ByteRange(0, len(body))})
        else:
            inner = None if old is None else old.inner.get(number)
            new = _rewrite(codecs[1:], inner, {entry: changes[(number, *entry)] for entry in below})
            contents[number] = new if new.chunk_count else None
    return _arrange(codecs[0], old, contents)


def _arrange(
    codec: IndexCodec, old: OpenZarrShard | None, contents: Mapping[int, _Content | None]
) -> _Content:
    starts, nbytes = _columns(codec, old, contents)
    present = np.flatnonzero(nbytes != _ABSENT)
    total = int(nbytes[present].sum()) + codec.nbytes + codec.trailer_nbytes
    # In a large shard chunks keep their order, so that few long ranges are copied.
    order = present if total < LARGE_NBYTES else _in_place(present, starts, nbytes)
    is_first = codec.location == "start"
    begin = codec.nbytes if is_first else 0
    offsets = np.full_like(starts, _ABSENT)
    offsets[order] = begin + np.cumsum(nbytes[order]) - nbytes[order]
    table = np.stack([offsets, nbytes], axis=1)
    packed: NDArray[np.generic] = table.astype(">i8" if codec.big_endian else "<i8")
    index = ShardIndex(packed.tobytes(), codec.big_endian)
    pieces: list[Piece | Checksummed] = []
    for run in _runs(order, starts, nbytes):
        if isinstance(run, ByteRange):
            pieces.append(run)
        elif (content := contents[run]) is not None:
            pieces += content.pieces
    pieces.insert(0 if is_first else len(pieces), codec.encode(index))
    whole = None if old is None else old.place.byte_range
    # Each checksum of the trailer is of all before it, of the checksums before it too.
    for behind in range(codec.trailer_nbytes - CHECKSUM_NBYTES, -1, -CHECKSUM_NBYTES):
        pieces = [Checksummed(pieces, whole and ByteRange(whole.start, whole.stop - behind))]
    places: dict[Entry, ByteRange] = {}
    for number, content in contents.items():
        if content is not None:
            at = int(offsets[number])
            for entry, place in content.places.items():
                places[number, *entry] = ByteRange(place.start + at, place.stop + at)
    return _Content(pieces, total, places, index, len(present))


def _columns(
    codec: IndexCodec, old: OpenZarrShard | None, contents: Mapping[int, _Content | None]
) -> tuple[Numbers, Numbers]:
    """Return for each entry its start in the old object, if it is kept, and its size."""
    if old is None:
        starts = np.full(codec.entry_count, _ABSENT, np.int64)
        nbytes = starts.copy()
    else:
        starts, nbytes = old.columns()
    changed = list(contents)
    starts[changed] = _ABSENT
    nbytes[changed] = _ABSENT  # until those that are kept have been counted
    if old is not None:
        old_nbytes = old.place.byte_range.length
        # Chunks that share bytes become several: a large shard may double by that.
        kept_nbytes = float(nbytes.sum(where=nbytes != _ABSENT, dtype=np.float64))
        if kept_nbytes > max(LARGE_NBYTES, 2 * old_nbytes):
            raise ConflictError(
                f"{old.place.ref}: its chunks share bytes, and would take {kept_nbytes:.3g} bytes"
                f" each by itself instead of {old_nbytes}"
            )
    nbytes[changed] = [_ABSENT if each is None else each.nbytes for each in contents.values()]
    return starts, nbytes


def _in_place(present: Numbers, starts: Numbers, nbytes: Numbers) -> Numbers:
    is_kept = starts[present] != _ABSENT
    kept, new = present[is_kept], present[~is_kept]
    return np.concatenate([kept[np.lexsort((nbytes[kept], starts[kept]))], new])


def _runs(order: Numbers, starts: Numbers, nbytes: Numbers) -> Iterator[int | ByteRange]:
    """Yield the entries in *order*: new ones, and ranges of the old object for kept neighbours."""
    order = order[nbytes[order] > 0]  # an empty chunk would part its neighbours
    if not len(order):
        return
    start = starts[order]
    stop = start + nbytes[order]
    is_kept = start != _ABSENT
    is_next = is_kept[1:] & is_kept[:-1] & (start[1:] == stop[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~is_next]))
    last = np.append(first[1:] - 1, len(order) - 1)
    columns = order[first], is_kept[first], start[first], stop[last]
    for number, kept, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        yield ByteRange(begin, end) if kept else number
