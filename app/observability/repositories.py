"""Counters of commits and sessions, around the classes that perform them."""

from typing import Any

from prometheus_client import Counter

from app.errors import CommitConflictError
from app.formats.icechunk.session import SessionDocument
from app.resolve.icechunk.commit import CommitResult, Committer
from app.resolve.icechunk.session import Session
from app.resolve.icechunk.sessions import Sessions


class CountingCommitter(Committer):
    """Counts commits by outcome: ``made``, ``conflict``, ``failed``."""

    def __init__(self, *args: Any, commits: Counter) -> None:
        super().__init__(*args)
        self._commits = commits

    async def commit(self, *args: Any, **kwargs: Any) -> CommitResult:
        """Commit, and count the outcome."""
        try:
            committed = await super().commit(*args, **kwargs)
        except Exception as error:
            is_conflict = isinstance(error, CommitConflictError)
            self._commits.labels("conflict" if is_conflict else "failed").inc()
            raise
        self._commits.labels("made").inc()
        return committed


class CountingSessions(Sessions):
    """Counts sessions that are ``begun``, and ``discarded`` by their clients."""

    def __init__(self, *args: Any, events: Counter) -> None:
        super().__init__(*args)
        self._events = events

    async def create(self, *args: Any) -> tuple[str, SessionDocument]:
        """Begin a session, and count it."""
        created = await super().create(*args)
        self._events.labels("begun").inc()
        return created

    async def discard(self, session: Session) -> None:
        """Discard a session, and count it."""
        await super().discard(session)
        self._events.labels("discarded").inc()
