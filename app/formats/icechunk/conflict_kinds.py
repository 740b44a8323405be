"""What can be wrong between two commits on one parent, by the names that the library has for it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from app.formats.icechunk.coords_set import CoordsSet
from app.formats.icechunk.updated_chunks import Coords

_MOST_TOLD: Final = 100


class ConflictKind(StrEnum):
    """Ours over theirs, who came first."""

    CHUNK_DOUBLE_UPDATE = "chunk_double_update"
    """Both changed a chunk."""
    CHUNKS_UPDATED_IN_UPDATED_ARRAY = "chunks_updated_in_updated_array"
    """One changed chunks, the other the metadata that say how these are read."""
    CHUNKS_UPDATED_IN_DELETED_ARRAY = "chunks_updated_in_deleted_array"
    ZARR_METADATA_DOUBLE_UPDATE = "zarr_metadata_double_update"
    ZARR_METADATA_UPDATE_OF_DELETED_ARRAY = "zarr_metadata_update_of_deleted_array"
    ZARR_METADATA_UPDATE_OF_DELETED_GROUP = "zarr_metadata_update_of_deleted_group"
    DELETE_OF_UPDATED_ARRAY = "delete_of_updated_array"
    DELETE_OF_UPDATED_GROUP = "delete_of_updated_group"
    """They changed its metadata, or made nodes in it."""
    NEW_NODE_CONFLICTS_WITH_EXISTING_NODE = "new_node_conflicts_with_existing_node"
    NEW_NODE_IN_INVALID_GROUP = "new_node_in_invalid_group"
    """The group is no more, or became an array."""
    MOVE_OPERATION_CANNOT_BE_REBASED = "move_operation_cannot_be_rebased"
    """They moved nodes."""


class Policy(StrEnum):
    """Whose chunk stays where both changed it; nothing else can be settled."""

    FAIL = "fail"
    OURS = "ours"
    THEIRS = "theirs"


@dataclass(frozen=True, slots=True)
class UpdatedChunks:
    """The changed chunks of an array."""

    count: int
    chunks: list[list[int]]
    """The coords of the first of them: of shards, where the array is sharded."""


class Conflict(NamedTuple):
    """Something that keeps our changes from being put on top of theirs."""

    kind: ConflictKind
    path: str
    """Where the node is, or is to be."""
    chunks: UpdatedChunks | None = None
    """Where it is about chunks: how many, and the first of them."""


def tell_chunks(*batches: Coords) -> UpdatedChunks:
    """Count the chunks in *batches*, and name the first."""
    every = CoordsSet()
    for coords in batches:
        every.add(coords)
    return UpdatedChunks(every.count(), every.first(_MOST_TOLD))
