"""Shards that references lead to, and chunks seen as such."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import mul

from app.formats.icechunk.index import Manifest
from app.formats.icechunk.metadata import Node
from app.formats.icechunk.plain import PlainChunk
from app.formats.icechunk.references import Inlined, Native, Reference, Virtual
from app.formats.icechunk.repository import Repository, foreign_place, named_by
from app.formats.surveying import Shard
from app.formats.zarr_sharding_indexed.survey import ZarrShard
from app.model import ByteRange, ObjectRef, Part, Stored, VirtualKey


@dataclass(frozen=True, slots=True)
class OnlyShard:
    """The shard that a key was asked for in."""

    shard: Shard
    prefix: str = ""

    def named(self, _: str) -> Shard | None:
        """Know of no object that is a shard."""
        return None

    def holding(self, _: VirtualKey) -> Shard | None:
        """Give the only one."""
        return self.shard

    def every(self) -> Iterator[Shard] | None:
        """Give the only one."""
        return iter((self.shard,))


def place_of(
    repository: Repository,
    ref: ObjectRef,
    manifest: Manifest,
    reference: Reference,
    follow: Callable[[str], ObjectRef],
) -> tuple[Stored | Part, bytes | None]:
    """Tell where *reference* leads to; what is inline in *ref* comes with its bytes.

    Raises: what *follow* does.
    """
    match reference:
        case Native(chunk_id, byte_range):
            name = repository.file("chunks", chunk_id)
            return Stored(name, byte_range, named_by(chunk_id)), None
        case Inlined(place):
            data = manifest.read(place)
            return Part(ref, ByteRange(0, len(data))), data
        case Virtual(location, byte_range, checksum):
            return foreign_place(follow(location), byte_range, checksum), None


def enclose(node: Node, coords: tuple[int, ...], place: Stored | Part) -> Shard:
    """Take the bytes at *place* for the shard or chunk *coords* of an array."""
    array = node.document.array
    if array is None:
        key = VirtualKey(node.chunks.keys.format(coords) if node.chunks else "")
        return PlainChunk(key, place)
    return ZarrShard(place.ref, array, tuple(map(mul, coords, array.shard_shape)), inside=place)
