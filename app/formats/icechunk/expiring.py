"""Which snapshots expire, and what those that stay have instead of their ancestors."""

from typing import NamedTuple

from app.formats.icechunk.keys import MAIN
from app.formats.icechunk.lineage import Lineage, tips
from app.formats.icechunk.repo_changes import ExpirationRan
from app.formats.icechunk.repo_info import RepoInfo


class Expiring(NamedTuple):
    """What is to expire."""

    older_than_us: int
    """Snapshots that were written before, in microseconds since 1970 began."""
    branches: bool = False
    """Whether branches go that are at such a snapshot; ``main`` stays."""
    tags: bool = False
    """Whether tags go that are at such a snapshot."""


def plan_expiration(info: RepoInfo, expiring: Expiring) -> ExpirationRan:
    """Find what expires, as the library does.

    The first snapshot of all stays, and those that refs are at. What came from one that goes comes
    right after the first, even if between them others stay for the sake of a ref.

    Raises: `DecodeError`.
    """
    lineage = Lineage.of(info)
    snapshots = lineage.snapshots
    old = {
        object_id
        for object_id, each in snapshots.items()
        if each.parent_id is not None and each.flushed_at_us < expiring.older_than_us
    }
    branches, tags = tips(info.branches), tips(info.tags)
    gone_branches, gone_tags = set[str](), set[str]()
    if expiring.branches:
        gone_branches = {name for name, at in branches.items() if at in old} - {MAIN.name}
    if expiring.tags:
        gone_tags = {name for name, at in tags.items() if at in old}
    dropped = old - {at for name, at in branches.items() if name not in gone_branches}
    dropped -= {at for name, at in tags.items() if name not in gone_tags}
    reparented = {
        object_id: lineage.reparented(object_id, _first(lineage, object_id))
        for object_id, each in snapshots.items()
        if object_id not in dropped and each.parent_id in dropped
    }
    return ExpirationRan(
        frozenset(dropped), reparented, frozenset(gone_tags), frozenset(gone_branches)
    )


def _first(lineage: Lineage, object_id: bytes) -> bytes:
    *_, first = lineage.ancestry(object_id)
    return first
