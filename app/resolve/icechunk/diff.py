"""What changed between two snapshots of a repository, told from its transaction logs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import batched
from typing import Final

from app.errors import BadParameterError, DamagedError
from app.formats.icechunk.changes import Changes, Diff
from app.formats.icechunk.node_paths import NodePaths, NodePathsDecoder
from app.formats.icechunk.snapshot_list import SnapshotInfo
from app.formats.icechunk.transaction_log import TransactionLog
from app.resolve.icechunk.logs import decoded, logs_of, read_logs
from app.resolve.icechunk.repositories import OpenedRepository

_LOGS_AT_ONCE: Final = 8
_MOST_SNAPSHOTS: Final = 10_000
_MOST_NBYTES: Final = 256 * 1024 * 1024
"""More coords of chunks are not put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDiff(Diff):
    """The changes from one snapshot to another."""

    from_snapshot_id: str
    to_snapshot_id: str
    missing_tx_logs: list[str]
    """Logs of expired snapshots that are gone; what those changed is not told."""


async def read_diff(opened: OpenedRepository, before: str, after: str, limit: int) -> SnapshotDiff:
    """Tell what changed since *before*, up to and with *after*, with *limit* coords of chunks.

    Raises: `UnknownRefError`; `BadParameterError` if *before* is no ancestor of *after*, or so far
    away that there is too much to tell.
    """
    start, stop = await opened.find(before), await opened.find(after)
    wanted = list(logs_of(await _since(opened, start, stop)))
    if len(wanted) > _MOST_SNAPSHOTS:
        raise BadParameterError(f"there are more than {_MOST_SNAPSHOTS} commits in between")
    changes, missing = Changes(), list[str]()
    for some in batched(wanted, _LOGS_AT_ONCE):
        logs = await read_logs(opened, some)
        await asyncio.to_thread(_add, changes, [log for log in logs if log is not None])
        missing += [each.snapshot_id for each, log in zip(some, logs, strict=True) if log is None]
        if changes.nbytes > _MOST_NBYTES:
            raise BadParameterError("too many chunks changed in between to put them together")
    paths = (await _paths(opened, start)).paths, (await _paths(opened, stop)).paths
    diff = await asyncio.to_thread(changes.between, *paths, limit)
    return SnapshotDiff(
        **{field.name: getattr(diff, field.name) for field in fields(diff)},
        from_snapshot_id=start,
        to_snapshot_id=stop,
        missing_tx_logs=missing,
    )


async def _since(opened: OpenedRepository, start: str, stop: str) -> list[SnapshotInfo]:
    """List the snapshots after *start*, earliest first, the last of which is *stop*."""
    chain: list[SnapshotInfo] = []
    async for info in opened.ancestry(stop):
        if info.snapshot_id == start:
            return chain[::-1]
        chain.append(info)
        if len(chain) > _MOST_SNAPSHOTS:
            break
    async for _ in opened.ancestry(start):
        break
    if len(chain) > _MOST_SNAPSHOTS:
        raise BadParameterError(f"{start} is not among the last {_MOST_SNAPSHOTS} before {stop}")
    raise BadParameterError(f"from: {start} is no ancestor of {stop}")


def _add(changes: Changes, logs: Sequence[TransactionLog]) -> None:
    for log in logs:
        changes.add(log)


async def _paths(opened: OpenedRepository, snapshot_id: str) -> NodePaths:
    repository, object_id = opened.repository, decoded(snapshot_id)
    decode = NodePathsDecoder(snapshot_id, repository.limit_nbytes)
    paths = await repository.read("snapshots", object_id, decode, opened.fetch)
    if paths is None:
        name = repository.file("snapshots", object_id)
        raise DamagedError(name, "does not exist, and the repository lists it")
    return paths
