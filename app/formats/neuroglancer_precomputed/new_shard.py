"""The bytes of a shard that was planned, and what is known of its indexes by that.

As other writers do it, the shard index comes first, then all chunks, then all minishard indexes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from app.formats.neuroglancer_precomputed.index import ENTRY_NBYTES, MinishardIndex, ShardIndex
from app.formats.neuroglancer_precomputed.minishards import Encoded, Numbers, encode_minishards
from app.formats.neuroglancer_precomputed.planning import Arrangement, length_of
from app.formats.neuroglancer_precomputed.shards import (
    MAX_WHOLE_INDEX_NBYTES,
    read_entry,
    read_index,
    read_minishard,
)
from app.formats.neuroglancer_precomputed.survey import PrecomputedShard
from app.formats.reading import Opaque, Read
from app.formats.writing import NewShard
from app.model import ByteRange, Piece

_KNOWN_NBYTES: Final = 1024**2
"""Larger minishard indexes are read again by whoever writes the shard again."""
_KNOWN_MINISHARDS: Final = 256
"""Indexes of further minishards are read again by whoever wants a chunk of them."""

type Known = tuple[Read[Any], Any]
"""A read that need not be performed, and what it would give."""


@dataclass(frozen=True, slots=True, eq=False)
class WrittenShard:
    """The indexes of *shard* over the chunks that are *planned*."""

    shard: PrecomputedShard
    planned: Arrangement
    minishards: Encoded
    index: bytes

    @classmethod
    def of(cls, shard: PrecomputedShard, planned: Arrangement) -> Self:
        """Encode the indexes."""
        sharding = shard.part.sharding
        minishards = encode_minishards(planned.chunks, is_gzip=sharding.is_minishard_index_gzip)
        index = _encode_index(minishards, planned.nbytes, sharding.index_nbytes)
        return cls(shard, planned, minishards, index)

    @property
    def pieces(self) -> Sequence[Piece]:
        """All bytes."""
        pieces = self.index, *self.planned.pieces, self.minishards.data
        return [piece for piece in pieces if length_of(piece)]

    def places(self, ids: Collection[int]) -> Mapping[int, ByteRange]:
        """Return the ranges in the new object of those chunks of *ids* that it holds."""
        chunks = self.planned.chunks
        at = np.flatnonzero(np.isin(chunks.ids, np.array(list(ids), np.uint64)))
        columns = (each[at].tolist() for each in (chunks.ids, chunks.starts, chunks.stops))
        return {
            chunk_id: self._region(start, stop)
            for chunk_id, start, stop in zip(*columns, strict=True)
        }

    def known(self, ids: Collection[int]) -> Iterator[Known]:
        """Tell the shard index, and the entries of it that are read for the chunks *ids*."""
        ref, nbytes = self.shard.ref, len(self.index)
        yield read_index(ref, nbytes), ShardIndex(self.index)
        if nbytes > MAX_WHOLE_INDEX_NBYTES:
            for number in self._owners(ids):
                start = number * ENTRY_NBYTES
                entry = self.index[start : start + ENTRY_NBYTES]
                yield read_entry(ref, number), ShardIndex(entry, number)

    def known_of_version(self, ids: Collection[int]) -> Iterator[Known]:
        """Tell the minishard indexes of the chunks *ids*, and all of them as they are stored."""
        shard, sharding = self.shard, self.shard.part.sharding
        if 0 < len(self.minishards.data) <= _KNOWN_NBYTES:
            place = self._region(self.planned.nbytes, self._end(-1))
            read = Read("minishard-index", shard.ref, place, Opaque)
            yield read, Opaque(self.minishards.data)
        numbers, owners = self.minishards.numbers, self.planned.chunks.owners
        for number in self._owners(ids):
            at = int(np.searchsorted(numbers, number))
            if at == len(numbers) or numbers[at] != number:
                continue
            place = self._region(self._end(at - 1) if at else self.planned.nbytes, self._end(at))
            first, last = np.searchsorted(owners, np.array([number, number + 1], np.uint64))
            columns = (column[first:last].copy() for column in self.planned.chunks[:3])
            index = MinishardIndex(*(column.data for column in columns))
            yield read_minishard(shard.ref, place, sharding, shard.most_nbytes), index

    def _owners(self, ids: Collection[int]) -> list[int]:
        """Give the minishards of *ids*, unless they are too many."""
        addresses = self.shard.part.sharding.addresses(np.array(list(ids), np.uint64))
        return [int(number) for number in np.unique(addresses[1])[:_KNOWN_MINISHARDS]]

    def _end(self, at: int) -> int:
        return self.planned.nbytes + int(self.minishards.ends[at])

    def _region(self, start: int, stop: int) -> ByteRange:
        """Count from the beginning of the object."""
        return ByteRange(len(self.index) + start, len(self.index) + stop)


def _encode_index(minishards: Encoded, start: int, nbytes: int) -> bytes:
    """Write a shard index of *nbytes*, behind which *minishards* begin at *start*."""
    entries = np.zeros((nbytes // ENTRY_NBYTES, 2), "<u8")
    ends = minishards.ends + start
    starts: Numbers = np.append(start, ends)[: len(ends)]
    entries[minishards.numbers] = np.column_stack([starts, ends])
    return entries.tobytes()


def empty_shard(shard: PrecomputedShard) -> NewShard:
    """Write a shard whose minishards are all empty."""
    index = bytes(shard.part.sharding.index_nbytes)
    known = (read_index(shard.ref, len(index)), ShardIndex(index))
    return NewShard(pieces=[index], places={}, indexes=[known])
