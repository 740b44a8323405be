"""From a key of a Zarr v3 node to the place of its bytes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardgate.errors import BadKeyError, DamagedError, ReadOnlyError
from shardgate.formats.contract import Document, Layout, Slot, StoredContainer, Target, Translator
from shardgate.formats.documents import Json, may_contain, show
from shardgate.formats.listing import PLAIN, UNIFORM, ListingRules
from shardgate.formats.reading import DecodeError, Fetch, Opaque, Read, RunInThread, Versioned
from shardgate.formats.surveying import ChunkCollection, Listing
from shardgate.formats.zarr.array_spec import ArraySpec
from shardgate.formats.zarr.index import IndexCodec, shard_of
from shardgate.formats.zarr.metadata import Node, NodeTranslator, parse_node
from shardgate.formats.zarr.rewrite import ZarrRewriter
from shardgate.formats.zarr.survey import ZarrShards, array_names, describe, walk_chunks
from shardgate.model import (
    MISSING,
    ETag,
    Inline,
    Location,
    Missing,
    ObjectRef,
    Part,
    Stored,
    SuffixRange,
    VirtualKey,
    Whole,
)

type Chunk = Stored | Whole | Inline | Missing
type ShardPlace = Chunk | Part

MARKER: Final = VirtualKey("zarr.json")
_SHARDED: Final = re.compile(rb'"name"\s*:\s*"sharding_indexed"')
"""The codec in JSON: without an object there is no configuration of it."""


@dataclass(frozen=True, slots=True)
class ZarrLimits:
    """Sizes beyond which arrays are read in another way, or refused."""

    whole_index_nbytes: int
    """A larger shard index is read one entry at a time."""
    limit_bytes: int
    written_nbytes: int
    """Shards with a larger index are not written: a rewrite has it in memory several times."""


@dataclass(frozen=True, slots=True)
class Zarr3(ZarrLimits):
    """Zarr v3: every directory with a ``zarr.json`` is a container."""

    def parse(self, document: Json, data: bytes) -> Node:
        return parse_node(document, data)

    def may_rewrite(self, data: bytes) -> bool:
        return may_contain(data, _SHARDED)

    def layout(self, directory: ObjectRef, spec: Versioned[Node]) -> "ZarrLayout":
        return ZarrLayout(directory, spec, self)

    def translator(self, directory: ObjectRef) -> Translator:
        return NodeTranslator(directory, self.limit_bytes)


@dataclass(frozen=True, slots=True)
class ZarrLayout(Layout):
    """An array or group."""

    directory: ObjectRef
    node: Versioned[Node]
    limits: ZarrLimits

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate an inner chunk by its key in the unsharded array; serve other objects whole."""
        if key == MARKER:
            return show(self.directory.join(MARKER), self.node)
        return await locate_chunk(self.directory, self.node.value.array, key, fetch, self.limits)

    async def target(self, key: VirtualKey, _: Fetch) -> Target:
        array = self.node.value.array
        if key == MARKER:
            translator = NodeTranslator(self.directory, self.limits.limit_bytes)
            return Document(self.directory.join(key), translator)
        if array is None or not array.keys.owns(key):
            return Whole(self.directory.join(key))
        return chunk_slot(self.directory, array, key, self.limits)

    def encloses(self, _: VirtualKey) -> bool:
        return self.node.value.kind == "array"

    async def listing_rules(self, directory: VirtualKey, _: Fetch) -> ListingRules:
        """Hide the shards, which are not served under their own names."""
        array = self.node.value.array
        if self.node.value.kind != "array":
            return UNIFORM if directory else ListingRules()
        if array is None or directory:
            return PLAIN
        walk = walk_chunks(ZarrShards(self.directory, array))
        return ListingRules(lambda name: not array.keys.owns(name), (walk,))

    async def collections(
        self, _: Fetch, __: Listing, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        """Describe an array; a group has no chunks of its own."""
        if self.node.value.kind != "array":
            return ()
        try:
            return (ChunkCollection(await run_in_thread(describe, self.node.value), self._shards),)
        except DecodeError as error:
            return (DamagedError(self.directory.join(MARKER), str(error)),)

    def as_stored(self) -> Layout:
        return StoredContainer(self.directory, self)

    async def explain_absence(self, key: VirtualKey, _: Fetch) -> str:
        array = self.node.value.array
        name = self.directory.key.rpartition("/")[2]
        return "" if array is None else array.explain_absence(key, name)

    def expects(self, path: str) -> bool:
        return path in self.node.value.sharded

    def names_below(self) -> Sequence[str] | None:
        return array_names(self.node.value)

    async def shards_at(self, _: VirtualKey, __: Fetch) -> ZarrShards | None:
        return self._shards

    @property
    def _shards(self) -> ZarrShards | None:
        array = self.node.value.array
        return None if array is None else ZarrShards(self.directory, array)


async def locate_chunk(
    directory: ObjectRef, array: ArraySpec | None, key: str, fetch: Fetch, limits: ZarrLimits
) -> Chunk:
    """Locate the inner chunk *key*, level by level; a key of another spelling names an object."""
    if array is None or (coords := array.keys.parse(key)) is None:
        return Whole(directory.join(key))
    if (origin := array.origin(coords)) is None:
        return MISSING
    shard = array.shard(origin)
    location: Chunk = Whole(directory.join(array.keys.format(shard.coords)))
    for level in shard.levels:
        entry = level.entry(shard.element)
        location = await locate_entry(
            location, level.index, entry, fetch, limits.whole_index_nbytes
        )
    return location


def chunk_slot(directory: ObjectRef, array: ArraySpec, key: str, limits: ZarrLimits) -> Slot:
    """Return where the inner chunk *key* is written. Raises: `BadKeyError`, `ReadOnlyError`."""
    coords = array.keys.parse(key)
    if coords is None or (origin := array.origin(coords)) is None:
        grid = array.explain_absence(key, "it")
        raise BadKeyError(f"{key} is no chunk of an array of shape {list(array.shape)}: {grid}")
    shard = array.shard(origin)
    ref = directory.join(array.keys.format(shard.coords))
    indexes = tuple(level.index for level in shard.levels)
    largest = max(index.nbytes for index in indexes)
    if largest > limits.written_nbytes:
        raise ReadOnlyError(
            f"{ref}: a shard index of {largest} bytes, over {limits.written_nbytes}"
        )
    return Slot(ZarrRewriter(ref, indexes, array.chunk), shard.entry)


async def locate_entry(
    shard: ShardPlace, index: IndexCodec, entry: int, fetch: Fetch, whole_index_nbytes: int
) -> Chunk:
    """Locate inner chunk *entry* of *shard*, an object, a range of one or inline bytes; the inner
    chunk is then a range of the same. Raises: `DamagedError` where the index contradicts a stored
    shard, `DecodeError` where it contradicts an inline one.
    """
    if isinstance(shard, Missing):
        return MISSING
    if isinstance(shard, Inline):
        return _locate_inline(shard, index, entry)
    if index.nbytes > whole_index_nbytes and not index.is_read_whole:
        if isinstance(shard, Whole):
            # Only the store knows where the shard ends; its last byte comes with size and ETag.
            end = await fetch(Read("shard-end", shard.ref, SuffixRange(1), Opaque))
            if (stored := shard_of(shard, end)) is None:
                return MISSING
            shard = stored
        read = index.read_entry(shard, entry)
        row = 0  # of an index of one entry
    else:
        read = index.read(shard)
        row = entry
    found = await fetch(read)
    if (stored := shard_of(shard, found)) is None or found is None:
        return MISSING
    return index.narrow(stored, found.value, row) or MISSING


def _locate_inline(shard: Inline, codec: IndexCodec, entry: int) -> Chunk:
    place = codec.place(len(shard.data))
    index = codec(shard.data[place.start : place.stop])
    found = codec.find(index, entry, len(shard.data))
    if found is None:
        return MISSING
    # Like the ETag of a stored chunk: version of the shard, offset and length.
    etag = ETag(f'{shard.etag[:-1]}-{found.start:x}-{found.length:x}"')
    return Inline(shard.data[found.start : found.stop], etag)
