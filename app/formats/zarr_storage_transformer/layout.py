"""From a key in a hierarchy to the place of its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.errors import DamagedError, StorageUnavailableError
from app.formats.contract import Aside, Listing
from app.formats.documents import DocumentDecoder, Json, show
from app.formats.naming import Name, Window
from app.formats.reading import DecodeError, Fetch, Read, Versioned
from app.formats.surveying import Collection, Description, Shards
from app.formats.zarr_sharding_indexed.layout import ShardReader
from app.formats.zarr_storage_transformer.describe import array_paths, describe
from app.formats.zarr_storage_transformer.keys import (
    CONSOLIDATED,
    METADATA,
    DataKey,
    MetadataKeys,
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
from app.formats.zarr_storage_transformer.survey import shards_of
from app.model import MISSING, ByteRange, Location, ObjectRef, VirtualKey, Whole


@dataclass(frozen=True, slots=True)
class Zarr2022:
    """Zarr v3 as drafted in 2022: the ``zarr.json`` of a hierarchy is its entry point."""

    whole_index_nbytes: int
    """A larger shard index is read one entry at a time."""
    limit_bytes: int
    """Larger metadata of an array are refused."""

    def parse(self, document: Json, _: bytes) -> Hierarchy | None:
        """Understand an entry point.

        Raises: `DecodeError`.
        """
        return parse_hierarchy(document)

    def layout(self, directory: ObjectRef, spec: Versioned[Hierarchy]) -> "HierarchyLayout":
        """Open the hierarchy at *directory*."""
        return HierarchyLayout(directory, spec.value, self)


@dataclass(frozen=True, slots=True)
class HierarchyLayout:
    """A whole hierarchy: metadata of all nodes on one side, chunks of all arrays on the other."""

    directory: ObjectRef
    hierarchy: Hierarchy
    limits: Zarr2022

    def encloses(self, _: VirtualKey) -> bool:
        """Know that a hierarchy has the store to itself."""
        return True

    def shows(self, key: VirtualKey) -> bool:
        """Hide chunk data of every array: which of them is sharded, only its metadata tell."""
        return bool(self.hierarchy.why_sharded) or split_data_key(key.rstrip("/")) is None

    async def names(self, _: VirtualKey, __: Fetch) -> Sequence[Name] | None:
        """Keys are those of objects, or not worth listing."""
        return None

    def items(self, _: Window, __: Fetch, ___: Aside) -> None:
        """Only indexes know the keys."""

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
        identifier = array.identifiers.format(array.grid.shard(coords))
        shard = Whole(self.directory.join(DataKey(key.path, identifier).format()))
        reader = ShardReader(array.grid.index, fetch, self.limits.whole_index_nbytes)
        return await reader.locate(shard, array.grid.entry(coords))

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
