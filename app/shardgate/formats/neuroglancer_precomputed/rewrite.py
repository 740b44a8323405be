"""Shards of volumes, skeletons and annotations, written anew.

As other writers do it, the shard index comes first, then all chunks, then all minishard indexes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardgate.errors import BadBodyError, ConflictError, DamagedError
from shardgate.formats.compression import decode_content, deflate
from shardgate.formats.contract import Entry, NewShard
from shardgate.formats.neuroglancer_precomputed.index import MinishardPlaces, encode_minishard
from shardgate.formats.neuroglancer_precomputed.keys import Ids
from shardgate.formats.neuroglancer_precomputed.survey import PrecomputedShard, ShardTables
from shardgate.formats.reading import DecodeError, Fetch, Read
from shardgate.formats.surveying import Ranges
from shardgate.model import ByteRange, ObjectRef, Piece


@dataclass(frozen=True, slots=True)
class ChunkRewriter:
    """Rewrites *shard*; entries are chunk ids."""

    shard: PrecomputedShard

    @property
    def ref(self) -> ObjectRef:
        return self.shard.ref

    def encode(self, entry: Entry, body: bytes, *, coding: str) -> bytes:
        """Check a chunk, and compress it where the shard has gzip, unless it came so."""
        plain = body
        if coding:
            try:
                plain = decode_content(coding, body, self.shard.most_nbytes)
            except DecodeError as error:
                raise BadBodyError(f"the body: {error}") from error
        if not plain:
            raise BadBodyError("the body is empty, and no chunk is")
        part = self.shard.part
        if (nbytes := part.chunk_nbytes(entry[0])) is not None and len(plain) != nbytes:
            raise BadBodyError(f"{len(plain)} bytes of a chunk that has {nbytes}")
        if part.sharding.data_encoding == "raw":
            return plain
        return body if coding == "gzip" else deflate(plain)

    async def open(self, _: Collection[Entry], fetch: Fetch) -> ShardTables | None:
        """Read all indexes; `plan` checks them. Raises: `DamagedError`, `ConflictError`."""
        tables = await self.shard.open(fetch)
        if tables is not None and tables.opened.index_ref != tables.region.ref:
            raise ConflictError(
                f"{self.ref}: the shard is stored in two objects, .index and .data, an old form"
                " that is not written"
            )
        return tables

    def plan(
        self, old: ShardTables | None, changes: Mapping[Entry, bytes | None]
    ) -> NewShard | None:
        kept_ids = np.empty(0, np.uint64)
        kept = Ranges.of()
        if old is not None:
            kept_ids, kept = _keep(old, without=changes)
        added = {entry[0]: data for entry, data in changes.items() if data is not None}
        if not added and not len(kept_ids):
            return None
        ids = np.concatenate([kept_ids, np.array(list(added), np.uint64)])
        new = np.array(list(map(len, added.values())), np.uint64)
        owners = self.shard.part.sharding.addresses(ids)[1]
        # By minishard, then by id: chunks lie as their indexes list them.
        order = np.lexsort((ids, owners))
        stops = np.cumsum(np.concatenate([kept.stops - kept.starts, new])[order])
        starts = np.append(np.uint64(0), stops[:-1])
        index, minishards = self._encode(ids[order], starts, stops, owners[order])
        is_new = order >= len(kept.starts)
        columns = (each[is_new].tolist() for each in (ids[order], starts, stops))
        return NewShard(
            pieces=[index, *_pieces(kept, list(added.values()), order), minishards],
            places={
                (chunk_id,): ByteRange(len(index) + start, len(index) + stop)
                for chunk_id, start, stop in zip(*columns, strict=True)
            },
            index=self._known(index),
        )

    def plan_empty(self) -> NewShard:
        index = bytes(self.shard.part.sharding.index_nbytes)
        return NewShard(pieces=[index], places={}, index=self._known(index))

    def _known(self, index: bytes) -> tuple[Read[MinishardPlaces], MinishardPlaces]:
        return self.shard.part.sharding.read_index(self.ref), MinishardPlaces(index)

    def _encode(self, ids: Ids, starts: Ids, stops: Ids, owners: Ids) -> tuple[bytes, bytes]:
        """Encode the shard index, and all minishard indexes; columns are in their order."""
        sharding = self.shard.part.sharding
        entries = np.zeros((1 << sharding.minishard_bits, 2), "<u8")
        end = int(stops[-1])
        numbers, firsts = np.unique(owners, return_index=True)
        minishards: list[bytes] = []
        for number, edges in zip(numbers, pairwise([*firsts.tolist(), len(ids)]), strict=True):
            rows = slice(*edges)
            encoding = sharding.minishard_index_encoding
            encoded = encode_minishard(ids[rows], starts[rows], stops[rows], encoding)
            entries[number] = end, end + len(encoded)
            end += len(encoded)
            minishards.append(encoded)
        return entries.tobytes(), b"".join(minishards)


def _keep(old: ShardTables, without: Collection[Entry]) -> tuple[Ids, Ranges]:
    """Return all chunks but *without*. Raises: `DamagedError` for an entry that would be lost."""
    ids, places = old.decode().sound(old.region.ref)
    starts, stops = map(np.concatenate, zip(places, old.indexes, strict=True))
    filled = starts < stops
    order = np.lexsort((stops[filled], starts[filled]))
    if (starts[filled][order][1:] < stops[filled][order][:-1]).any():
        raise DamagedError(old.region.ref, "its chunks overlap one another, or an index")
    stays = ~np.isin(ids, np.array([entry[0] for entry in without], np.uint64))
    return ids[stays], Ranges(places.starts[stays], places.stops[stays])


def _pieces(kept: Ranges, added: Sequence[bytes], order: NDArray[np.intp]) -> Iterator[Piece]:
    """Yield the bytes of chunks in *order*, first *kept* ones; neighbours of these as one range."""
    count = len(kept.starts)
    none = np.zeros(len(added), np.uint64)
    starts, stops = (np.concatenate([column, none])[order] for column in kept)
    is_new = order >= count
    cuts = np.flatnonzero(is_new[1:] | is_new[:-1] | (starts[1:] != stops[:-1])) + 1
    for first, end in pairwise([0, *cuts.tolist(), len(order)]):
        if is_new[first]:
            yield added[order[first] - count]
        elif starts[first] < stops[end - 1]:
            yield ByteRange(int(starts[first]), int(stops[end - 1]))
