"""From a key in a hierarchy to the place of its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.errors import BadKeyError, DamagedError, StorageUnavailableError
from app.formats.documents import DocumentDecoder, Json, show
from app.formats.naming import PLAIN, Name, Shelf
from app.formats.reading import DecodeError, Fetch, Read, Versioned
from app.formats.surveying import Collection, Description, Listing, Shards
from app.formats.writing import Document as Translated
from app.formats.writing import Slot, Target
from app.formats.zarr_sharding_indexed.layout import ShardReader
from app.formats.zarr_sharding_indexed.listing import ChunkWalk
from app.formats.zarr_sharding_indexed.rewriting import WRITTEN_NBYTES, ZarrRewriter, demand_small
from app.formats.zarr_storage_transformer.describe import array_paths, describe
from app.formats.zarr_storage_transformer.keys import (
    CONSOLIDATED,
    METADATA,
    DataKey,
    MetadataKeys,
    array_path,
    is_chunk_name,
    split_data_key,
)
from app.formats.zarr_storage_transformer.metadata import (
    ArraySpec,
    Document,
    Hierarchy,
    parse_array_document,
    parse_consolidated,
    parse_hierarchy,
)
from app.formats.zarr_storage_transformer.survey import sharded, shards_of
from app.formats.zarr_storage_transformer.translating import (
    ArrayTranslator,
    ConsolidatedTranslator,
)
from app.model import MISSING, ByteRange, Location, ObjectRef, VirtualKey, Whole


@dataclass(frozen=True, slots=True)
class Zarr2022:
    """Zarr v3 as drafted in 2022: the ``zarr.json`` of a hierarchy is its entry point."""

    whole_index_nbytes: int
    """A larger shard index is read one entry at a time."""
    limit_bytes: int
    """Larger metadata of an array are refused."""
    written_nbytes: int = WRITTEN_NBYTES
    """Shards with a larger index are not written."""

    def parse(self, document: Json, _: bytes) -> Hierarchy | None:
        """Understand an entry point.

        Raises: `DecodeError`.
        """
        return parse_hierarchy(document)

    def layout(self, directory: ObjectRef, spec: Versioned[Hierarchy]) -> "HierarchyLayout":
        """Open the hierarchy at *directory*."""
        return HierarchyLayout(directory, spec.value, self)

    def translator(self, _: ObjectRef) -> None:
        """Leave markers to who knows nodes; an entry point tells of no shards."""


@dataclass(frozen=True, slots=True)
class HierarchyLayout:
    """A whole hierarchy: metadata of all nodes on one side, chunks of all arrays on the other."""

    directory: ObjectRef
    hierarchy: Hierarchy
    limits: Zarr2022

    def encloses(self, _: VirtualKey) -> bool:
        """Know that a hierarchy has the store to itself."""
        return True

    async def shard(self, key: VirtualKey, fetch: Fetch) -> str | None:
        """Name the object."""
        data_key = None if self.hierarchy.why_sharded else split_data_key(key)
        found = data_key and await self._array(data_key.path, fetch)
        if not data_key or not found or (array := found.value.array) is None:
            return None
        coords = array.identifiers.parse(data_key.identifier)
        if coords is None or not array.grid.holds(coords):
            return None
        return str(self._shard(array, data_key.path, coords))

    async def target(self, key: VirtualKey, fetch: Fetch) -> Target:
        """Find where a chunk is written, be it there or not; all else is stored as it is."""
        ref = self.directory.join(key)
        if self.hierarchy.why_sharded:
            return Whole(ref)
        if key == CONSOLIDATED:
            keys, limit = self._metadata_keys, self.limits.limit_bytes
            return Translated(ref, ConsolidatedTranslator(self.directory, keys, limit))
        if self._metadata_keys.owns(key):
            return Translated(ref, ArrayTranslator())
        if (data_key := split_data_key(key)) is None:
            return Whole(ref)
        return await self._chunk_target(data_key, fetch)

    async def shelf(self, directory: VirtualKey, fetch: Fetch) -> Shelf:
        """Show all but the shards; which arrays are sharded, only their metadata tell."""
        if self.hierarchy.why_sharded:
            return PLAIN
        if (path := array_path(directory)) is None:
            return Shelf()
        if (found := await self._array(path, fetch)) is None:
            return Shelf()
        if (array := found.value.array) is None:
            return PLAIN
        return Shelf(lambda name: not is_chunk_name(name), (ChunkWalk(sharded(path, array)),))

    async def names(self, _: VirtualKey, __: Fetch) -> Sequence[Name] | None:
        """Keys are those of objects, or not worth listing."""
        return None

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Find a chunk by its key, or metadata without the transformer; the rest is as it is."""
        if self.hierarchy.why_sharded:
            return Whole(self.directory.join(key))
        if key == CONSOLIDATED:
            return await self._locate_document(key, parse_consolidated, fetch)
        if self._metadata_keys.owns(key):
            return await self._locate_document(key, parse_array_document, fetch)
        if (data_key := split_data_key(key)) is not None:
            return await self._locate_chunk(data_key, fetch)
        return Whole(self.directory.join(key))

    async def collections(
        self, fetch: Fetch, listing: Listing
    ) -> Sequence[Collection | DamagedError]:
        """Describe every array, or tell why nothing in the hierarchy is understood."""
        if why := self.hierarchy.why_sharded:
            return (Collection(Description("", "zarr", "hierarchy", why_sharded=why), None),)
        try:
            paths = await self._array_paths(fetch, listing)
        except DamagedError as damaged:
            return (damaged,)
        return [await self._collection(path, fetch) for path in paths]

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        """Find the shards of the array that *key* is of."""
        if self.hierarchy.why_sharded or (data_key := split_data_key(key)) is None:
            return None
        found = await self._array(data_key.path, fetch)
        return None if found is None else self._shards(data_key.path, found.value.array)

    def expects(self, _: str) -> bool:
        """Expect no arrays below."""
        return False

    def names_below(self) -> Sequence[str]:
        """Know that a hierarchy has the store to itself."""
        return ()

    @property
    def _metadata_keys(self) -> MetadataKeys:
        return MetadataKeys(self.hierarchy.metadata_key_suffix)

    async def _locate_document(
        self, key: VirtualKey, parse: Callable[[Json, bytes], Document], fetch: Fetch
    ) -> Location:
        found = await self._fetch(key, parse, fetch)
        return MISSING if found is None else show(found)

    async def _locate_chunk(self, key: DataKey, fetch: Fetch) -> Location:
        found = await self._array(key.path, fetch)
        array = None if found is None else found.value.array
        if array is None or (coords := array.identifiers.parse(key.identifier)) is None:
            return Whole(self.directory.join(key.format()))
        if not array.grid.holds(coords):
            return MISSING
        shard = Whole(self._shard(array, key.path, coords))
        reader = ShardReader(array.grid.index, fetch, self.limits.whole_index_nbytes)
        return await reader.locate(shard, array.grid.entry(coords))

    def _shard(self, array: ArraySpec, path: str, coords: tuple[int, ...]) -> ObjectRef:
        """Name the shard of the chunk at *coords*."""
        identifier = array.identifiers.format(array.grid.shard(coords))
        return self.directory.join(DataKey(path, identifier).format())

    async def _chunk_target(self, key: DataKey, fetch: Fetch) -> Slot | Whole:
        found = await self._array(key.path, fetch)
        array = None if found is None else found.value.array
        if array is None:
            return Whole(self.directory.join(key.format()))
        coords = array.identifiers.parse(key.identifier)
        if coords is None or not array.grid.holds(coords):
            counts = list(array.grid.chunk_grid_shape)
            raise BadKeyError(f"{key.format()} is no chunk of an array of {counts} chunks")
        ref = self._shard(array, key.path, coords)
        demand_small(ref, (array.grid.index,), self.limits.written_nbytes)
        rewriter = ZarrRewriter(ref, (array.grid.index,), array.chunk)
        return Slot(rewriter, (array.grid.entry(coords),))

    async def _array_paths(self, fetch: Fetch, listing: Listing) -> Sequence[str]:
        """Name the arrays by listing; where that is impossible, by what zarr-python 2 gathered.

        There is no other array where the root is one.
        """
        try:
            found = [self._metadata_keys.parse(key) async for key in listing(METADATA)]
        except StorageUnavailableError as error:
            if not error.lasting:
                raise
            if (gathered := await self._fetch(CONSOLIDATED, parse_consolidated, fetch)) is not None:
                return array_paths(gathered.value, self._metadata_keys)
            if await self._array("", fetch) is None:
                raise
            return ("",)
        return sorted(path for path in found if path is not None)

    async def _collection(self, path: str, fetch: Fetch) -> Collection | DamagedError:
        ref = self.directory.join(self._metadata_keys.format(path))
        try:
            if (found := await self._array(path, fetch)) is None:
                return DamagedError(ref, "does not exist, though other metadata name it")
            description = describe(path, found.value)
        except DamagedError as damaged:
            return damaged
        except DecodeError as error:
            return DamagedError(ref, str(error))
        return Collection(description, self._shards(path, found.value.array))

    def _shards(self, path: str, array: ArraySpec | None) -> Shards | None:
        return None if array is None else shards_of(self.directory, path, array)

    async def _array(self, path: str, fetch: Fetch) -> Versioned[Document] | None:
        return await self._fetch(self._metadata_keys.format(path), parse_array_document, fetch)

    async def _fetch(
        self, key: VirtualKey, parse: Callable[[Json, bytes], Document], fetch: Fetch
    ) -> Versioned[Document] | None:
        limit = self.limits.limit_bytes
        decode = DocumentDecoder(parse, limit)
        ref = self.directory.join(key)
        return await fetch(Read("metadata", ref, ByteRange(0, limit + 1), decode))
