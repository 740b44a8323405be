"""From the name of a chunk to the place of its bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from app.errors import BadKeyError, ConflictError, DamagedError, ReadOnlyError
from app.formats.contract import Layout, Slot, Target, Translator
from app.formats.documents import Json, show
from app.formats.listing import PLAIN, ListingRules, Walk
from app.formats.neuroglancer_precomputed.keys import VoxelBounds
from app.formats.neuroglancer_precomputed.listing import IdWalk, VolumeWalk
from app.formats.neuroglancer_precomputed.lookup import MinishardReader
from app.formats.neuroglancer_precomputed.metadata import (
    Info,
    Kind,
    MemberDescription,
    ShardedPart,
    describe,
    parse_info,
    voxel_nbytes,
)
from app.formats.neuroglancer_precomputed.metadata_writing import InfoTranslator
from app.formats.neuroglancer_precomputed.rewrite import ChunkRewriter
from app.formats.neuroglancer_precomputed.survey import PrecomputedShard, PrecomputedShards
from app.formats.reading import DecodeError, Fetch, Versioned
from app.formats.surveying import Collection, Listing
from app.model import MISSING, Gzipped, Location, ObjectRef, VirtualKey, Whole

MARKER: Final = VirtualKey("info")


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Every directory with an ``info`` of a precomputed volume, mesh … is a container."""

    whole_index_nbytes: int
    decoded_nbytes: int
    """A larger minishard index or manifest is refused, before and after it is inflated."""

    def parse(self, document: Json, data: bytes) -> Info | None:
        """Understand an ``info``; `None` for other files of that name. Raises: `DecodeError`."""
        return parse_info(document, data)

    def layout(self, directory: ObjectRef, spec: Versioned[Info]) -> "PrecomputedLayout":
        """Open the container at *directory*."""
        return PrecomputedLayout(directory, spec, self)

    def translator(self, _: ObjectRef) -> Translator:
        """Return the translator of markers, which keeps stored sharding."""
        return InfoTranslator()


@dataclass(frozen=True, slots=True)
class PrecomputedLayout(Layout):
    """A volume, or a directory of meshes, skeletons, annotations or properties."""

    directory: ObjectRef
    info: Versioned[Info]
    options: Precomputed

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate a chunk by its name in the unsharded container; serve other objects whole."""
        if key == MARKER:
            return show(self.info)
        path, _, name = key.rpartition("/")
        parts = self.info.value.parts_at.get(path, ())
        for part in parts:
            if (chunk_id := part.names.parse(name)) is not None:
                return await self._locate_chunk(part, chunk_id, fetch)
        if any(part.names.owns(name) for part in parts):
            return MISSING
        return Whole(self.directory.join(key))

    async def _locate_chunk(self, part: ShardedPart, chunk_id: int, fetch: Fetch) -> Location:
        reader = MinishardReader(
            self.directory.join(part.path),
            part.sharding,
            fetch,
            self.options.whole_index_nbytes,
            self.options.decoded_nbytes,
        )
        if (minishard := await reader.open(chunk_id)) is None:
            return MISSING
        if (chunk := minishard.locate(chunk_id)) is None:
            return MISSING
        if part.kind is Kind.FRAGMENTS:
            return await reader.locate_fragments(minishard, chunk)
        return Gzipped(chunk) if part.sharding.is_data_gzip else chunk

    async def target(self, key: VirtualKey, _: Fetch) -> Target:
        """Find where *key* is written; shards themselves cannot be, as chunks would be lost."""
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

    def _slot(self, part: ShardedPart, chunk_id: int) -> Slot:
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
        is_volume = part.kind is Kind.VOLUME
        nbytes = voxel_nbytes(info.document, part.member) if is_volume else None
        return Slot(ChunkRewriter(shard, nbytes), (chunk_id,))

    def encloses(self, key: VirtualKey) -> bool:
        """Return whether *key* lies below a directory of chunks."""
        paths = self.info.value.paths
        return any(key[:at] in paths for at, letter in enumerate(key) if letter == "/")

    async def shard(self, key: VirtualKey, _: Fetch) -> str | None:
        """Return the URL of the shard without its ending, which may be that of two objects."""
        path, _slash, name = key.rpartition("/")
        for part in self.info.value.parts_at.get(path, ()):
            if (chunk_id := part.names.parse(name)) is not None:
                number, _minishard = part.sharding.address(chunk_id)
                return str(self.directory.join(path).join(part.sharding.shard_name(number)))
        return None

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        """Hide shards, whose chunks are listed, and objects that are named like chunks."""
        parts_at = self.info.value.parts_at
        parts = parts_at.get(directory.removesuffix("/"), ())
        if not parts:
            is_deepest = not any(path.startswith(directory) for path in parts_at)
            return PLAIN if is_deepest and self.encloses(directory) else ListingRules()
        shards = [self._shards((part,)) for part in parts]

        def shows(name: str) -> bool:
            is_owned = any(part.names.owns(name) for part in parts)
            return not is_owned and not any(each.hides(name) for each in shards)

        return ListingRules(shows, tuple(self._walks(parts, fetch)))

    def _walks(self, parts: Sequence[ShardedPart], fetch: Fetch) -> Iterator[Walk]:
        for part in parts:
            if isinstance(part.names, VoxelBounds):
                yield VolumeWalk(part.names, self._shards((part,)))
            elif part.kind is not Kind.FRAGMENTS:
                yield IdWalk(part, parts, self._shards((part,)), fetch)

    async def collections(self, _: Fetch, __: Listing) -> Sequence[Collection | DamagedError]:
        """Describe all objects of the document, sharded or not."""
        return [
            DamagedError(self.directory.join(MARKER), str(each))
            if isinstance(each, DecodeError)
            else Collection(each.description, self._shards(each.parts) if each.parts else None)
            for each in describe(self.info.value)
        ]

    async def shards_at(self, key: VirtualKey, __: Fetch) -> PrecomputedShards | None:
        """Return the shards below the path of *key*, preferably those for such names."""
        path, _, name = key.rpartition("/")
        found_members = (
            each for each in describe(self.info.value) if isinstance(each, MemberDescription)
        )
        found = [each.parts for each in found_members if each.parts and each.parts[0].path == path]
        named = (parts for parts in found if any(p.names.parse(name) is not None for p in parts))
        parts = next(named, found[0] if found else None)
        return None if parts is None else self._shards(parts)

    def names_below(self) -> Sequence[str]:
        """Return the directories of meshes, skeletons and properties."""
        return self.info.value.below

    def _shards(self, parts: tuple[ShardedPart, ...]) -> PrecomputedShards:
        return PrecomputedShards(self.directory, parts, self.options.decoded_nbytes)
