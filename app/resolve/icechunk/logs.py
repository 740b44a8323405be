"""Transaction logs of snapshots, and of their expired ancestors."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from app.concurrency import bounded_gather
from app.errors import DamagedError
from app.formats.icechunk.ids import decode_id, encode_id
from app.formats.icechunk.repo_info import SnapshotInfo
from app.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder
from app.resolve.icechunk.repository import OpenedRepository


class Log(NamedTuple):
    """Name of a log."""

    snapshot_id: str
    is_pruned: bool
    """True if its snapshot has expired, so that the log may be deleted too."""


def logs_of(chain: Sequence[SnapshotInfo]) -> Iterator[Log]:
    """Name the logs of the snapshots of *chain*, earliest first; pruned ones before their heirs."""
    for info in chain:
        for pruned in info.pruned_ancestor_tx_logs:
            yield Log(encode_id(pruned), is_pruned=True)
        yield Log(info.snapshot_id, is_pruned=False)


async def read_logs(opened: OpenedRepository, wanted: Sequence[Log]) -> list[TransactionLog | None]:
    """Read logs concurrently; `None` for those that were deleted with their expired snapshots.

    Raises: `DamagedError` if another one does not exist.
    """
    return await bounded_gather(partial(_read_log, opened), wanted, limit=len(wanted) or 1)


async def _read_log(opened: OpenedRepository, wanted: Log) -> TransactionLog | None:
    repository, object_id = opened.repository, decoded(wanted.snapshot_id)
    decode = TransactionLogDecoder(wanted.snapshot_id, repository.limit_nbytes)
    log = await repository.read("transactions", object_id, decode, opened.fetch)
    if log is None and not wanted.is_pruned:
        name = repository.file("transactions", object_id)
        raise DamagedError(name, "does not exist, so that the changes of the snapshot are unknown")
    return log


def decoded(snapshot_id: str) -> bytes:
    """Decode the id of a snapshot that was read."""
    if (object_id := decode_id(snapshot_id)) is None:
        raise ValueError(f"not an id: {snapshot_id}")
    return object_id
