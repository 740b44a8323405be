"""Where chunks lie in a new shard, and what it is put together of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.errors import ConflictError
from app.formats.writing import LARGE_NBYTES, Entry, Sealed
from app.formats.zarr_sharding_indexed.index import (
    CHECKSUM_NBYTES,
    IndexCodec,
    IndexLocation,
    ShardIndex,
)
from app.formats.zarr_sharding_indexed.opened import EMPTY, Numbers, OpenZarrShard
from app.model import ByteRange, Piece

_MOST_GROWTH: Final = 2
"""Chunks that share bytes become several; a large shard that would grow by more is left alone."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is new in a shard: an encoded chunk, or a shard inside of it."""

    pieces: Sequence[Piece | Sealed]
    nbytes: int
    places: Mapping[Entry, ByteRange]
    """Of the chunks in it that were written, counted from its beginning."""

    @classmethod
    def of_chunk(cls, body: bytes) -> "Part":
        """Make a part of an encoded chunk."""
        return cls((body,), len(body), {(): ByteRange(0, len(body))})


@dataclass(frozen=True, slots=True)
class NewIndex:
    """The index of a new shard, and that shard."""

    index: ShardIndex
    part: Part
    chunk_count: int


def arrange(
    codec: IndexCodec, old: OpenZarrShard | None, parts: Mapping[int, Part | None]
) -> NewIndex:
    """Lay out a shard with *parts* in place of what their entries name in *old*.

    Raises: `DamagedError`, `ConflictError`.
    """
    starts, nbytes = _contents(codec, old, parts)
    present = np.flatnonzero(nbytes != EMPTY)
    total = int(nbytes[present].sum()) + codec.nbytes + codec.trailer_nbytes
    order = present if total < LARGE_NBYTES else _in_place(present, starts, nbytes)
    first = codec.nbytes if codec.location is IndexLocation.START else 0
    offsets = np.full_like(starts, EMPTY)
    offsets[order] = first + np.cumsum(nbytes[order]) - nbytes[order]
    index = _index(codec, offsets, nbytes)
    pieces = _gather(_runs(order, starts, nbytes), parts)
    at = 0 if codec.location is IndexLocation.START else len(pieces)
    pieces.insert(at, codec.encode(index))
    for nbytes_behind in range(codec.trailer_nbytes - CHECKSUM_NBYTES, -1, -CHECKSUM_NBYTES):
        pieces = [Sealed(pieces, _without_end(old, nbytes_behind))]
    places = dict(_places(offsets, parts))
    return NewIndex(index, Part(pieces, total, places), len(present))


def _without_end(old: OpenZarrShard | None, nbytes: int) -> ByteRange | None:
    """Tell where all of *old* is but its last *nbytes*."""
    return None if old is None else ByteRange(old.place.start, old.place.stop - nbytes)


def _contents(
    codec: IndexCodec, old: OpenZarrShard | None, parts: Mapping[int, Part | None]
) -> tuple[Numbers, Numbers]:
    """Tell of each entry where it begins in the old object, if it is kept, and its bytes."""
    if old is None:
        starts, nbytes = (np.full(codec.entry_count, EMPTY, np.int64) for _ in range(2))
    else:
        starts, nbytes = old.table()
    numbers = list(parts)
    starts[numbers] = EMPTY
    nbytes[numbers] = EMPTY
    if old is not None:
        _demand_room(old, nbytes)
    nbytes[numbers] = [EMPTY if part is None else part.nbytes for part in parts.values()]
    return starts, nbytes


def _demand_room(old: OpenZarrShard, nbytes: Numbers) -> None:
    kept = float(nbytes.sum(where=nbytes != EMPTY, dtype=np.float64))
    if kept > max(LARGE_NBYTES, _MOST_GROWTH * old.place.length):
        raise ConflictError(
            f"{old.ref}: its chunks share bytes, and would take {kept:.3g} bytes each by itself "
            f"instead of {old.place.length}"
        )


def _in_place(present: Numbers, starts: Numbers, nbytes: Numbers) -> Numbers:
    """Put what is kept in the order in which it lies, and what is new behind that."""
    is_kept = starts[present] != EMPTY
    kept, new = present[is_kept], present[~is_kept]
    return np.concatenate([kept[np.lexsort((nbytes[kept], starts[kept]))], new])


def _runs(order: Numbers, starts: Numbers, nbytes: Numbers) -> Iterator[int | ByteRange]:
    """Give what lies one behind the other: numbers of new parts, and ranges of the old object."""
    order = order[nbytes[order] > 0]
    start = starts[order]
    stop = start + nbytes[order]
    is_kept = start != EMPTY
    goes_on = is_kept[1:] & is_kept[:-1] & (start[1:] == stop[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on])[: len(order)])
    last = np.append(first[1:] - 1, len(order) - 1) if len(order) else first
    for number, kept, begin, end in zip(
        order[first].tolist(),
        is_kept[first].tolist(),
        start[first].tolist(),
        stop[last].tolist(),
        strict=True,
    ):
        yield ByteRange(begin, end) if kept else number


def _gather(
    runs: Iterator[int | ByteRange], parts: Mapping[int, Part | None]
) -> list[Piece | Sealed]:
    """Put pieces together; where a new part begins or ends with what is kept, that is joined."""
    gathered: list[Piece | Sealed] = []
    for run in runs:
        for piece in _pieces(run, parts):
            before = gathered[-1] if gathered else None
            match before, piece:
                case ByteRange(), ByteRange() if before.stop == piece.start:
                    gathered[-1] = ByteRange(before.start, piece.stop)
                case _:
                    gathered.append(piece)
    return gathered


def _pieces(run: int | ByteRange, parts: Mapping[int, Part | None]) -> Sequence[Piece | Sealed]:
    if isinstance(run, ByteRange):
        return (run,)
    part = parts[run]
    return () if part is None else part.pieces


def _index(codec: IndexCodec, offsets: Numbers, nbytes: Numbers) -> ShardIndex:
    table = np.stack([offsets, nbytes], axis=1)  # -1 is the marker of what is empty
    packed: NDArray[np.generic] = table.astype(">i8" if codec.big_endian else "<i8")
    return ShardIndex(packed.tobytes(), codec.big_endian)


def _places(
    offsets: Numbers, parts: Mapping[int, Part | None]
) -> Iterator[tuple[Entry, ByteRange]]:
    for number, part in parts.items():
        if part is not None:
            at = int(offsets[number])
            for entry, place in part.places.items():
                yield (number, *entry), ByteRange(at + place.start, at + place.stop)
