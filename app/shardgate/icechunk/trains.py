"""Trains of commits: those that wait for one branch are made together, by one swap of ``repo``.

1. All commits that arrive during a train are the next one. A train of one is the ordinary case.
   It begins with the version of ``repo`` that the train before has written.
2. Each is prepared on top of the one before it; one that fails does not hold up the others.
3. Their files are written together; nothing of them is visible yet.
4. One swap of ``repo`` adds all snapshots and moves the branch. If another writer has moved the
   branch, the commits are prepared again on its new tip.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from shardgate.concurrency import BatchQueue, SingleFlight, resolve, retry_conflicts, run_in_thread
from shardgate.errors import CommitConflictError, ShardgateError, StorageError, UnknownRefError
from shardgate.formats.icechunk.changes import (
    ChangeSet,
    Edit,
    check_natives,
    check_references,
    edit,
    nbytes_of,
)
from shardgate.formats.icechunk.ids import NODE_ID_NBYTES
from shardgate.formats.icechunk.repo_info import RepoInfo
from shardgate.icechunk.chunk_files import chunk_lengths
from shardgate.icechunk.commit import (
    SHORT_NBYTES,
    BranchTip,
    CommitBuilder,
    CommitRequest,
    CommitResult,
    PreparedFiles,
    config_of,
    find_commit,
)
from shardgate.icechunk.repo_swap import Planned, RepoFile, RepoSwaps
from shardgate.icechunk.repository import OpenedRepository, read_snapshot
from shardgate.model import ObjectRef
from shardgate.read.budget import ByteBudget
from shardgate.storage.contract import CONFLICT, Conflict, ObjectStore

type _Branch = tuple[ObjectRef, str]
"""A repository, and the name of a branch."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingCommit:
    """A commit that waits for its train, or is part of one."""

    builder: CommitBuilder
    file: RepoFile | None
    """Version of ``repo``, if one was read a moment ago."""
    done: "asyncio.Future[CommitResult]"


type _Outcomes = dict[PendingCommit, CommitResult | Exception]


class _LookUp(NamedTuple):
    tip: BranchTip | None
    """`None` if all commits have outcomes."""
    outcomes: _Outcomes
    """Of the commits that were made before, or cannot be made."""


@dataclass(slots=True)
class Train:
    """Commits of one branch that become visible together."""

    swaps: RepoSwaps
    opened: OpenedRepository
    branch: str
    commits: Sequence[PendingCommit]
    known: RepoFile | None
    """Version of ``repo`` to begin with, which other writers may have replaced."""
    tip: BranchTip | None = None
    is_overtaken: bool = False
    """True if another writer has moved the branch since."""
    written: RepoFile | None = None
    """Version of ``repo`` that has the commits."""

    async def run(self) -> None:
        """Make the commits, and pass to each its outcome."""
        opened = self.opened
        try:
            if self.known is not None:
                found = await self.swaps.look_up(opened, self._look(), self.known)
                self.tip = None if found.outcomes else found.tip
            if self.tip is None:
                self._settle(await self.swaps.look_up(opened, self._look()))
            if self.tip is not None:
                await self.swaps.store.verify_conditional_writes(opened.directory)
                await retry_conflicts(self._attempt, Conflict, self)
        except Exception as error:  # noqa: BLE001  passed to the callers
            for commit in self.commits:
                resolve(commit.done, error)

    def __str__(self) -> str:
        return f"{self.opened.directory}: branch {self.branch}"

    def _waiting(self) -> list[PendingCommit]:
        """Return the commits without an outcome; the callers of others may have left."""
        return [commit for commit in self.commits if not commit.done.done()]

    def _look(self) -> Callable[[RepoFile], _LookUp]:
        """Return a function that looks up the waiting commits in a version of ``repo``."""
        waiting = self._waiting()

        def look(file: RepoFile) -> _LookUp:
            found = _LookUp(None, {})
            for commit in waiting:
                builder = commit.builder
                try:
                    known = find_commit(builder.request, file, builder.opened)
                except ShardgateError as error:
                    found.outcomes[commit] = error
                    continue
                if isinstance(known, CommitResult):
                    found.outcomes[commit] = known
                else:
                    found = found._replace(tip=known)
            return found

        return look

    def _settle(self, found: _LookUp) -> None:
        self.tip = found.tip
        _pass_on(found.outcomes)

    async def _attempt(self) -> Conflict | None:
        """Move the branch from the tip by one swap, or learn the tip to which it has moved."""
        if (tip := self.tip) is None:
            return None
        files = PreparedFiles(self.swaps, self.opened.repository)
        outcomes: _Outcomes = {}
        last = await self._prepare(tip, files, outcomes)
        if not last.ahead and tip.file is self.known:
            # They may succeed on the current version; their builders take these files for written.
            self.known = None
            await files.write()
            self._settle(await self.swaps.look_up(self.opened, self._look()))
            return CONFLICT
        if not last.ahead:
            return None
        await files.write(partial(self.swaps.write_backup, self.opened, tip.file))
        changes = [each.change for each in last.ahead]
        look = self._look()

        def plan(file: RepoFile) -> Planned[_LookUp | None]:
            found = look(file)
            # One was made before, or the branch has moved: begin again on what was found.
            if found.outcomes or found.tip is None or found.tip.snapshot != tip.snapshot:
                return Planned(found)
            return Planned(None, changes)

        try:
            swapped = await self.swaps.update(self.opened, plan, tip.file)
        except StorageError:
            await self._reconcile(outcomes)
            raise
        if swapped.answer is not None:
            self.is_overtaken = True
            self._settle(swapped.answer)
            return CONFLICT
        self.written = swapped.file
        _pass_on(outcomes)
        return None

    async def _prepare(
        self, tip: BranchTip, files: PreparedFiles, outcomes: _Outcomes
    ) -> BranchTip:
        """Prepare the waiting commits one on top of the other, and return the last one.

        Add to *outcomes* those that hold once the commits are made. A commit may have failed
        because of one that is not made yet, and never will be if the swap fails.
        """
        for commit in self._waiting():
            request = commit.builder.request
            try:
                if tip.ahead and (twin := tip.find_ahead(request.write_id)) is not None:
                    outcomes[commit] = CommitResult.of(twin)
                    continue
                prepared = await commit.builder.build(tip, files)
            except Exception as error:  # noqa: BLE001  passed to the caller
                # It may have failed because of a commit before it, or of a version that is not the
                # current one: the swap decides about both.
                if tip.ahead or tip.file is self.known:
                    outcomes[commit] = error
                else:
                    resolve(commit.done, error)
            else:
                tip = tip.with_commit(prepared)
                outcomes[commit] = CommitResult.of(prepared.change.snapshot)
        return tip

    async def _reconcile(self, outcomes: _Outcomes) -> None:
        """Pass on the *outcomes* if the swap was made, though its response was lost."""
        with suppress(ShardgateError):
            found = await self.swaps.look_up(self.opened, self._look())
            made = {
                commit: result
                for commit, result in found.outcomes.items()
                if isinstance(result, CommitResult)
            }
            if any(outcomes.get(commit) == result for commit, result in made.items()):
                _pass_on(outcomes)
            _pass_on(made)


def _pass_on(outcomes: Mapping[PendingCommit, CommitResult | Exception]) -> None:
    for commit, outcome in outcomes.items():
        resolve(commit.done, outcome)


class Committer:
    """Commits to branches, by one train after the other for each.

    A commit whose caller leaves before it is prepared is left out; prepared commits are made even
    if all callers leave. *on_commit* is called with ``made``, ``conflict`` or ``failed``.
    """

    def __init__(
        self,
        swaps: RepoSwaps,
        budget: ByteBudget,
        on_commit: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Make a committer; *budget* is for manifests that are rewritten."""
        self.swaps = swaps
        self._budget = budget
        self._on_commit = on_commit
        self._queues: dict[_Branch, BatchQueue[PendingCommit]] = {}
        self._running = SingleFlight[_Branch]()

    async def aclose(self) -> None:
        """Cancel all trains, and wait until they have ended."""
        await self._running.aclose()

    async def commit(
        self,
        opened: OpenedRepository,
        changes: ChangeSet,
        request: CommitRequest,
        file: RepoFile | None = None,
    ) -> CommitResult:
        """Commit *changes*; start from *file*, a version of ``repo``, if it was read a moment ago.

        Raises: `CommitConflictError`, `BadBodyError`, `ConflictError`, `LockedError`,
        `UnknownRefError`, `ClockSkewError`, `DamagedError`, `BusyError`, `UnwritableError`,
        `StorageError`. After `StorageError` the outcome is unknown; repeating the same request
        finds or makes the commit.
        """
        builder = CommitBuilder(opened, changes, request, self.swaps, self._budget)
        try:
            if request.branch is None:
                committed = await self._detach(builder, file)
            else:
                future = asyncio.get_running_loop().create_future()
                committed = await self._join(request.branch, PendingCommit(builder, file, future))
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
        found = await self.swaps.look_up(opened, lambda file: find_commit(request, file, opened))
        if isinstance(found, CommitResult):
            return found
        info = found.info
        parent_id = request.parent_id or found.snapshot_id
        is_listed = parent_id == found.snapshot_id or await opened.decode_in_thread(
            opened.repo, lambda: info.snapshot(parent_id) is not None, is_long=info.is_long
        )
        parent = is_listed and await read_snapshot(opened.repository, parent_id, opened.fetch)
        if not parent:
            raise UnknownRefError(f"there is no snapshot {parent_id} in {opened.directory}")
        new_id = partial(secrets.token_bytes, NODE_ID_NBYTES)
        is_long = parent.nbytes > SHORT_NBYTES or nbytes_of(edits) > SHORT_NBYTES
        changes = await run_in_thread(edit, parent, edits, new_id, is_long=is_long)
        await _check_references(self.swaps.store, opened, info, changes)
        return await self.commit(opened, changes, replace(request, parent_id=parent_id), found.file)

    async def _detach(self, builder: CommitBuilder, known: RepoFile | None) -> CommitResult:
        """Make a detached snapshot, which needs no train: no other commit comes on top of it."""
        opened = builder.opened

        def look(file: RepoFile) -> CommitResult | BranchTip:
            return find_commit(builder.request, file, opened)

        found = await self.swaps.look_up(opened, look, known)
        if isinstance(found, CommitResult):
            return found
        await self.swaps.store.verify_conditional_writes(opened.directory)
        files = PreparedFiles(self.swaps, opened.repository)
        prepared = await builder.build(found, files)
        await files.write(partial(self.swaps.write_backup, opened, found.file))

        def plan(file: RepoFile) -> Planned[CommitResult]:
            # Another request with the same key may have been faster.
            if isinstance(made := look(file), CommitResult):
                return Planned(made)
            return Planned(CommitResult.of(prepared.change.snapshot), [prepared.change])

        return (await self.swaps.update(opened, plan, found.file)).answer

    async def _join(self, branch_name: str, commit: PendingCommit) -> CommitResult:
        """Make *commit* with all others that wait for its branch."""
        branch = commit.builder.opened.directory, branch_name
        if (queue := self._queues.get(branch)) is None:
            queue = self._queues[branch] = BatchQueue()
            self._running.start(branch, partial(self._run, branch, queue))
        queue.add(commit)
        try:
            return await commit.done
        except asyncio.CancelledError:
            with suppress(ValueError):  # the train has departed
                queue.requests.remove(commit)
            raise

    async def _run(self, branch: _Branch, queue: BatchQueue[PendingCommit]) -> None:
        clock = asyncio.get_running_loop().time
        commits: list[PendingCommit] = []
        try:
            known = queue.requests[0].file
            while True:
                departed_at = clock()
                commits = queue.take(32)  # no caller waits long for the files of all others
                opened = commits[0].builder.opened
                train = Train(self.swaps, opened, branch[1], commits, known)
                await train.run()
                # Where others write to the branch as well, it is probably outdated.
                known = None if train.is_overtaken else train.written
                # A client that commits alone does not wait for others.
                is_shared = len(commits) + len(queue.requests) > 1
                # Callers of the last train come back now, and can share the next one; those with
                # sessions, for which no file was read, take many requests before that.
                if is_shared and any(commit.file is not None for commit in commits):
                    await queue.fill(min(0.25, clock() - departed_at))
                if not queue.requests:
                    return
        finally:
            del self._queues[branch]
            for commit in [*commits, *queue.requests]:
                commit.done.cancel()


async def _check_references(
    store: ObjectStore, opened: OpenedRepository, info: RepoInfo, changes: ChangeSet
) -> None:
    config = config_of(opened, info)
    allowed = opened.repository.allowed
    is_long = changes.nbytes > SHORT_NBYTES
    wanted = await run_in_thread(check_references, changes, config, allowed, is_long=is_long)
    lengths = await chunk_lengths(store, opened.repository, list(wanted))
    await run_in_thread(check_natives, changes, wanted, lengths, is_long=is_long)
