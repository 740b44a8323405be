"""Pages of the differences between two versions; every page reads the logs of all commits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Final, NamedTuple

from shardgate.concurrency import bounded_gather
from shardgate.errors import BadParameterError, UnknownRefError
from shardgate.formats.icechunk.differences import (
    Difference,
    DiffPosition,
    find_differences,
    take_differences,
)
from shardgate.formats.icechunk.snapshot import StoredSnapshot
from shardgate.formats.icechunk.transaction_log import TransactionLog
from shardgate.icechunk.repository import OpenedRepository, read_snapshot
from shardgate.read.budget import ByteBudget, ByteReservation

_MAX_LOGS: Final = 10_000
_MAX_NBYTES: Final = 256 * 1024**2
_AFTER: Final = re.compile(r"([0-9A-Z]{20})\.([0-9A-Z]{20})\.([0-9]{1,9})\.([0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a node, or of chunks of an array."""

    path: str
    """In the later version, or if it has no such node, in the earlier one."""
    change: str
    """`deleted`, `created`, `moved`, `updated` (the metadata), or `chunks_updated`."""
    node_type: str
    former_path: str | None
    """Path of a `moved` node in the earlier version."""
    chunks: list[list[int]]
    """Chunks that were written or deleted: of shards, where the array is sharded."""


class DiffPage(NamedTuple):
    """Part of the differences between two snapshots."""

    from_snapshot_id: str
    to_snapshot_id: str
    changes: list[Change]
    next: str | None
    """Argument *after* of the next part, if there is one."""


async def read_diff(
    opened: OpenedRepository,
    budget: ByteBudget,
    refs: tuple[str, str],
    after: str | None,
    limit: int,
) -> DiffPage:
    """Read a page of the differences between *refs*, of which the first is an ancestor of the other
    one; pages after the first are of the same snapshots, wherever the refs have moved.

    Raises: `UnknownRefError`, `BadParameterError`, `DamagedError`, also without a log, `BusyError`.
    """
    start = DiffPosition(0)
    if after is None:
        from_id = await opened.find(refs[0])
        to_id = await opened.find(refs[1])
    else:
        if (found := _AFTER.fullmatch(after)) is None:
            raise BadParameterError("after: no page of differences ended with it")
        from_id, to_id, number, chunk_number = found.groups()
        start = DiffPosition(int(number), int(chunk_number))
    wanted = await _logs_between(opened, from_id, to_id)
    held = ByteReservation(budget)
    try:
        logs = await _read_logs(opened, wanted, held)
        before = await _read_nodes(opened, from_id)
        later = await _read_nodes(opened, to_id)
        # The differences refer to the logs' coordinates, and joining them takes as much again.
        await held.reserve(2 * sum(log.nbytes for log in logs))

        def compare() -> tuple[list[Change], DiffPosition | None]:
            found = find_differences(before.nodes, later.nodes, logs)
            taken, stop = take_differences(found, start, limit)
            return [_describe(each, chunks) for each, chunks in taken], stop

        changes, stop = await opened.decode_in_thread(opened.directory, compare)
    finally:
        await held.release()
    next_ = None if stop is None else f"{from_id}.{to_id}.{stop.number}.{stop.chunks}"
    return DiffPage(from_id, to_id, changes, next_)


async def _logs_between(opened: OpenedRepository, from_id: str, to_id: str) -> list[bytes]:
    """Return the ids of the logs of all commits after *from_id* up to *to_id*, latest first; those
    of expired snapshots are kept for this.
    """
    wanted: list[bytes] = []
    async for each in opened.ancestry(to_id):
        if each.snapshot_id == from_id:
            return wanted
        wanted += [each.object_id, *reversed(each.pruned_ancestor_tx_logs)]
        if len(wanted) > _MAX_LOGS:
            raise BadParameterError(f"from: more than {_MAX_LOGS} commits have been made since")
    raise BadParameterError(f"from: {from_id} is no ancestor of {to_id}, or has expired")


async def _read_logs(
    opened: OpenedRepository, wanted: Sequence[bytes], held: ByteReservation
) -> list[TransactionLog]:
    logs: list[TransactionLog] = []
    nbytes = 0
    for batch in batched(wanted, 8):  # so that a limit is noticed early
        found = await bounded_gather(opened.read_log, batch)
        logs += found
        nbytes += sum(log.nbytes for log in found)
        if nbytes > _MAX_NBYTES:
            raise BadParameterError("from: more has changed since than one answer compares")
        await held.reserve(nbytes)
    return logs


async def _read_nodes(opened: OpenedRepository, snapshot_id: str) -> StoredSnapshot:
    snapshot = await read_snapshot(opened.repository, snapshot_id, opened.fetch)
    if snapshot is None:
        raise UnknownRefError(f"there is no snapshot {snapshot_id} in {opened.directory}")
    return snapshot


def _describe(each: Difference, chunks: list[list[int]]) -> Change:
    node_type = "array" if each.is_array else "group"
    return Change(each.path, each.kind.name.lower(), node_type, each.former_path, chunks)
