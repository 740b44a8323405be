"""Commits: manifests first, then snapshot and log; the branch moves last, and only once."""

import asyncio
from contextlib import suppress
from typing import Final
from weakref import WeakValueDictionary

from app.errors import BusyError, DamagedError, StorageError
from app.formats.icechunk.changes import ChangeSet
from app.formats.icechunk.repo_info import RepoInfo
from app.formats.icechunk.write_ids import check_metadata
from app.model import ObjectRef
from app.resolve.budget import ByteBudget
from app.resolve.icechunk.commit_request import CommitRequest, Committed, Tip, look
from app.resolve.icechunk.making import Making
from app.resolve.icechunk.repo_swap import Planned, RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.icechunk.staging import Staging

_ATTEMPTS: Final = 100
"""How often a commit is begun anew because others have committed to the branch meanwhile."""


class Committer:
    """Commits changes; nothing of one is seen before all of it is."""

    def __init__(self, swaps: RepoSwaps, budget: ByteBudget) -> None:
        self._swaps = swaps
        self._budget = budget
        """Of manifests that are rewritten."""
        self._turns = WeakValueDictionary[tuple[ObjectRef, str], asyncio.Lock]()
        """Who was overtaken waits for others who were, lest they overtake each other again."""

    async def look(self, opened: OpenedRepository, request: CommitRequest) -> Committed | Tip:
        """Give the commit that *request* has made before, or where its branch is now.

        Raises: `UnknownRefError`, `LockedError`, `ConflictError` for a key that was used for
        something else, and what `RepoSwaps` raises.
        """

        def plan(info: RepoInfo) -> Planned[Committed | Tip]:
            return Planned(look(request, info, opened))

        return await self._swaps.update(opened, plan)

    async def commit(
        self,
        opened: OpenedRepository,
        changes: ChangeSet,
        request: CommitRequest,
        seen: Tip | None = None,
    ) -> Committed:
        """Commit *changes*, on top of what others have committed since the parent.

        *seen* is what `look` has just told, if that is known.

        Raises: `CommitConflictError` where that does not go together, `BadBodyError`,
        `ConflictError`, `LockedError`, `UnknownRefError`, `ClockSkewError`, `DamagedError`,
        `BusyError`, `UnwritableError`, `StorageError`; after the last nobody knows whether it was
        done, and the same request finds out.
        """
        check_metadata(request.metadata)
        await self._swaps.store.verify_conditional_writes(opened.directory)
        staging = Staging(opened, self._swaps.store, self._budget)
        making = Making(opened, request, staging, self._swaps.now_us)
        found = await self._attempt(making, changes, seen or await self.look(opened, request))
        if isinstance(found, Committed):
            return found
        turn = self._turns.setdefault((opened.repo, request.branch), asyncio.Lock())
        async with turn:
            for _ in range(_ATTEMPTS):
                found = await self._attempt(making, changes, found)
                if isinstance(found, Committed):
                    return found
        raise BusyError(f"{opened.directory}: others have moved {request.branch} all the time")

    async def _attempt(
        self, making: Making, changes: ChangeSet, seen: Committed | Tip
    ) -> Committed | Tip:
        """Move the branch, unless others have or we had; where that is not clear, look again."""
        if isinstance(seen, Committed):
            return seen
        opened, request = making.opened, making.request
        made = await making.make(changes, seen)

        def plan(info: RepoInfo) -> Planned[Committed | Tip]:
            seen = look(request, info, opened)
            if isinstance(seen, Committed) or seen.snapshot != made.tip:
                return Planned(seen)
            new = made.change.snapshot
            return Planned(Committed(new.snapshot_id, new.parent_id), made.change)

        try:
            return await self._swaps.update(opened, plan)
        except StorageError:
            with suppress(StorageError, DamagedError):
                if isinstance(seen := await self.look(opened, request), Committed):
                    return seen
            raise
