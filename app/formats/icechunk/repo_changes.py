"""What can be done to ``repo``, one operation at a time."""

from typing import NamedTuple

from app.formats.icechunk.fields import Availability

type Items = tuple[tuple[str, bytes], ...]
"""Metadata: names, and values as FlexBuffers spell them."""


class NewSnapshot(NamedTuple):
    """A snapshot that ``repo`` does not list yet."""

    object_id: bytes
    parent_id: bytes | None
    flushed_at_us: int
    """Microseconds since 1970 began, UTC."""
    message: str
    items: Items = ()
    pruned_ancestor_tx_logs: tuple[bytes, ...] = ()


class NewCommit(NamedTuple):
    """A snapshot is put on top of a branch."""

    branch: str
    snapshot: NewSnapshot


class Amended(NamedTuple):
    """A snapshot takes the place of the tip of a branch, whose parent is its own."""

    branch: str
    snapshot: NewSnapshot


class TagCreated(NamedTuple):
    """A tag that never was."""

    name: str
    snapshot_id: bytes


class TagDeleted(NamedTuple):
    """A tag is taken away, its name for ever."""

    name: str


class BranchCreated(NamedTuple):
    """A new branch."""

    name: str
    snapshot_id: bytes


class BranchReset(NamedTuple):
    """A branch is put at another snapshot."""

    name: str
    snapshot_id: bytes


class BranchDeleted(NamedTuple):
    """A branch is taken away."""

    name: str


class StatusChanged(NamedTuple):
    """What may be done with the repository changes."""

    availability: Availability
    reason: str | None = None


type RepoChange = (
    NewCommit
    | Amended
    | TagCreated
    | TagDeleted
    | BranchCreated
    | BranchReset
    | BranchDeleted
    | StatusChanged
)
"""One operation."""
