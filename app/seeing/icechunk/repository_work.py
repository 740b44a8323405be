"""Counts of what is done in Icechunk repositories, around what does it."""

from collections import Counter

from app.errors import CommitConflictError
from app.formats.icechunk.change_set import ChangeSet
from app.resolve.budget import ByteBudget
from app.resolve.fetch import ReadCache
from app.resolve.icechunk.commit_request import CommitRequest, Committed, Tip
from app.resolve.icechunk.committing import Committer
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.icechunk.session import Session
from app.resolve.icechunk.sessions import SessionReport, Sessions
from app.storage.contract import ObjectStore


class CountingCommitter(Committer):
    """Counts commits by what became of them: ``made``, ``conflict``, ``failed``."""

    def __init__(self, swaps: RepoSwaps, budget: ByteBudget, commits: Counter[str]) -> None:
        super().__init__(swaps, budget)
        self._commits = commits

    async def commit(
        self,
        opened: OpenedRepository,
        changes: ChangeSet,
        request: CommitRequest,
        seen: Tip | None = None,
    ) -> Committed:
        """Commit, and count."""
        try:
            made = await super().commit(opened, changes, request, seen)
        except CommitConflictError:
            self._commits["conflict"] += 1
            raise
        except Exception:
            self._commits["failed"] += 1
            raise
        self._commits["made"] += 1
        return made


class CountingSessions(Sessions):
    """Counts sessions that are ``begun``, and ``discarded`` by who has no more use for them."""

    def __init__(self, store: ObjectStore, fetch: ReadCache, events: Counter[str]) -> None:
        super().__init__(store, fetch)
        self._events = events

    async def create(self, opened: OpenedRepository, branch: str) -> SessionReport:
        """Begin a session, and count."""
        begun = await super().create(opened, branch)
        self._events["begun"] += 1
        return begun

    async def discard(self, session: Session) -> None:
        """End a session, and count."""
        await super().discard(session)
        self._events["discarded"] += 1
