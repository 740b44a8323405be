"""Counters of commits and sessions, around the classes that perform them."""

from prometheus_client import Counter

from app.errors import CommitConflictError
from app.formats.icechunk.changes import ChangeSet
from app.formats.icechunk.session import SessionDocument
from app.resolve.budget import ByteBudget
from app.resolve.icechunk.commit import BranchTip, CommitRequest, CommitResult, Committer
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.resolve.icechunk.repository import OpenedRepository
from app.resolve.icechunk.session import Session
from app.resolve.icechunk.sessions import Sessions
from app.resolve.metadata_cache import ReadCache
from app.storage.contract import ObjectStore


class CountingCommitter(Committer):
    """Counts commits by outcome: ``made``, ``conflict``, ``failed``."""

    def __init__(self, swaps: RepoSwaps, budget: ByteBudget, commits: Counter) -> None:
        super().__init__(swaps, budget)
        self._commits = commits

    async def commit(
        self,
        opened: OpenedRepository,
        changes: ChangeSet,
        request: CommitRequest,
        tip: BranchTip | None = None,
    ) -> CommitResult:
        """Commit, and count the outcome."""
        try:
            committed = await super().commit(opened, changes, request, tip)
        except CommitConflictError:
            self._commits.labels("conflict").inc()
            raise
        except Exception:
            self._commits.labels("failed").inc()
            raise
        self._commits.labels("made").inc()
        return committed


class CountingSessions(Sessions):
    """Counts sessions that are ``begun``, and ``discarded`` by their clients."""

    def __init__(self, store: ObjectStore, fetch: ReadCache, events: Counter) -> None:
        super().__init__(store, fetch)
        self._events = events

    async def create(self, opened: OpenedRepository, branch: str) -> tuple[str, SessionDocument]:
        """Begin a session, and count it."""
        created = await super().create(opened, branch)
        self._events.labels("begun").inc()
        return created

    async def discard(self, session: Session) -> None:
        """Discard a session, and count it."""
        await super().discard(session)
        self._events.labels("discarded").inc()
