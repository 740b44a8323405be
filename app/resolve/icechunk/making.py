"""A commit that nobody knows of yet, made on top of the tip of its branch."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from app.errors import BadBodyError, ClockSkewError, DamagedError
from app.formats.icechunk.changes import ChangeSet
from app.formats.icechunk.commit import Outcome, apply_changes
from app.formats.icechunk.config import Config
from app.formats.icechunk.metadata_items import encode_metadata
from app.formats.icechunk.repo_info import RepoInfo, SnapshotInfo
from app.formats.icechunk.repo_writer import Amended, FutureError, NewCommit, moment_after
from app.formats.icechunk.snapshot import StoredSnapshot
from app.formats.icechunk.transaction_log import TransactionLog, merge_logs
from app.formats.icechunk.write_ids import marked
from app.resolve.icechunk.commit_request import CommitRequest, Tip
from app.resolve.icechunk.logs import Log, decoded, read_logs
from app.resolve.icechunk.rebasing import Rebasing, read_snapshot
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.icechunk.staging import Staging, new_object_id


class Made(NamedTuple):
    """A snapshot that is written, and was made on top of a tip."""

    tip: SnapshotInfo
    """As it was listed then: what comes before it may expire."""
    change: NewCommit | Amended


class Making:
    """Writes the snapshot of one commit, again for each tip that it turns out to be put on."""

    def __init__(
        self,
        opened: OpenedRepository,
        request: CommitRequest,
        staging: Staging,
        now_us: Callable[[], int],
    ) -> None:
        self.opened = opened
        self.request = request
        self._now_us = now_us
        self._staging = staging
        self._rebasing = Rebasing(opened, request.parent_id, request.policy)
        self._rebases = 0

    async def make(self, changes: ChangeSet, tip: Tip) -> Made:
        """Write all that *changes* of the parent are on top of *tip*."""
        opened, request = self.opened, self.request
        may_be_empty = request.allow_empty
        before = await self._read_tip(tip)
        if tip.snapshot_id != request.parent_id:
            if request.amend:
                self._rebasing.refuse(tip.snapshot_id, "branch_moved")
            self._rebases += 1
            may_be_empty |= not changes.is_empty  # for all of it may give way to theirs
            changes = await self._rebasing.rebase(changes, tip.info, before, tip.snapshot_id)
        applied = await asyncio.to_thread(apply_changes, changes, before)
        if applied.is_empty and not may_be_empty:
            raise BadBodyError("nothing changes, and allow_empty is not set")
        staged = await self._staging.write_manifests(applied, _config(opened, tip.info))
        rewritten = {each.rewrite.node_id: each.rewritten for each in staged}
        files = [file for each in staged for file in each.files]
        name = opened.repository.file("snapshots", before.object_id)
        outcome = await opened.think(name, lambda: applied.finish(rewritten, files))
        snapshot = await asyncio.to_thread(self._snapshot, tip, before, outcome)
        log = outcome.log
        if request.amend:
            log = await self._amended_log(tip, log)
        await self._staging.write_snapshot(snapshot, log)
        return Made(tip.snapshot, self._change(tip, snapshot))

    async def _read_tip(self, tip: Tip) -> StoredSnapshot:
        opened = self.opened
        if (found := await read_snapshot(opened, tip.snapshot_id)) is None:
            name = opened.repository.file("snapshots", decoded(tip.snapshot_id))
            raise DamagedError(name, "does not exist, and the repository lists it")
        return found

    async def _amended_log(self, tip: Tip, log: TransactionLog) -> TransactionLog:
        """Tell what the tip and what takes its place have changed together."""
        (before,) = await read_logs(self.opened, [Log(tip.snapshot_id, is_pruned=False)])
        return log if before is None else await asyncio.to_thread(merge_logs, before, log)

    def _snapshot(self, tip: Tip, before: StoredSnapshot, outcome: Outcome) -> StoredSnapshot:
        request = self.request
        told = marked(request.metadata, request.write_id, self._rebases)
        try:
            metadata = encode_metadata(told)
            flushed_at_us = moment_after(before.flushed_at_us, self._now_us())
        except FutureError as error:
            raise ClockSkewError(f"{self.opened.directory}: {tip.snapshot_id}: {error}") from None
        except ValueError as error:
            raise BadBodyError(f"metadata: {error}") from None
        return StoredSnapshot(
            new_object_id(),
            outcome.nodes,
            outcome.manifest_files,
            flushed_at_us,
            request.message,
            metadata,
            before.extra,
        )

    def _change(self, tip: Tip, snapshot: StoredSnapshot) -> NewCommit | Amended:
        new = SnapshotInfo(
            snapshot.object_id,
            tip.snapshot.parent if self.request.amend else tip.snapshot.object_id,
            snapshot.flushed_at_us,
            snapshot.message,
            snapshot.metadata,
            tip.snapshot.pruned_ancestor_tx_logs if self.request.amend else (),
        )
        kind = Amended if self.request.amend else NewCommit
        return kind(self.request.branch, new)


def _config(opened: OpenedRepository, info: RepoInfo) -> Config:
    if isinstance(info.config, Config):
        return info.config
    raise DamagedError(opened.repo, str(info.config))
