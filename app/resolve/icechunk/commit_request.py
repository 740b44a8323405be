"""What a commit is asked to be, and what there is of it in ``repo``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.errors import ConflictError, DamagedError, UnknownRefError
from app.formats.documents import Json
from app.formats.icechunk.conflicts import Policy
from app.formats.icechunk.repo_info import RepoInfo, SnapshotInfo
from app.formats.icechunk.write_ids import WriteId, find_write
from app.resolve.icechunk.repositories import OpenedRepository, demand_unlocked


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """How changes are committed."""

    branch: str
    parent_id: str
    """The snapshot that they were made against."""
    message: str
    write_id: WriteId
    metadata: Mapping[str, Json] = field(default_factory=dict)
    policy: Policy = Policy.FAIL
    amend: bool = False
    """Whether the commit takes the place of the tip, which has to be the parent."""
    allow_empty: bool = False


class Committed(NamedTuple):
    """A commit that is there for all to see."""

    snapshot_id: str
    parent_id: str | None


class Tip(NamedTuple):
    """Where a branch is, as *info* tells."""

    info: RepoInfo
    snapshot: SnapshotInfo

    @property
    def snapshot_id(self) -> str:
        """The id of that snapshot."""
        return self.snapshot.snapshot_id


def look(request: CommitRequest, info: RepoInfo, opened: OpenedRepository) -> Committed | Tip:
    """Give the commit that *request* has made before, or where its branch is.

    Raises: `UnknownRefError`, `LockedError`, `ConflictError` for a key that was used for something
    else, `DecodeError`, `DamagedError`.
    """
    if (made := find_write(info, request.write_id)) is not None:
        return Committed(made.snapshot_id, made.parent_id)
    demand_unlocked(info, opened.repo)
    if (tip_id := info.branches.get(request.branch)) is None:
        raise UnknownRefError(f"there is no branch {request.branch} in {opened.directory}")
    if (snapshot := info.snapshot(tip_id)) is None:
        raise DamagedError(opened.repo, f"it does not list {tip_id}, which a branch is at")
    if request.amend and snapshot.parent_id is None:
        raise ConflictError(f"{tip_id} is the first commit, which cannot be amended")
    return Tip(info, snapshot)
