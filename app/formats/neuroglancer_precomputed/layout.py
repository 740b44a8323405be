"""From the name of a chunk to the place of its bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from app.errors import BadKeyError, ConflictError, DamagedError, ReadOnlyError
from app.formats.documents import Json, show
from app.formats.naming import PLAIN, Name, Shelf, Walk
from app.formats.neuroglancer_precomputed.describe import Described, describe
from app.formats.neuroglancer_precomputed.id_keys import IdWalk
from app.formats.neuroglancer_precomputed.keys import VoxelBounds
from app.formats.neuroglancer_precomputed.metadata import (
    Info,
    Kind,
    Part,
    parse_info,
    voxel_nbytes,
)
from app.formats.neuroglancer_precomputed.rewriting import ChunkRewriter
from app.formats.neuroglancer_precomputed.shards import ShardReader
from app.formats.neuroglancer_precomputed.survey import PrecomputedShard, PrecomputedShards
from app.formats.neuroglancer_precomputed.translating import InfoTranslator
from app.formats.neuroglancer_precomputed.volume_keys import VolumeWalk
from app.formats.reading import DecodeError, Fetch, Versioned
from app.formats.surveying import Collection, Listing
from app.formats.writing import Slot, Target, Translator
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

    def translator(self, _: ObjectRef) -> Translator:
        """Keep the sharding that what is stored tells of."""
        return InfoTranslator()


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

    async def shard(self, key: VirtualKey, _: Fetch) -> str | None:
        """Name the object, or the two, without the ending."""
        path, _slash, name = key.rpartition("/")
        for part in self.info.value.parts_at.get(path, ()):
            if (chunk_id := part.names.parse(name)) is not None:
                number, _minishard = part.sharding.address(chunk_id)
                return str(self.directory.join(path).join(part.sharding.shard_name(number)))
        return None

    async def target(self, key: VirtualKey, _: Fetch) -> Target:
        """Find where a chunk is written, be it there or not; all else is stored as it is.

        Raises: `BadKeyError`; `ConflictError` for a shard, whose chunks would be gone.
        """
        path, _slash, name = key.rpartition("/")
        parts = self.info.value.parts_at.get(path, ())
        for part in parts:
            if (chunk_id := part.names.parse(name)) is not None:
                return self._slot(part, chunk_id)
        for part in parts:
            if part.names.owns(name):
                raise BadKeyError(f"{key} is the name of no chunk: {part.names.rule}")
            if self._shards((part,)).hides(name):
                raise ConflictError(
                    f"{key} is a shard: its chunks are written by their own keys, and the whole "
                    'object through a dataset with view = "raw"'
                )
        return Whole(self.directory.join(key))

    async def shelf(self, directory: VirtualKey, fetch: Fetch) -> Shelf:
        """Show all but shards, whose chunks are shown, and what is named like chunks."""
        parts_at = self.info.value.parts_at
        parts = parts_at.get(directory.removesuffix("/"), ())
        if not parts:
            is_deepest = not any(path.startswith(directory) for path in parts_at)
            return PLAIN if is_deepest and self.encloses(directory) else Shelf()
        shards = [self._shards((part,)) for part in parts]

        def shows(name: str) -> bool:
            is_owned = any(part.names.owns(name) for part in parts)
            return not is_owned and not any(each.hides(name) for each in shards)

        return Shelf(shows, tuple(self._walks(parts, fetch)))

    def _walks(self, parts: Sequence[Part], fetch: Fetch) -> Iterator[Walk]:
        for part in parts:
            if isinstance(part.names, VoxelBounds):
                yield VolumeWalk(part.names, self._shards((part,)))
            elif part.kind is not Kind.FRAGMENTS:
                yield IdWalk(part, parts, self._shards((part,)), fetch)

    async def names(self, _: VirtualKey, __: Fetch) -> Sequence[Name] | None:
        """Keys are those of objects, or not worth listing."""
        return None

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

    def expects(self, _: str) -> bool:
        """Expect no arrays below."""
        return False

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

    def _slot(self, part: Part, chunk_id: int) -> Slot:
        """Find the shard of a chunk, and its entry there.

        Raises: `ReadOnlyError` where no shard can be written.
        """
        info, sharding, most_nbytes = self.info.value, part.sharding, self.options.decoded_nbytes
        here = info.parts_at[part.path]
        if part.kind in {Kind.MANIFESTS, Kind.FRAGMENTS}:
            raise ReadOnlyError("sharded multi-resolution meshes can only be read")
        if len(here) > 1:
            raise ReadOnlyError(f"the shards in {part.path or '.'} are those of several things")
        if sharding.index_nbytes > most_nbytes:
            raise ReadOnlyError(
                f"a shard index of {sharding.index_nbytes} bytes, over {most_nbytes}"
            )
        number, _ = sharding.address(chunk_id)
        shard = PrecomputedShard(self.directory, here[0], number, most_nbytes)
        if part.kind is Kind.VOLUME:
            return Slot(ChunkRewriter(shard, voxel_nbytes(info.document, part.member)), (chunk_id,))
        return Slot(ChunkRewriter(shard), (chunk_id,))

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
