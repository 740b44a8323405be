"""The sessions of all repositories: begun, found on any replica, discarded, swept away."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import cachetools

from app.concurrency import bounded_gather
from app.errors import (
    BusyError,
    ClockSkewError,
    ShardgateError,
    StorageError,
    UnknownRefError,
    UnknownSessionError,
)
from app.formats.icechunk.config import Config
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id, encode_id
from app.formats.icechunk.keys import Branch
from app.formats.icechunk.repository import Repository
from app.formats.icechunk.session import (
    Committed,
    Discarded,
    Sealed,
    SessionDocument,
    encode_session,
)
from app.formats.reading import DecodeError, Fetch
from app.model import ObjectRef
from app.resolve.icechunk.journal import Journal, Place, list_sessions
from app.resolve.icechunk.ledger import Ledger
from app.resolve.icechunk.repo_swap import demand_clock
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.icechunk.session import Entities, Session, weigh_entity
from app.resolve.icechunk.session_store import SessionStore
from app.resolve.icechunk.session_stores import SessionStores
from app.resolve.metadata_cache import ReadCache, SizedLRUCache
from app.storage.contract import ABSENT, Conflict, ObjectStore

LIFETIME_S: Final = 24 * 3600.0
"""A session that nobody writes to ends after so long."""
_MOST_SWEPT: Final = 100
"""So many sessions are looked at when another one begins."""
_SWEEP_S: Final = 2.0
"""So long that takes at most; the next one goes on."""
_MOST_KNOWN: Final = 10_000
_ASKED_AT_ONCE: Final = 16
_LOOKED_AT_AGAIN_S: Final = 600.0
_JOURNAL_NBYTES: Final = 32 * 1024**2
_ENTITIES_NBYTES: Final = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class SessionReport:
    """How a session stands."""

    session_id: str
    branch: str
    parent_id: str
    created_at_s: float
    expires_at_s: float
    state: str
    """``open``, ``sealed`` while it is being committed, or ``committed``."""
    snapshot_id: str | None
    """What it became."""


def report(session_id: str, document: SessionDocument) -> SessionReport:
    """Tell how a session stands."""
    state = document.state
    return SessionReport(
        session_id,
        document.branch,
        document.parent_id,
        document.created_at_s,
        document.expires_at_s,
        type(state).__name__.lower(),
        state.snapshot_id if isinstance(state, Committed) else None,
    )


class Sessions:
    """Begins, finds and ends sessions; the keys of each are in a bucket of *stores*."""

    def __init__(
        self,
        store: ObjectStore,
        fetch: ReadCache,
        *,
        lifetime_s: float = LIFETIME_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._journal = Journal(store, max_bytes=_JOURNAL_NBYTES)
        self._entities: Entities = SizedLRUCache(_ENTITIES_NBYTES, weigh_entity)
        self._looked_at: cachetools.LRUCache[Place, float] = cachetools.LRUCache(_MOST_KNOWN)
        """Until when nothing has to be done about a session that nobody uses."""
        self.stores = SessionStores()

    async def create(self, opened: OpenedRepository, branch: str) -> SessionReport:
        """Begin a session at the tip of *branch*.

        Raises: `UnknownRefError`, `ReadOnlyError`, `LockedError`, `ClockSkewError`,
        `UnwritableError`, `StorageError`.
        """
        await self._store.verify_conditional_writes(opened.directory)
        self._fetch.forget(opened.repo)
        info = await opened.writable_info()
        tip = await opened.repository.refs.resolve(Branch(branch), opened.fetch)
        if tip is None:
            raise UnknownRefError(f"there is no branch {branch} in {opened.directory}")
        now_s = self._clock()
        document = SessionDocument(
            branch, tip.snapshot_id, _inline_nbytes(info.config), now_s, now_s + self._lifetime_s
        )
        place = Place(opened.directory, encode_id(secrets.token_bytes(OBJECT_ID_NBYTES)))
        made = await self._store.put(place.document, [encode_session(document)], expected=ABSENT)
        if isinstance(made, Conflict):
            raise BusyError("no id was free")
        try:
            await demand_clock(self._store, place.document, now_s)
        except ClockSkewError:
            await self._store.delete(place.document, expected=None)
            raise
        with suppress(StorageError, TimeoutError):  # others go on, when they begin a session
            async with asyncio.timeout(_SWEEP_S):
                await self._sweep(opened)
        return report(place.session_id, document)

    async def find(self, repository: Repository, session_id: str, fetch: Fetch) -> Session:
        """Find a session, and ask how it stands; the snapshot that it builds on may be gone.

        Raises: `UnknownSessionError`, `DamagedError`, `StorageError`.
        """
        session = self._session(repository, session_id, fetch)
        await session.ask()
        return session

    async def every(self, opened: OpenedRepository) -> list[SessionReport]:
        """Tell how all sessions stand that go on, in the order of their ids."""

        async def ask(session_id: str) -> SessionReport | None:
            document = await self._ledger(opened, Place(opened.directory, session_id)).ask()
            if document is None or isinstance(document.state, Discarded):
                return None
            return report(session_id, document) if document.expires_at_s > self._clock() else None

        ids = [each async for each in list_sessions(self._store, opened.directory)]
        asked = await bounded_gather(ask, ids, limit=_ASKED_AT_ONCE)
        return [each for each in asked if each is not None]

    async def discard(self, session: Session) -> None:
        """End *session*, and remove what is stored of it but files of chunks.

        Raises: `BusyError` while it is being committed, `UnknownSessionError`.
        """

        def edit(document: SessionDocument | None) -> SessionDocument:
            document = session.demand_there(document)
            if isinstance(state := document.state, Sealed) and state.until_s > self._clock():
                raise BusyError("the session is being committed")
            return _discarded(document)

        await session.ledger.change(edit)
        await self._remove(session.place)

    def _session(self, repository: Repository, session_id: str, fetch: Fetch) -> Session:
        if decode_id(session_id) is None:
            raise UnknownSessionError(f"there is no session {session_id}")
        root = root_of(repository, session_id)
        if (store := self.stores.find(root)) is None:
            session = Session(
                Place(repository.directory, session_id),
                repository,
                self._store,
                fetch,
                self._journal,
                entities=self._entities,
                lifetime_s=self._lifetime_s,
                clock=self._clock,
            )
            store = self.stores.add(root, SessionStore(session))
        return store.session

    async def _sweep(self, opened: OpenedRepository) -> None:
        """Remove what has ended, as far as that takes no long time and can be done."""
        count = 0
        async for session_id in list_sessions(self._store, opened.directory):
            place = Place(opened.directory, session_id)
            if self._looked_at.get(place, 0.0) > self._clock():
                continue
            self._looked_at[place] = self._clock() + _LOOKED_AT_AGAIN_S
            try:
                with suppress(ShardgateError):
                    await self._tidy(place, self._ledger(opened, place))
            except asyncio.CancelledError:
                self._looked_at.pop(place, None)
                raise
            count += 1
            if count == _MOST_SWEPT:
                return

    def _ledger(self, opened: OpenedRepository, place: Place) -> Ledger:
        """Ask for the document of a session of which nothing else is wanted."""
        return Ledger(self._store, place.document, limit_nbytes=opened.repository.limit_nbytes)

    async def _tidy(self, place: Place, ledger: Ledger) -> None:
        document = await ledger.ask()
        if document is None:
            return
        if await self._is_over(ledger, document):
            await self._remove(place)
        elif isinstance(document.state, Committed):
            await self._journal.clear(place)
            self._looked_at[place] = document.expires_at_s

    async def _is_over(self, ledger: Ledger, document: SessionDocument) -> bool:
        """Tell whether nobody writes to a session any more, and none will.

        It is marked before anything is removed: who writes to it or commits it at this moment
        either has made it last longer, or finds out.
        """

        def edit(document: SessionDocument | None) -> SessionDocument | None:
            if document is None or document.expires_at_s > self._clock():
                return document
            return _discarded(document)

        now: SessionDocument | None = document
        if document.expires_at_s <= self._clock():
            now = await ledger.change(edit)
        return now is not None and isinstance(now.state, Discarded)

    async def _remove(self, place: Place) -> None:
        """Remove the journal, then the document, by which others would find the rest."""
        await self._journal.clear(place)
        await self._store.delete(place.document, expected=None)


def root_of(repository: Repository, session_id: str) -> ObjectRef:
    """Name the root of the keys of a session.

    Who may follow other references sees another session.
    """
    more = f"+{hash(repository.allowed):x}" if repository.allowed else ""
    return ObjectRef(f"{repository.directory}/@session.{session_id}{more}", "")


def _discarded(document: SessionDocument) -> SessionDocument:
    """Mark *document*, once."""
    is_marked = isinstance(document.state, Discarded)
    return document if is_marked else replace(document, state=Discarded(), nodes={})


def _inline_nbytes(config: Config | DecodeError) -> int:
    """Tell which chunks are kept inline; who cannot know that keeps none."""
    return 0 if isinstance(config, DecodeError) else config.inline_chunk_threshold_bytes
