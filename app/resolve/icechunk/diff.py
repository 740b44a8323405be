"""What changed between two snapshots of a repository, told from its transaction logs."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import batched
from typing import Final, NamedTuple

from app.errors import BadParameterError, DamagedError
from app.formats.icechunk.changes import Changes, Diff
from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.node_paths import NodePaths, NodePathsDecoder
from app.formats.icechunk.snapshot_list import SnapshotInfo
from app.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder
from app.resolve.icechunk.repositories import OpenedRepository
from app.storage.abreast import abreast

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


class _Log(NamedTuple):
    snapshot_id: str
    is_pruned: bool
    """Whether its snapshot has expired, so that the log may be gone too."""


async def read_diff(opened: OpenedRepository, before: str, after: str, limit: int) -> SnapshotDiff:
    """Tell what changed since *before*, up to and with *after*, with *limit* coords of chunks.

    Raises: `UnknownRefError`; `BadParameterError` if *before* is no ancestor of *after*, or so far
    away that there is too much to tell.
    """
    start, stop = await opened.find(before), await opened.find(after)
    wanted = list(_logs(await _since(opened, start, stop)))
    if len(wanted) > _MOST_SNAPSHOTS:
        raise BadParameterError(f"there are more than {_MOST_SNAPSHOTS} commits in between")
    changes, missing = Changes(), list[str]()
    for some in batched(wanted, _LOGS_AT_ONCE):
        logs = await abreast(partial(_read_log, opened), some, at_a_time=_LOGS_AT_ONCE)
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


def _logs(chain: Sequence[SnapshotInfo]) -> Iterator[_Log]:
    for info in chain:
        for pruned in info.pruned_ancestor_tx_logs:
            yield _Log(pruned, is_pruned=True)
        yield _Log(info.snapshot_id, is_pruned=False)


async def _read_log(opened: OpenedRepository, wanted: _Log) -> TransactionLog | None:
    """Read a log; `None` if it is gone together with its snapshot.

    Raises: `DamagedError` if it is gone otherwise.
    """
    repository, object_id = opened.repository, _decoded(wanted.snapshot_id)
    decode = TransactionLogDecoder(wanted.snapshot_id, repository.limit_nbytes)
    log = await repository.read("transactions", object_id, decode, opened.fetch)
    if log is None and not wanted.is_pruned:
        name = repository.file("transactions", object_id)
        raise DamagedError(name, "does not exist, so that nothing tells what was changed")
    return log


def _add(changes: Changes, logs: Sequence[TransactionLog]) -> None:
    for log in logs:
        changes.add(log)


async def _paths(opened: OpenedRepository, snapshot_id: str) -> NodePaths:
    repository, object_id = opened.repository, _decoded(snapshot_id)
    decode = NodePathsDecoder(snapshot_id, repository.limit_nbytes)
    paths = await repository.read("snapshots", object_id, decode, opened.fetch)
    if paths is None:
        name = repository.file("snapshots", object_id)
        raise DamagedError(name, "does not exist, and the repository lists it")
    return paths


def _decoded(snapshot_id: str) -> bytes:
    """Give the id that the name of a file spells, as those do that were read."""
    if (object_id := decode_id(snapshot_id)) is None:
        raise ValueError(f"no id: {snapshot_id}")
    return object_id
