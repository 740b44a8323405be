"""Shards of an array, planned anew.

Of shards inside of the shard only those are planned anew that hold a changed chunk. Each is laid
out by its own size, see `LARGE_NBYTES`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from app.errors import BadBodyError, ReadOnlyError, UnknownCodingError
from app.formats.reading import Fetch, Read
from app.formats.writing import Entry, NewShard
from app.formats.zarr_sharding_indexed.arranging import NewIndex, Part, arrange
from app.formats.zarr_sharding_indexed.chunk import ChunkForm
from app.formats.zarr_sharding_indexed.index import IndexCodec
from app.formats.zarr_sharding_indexed.opened import OpenZarrShard, grouped, open_shard
from app.model import ObjectRef

WRITTEN_NBYTES: Final = 64 * 1024**2
"""Shards are written by their whole index, which is in memory several times meanwhile."""


def demand_small(ref: ObjectRef, codecs: tuple[IndexCodec, ...], most_nbytes: int) -> None:
    """Raise where an index of the shard *ref* takes more than *most_nbytes*.

    Raises: `ReadOnlyError`.
    """
    if (largest := max(codec.nbytes for codec in codecs)) > most_nbytes:
        raise ReadOnlyError(f"{ref}: a shard index of {largest} bytes, over {most_nbytes}")


@dataclass(frozen=True, slots=True)
class ZarrRewriter:
    """Plans the shard *ref* anew."""

    ref: ObjectRef
    codecs: tuple[IndexCodec, ...]
    """Of the index, of those of the shards inside, and so on."""
    chunk: ChunkForm

    def encode(self, _: Entry, body: bytes, *, is_gzip: bool) -> bytes:
        """Take *body* for what the inner codecs wrote, where they can have done so."""
        if is_gzip:
            raise UnknownCodingError("inner chunks have no content coding, only codecs")
        if (fault := self.chunk.fault(body)) is not None:
            raise BadBodyError(fault)
        return body

    async def open(self, entries: Collection[Entry], fetch: Fetch) -> OpenZarrShard | None:
        """Read the index, and those of the shards inside that hold *entries*."""
        return await open_shard(self.ref, self.codecs, entries, fetch)

    def plan(
        self, old: OpenZarrShard | None, changes: Mapping[Entry, bytes | None]
    ) -> NewShard | None:
        """Plan the shard with *changes*."""
        found = _rewrite(self.codecs, old, changes)
        return self._shard(found) if found.chunk_count else None

    def plan_empty(self) -> NewShard:
        """Plan a shard with nothing in it but its index."""
        return self._shard(arrange(self.codecs[0], None, {}))

    def _shard(self, new: NewIndex) -> NewShard:
        codec = self.codecs[0]
        read = Read("shard-index", self.ref, codec.request, codec)
        return NewShard(new.part.pieces, new.part.places, ((read, new.index),))


def _rewrite(
    codecs: tuple[IndexCodec, ...],
    old: OpenZarrShard | None,
    changes: Mapping[Entry, bytes | None],
) -> NewIndex:
    parts: dict[int, Part | None] = {}
    for number, below in grouped(changes).items():
        if len(codecs) == 1:
            body = changes[(number,)]
            parts[number] = None if body is None else Part.of_chunk(body)
        else:
            inner = None if old is None else old.inner.get(number)
            new = _rewrite(codecs[1:], inner, {entry: changes[(number, *entry)] for entry in below})
            parts[number] = new.part if new.chunk_count else None
    return arrange(codecs[0], old, parts)
