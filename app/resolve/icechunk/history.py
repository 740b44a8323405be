"""Snapshots that led to a state of a repository, page by page, and the newest of each ref."""

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from app.errors import UnknownRefError
from app.formats.documents import Json
from app.formats.icechunk.repo_info import SnapshotInfo
from app.formats.surveying import State
from app.resolve.icechunk.repository import OpenedRepository

_METADATA_NBYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Snapshot in a history."""

    snapshot_id: str
    parent_id: str | None
    message: str
    flushed_at: datetime
    metadata: dict[str, Json]


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Page of snapshots, newest first, each the parent of the one before."""

    history: list[Ancestor]
    next: str | None


async def read_history(
    opened: OpenedRepository, ref: str, after: str | None, limit: int
) -> HistoryPage:
    """Read up to *limit* snapshots that led to *ref*, or ancestors of the snapshot *after*."""
    start = await opened.find(ref)
    infos: list[SnapshotInfo] = []
    nbytes = 0
    async for info in opened.ancestry(after or start):
        if info.snapshot_id == after:
            continue
        if len(infos) == limit or nbytes > _METADATA_NBYTES:
            return HistoryPage(await _decode(opened, infos), infos[-1].snapshot_id)
        infos.append(info)
        nbytes += sum(len(value) for _, value in info.metadata.items)
    return HistoryPage(await _decode(opened, infos), None)


async def _decode(opened: OpenedRepository, infos: list[SnapshotInfo]) -> list[Ancestor]:
    def decode(info: SnapshotInfo) -> Ancestor:
        metadata = info.metadata.decode()
        return Ancestor(info.snapshot_id, info.parent_id, info.message, info.flushed_at, metadata)

    return await opened.decode_in_thread(opened.directory, lambda: list(map(decode, infos)))


@dataclass(frozen=True, slots=True)
class RefTip:
    """Branch or tag, and its newest commit."""

    ref: str
    """As in keys: ``@tag.v1``."""
    snapshot_id: str
    message: str
    flushed_at: datetime | None


async def read_tips(opened: OpenedRepository, states: Iterable[State]) -> list[RefTip]:
    """Read the commit of each of *states*."""
    return [await _read_tip(opened, state) for state in states]


async def _read_tip(opened: OpenedRepository, state: State) -> RefTip:
    try:
        async with aclosing(opened.ancestry(state.snapshot_id)) as ancestors:
            newest = await anext(ancestors)
    except UnknownRefError:
        return RefTip(state.ref, state.snapshot_id, "", None)
    return RefTip(state.ref, state.snapshot_id, newest.message, newest.flushed_at)
