"""Where chunks lie in a shard that is made anew: some kept, some new, and no holes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from app.formats.neuroglancer_precomputed.index import Sharding
from app.formats.neuroglancer_precomputed.keys import Ids
from app.formats.neuroglancer_precomputed.minishards import Columns, Numbers
from app.model import ByteRange, Piece


class Kept(NamedTuple):
    """Chunks of the old object that stay; each column has one element per chunk."""

    ids: Ids
    starts: Numbers
    stops: Numbers


class Arrangement(NamedTuple):
    """The chunks of a new shard, one behind the other."""

    pieces: Sequence[Piece]
    nbytes: int
    """Of all pieces."""
    chunks: Columns
    """By minishard and id; places count from the first piece."""


def arrange(
    sharding: Sharding, kept: Kept, new: Mapping[int, bytes], large_nbytes: int
) -> Arrangement:
    """Put chunks where they shall lie.

    In a small shard they lie by minishard and id. In one of *large_nbytes* those that are kept
    stay in their order, and new ones follow; so they do where chunks share bytes, and go on to.
    """
    units = _Units.of(kept, new)
    owners = sharding.addresses(units.ids)[1]
    order = np.lexsort((units.ids, owners))
    if units.lengths.sum() < large_nbytes and not _overlap(kept):
        starts, pieces = _in_order(units, order)
    else:
        starts, pieces = _in_place(units, order)
    ends = starts + units.lengths
    columns = units.ids, starts.astype(np.uint64), ends.astype(np.uint64), owners
    return Arrangement(
        pieces=pieces,
        nbytes=int(ends.max(initial=0)),
        chunks=Columns(*(column[order] for column in columns)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """The chunks of the new shard: first those that are kept, then the new ones."""

    kept: Kept
    new: Sequence[bytes]
    ids: Ids
    lengths: Numbers

    @classmethod
    def of(cls, kept: Kept, new: Mapping[int, bytes]) -> Self:
        added = list(new.values())
        return cls(
            kept=kept,
            new=added,
            ids=np.concatenate([kept.ids, np.array(list(new), np.uint64)]),
            lengths=np.concatenate(
                [kept.stops - kept.starts, np.array(list(map(len, added)), np.int64)]
            ),
        )


def _overlap(kept: Kept) -> bool:
    """Tell whether chunks share bytes."""
    filled = kept.starts < kept.stops
    order = np.argsort(kept.starts[filled], kind="stable")
    starts, stops = kept.starts[filled][order], kept.stops[filled][order]
    return bool((starts[1:] < stops[:-1]).any())


def _in_order(units: _Units, order: Numbers) -> tuple[Numbers, list[Piece]]:
    """Put chunks one behind the other in *order*; tell where each begins."""
    lengths = units.lengths[order]
    starts = np.empty_like(lengths)
    starts[order] = np.cumsum(lengths) - lengths
    return starts, list(_pieces(units, order))


def _pieces(units: _Units, order: Numbers) -> Iterator[Piece]:
    """Give the bytes of chunks in *order*; kept neighbours are one range."""
    count = len(units.kept.ids)
    is_kept = order < count
    begins, ends = (
        np.append(column, 0)[np.where(is_kept, order, count)]
        for column in (units.kept.starts, units.kept.stops)
    )
    goes_on = is_kept[1:] & is_kept[:-1] & (begins[1:] == ends[:-1])
    firsts = np.flatnonzero(np.append(True, ~goes_on)[: len(order)])
    lasts = np.append(firsts[1:], len(order))[: len(firsts)] - 1
    runs = (order[firsts], begins[firsts], ends[lasts])
    for unit, start, stop in zip(*(column.tolist() for column in runs), strict=True):
        if unit >= count:
            yield units.new[unit - count]
        elif start < stop:
            yield ByteRange(start, stop)


def _in_place(units: _Units, order: Numbers) -> tuple[Numbers, list[Piece]]:
    """Let what is kept move up over the holes, and put the rest behind it in *order*."""
    kept, count = units.kept, len(units.kept.ids)
    by_place = np.lexsort((kept.stops, kept.starts))
    begins, ends = kept.starts[by_place], np.maximum.accumulate(kept.stops[by_place])
    holes = np.maximum(begins - np.append(0, ends)[:count], 0)
    starts = np.empty(len(units.ids), np.int64)
    starts[by_place] = begins - np.cumsum(holes)
    firsts = np.flatnonzero(np.append(True, holes[1:] > 0)[:count])
    lasts = np.append(firsts[1:], count)[: len(firsts)] - 1
    runs = zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True)
    pieces: list[Piece] = [ByteRange(start, stop) for start, stop in runs if start < stop]
    added = order[order >= count]
    lengths = units.lengths[added]
    reached = int(ends[-1] - holes.sum()) if count else 0
    starts[added] = reached + np.cumsum(lengths) - lengths
    pieces += (units.new[at - count] for at in added.tolist())
    return starts, pieces


def length_of(piece: Piece) -> int:
    """Tell how many bytes *piece* brings."""
    return piece.length if isinstance(piece, ByteRange) else len(piece)
