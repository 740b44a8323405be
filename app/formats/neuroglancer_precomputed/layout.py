"""From the name of a chunk to the place of its bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.errors import DamagedError
from app.formats.contract import Aside, Listing
from app.formats.documents import Json, show
from app.formats.naming import Name, Window
from app.formats.neuroglancer_precomputed.describe import Described, describe
from app.formats.neuroglancer_precomputed.metadata import Info, Kind, Part, parse_info
from app.formats.neuroglancer_precomputed.shards import ShardReader
from app.formats.neuroglancer_precomputed.survey import PrecomputedShards
from app.formats.reading import DecodeError, Fetch, Versioned
from app.formats.surveying import Collection
from app.model import (
    MISSING,
    Gzipped,
    Location,
    ObjectRef,
    VirtualKey,
    Whole,
)

MARKER: Final = VirtualKey("info")


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Every directory with an ``info`` of a precomputed volume, mesh … is a container."""

    whole_index_nbytes: int
    """A larger shard index is read one entry at a time."""
    decoded_nbytes: int
    """A larger minishard index or manifest is refused, before and after it is inflated."""

    def parse(self, document: Json, data: bytes) -> Info | None:
        """Understand an ``info``; many other things are called so.

        Raises: `DecodeError`.
        """
        return parse_info(document, data)

    def layout(self, directory: ObjectRef, spec: Versioned[Info]) -> "PrecomputedLayout":
        """Open the container at *directory*."""
        return PrecomputedLayout(directory, spec, self)


@dataclass(frozen=True, slots=True)
class PrecomputedLayout:
    """A volume, or a directory of meshes, skeletons, annotations or properties."""

    directory: ObjectRef
    info: Versioned[Info]
    options: Precomputed

    def encloses(self, key: VirtualKey) -> bool:
        """Tell whether *key* lies where chunks are."""
        paths = self.info.value.paths
        return any(key[:at] in paths for at, letter in enumerate(key) if letter == "/")

    def shows(self, _: VirtualKey) -> bool:
        """Hide nothing: names of shards and of chunks are different."""
        return True

    async def names(self, _: VirtualKey, __: Fetch) -> Sequence[Name] | None:
        """Keys are those of objects, or not worth listing."""
        return None

    def items(self, _: Window, __: Fetch, ___: Aside) -> None:
        """Only indexes know the keys."""

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Find a chunk by the name it has unsharded; what is no chunk is served as it is."""
        info = self.info.value
        if key == MARKER:
            return show(self.info)
        path, _, name = key.rpartition("/")
        parts = info.parts_at.get(path, ())
        for part in parts:
            if (chunk_id := part.names.parse(name)) is not None:
                return await self._locate_chunk(part, chunk_id, fetch)
        if any(part.names.owns(name) for part in parts):
            return MISSING
        return Whole(self.directory.join(key))

    async def collections(self, _: Fetch, __: Listing) -> Sequence[Collection | DamagedError]:
        """Describe all that the document names, sharded or not."""
        return [self._collection(described) for described in describe(self.info.value)]

    async def shards_at(self, key: VirtualKey, __: Fetch) -> PrecomputedShards | None:
        """Find the shards below the path of *key*, and among them those for such names."""
        path, _, name = key.rpartition("/")
        described = (each for each in describe(self.info.value) if isinstance(each, Described))
        found = [each.parts for each in described if each.parts and each.parts[0].path == path]
        named = (parts for parts in found if any(p.names.parse(name) is not None for p in parts))
        parts = next(named, found[0] if found else None)
        return None if parts is None else self._shards(parts)

    def names_below(self) -> Sequence[str]:
        """Name the directories of meshes, skeletons and properties."""
        return self.info.value.below

    def _collection(self, described: Described | DecodeError) -> Collection | DamagedError:
        match described:
            case DecodeError():
                return DamagedError(self.directory.join(MARKER), str(described))
            case Described(description, parts):
                return Collection(description, self._shards(parts) if parts else None)

    def _shards(self, parts: tuple[Part, ...]) -> PrecomputedShards:
        return PrecomputedShards(self.directory, parts, self.options.decoded_nbytes)

    async def _locate_chunk(self, part: Part, chunk_id: int, fetch: Fetch) -> Location:
        directory = self.directory.join(part.path)
        shards = ShardReader(
            directory,
            part.sharding,
            fetch,
            self.options.whole_index_nbytes,
            self.options.decoded_nbytes,
        )
        if (minishard := await shards.open(chunk_id)) is None:
            return MISSING
        if (chunk := minishard.locate(chunk_id)) is None:
            return MISSING
        if part.kind is Kind.FRAGMENTS:
            return await shards.locate_fragments(minishard, chunk)
        return Gzipped(chunk) if part.sharding.is_data_gzip else chunk
