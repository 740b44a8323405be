"""Shards of an array, written anew: the old indexes, the changed chunks, the new object.

Of shards inside of the shard only those are rewritten that hold a changed chunk. Each is laid
out by its own size, see `LARGE_NBYTES`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.errors import (
    BadBodyError,
    ConflictError,
    DamagedError,
    ReadOnlyError,
    UnknownCodingError,
    VersionChangedError,
)
from app.formats.contract import LARGE_NBYTES, Checksummed, Entry, NewShard
from app.formats.reading import DecodeError, Fetch, Read
from app.formats.zarr.codecs import ChunkForm
from app.formats.zarr.index import CHECKSUM_NBYTES, IndexCodec, IndexLocation, ShardIndex
from app.model import ByteRange, ETag, ObjectRef, Piece, Stored

WRITTEN_NBYTES: Final = 64 * 1024**2
"""Largest index of a shard that is written: a rewrite has it in memory several times."""
_MOST_GROWTH: Final = 2
"""Chunks that share bytes become several; a large shard that would grow by more is refused."""
_ABSENT: Final = -1
"""Start and size of empty entries; as int64 the marker of the index."""

type Numbers = NDArray[np.int64]


def demand_small(ref: ObjectRef, codecs: tuple[IndexCodec, ...], most_nbytes: int) -> None:
    """Check that no index of the shard takes more. Raises: `ReadOnlyError`."""
    if (largest := max(codec.nbytes for codec in codecs)) > most_nbytes:
        raise ReadOnlyError(f"{ref}: a shard index of {largest} bytes, over {most_nbytes}")


@dataclass(frozen=True, slots=True)
class OpenZarrShard:
    """The index of a shard, and the indexes of those inside of it that are to be changed."""

    ref: ObjectRef
    etag: ETag
    size: int
    place: ByteRange
    """The range of the shard in the object."""
    codec: IndexCodec
    index: ShardIndex
    inner: Mapping[int, "OpenZarrShard"]
    """Shards inside, by their entries in the index."""

    def lookup(self, entry: Entry) -> ByteRange | None:
        number, *deeper = entry
        found = self.find(number)
        return found if found is None or not deeper else self.inner[number].lookup(tuple(deeper))

    def find(self, number: int) -> ByteRange | None:
        """Return the range in the object of entry *number* of the index, if it is not empty."""
        try:
            found = self.codec.find(self.index, number, self.place.length)
        except DecodeError as error:
            raise DamagedError(self.ref, str(error)) from error
        return None if found is None else self.place.narrow(found)

    def columns(self) -> tuple[Numbers, Numbers]:
        """Return for each entry its start in the object and its size; both -1 if it is empty."""
        try:
            columns = self.codec.columns(self.index, self.place.length)
        except DecodeError as error:
            raise DamagedError(self.ref, str(error)) from error
        if columns.is_damaged.any():
            self.find(int(columns.is_damaged.argmax()))
        starts = columns.offsets.astype(np.int64) + self.place.start
        nbytes = columns.nbytes.astype(np.int64)
        is_empty = columns.is_empty
        return np.where(is_empty, _ABSENT, starts), np.where(is_empty, _ABSENT, nbytes)

    async def with_inner(
        self, codecs: tuple[IndexCodec, ...], entries: Iterable[Entry], fetch: Fetch
    ) -> "OpenZarrShard":
        """Read the indexes of the shards inside that hold *entries*; *codecs* are theirs."""
        if not codecs:
            return self
        inner = {}
        for number, below in _grouped(entries).items():
            if (place := self.find(number)) is None:
                continue
            found = await fetch(codecs[0].read(Stored(self.ref, place, self.etag)))
            if found is None:
                raise VersionChangedError(self.ref)
            opened = replace(self, place=place, codec=codecs[0], index=found.value, inner={})
            inner[number] = await opened.with_inner(codecs[1:], below, fetch)
        return replace(self, inner=inner)


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

    def encode(self, _: Entry, body: bytes, *, is_gzip: bool) -> bytes:
        if is_gzip:
            raise UnknownCodingError("inner chunks have no content coding, only codecs")
        if (fault := self.chunk.fault(body)) is not None:
            raise BadBodyError(fault)
        return body

    async def open(self, entries: Collection[Entry], fetch: Fetch) -> OpenZarrShard | None:
        codec = self.codecs[0]
        found = await fetch(Read("shard-index", self.ref, codec.request, codec))
        if found is None:
            return None
        whole = ByteRange(0, found.size)
        shard = OpenZarrShard(self.ref, found.etag, found.size, whole, codec, found.value, {})
        return await shard.with_inner(self.codecs[1:], entries, fetch)

    def plan(
        self, old: OpenZarrShard | None, changes: Mapping[Entry, bytes | None]
    ) -> NewShard | None:
        shard = _rewrite(self.codecs, old, changes)
        return self._new_shard(shard) if shard.chunk_count else None

    def plan_empty(self) -> NewShard:
        return self._new_shard(_arrange(self.codecs[0], None, {}))

    def _new_shard(self, shard: "_PlannedShard") -> NewShard:
        codec = self.codecs[0]
        read = Read("shard-index", self.ref, codec.request, codec)
        return NewShard(shard.content.pieces, shard.content.places, ((read, shard.index),))


@dataclass(frozen=True, slots=True)
class _Content:
    """New content of an entry: an encoded chunk, or a shard inside."""

    pieces: Sequence[Piece | Checksummed]
    nbytes: int
    places: Mapping[Entry, ByteRange]
    """Ranges of the written chunks, counted from the beginning of the content."""

    @classmethod
    def of_chunk(cls, body: bytes) -> "_Content":
        return cls((body,), len(body), {(): ByteRange(0, len(body))})


@dataclass(frozen=True, slots=True)
class _PlannedShard:
    index: ShardIndex
    content: _Content
    chunk_count: int


def _rewrite(
    codecs: tuple[IndexCodec, ...], old: OpenZarrShard | None, changes: Mapping[Entry, bytes | None]
) -> _PlannedShard:
    contents: dict[int, _Content | None] = {}
    for number, below in _grouped(changes).items():
        if len(codecs) == 1:
            body = changes[(number,)]
            contents[number] = None if body is None else _Content.of_chunk(body)
        else:
            inner = None if old is None else old.inner.get(number)
            new = _rewrite(codecs[1:], inner, {entry: changes[(number, *entry)] for entry in below})
            contents[number] = new.content if new.chunk_count else None
    return _arrange(codecs[0], old, contents)


def _arrange(
    codec: IndexCodec, old: OpenZarrShard | None, contents: Mapping[int, _Content | None]
) -> _PlannedShard:
    starts, nbytes = _columns(codec, old, contents)
    present = np.flatnonzero(nbytes != _ABSENT)
    total = int(nbytes[present].sum()) + codec.nbytes + codec.trailer_nbytes
    order = present if total < LARGE_NBYTES else _in_place(present, starts, nbytes)
    is_first = codec.location is IndexLocation.START
    offsets = np.full_like(starts, _ABSENT)
    offsets[order] = is_first * codec.nbytes + np.cumsum(nbytes[order]) - nbytes[order]
    table = np.stack([offsets, nbytes], axis=1)
    packed: NDArray[np.generic] = table.astype(">i8" if codec.big_endian else "<i8")
    index = ShardIndex(packed.tobytes(), codec.big_endian)
    pieces = list(_joined(_runs(order, starts, nbytes), contents))
    pieces.insert(0 if is_first else len(pieces), codec.encode(index))
    for behind in range(codec.trailer_nbytes - CHECKSUM_NBYTES, -1, -CHECKSUM_NBYTES):
        replaced = None if old is None else ByteRange(old.place.start, old.place.stop - behind)
        pieces = [Checksummed(pieces, replaced)]
    places = {
        (number, *entry): ByteRange(place.start + at, place.stop + at)
        for number, content in contents.items()
        if content is not None
        for at in (int(offsets[number]),)
        for entry, place in content.places.items()
    }
    return _PlannedShard(index, _Content(pieces, total, places), len(present))


def _columns(
    codec: IndexCodec, old: OpenZarrShard | None, contents: Mapping[int, _Content | None]
) -> tuple[Numbers, Numbers]:
    """Return for each entry its start in the old object, if it is kept, and its size."""
    if old is None:
        starts, nbytes = (np.full(codec.entry_count, _ABSENT, np.int64) for _ in range(2))
    else:
        starts, nbytes = old.columns()
    numbers = list(contents)
    starts[numbers] = _ABSENT
    nbytes[numbers] = _ABSENT
    if old is not None:
        kept = float(nbytes.sum(where=nbytes != _ABSENT, dtype=np.float64))
        if kept > max(LARGE_NBYTES, _MOST_GROWTH * old.place.length):
            raise ConflictError(
                f"{old.ref}: its chunks share bytes, and would take {kept:.3g} bytes each by"
                f" itself instead of {old.place.length}"
            )
    nbytes[numbers] = [_ABSENT if each is None else each.nbytes for each in contents.values()]
    return starts, nbytes


def _in_place(present: Numbers, starts: Numbers, nbytes: Numbers) -> Numbers:
    is_kept = starts[present] != _ABSENT
    kept, new = present[is_kept], present[~is_kept]
    return np.concatenate([kept[np.lexsort((nbytes[kept], starts[kept]))], new])


def _runs(order: Numbers, starts: Numbers, nbytes: Numbers) -> Iterator[int | ByteRange]:
    """Yield the entries in *order*: new ones, and ranges of the old object for kept neighbours."""
    order = order[nbytes[order] > 0]
    start = starts[order]
    stop = start + nbytes[order]
    is_kept = start != _ABSENT
    is_next = is_kept[1:] & is_kept[:-1] & (start[1:] == stop[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~is_next])[: len(order)])
    last = np.append(first[1:] - 1, len(order) - 1) if len(order) else first
    columns = order[first], is_kept[first], start[first], stop[last]
    for number, kept, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        yield ByteRange(begin, end) if kept else number


def _joined(
    runs: Iterator[int | ByteRange], contents: Mapping[int, _Content | None]
) -> Iterator[Piece | Checksummed]:
    """Yield pieces; where a new shard inside begins or ends with a kept range, that is joined."""
    before: Piece | Checksummed | None = None
    for run in runs:
        content = None if isinstance(run, ByteRange) else contents[run]
        pieces = (run,) if isinstance(run, ByteRange) else content.pieces if content else ()
        for piece in pieces:
            match before, piece:
                case ByteRange(), ByteRange() if before.stop == piece.start:
                    before = ByteRange(before.start, piece.stop)
                case _:
                    if before is not None:
                        yield before
                    before = piece
    if before is not None:
        yield before
