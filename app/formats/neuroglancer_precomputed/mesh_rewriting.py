"""Shards of multi-resolution meshes, made anew: fragments and manifests go together."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.errors import ConflictError, DamagedError
from app.formats.neuroglancer_precomputed.bodies import ChunkEncoder
from app.formats.neuroglancer_precomputed.fragments import FragmentSizes, ManifestReads
from app.formats.neuroglancer_precomputed.mesh import ManifestDecoder
from app.formats.neuroglancer_precomputed.minishards import Numbers
from app.formats.neuroglancer_precomputed.new_shard import (
    Known,
    Place,
    WrittenShard,
    empty_shard,
)
from app.formats.neuroglancer_precomputed.opened import (
    NOTHING,
    OpenedShard,
    survey_to_write,
    without_ids,
)
from app.formats.neuroglancer_precomputed.planning import Kept, New, arrange, length_of
from app.formats.neuroglancer_precomputed.survey import PrecomputedShard
from app.formats.reading import Fetch
from app.formats.writing import LARGE_NBYTES, Entry, NewShard
from app.model import ByteRange, ETag, ObjectRef, Piece

FRAGMENTS: Final = 0
MANIFEST: Final = 1
"""Behind the id in an `Entry`."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenedMeshes:
    """A shard of which it is known where the fragments of each mesh are."""

    shard: OpenedShard
    kept: Kept
    places: Mapping[int, Place]
    """Of the meshes it was opened for."""

    @property
    def etag(self) -> ETag:
        """The version of the object."""
        return self.shard.etag

    @property
    def size(self) -> int:
        """Of the object, in bytes."""
        return self.shard.size

    def lookup(self, entry: Entry) -> ByteRange | None:
        """Find a manifest, or the fragments before it."""
        chunk_id, part = entry
        place = self.places.get(chunk_id)
        if place is None:
            return None
        return place.chunk if part == MANIFEST else place.lead


@dataclass(frozen=True, slots=True)
class MeshRewriter:
    """Plans *shard*; entries are an id, and `FRAGMENTS` or `MANIFEST`."""

    shard: PrecomputedShard
    large_nbytes: int = LARGE_NBYTES
    """What a shard has of meshes that stay in the order in which they lie."""

    @property
    def ref(self) -> ObjectRef:
        """The object."""
        return self.shard.ref

    def encode(self, entry: Entry, body: bytes, *, is_gzip: bool) -> bytes:
        """Check a manifest, and compress it where the shard has gzip; fragments never are.

        Raises: `BadBodyError`.
        """
        encoder = ChunkEncoder(self._is_gzip, self.shard.most_nbytes)
        if entry[1] == MANIFEST:
            return encoder.encode_manifest(body, is_gzip=is_gzip)
        return encoder.encode_fragments(body, is_gzip=is_gzip)

    async def open(self, entries: Collection[Entry], fetch: Fetch) -> OpenedMeshes | None:
        """Read all indexes, and all manifests: nothing else tells how long fragments are.

        Raises: `DamagedError`, `ConflictError` for a shard in two objects.
        """
        if (survey := await survey_to_write(self.shard, fetch)) is None:
            return None
        shard = OpenedShard(survey)
        ids, starts, stops, _ = shard.chunks
        reads = ManifestReads.of(self.shard, starts, stops)
        kept = _with_leads(shard, await reads.perform(shard.etag, fetch))
        wanted = np.isin(ids, np.array([entry[0] for entry in entries], np.uint64))
        columns = (ids, kept.starts, starts, stops)
        places = {
            chunk_id: Place(ByteRange(lead, start), ByteRange(start, stop))
            for chunk_id, lead, start, stop in zip(
                *(column[wanted].tolist() for column in columns), strict=True
            )
        }
        return OpenedMeshes(shard, kept, places)

    def plan(
        self, old: OpenedMeshes | None, changes: Mapping[Entry, bytes | None]
    ) -> NewShard | None:
        """Plan the shard with *changes*.

        Raises: `ConflictError` where fragments and manifest of a mesh would not fit together.
        """
        changed: dict[int, dict[int, bytes | None]] = defaultdict(dict)
        for (chunk_id, part), data in changes.items():
            changed[chunk_id][part] = data
        places = {} if old is None else old.places
        added = {
            each: new
            for each, parts in changed.items()
            if (new := self._change(each, places.get(each), parts)) is not None
        }
        kept = NOTHING if old is None else without_ids(old.kept, changed)
        if not added and not len(kept.ids):
            return None
        planned = arrange(self.shard.part.sharding, kept, added, self.large_nbytes)
        written = WrittenShard.of(self.shard, planned)
        return NewShard(
            pieces=written.pieces,
            places=dict(_places(written.places(added), changes)),
            indexes=list(written.known(changed)),
            indexes_of_version=[*written.known_of_version(changed), *self._known_sizes(written)],
        )

    def plan_empty(self) -> NewShard:
        """Plan a shard whose minishards are all empty."""
        return empty_shard(self.shard)

    @property
    def _is_gzip(self) -> bool:
        return self.shard.part.sharding.is_data_gzip

    def _change(
        self, chunk_id: int, place: Place | None, parts: Mapping[int, bytes | None]
    ) -> New | None:
        """Put a mesh together of what it has in the old shard, and what changes.

        Raises: `ConflictError`.
        """
        has: dict[int, Piece | None] = {FRAGMENTS: None, MANIFEST: None}
        if place is not None:
            has = {FRAGMENTS: place.lead, MANIFEST: place.chunk}
        has |= parts
        manifest, fragments = has[MANIFEST], has[FRAGMENTS] or b""
        both = f"write {chunk_id} and {chunk_id}.index in one batch"
        if manifest is None:
            if parts.get(FRAGMENTS) is not None:
                raise ConflictError(f"fragments of mesh {chunk_id}, which has no manifest: {both}")
            return None
        nbytes, told = length_of(fragments), self._told(manifest, place)
        if nbytes != told:
            raise ConflictError(
                f"{nbytes} bytes of fragments of mesh {chunk_id}, whose manifest tells of {told}:"
                f" {both}"
            )
        return New([fragments, manifest], nbytes + length_of(manifest), nbytes)

    def _told(self, manifest: Piece, place: Place | None) -> int:
        """Tell how long the fragments are by *manifest*, that of *place* if it is kept."""
        if isinstance(manifest, bytes):
            decode = ManifestDecoder(self._is_gzip, self.shard.most_nbytes)
            return decode(manifest).fragments_nbytes
        return 0 if place is None else place.lead.length

    def _known_sizes(self, written: WrittenShard) -> Iterator[Known]:
        """Tell what reads of the new manifests would give."""
        starts, stops, sizes = written.by_place()
        for at, read in ManifestReads.of(self.shard, starts, stops).each():
            yield read, FragmentSizes(sizes[at].tobytes())


def _with_leads(shard: OpenedShard, sizes: Numbers) -> Kept:
    """Put the fragments before each chunk to it.

    Raises: `DamagedError` where they do not fit there.
    """
    ids, starts, stops, _ = shard.chunks
    begins = starts - sizes
    wrong = np.flatnonzero(begins < shard.survey.region.start)
    if wrong.size:
        at = wrong[0]
        raise DamagedError(
            shard.survey.whole.ref,
            f"the manifest of mesh {ids[at]} is of {sizes[at]} bytes of fragments, more than lie"
            " before it",
        )
    shard.check_places(ids, begins, stops)
    return Kept(ids, begins, stops, sizes)


def _places(
    places: Mapping[int, Place], changes: Mapping[Entry, bytes | None]
) -> Iterator[tuple[Entry, ByteRange]]:
    for entry, data in changes.items():
        if data is not None:
            place = places[entry[0]]
            yield entry, place.chunk if entry[1] == MANIFEST else place.lead
