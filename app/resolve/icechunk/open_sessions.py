"""What sessions need that go on, and which have ended."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.session_document import Committed, Discarded, Sealed, SessionDocument
from app.resolve.icechunk.clocks import SKEW_S
from app.resolve.icechunk.journal import Journal, Place, list_sessions
from app.resolve.icechunk.ledger import Ledger
from app.resolve.icechunk.repositories import OpenedRepository
from app.storage.contract import ObjectStore

_S: Final = 1_000_000


class OpenSession(NamedTuple):
    """A session that goes on."""

    session_id: str
    branch: str
    parent_id: str
    """The snapshot that it began with."""
    since_us: int
    """None of its chunks was written before, in microseconds since 1970 began."""


class Sessions(NamedTuple):
    """The sessions of a repository."""

    open: Sequence[OpenSession]
    ended: Sequence[Place]

    @property
    def parents(self) -> frozenset[bytes]:
        """Name the snapshots that those which go on began with."""
        found = (decode_id(each.parent_id) for each in self.open)
        return frozenset(each for each in found if each is not None)

    @property
    def oldest(self) -> OpenSession | None:
        """Find the one that goes on since longest."""
        return min(self.open, key=lambda each: each.since_us, default=None)


async def find_sessions(store: ObjectStore, opened: OpenedRepository, now_us: int) -> Sessions:
    """Read the documents of all sessions.

    Raises: `DamagedError` where one of them cannot be read: nobody knows what it needs.
    """
    going_on, ended = list[OpenSession](), list[Place]()
    async for session_id in list_sessions(store, opened.directory):
        place = Place(opened.directory, session_id)
        ledger = Ledger(store, place.document, limit_nbytes=opened.repository.limit_nbytes)
        document = await ledger.ask()
        if document is None:
            continue
        if _has_ended(document, now_us / _S):
            ended.append(place)
        elif not isinstance(document.state, Committed):
            since_us = round((document.created_at_s - SKEW_S) * _S)
            going_on.append(OpenSession(session_id, document.branch, document.parent_id, since_us))
    return Sessions(going_on, ended)


def _has_ended(document: SessionDocument, now_s: float) -> bool:
    """Tell whether nobody writes to a session, or commits it, any more."""
    last_s = document.expires_at_s
    if isinstance(document.state, Sealed):
        last_s = max(last_s, document.state.until_s)
    return isinstance(document.state, Discarded) or last_s + SKEW_S <= now_s


async def remove_session(store: ObjectStore, place: Place) -> None:
    """Remove what is stored of a session: the document last, by which others find the rest."""
    await Journal(store, max_bytes=0).clear(place)
    await store.delete(place.document, expected=None)
