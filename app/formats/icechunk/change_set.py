"""What a commit is to change, by the ids of nodes: written down before anything is stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.formats.icechunk.payloads import Payloads
from app.formats.icechunk.updated_chunks import Coords


@dataclass(frozen=True, slots=True)
class ChunkChanges:
    """The changed chunks of one array."""

    coords: Coords
    """Of shape (count, ndim): of shards, where the array is sharded. In C order, each once."""
    payloads: Payloads
    """What each refers to from now on."""


class NodeDocument(NamedTuple):
    """A node that the parent has not."""

    path: str
    """Absolute: ``/a/b``, or ``/``."""
    document: bytes
    """Its ``zarr.json``, as it was given."""


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """What is to become of the snapshot that it was made against, the parent.

    No node is in two of the first three members; a node that is replaced at its path is *deleted*,
    and another one is *new*. Of deleted groups all that is below them is *deleted* too.
    """

    new: Mapping[bytes, NodeDocument] = field(default_factory=dict)
    updated: Mapping[bytes, bytes] = field(default_factory=dict)
    """The new ``zarr.json`` of nodes of the parent."""
    deleted: frozenset[bytes] = frozenset()
    """Nodes of the parent."""
    chunks: Mapping[bytes, ChunkChanges] = field(default_factory=dict)
    """Of arrays that are *new* or in the parent, and not *deleted*."""

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to commit."""
        return not (self.new or self.updated or self.deleted or self.chunks)
