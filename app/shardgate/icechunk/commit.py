"""Commits: write manifests, snapshot and transaction log, then move the branch once.

Nothing of a commit is visible before the swap of the file ``repo``. A commit on a branch that has
moved is rebased onto the new tip, unless the two conflict.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import batched
from typing import Final, NamedTuple, NoReturn, Self
from weakref import WeakValueDictionary

from shardgate.concurrency import bounded_gather, retry_conflicts
from shardgate.errors import (
    BadBodyError,
    ClockSkewError,
    CommitConflictError,
    ConflictError,
    DamagedError,
    StorageError,
    UnknownRefError,
)
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.apply import Applied, apply_changes
from shardgate.formats.icechunk.changes import (
    ChangeSet,
    Edit,
    check_natives,
    check_references,
    edit,
)
from shardgate.formats.icechunk.config import Config, parse_splitting
from shardgate.formats.icechunk.conflicts import CommitConflict, Policy, rebase
from shardgate.formats.icechunk.ids import NODE_ID_NBYTES
from shardgate.formats.icechunk.manifest_writer import (
    ArrayRewrite,
    Rewritten,
    needed_manifests,
    rewrite_manifests,
)
from shardgate.formats.icechunk.repo_info import RepoInfo, SnapshotInfo, encode_metadata
from shardgate.formats.icechunk.repo_writer import (
    FutureError,
    NewSnapshot,
    WriteId,
    check_metadata,
    find_write,
    marked,
    moment_after,
)
from shardgate.formats.icechunk.snapshot import ManifestFile, StoredSnapshot, write_snapshot
from shardgate.formats.icechunk.transaction_log import (
    TransactionLog,
    TransactionLogDecoder,
    merge_logs,
    write_transaction_log,
)
from shardgate.icechunk.chunk_files import chunk_lengths, new_object_id, put_new
from shardgate.icechunk.repo_swap import Planned, RepoSwaps, demand_readable
from shardgate.icechunk.repository import (
    OpenedRepository,
    read_snapshot,
    require_unlocked,
)
from shardgate.model import ObjectRef
from shardgate.read.budget import ByteBudget
from shardgate.storage.contract import CONFLICT, Conflict, ObjectStore

_LOGS_AT_ONCE: Final = 8
_MAX_LOGS: Final = 10_000
_MAX_LOG_NBYTES: Final = 256 * 1024**2
_MEMORY_PER_BYTE: Final = 16
_MEMORY_PER_CHANGE: Final = 256


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """Branch, parent and options of a commit."""

    branch: str
    parent_id: str
    message: str
    write_id: WriteId
    metadata: Mapping[str, Json] = field(default_factory=dict)
    policy: Policy = Policy.FAIL
    amend: bool = False
    """Replace the tip of the branch, which must be the parent."""
    allow_empty: bool = False


@dataclass(frozen=True, slots=True)
class CommitResult:
    """A new snapshot."""

    snapshot_id: str
    parent_id: str | None
    """The previous commit; after a rebase, not the one that the changes were made against."""

    @classmethod
    def of(cls, snapshot: SnapshotInfo) -> Self:
        return cls(snapshot.snapshot_id, snapshot.parent_id)


class BranchTip(NamedTuple):
    """Tip of a branch according to *info*."""

    info: RepoInfo
    snapshot: SnapshotInfo

    @property
    def snapshot_id(self) -> str:
        return self.snapshot.snapshot_id


@dataclass(frozen=True, slots=True)
class Committer:
    """Commits to branches; *on_commit* is called with ``made``, ``conflict`` or ``failed``."""

    swaps: RepoSwaps
    _budget: ByteBudget
    """For manifests that are rewritten."""
    _on_commit: Callable[[str], object] = lambda _: None
    _locks: WeakValueDictionary[tuple[ObjectRef, str], asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )
    """Order the commits of this process that lost a race for a branch."""

    async def find(
        self, opened: OpenedRepository, request: CommitRequest
    ) -> CommitResult | BranchTip:
        """Return the commit that *request* has made before, or else the tip of its branch.

        It reads the current ``repo`` by a plan without a change.

        Raises: `UnknownRefError`, `LockedError`, `ConflictError` for an idempotency key that was
        used for another request, and the errors of `RepoSwaps`.
        """

        def plan(info: RepoInfo) -> Planned[CommitResult | BranchTip]:
            return Planned(_find(request, info, opened))

        return await self.swaps.update(opened, plan)

    async def commit(
        self,
        opened: OpenedRepository,
        changes: ChangeSet,
        request: CommitRequest,
        tip: BranchTip | None = None,
    ) -> CommitResult:
        """Commit *changes*; start from *tip* if that was found a moment ago.

        Raises: `CommitConflictError`, `BadBodyError`, `ConflictError`, `LockedError`,
        `UnknownRefError`, `ClockSkewError`, `DamagedError`, `BusyError`, `UnwritableError`,
        `StorageError`. After `StorageError` the outcome is unknown; repeating the same request
        finds or makes the commit.
        """
        try:
            committed = await self._commit(opened, changes, request, tip)
        except Exception as error:
            is_conflict = isinstance(error, CommitConflictError)
            self._on_commit("conflict" if is_conflict else "failed")
            raise
        self._on_commit("made")
        return committed

    async def commit_edits(
        self, opened: OpenedRepository, edits: Sequence[Edit], request: CommitRequest
    ) -> CommitResult:
        """Commit *edits* of the parent without a session; an empty parent id stands for the tip.

        Every reference is checked before anything is written.

        Raises: `BadBodyError` and `NotAllowedError` for references that cannot be followed,
        `UnknownRefError`, and the errors of `commit`.
        """
        found = await self.find(opened, request)
        if isinstance(found, CommitResult):
            return found
        info = found.info
        parent_id = request.parent_id or found.snapshot_id
        is_listed = await opened.decode_in_thread(
            opened.repo, lambda: info.snapshot(parent_id) is not None
        )
        parent = is_listed and await read_snapshot(opened.repository, parent_id, opened.fetch)
        if not parent:
            raise UnknownRefError(f"there is no snapshot {parent_id} in {opened.directory}")
        changes = await asyncio.to_thread(
            edit, parent, edits, lambda: secrets.token_bytes(NODE_ID_NBYTES)
        )
        await _check_references(self.swaps.store, opened, info, changes)
        return await self.commit(opened, changes, replace(request, parent_id=parent_id), found)

    async def _commit(
        self,
        opened: OpenedRepository,
        changes: ChangeSet,
        request: CommitRequest,
        tip: BranchTip | None,
    ) -> CommitResult:
        found = tip or await self.find(opened, request)  # before all that fails for certain
        if isinstance(found, CommitResult):
            return found
        check_metadata(request.metadata)
        await self.swaps.store.verify_conditional_writes(opened.directory)
        builder = CommitBuilder(opened, request, self.swaps, self._budget)

        async def attempt() -> CommitResult | Conflict:
            nonlocal found
            if isinstance(found, BranchTip):
                found = await self._attempt(builder, changes, found)
            return found if isinstance(found, CommitResult) else CONFLICT

        if not isinstance(first := await attempt(), Conflict):
            return first
        async with self._locks.setdefault((opened.repo, request.branch), asyncio.Lock()):
            what = f"{opened.directory}: branch {request.branch}"
            return await retry_conflicts(attempt, Conflict, what)

    async def _attempt(
        self, builder: "CommitBuilder", changes: ChangeSet, tip: BranchTip
    ) -> CommitResult | BranchTip:
        """Move the branch from *tip* to a new commit; return the new tip if it has moved."""
        opened, request = builder.opened, builder.request
        change = await builder.build(changes, tip)

        def plan(info: RepoInfo) -> Planned[CommitResult | BranchTip]:
            found = _find(request, info, opened)
            if isinstance(found, CommitResult) or found.snapshot != tip.snapshot:
                return Planned(found)
            return Planned(CommitResult.of(change.snapshot), [change])

        try:
            return await self.swaps.update(opened, plan)
        except StorageError:
            with suppress(StorageError, DamagedError):
                if isinstance(found := await self.find(opened, request), CommitResult):
                    return found
            raise


@dataclass(slots=True)
class CommitBuilder:
    """Writes the files of one commit, again for each tip that it is rebased onto.

    Manifests that a rebase does not affect are reused. Nothing refers to the files until the branch
    moves; those of failed commits are garbage.
    """

    opened: OpenedRepository
    request: CommitRequest
    swaps: RepoSwaps
    budget: ByteBudget
    _rewritten: dict[bytes, tuple[ArrayRewrite, Rewritten]] = field(default_factory=dict)
    _rebases: int = 0

    async def build(self, changes: ChangeSet, tip: BranchTip) -> NewSnapshot:
        """Write the files of a commit of *changes*, made against the parent, on top of *tip*."""
        opened, request = self.opened, self.request
        may_be_empty = request.allow_empty
        if (base := await self._read_snapshot(tip.snapshot_id)) is None:
            name = opened.repository.file("snapshots", tip.snapshot.object_id)
            raise DamagedError(name, "does not exist, and the repository lists it")
        if tip.snapshot_id != request.parent_id:
            if request.amend:
                self._refuse(tip.snapshot_id, "branch_moved")
            self._rebases += 1
            may_be_empty |= not changes.is_empty  # all of it may give way to their changes
            changes = await self._rebase(changes, tip, base)
        config = _config(opened, tip.info)
        splitting = await opened.decode_in_thread(
            opened.repo, lambda: parse_splitting(config.splitting)
        )
        applied = await asyncio.to_thread(apply_changes, changes, base, splitting)
        if applied.is_empty and not may_be_empty:
            raise BadBodyError("nothing changes, and allow_empty is not set")
        rewritten = await self._write_manifests(applied, config.compression_level)
        name = opened.repository.file("snapshots", base.object_id)
        applied = await opened.decode_in_thread(name, lambda: applied.finish(rewritten))
        snapshot = await asyncio.to_thread(self._snapshot, tip, base, applied)
        log = applied.log
        if request.amend:
            amended = await self._read_log(tip.snapshot.object_id)
            log = await asyncio.to_thread(merge_logs, amended, log)
        object_id = snapshot.object_id
        data, log_data = await asyncio.to_thread(
            lambda: (write_snapshot(snapshot), write_transaction_log(object_id, log))
        )
        files = [("snapshots", object_id, data), ("transactions", object_id, log_data)]
        await bounded_gather(self._put, files)
        return self._change(tip, snapshot)

    async def _write_manifests(self, applied: Applied, level: int) -> dict[bytes, Rewritten]:
        async def rewrite(array: ArrayRewrite) -> tuple[bytes, Rewritten]:
            before, rewritten = self._rewritten.get(array.node_id, (None, None))
            if rewritten is None or before != array:
                rewritten = await self._rewrite(array, level, applied.manifest_files)
                self._rewritten[array.node_id] = array, rewritten
            return array.node_id, rewritten

        return dict(await bounded_gather(rewrite, applied.rewrites))

    async def _rewrite(
        self, array: ArrayRewrite, level: int, known: Mapping[bytes, ManifestFile]
    ) -> Rewritten:
        opened = self.opened
        needed = sorted(await asyncio.to_thread(needed_manifests, array))
        nbytes = _MEMORY_PER_CHANGE * len(array.changes.coords)
        nbytes += sum(_MEMORY_PER_BYTE * known[each].size_bytes for each in needed if each in known)
        async with self.budget.room(nbytes):
            read = await bounded_gather(
                lambda each: opened.repository.manifest(each, opened.fetch), needed
            )
            manifests = dict(zip(needed, read, strict=True))
            name = opened.directory.join(f"manifests ({array.path})")
            rewritten, contents = await opened.decode_in_thread(
                name, lambda: rewrite_manifests(array, manifests, new_object_id, level)
            )
            files = [("manifests", object_id, data) for object_id, data in contents.items()]
            await bounded_gather(self._put, files)
        return rewritten

    async def _put(self, file: tuple[str, bytes, bytes]) -> None:
        """Write a file of a folder, id and content; raise `ConflictError` if it is too large."""
        repository, (kind, object_id, data) = self.opened.repository, file
        name = repository.file(kind, object_id)
        demand_readable(name, data, repository.limit_nbytes)
        await put_new(self.swaps.store, name, data)

    async def _read_snapshot(self, snapshot_id: str) -> StoredSnapshot | None:
        return await read_snapshot(self.opened.repository, snapshot_id, self.opened.fetch)

    async def _rebase(self, changes: ChangeSet, tip: BranchTip, base: StoredSnapshot) -> ChangeSet:
        """Turn *changes* of the parent into changes of *base*; raise `CommitConflictError`."""
        opened, request, tip_id = self.opened, self.request, tip.snapshot_id
        chain = await opened.decode_in_thread(
            opened.repo, lambda: _snapshots_between(tip.info, request.parent_id, tip_id)
        )
        if chain is None:
            self._refuse(tip_id, "parent_not_in_history")
        logs = await self._read_logs(chain, tip_id)
        if (parent := await self._read_snapshot(request.parent_id)) is None:
            self._refuse(tip_id, "parent_not_in_history")
        rebased = await opened.decode_in_thread(
            opened.repo, lambda: rebase(changes, parent, logs, base, request.policy)
        )
        if isinstance(rebased, ChangeSet):
            return rebased
        raise CommitConflictError(request.parent_id, tip_id, list(map(asdict, rebased)))

    async def _read_logs(self, chain: Sequence[SnapshotInfo], tip_id: str) -> list[TransactionLog]:
        """Read the logs of *chain*; those of expired snapshots may be deleted."""
        found, nbytes = list[TransactionLog](), 0
        wanted = [
            object_id
            for info in chain
            for object_id in (*info.pruned_ancestor_tx_logs, info.object_id)
        ]
        if len(wanted) > _MAX_LOGS:
            self._refuse(tip_id, "too_many_commits")
        for batch in batched(wanted, _LOGS_AT_ONCE):
            try:
                logs = await bounded_gather(self._read_log, batch)
            except DamagedError:
                self._refuse(tip_id, "missing_transaction_log")
            found += logs
            nbytes += sum(log.nbytes for log in logs)
            if nbytes > _MAX_LOG_NBYTES:
                self._refuse(tip_id, "too_many_changes")
        return found

    async def _read_log(self, object_id: bytes) -> TransactionLog:
        repository = self.opened.repository
        decode = TransactionLogDecoder(object_id, repository.limit_nbytes)
        log = await repository.read("transactions", object_id, decode, self.opened.fetch)
        if log is None:
            name = repository.file("transactions", object_id)
            raise DamagedError(name, "does not exist: the changes of the snapshot are unknown")
        return log

    def _refuse(self, tip_id: str, kind: str) -> NoReturn:
        whole = asdict(CommitConflict(kind, "/"))
        raise CommitConflictError(self.request.parent_id, tip_id, [whole])

    def _snapshot(self, tip: BranchTip, base: StoredSnapshot, applied: Applied) -> StoredSnapshot:
        request = self.request
        try:
            metadata = encode_metadata(marked(request.metadata, request.write_id, self._rebases))
            newest, now_us = f"snapshot {tip.snapshot_id}", self.swaps.now_us()
            flushed_at_us = moment_after(base.flushed_at_us, now_us, newest)
        except FutureError as error:
            raise ClockSkewError(f"{self.opened.directory}: {error}") from None
        except ValueError as error:
            raise BadBodyError(f"metadata: {error}") from None
        return StoredSnapshot(
            new_object_id(),
            applied.nodes,
            applied.manifest_files,
            flushed_at_us,
            request.message,
            metadata,
            base.extra,
        )

    def _change(self, tip: BranchTip, snapshot: StoredSnapshot) -> NewSnapshot:
        new = SnapshotInfo(
            snapshot.object_id,
            tip.snapshot.parent if self.request.amend else tip.snapshot.object_id,
            snapshot.flushed_at_us,
            snapshot.message,
            snapshot.metadata,
            tip.snapshot.pruned_ancestor_tx_logs if self.request.amend else (),
        )
        return NewSnapshot(self.request.branch, new, self.request.amend)


def _find(
    request: CommitRequest, info: RepoInfo, opened: OpenedRepository
) -> CommitResult | BranchTip:
    """Look up the commit that *request* has made before, or else the tip of its branch."""
    if (made := find_write(info, request.write_id)) is not None:
        return CommitResult.of(made)
    require_unlocked(info, opened.repo)
    if (tip_id := info.branches.get(request.branch)) is None:
        raise UnknownRefError(f"there is no branch {request.branch} in {opened.directory}")
    if (snapshot := info.snapshot(tip_id)) is None:
        raise DamagedError(opened.repo, f"does not list {tip_id}, the tip of a branch")
    if request.amend and snapshot.parent_id is None:
        raise ConflictError(f"{tip_id} is the first commit, which cannot be amended")
    return BranchTip(info, snapshot)


async def _check_references(
    store: ObjectStore, opened: OpenedRepository, info: RepoInfo, changes: ChangeSet
) -> None:
    config, allowed = _config(opened, info), opened.repository.allowed
    wanted = await asyncio.to_thread(check_references, changes, config, allowed)
    lengths = await chunk_lengths(store, opened.repository, list(wanted))
    if await asyncio.to_thread(_are_short, lengths, wanted):
        await asyncio.to_thread(check_natives, changes, lengths)


def _are_short(lengths: Mapping[bytes, int], wanted: Mapping[bytes, int]) -> bool:
    return any(lengths.get(chunk_id, 0) < least for chunk_id, least in wanted.items())


def _config(opened: OpenedRepository, info: RepoInfo) -> Config:
    if isinstance(info.config, Config):
        return info.config
    raise DamagedError(opened.repo, str(info.config))


def _snapshots_between(info: RepoInfo, start: str, stop: str) -> list[SnapshotInfo] | None:
    """List the snapshots after *start* up to *stop*, earliest first; `None` if unrelated."""
    chain: list[SnapshotInfo] = []
    for each in info.ancestry(stop) or ():
        if each.snapshot_id == start:
            return chain[::-1]
        chain.append(each)
    return None
