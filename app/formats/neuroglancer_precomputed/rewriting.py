"""Shards of volumes, skeletons and annotations, made anew."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from app.formats.neuroglancer_precomputed.bodies import ChunkEncoder
from app.formats.neuroglancer_precomputed.keys import VoxelBounds
from app.formats.neuroglancer_precomputed.new_shard import WrittenShard, empty_shard
from app.formats.neuroglancer_precomputed.opened import NOTHING, OpenedShard, survey_to_write
from app.formats.neuroglancer_precomputed.planning import arrange
from app.formats.neuroglancer_precomputed.survey import PrecomputedShard
from app.formats.reading import Fetch
from app.formats.writing import LARGE_NBYTES, Entry, NewShard
from app.model import ObjectRef


@dataclass(frozen=True, slots=True)
class ChunkRewriter:
    """Plans *shard*, whose chunks are values of their own; entries are their ids."""

    shard: PrecomputedShard
    voxel_nbytes: int | None = None
    """Of the channels of a voxel, in a volume whose chunks are nothing but voxels."""
    large_nbytes: int = LARGE_NBYTES
    """What a shard has of chunks that stay in the order in which they lie."""

    @property
    def ref(self) -> ObjectRef:
        """The object."""
        return self.shard.ref

    def encode(self, entry: Entry, body: bytes, *, is_gzip: bool) -> bytes:
        """Check a chunk, and compress it where the shard has gzip.

        Raises: `BadBodyError`.
        """
        part = self.shard.part
        encoder = ChunkEncoder(part.sharding.is_data_gzip, self.shard.most_nbytes)
        return encoder.encode(body, is_gzip=is_gzip, nbytes=self._nbytes(entry))

    async def open(self, _: Collection[Entry], fetch: Fetch) -> OpenedShard | None:
        """Read all indexes; what they say of chunks that stay is looked through by `plan`.

        Raises: `DamagedError`, `ConflictError` for a shard in two objects.
        """
        survey = await survey_to_write(self.shard, fetch)
        return None if survey is None else OpenedShard(survey)

    def plan(
        self, old: OpenedShard | None, changes: Mapping[Entry, bytes | None]
    ) -> NewShard | None:
        """Plan the shard with *changes*.

        Raises: `DamagedError`.
        """
        changed = {entry[0]: data for entry, data in changes.items()}
        kept = NOTHING if old is None else old.keep(without=changed)
        added = {each: data for each, data in changed.items() if data is not None}
        if not added and not len(kept.ids):
            return None
        planned = arrange(self.shard.part.sharding, kept, added, self.large_nbytes)
        written = WrittenShard.of(self.shard, planned)
        return NewShard(
            pieces=written.pieces,
            places={(each,): place for each, place in written.places(added).items()},
            indexes=list(written.known(changed)),
            indexes_of_version=list(written.known_of_version(changed)),
        )

    def plan_empty(self) -> NewShard:
        """Plan a shard whose minishards are all empty."""
        return empty_shard(self.shard)

    def _nbytes(self, entry: Entry) -> int | None:
        names = self.shard.part.names
        if self.voxel_nbytes is None or not isinstance(names, VoxelBounds):
            return None
        return self.voxel_nbytes * names.count_voxels(entry[0])
