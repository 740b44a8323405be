"""The snapshots that led to a state of a repository, page by page."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from app.formats.documents import Json
from app.formats.icechunk.repo_info import SnapshotInfo
from app.resolve.icechunk.repositories import OpenedRepository

_METADATA_NBYTES: Final = 1 << 20
"""A page with more than that of metadata ends early."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A snapshot."""

    snapshot_id: str
    parent_id: str | None
    message: str
    flushed_at: datetime
    metadata: dict[str, Json]


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Some snapshots, newest first, each the parent of the one before."""

    history: list[Ancestor]
    next: str | None
    """The last of them, where there are more."""


async def read_history(
    opened: OpenedRepository, ref: str, after: str | None, limit: int
) -> HistoryPage:
    """Read up to *limit* of the snapshots that led to *ref*, or of those before *after*.

    A page after another tells the ancestors of the snapshot that the other ended with, wherever
    *ref* is by then.

    Raises: `UnknownRefError`.
    """
    start = await opened.find(ref)
    infos: list[SnapshotInfo] = []
    nbytes = 0
    async for info in opened.ancestry(after or start):
        if info.snapshot_id == after:
            continue
        if len(infos) == limit or nbytes > _METADATA_NBYTES:
            return HistoryPage(await _tell(opened, infos), infos[-1].snapshot_id)
        infos.append(info)
        nbytes += sum(len(value) for _, value in info.metadata.items)
    return HistoryPage(await _tell(opened, infos), None)


async def _tell(opened: OpenedRepository, infos: list[SnapshotInfo]) -> list[Ancestor]:
    return await opened.think(opened.directory, lambda: list(map(_ancestor, infos)))


def _ancestor(info: SnapshotInfo) -> Ancestor:
    return Ancestor(
        snapshot_id=info.snapshot_id,
        parent_id=info.parent_id,
        message=info.message,
        flushed_at=info.flushed_at,
        metadata=info.metadata.decode(),
    )
