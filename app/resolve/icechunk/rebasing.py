"""Changes put on top of what others have committed since they were begun, if that can be."""

from collections.abc import Mapping, Sequence
from itertools import batched
from typing import Final, NoReturn

from app.errors import CommitConflictError, DamagedError
from app.formats.icechunk.changes import ChangeSet
from app.formats.icechunk.conflicts import Conflict, Policy, rebase
from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.repo_info import RepoInfo, SnapshotInfo
from app.formats.icechunk.snapshot import StoredSnapshot, StoredSnapshotDecoder
from app.formats.icechunk.transaction_log import TransactionLog
from app.resolve.icechunk.logs import logs_of, read_logs
from app.resolve.icechunk.repositories import OpenedRepository

_LOGS_AT_ONCE: Final = 8
_MOST_LOGS: Final = 10_000
_MOST_NBYTES: Final = 256 * 1024**2
"""Of logs, decoded."""


class Rebasing:
    """Puts changes made against the snapshot *parent_id* on others."""

    def __init__(self, opened: OpenedRepository, parent_id: str, policy: Policy) -> None:
        self._opened = opened
        self._parent_id = parent_id
        self._policy = policy

    async def rebase(
        self, changes: ChangeSet, info: RepoInfo, tip: StoredSnapshot, tip_id: str
    ) -> ChangeSet:
        """Make *changes* changes of the snapshot *tip*, which *info* tells of.

        Raises: `CommitConflictError`, also where nothing tells what was changed in between.
        """
        opened = self._opened
        chain = await opened.think(opened.repo, lambda: _since(info, self._parent_id, tip_id))
        if chain is None:
            self.refuse(tip_id, "parent_not_in_history")
        logs = await self._read_logs(chain, tip_id)
        parent = await read_snapshot(opened, self._parent_id)
        if parent is None:
            self.refuse(tip_id, "parent_not_in_history")
        rebased = await opened.think(
            opened.repo, lambda: rebase(changes, parent, logs, tip, self._policy)
        )
        if isinstance(rebased, ChangeSet):
            return rebased
        raise CommitConflictError(self._parent_id, tip_id, list(map(_tell, rebased)))

    def refuse(self, tip_id: str, kind: str) -> NoReturn:
        """Raise: a conflict of this *kind* is one with all that was committed."""
        whole: Mapping[str, object] = {"kind": kind, "path": "/", "count": 0, "chunks": []}
        raise CommitConflictError(self._parent_id, tip_id, [whole])

    async def _read_logs(self, chain: Sequence[SnapshotInfo], tip_id: str) -> list[TransactionLog]:
        wanted, found, nbytes = list(logs_of(chain)), list[TransactionLog](), 0
        if len(wanted) > _MOST_LOGS:
            self.refuse(tip_id, "too_many_commits")
        for some in batched(wanted, _LOGS_AT_ONCE):
            try:
                logs = await read_logs(self._opened, some)
            except DamagedError:
                logs = [None]
            for log in logs:
                if log is None:
                    self.refuse(tip_id, "missing_transaction_log")
                found.append(log)
                nbytes += log.nbytes
            if nbytes > _MOST_NBYTES:
                self.refuse(tip_id, "too_many_changes")
        return found


def _tell(conflict: Conflict) -> Mapping[str, object]:
    """Spell a conflict as it is answered; of many chunks that are in it the first."""
    told = conflict.chunks
    count, chunks = (0, []) if told is None else (told.count, told.chunks)
    return {"kind": conflict.kind, "path": conflict.path, "count": count, "chunks": chunks}


def _since(info: RepoInfo, start: str, stop: str) -> list[SnapshotInfo] | None:
    """List the snapshots after *start*, earliest first; `None` if it is no ancestor of *stop*."""
    chain: list[SnapshotInfo] = []
    for each in info.ancestry(stop) or ():
        if each.snapshot_id == start:
            return chain[::-1]
        chain.append(each)
    return None


async def read_snapshot(opened: OpenedRepository, snapshot_id: str) -> StoredSnapshot | None:
    """Read a snapshot with all that it stores; `None` if there is none of that id.

    Raises: `DamagedError`, `StorageError`.
    """
    if (object_id := decode_id(snapshot_id)) is None:
        return None
    repository = opened.repository
    decode = StoredSnapshotDecoder(object_id, repository.limit_nbytes)
    return await repository.read("snapshots", object_id, decode, opened.fetch)
