"""Sessions of all repositories: created, opened on any replica, discarded, swept when expired."""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

import cachetools

from app.concurrency import bounded_gather
from app.errors import (
    BusyError,
    ClockSkewError,
    ShardgateError,
    StorageError,
    StorageUnavailableError,
    UnknownRefError,
    UnknownSessionError,
)
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
from app.resolve.icechunk.chunk_files import put_new
from app.resolve.icechunk.repo_swap import demand_clock
from app.resolve.icechunk.repository import OpenedRepository
from app.resolve.icechunk.session import Entities, Session, entity_nbytes
from app.resolve.icechunk.session_objects import (
    EntryCache,
    SessionDocumentStore,
    SessionJournal,
    SessionLocation,
    entry_nbytes,
    list_sessions,
)
from app.resolve.icechunk.session_store import SessionStore
from app.resolve.metadata_cache import ReadCache, SizedLRUCache
from app.storage.contract import ObjectStore
from app.storage.wrappers import StoreWrapper

LIFETIME_S: Final = 24 * 3600.0
"""Life of a session after its last write."""
_MAX_SWEPT: Final = 100
_SWEEP_S: Final = 2.0
_SWEEP_AGAIN_S: Final = 600.0
_MAX_CHECKED: Final = 10_000
_READS_AT_ONCE: Final = 16
_JOURNAL_NBYTES: Final = 32 * 1024**2
_ENTITIES_NBYTES: Final = 32 * 1024**2
_MAX_STORES: Final = 1024
_MAX_STORES_NBYTES: Final = 64 * 1024**2


class SessionStores(StoreWrapper):
    """Stores of recently used sessions, each behind a bucket of its own."""

    def __init__(self) -> None:
        self._recent = OrderedDict[str, SessionStore]()
        self._alive = WeakValueDictionary[str, SessionStore]()
        """Includes evicted stores that requests still use."""

    def find(self, root: ObjectRef) -> SessionStore | None:
        if root.bucket in self._recent:
            self._recent.move_to_end(root.bucket)
        return self._alive.get(root.bucket)

    def add(self, store: SessionStore) -> SessionStore:
        """Keep *store*, and evict the least recently used ones over the limits."""
        self._recent[store.root.bucket] = self._alive[store.root.bucket] = store
        while len(self._recent) > 1 and self._is_full():
            self._recent.popitem(last=False)
        return store

    def store_of(self, ref: ObjectRef) -> SessionStore:
        if (store := self._alive.get(ref.bucket)) is None:
            raise StorageUnavailableError(ref, "the session was not opened")
        return store

    async def aclose(self) -> None:
        """Do nothing: the underlying store is closed by its owner."""

    def _is_full(self) -> bool:
        sessions = [store.session for store in self._recent.values()]
        parents = {id(parent): parent.nbytes for each in sessions if (parent := each.parent)}
        nbytes = sum(each.nbytes for each in sessions) + sum(parents.values())
        return len(sessions) > _MAX_STORES or nbytes > _MAX_STORES_NBYTES


class Sessions:
    """Creates, opens and ends sessions; their keys are served by *stores*.

    *on_event* is called with ``begun`` and ``discarded``.
    """

    def __init__(
        self,
        store: ObjectStore,
        fetch: ReadCache,
        *,
        lifetime_s: float = LIFETIME_S,
        clock: Callable[[], float] = time.time,
        on_event: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._on_event = on_event
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._entries: EntryCache = SizedLRUCache(_JOURNAL_NBYTES, entry_nbytes)
        self._entities: Entities = SizedLRUCache(_ENTITIES_NBYTES, entity_nbytes)
        self._sweep_at: cachetools.LRUCache[SessionLocation, float] = cachetools.LRUCache(
            _MAX_CHECKED
        )
        """When a session has to be checked for expiry again."""
        self.stores = SessionStores()

    async def create(self, opened: OpenedRepository, branch: str) -> tuple[str, SessionDocument]:
        """Create a session at the tip of *branch*, and return its id and document."""
        await self._store.verify_conditional_writes(opened.directory)
        self._fetch.forget(opened.repo)
        info = await opened.writable_info()
        tip = await opened.repository.refs.resolve(Branch(branch), opened.fetch)
        if tip is None:
            raise UnknownRefError(f"there is no branch {branch} in {opened.directory}")
        now_s, inline_nbytes = self._clock(), 0
        if not isinstance(info.config, DecodeError):
            inline_nbytes = info.config.inline_chunk_threshold_bytes
        document = SessionDocument(
            branch, tip.snapshot_id, inline_nbytes, now_s, now_s + self._lifetime_s
        )
        session_id = encode_id(secrets.token_bytes(OBJECT_ID_NBYTES))
        name = SessionLocation(opened.directory, session_id).document
        await put_new(self._store, name, encode_session(document))
        try:
            await demand_clock(self._store, name, now_s)
        except ClockSkewError:
            await self._store.delete(name, expected=None)
            raise
        with suppress(StorageError, TimeoutError):  # the next session created continues
            async with asyncio.timeout(_SWEEP_S):
                await self._sweep(opened)
        self._on_event("begun")
        return session_id, document

    async def open(self, repository: Repository, session_id: str, fetch: Fetch) -> SessionStore:
        """Open a session and read its document; its parent may no longer exist."""
        if decode_id(session_id) is None:
            raise UnknownSessionError(f"there is no session {session_id}")
        root = _root_of(repository, session_id)
        if (store := self.stores.find(root)) is None:
            location = SessionLocation(repository.directory, session_id)
            session = Session(
                location,
                repository,
                self._store,
                fetch,
                SessionJournal(self._store, location, self._entries),
                entities=self._entities,
                lifetime_s=self._lifetime_s,
                clock=self._clock,
            )
            store = self.stores.add(SessionStore(session, root))
        await store.session.read()
        return store

    async def list_all(self, opened: OpenedRepository) -> dict[str, SessionDocument]:
        """Return the documents of the live sessions of a repository, ordered by session id."""

        async def read(session_id: str) -> SessionDocument | None:
            document = await self._documents(opened, session_id).read()
            if document is None or isinstance(document.state, Discarded):
                return None
            return document if document.expires_at_s > self._clock() else None

        ids = [each async for each in list_sessions(self._store, opened.directory)]
        documents = await bounded_gather(read, ids, limit=_READS_AT_ONCE)
        return {each: found for each, found in zip(ids, documents, strict=True) if found}

    async def discard(self, session: Session) -> None:
        """End *session* and delete its document and journal; raise `BusyError` during a commit."""

        def edit(document: SessionDocument | None) -> SessionDocument:
            document = session.require_live(document)
            if isinstance(state := document.state, Sealed) and state.until_s > self._clock():
                raise BusyError("the session is being committed")
            return _discarded(document)

        await session.documents.edit(edit)
        await self._remove(session.location)
        self._on_event("discarded")

    async def _sweep(self, opened: OpenedRepository) -> None:
        count = 0
        async for session_id in list_sessions(self._store, opened.directory):
            location = SessionLocation(opened.directory, session_id)
            if self._sweep_at.get(location, 0.0) > self._clock():
                continue
            self._sweep_at[location] = self._clock() + _SWEEP_AGAIN_S
            try:
                with suppress(ShardgateError):
                    await self._tidy(location, self._documents(opened, session_id))
            except asyncio.CancelledError:
                self._sweep_at.pop(location, None)
                raise
            count += 1
            if count == _MAX_SWEPT:
                return

    def _documents(self, opened: OpenedRepository, session_id: str) -> SessionDocumentStore:
        name = SessionLocation(opened.directory, session_id).document
        limit_nbytes = opened.repository.limit_nbytes
        return SessionDocumentStore(self._store, name, limit_nbytes=limit_nbytes)

    async def _tidy(self, location: SessionLocation, documents: SessionDocumentStore) -> None:
        """Remove one session if it has ended, or its journal if it is committed.

        The document is marked before anything is removed: a write or commit at the same time
        either postpones the end before, or sees the mark.
        """

        def discard_expired(document: SessionDocument | None) -> SessionDocument | None:
            is_live = document is None or document.expires_at_s > self._clock()
            return document if is_live or document is None else _discarded(document)

        document = await documents.read()
        if document is not None and document.expires_at_s <= self._clock():
            document = await documents.edit(discard_expired)
        if document is None:
            return
        if isinstance(document.state, Discarded):
            await self._remove(location)
        elif isinstance(document.state, Committed):
            await SessionJournal(self._store, location, self._entries).clear()
            self._sweep_at[location] = document.expires_at_s

    async def _remove(self, location: SessionLocation) -> None:
        """Remove the journal, and the document last: a sweep finds the journal by it."""
        await SessionJournal(self._store, location, self._entries).clear()
        await self._store.delete(location.document, expected=None)


def _root_of(repository: Repository, session_id: str) -> ObjectRef:
    """Return the root of a session's keys, which depends on the permitted virtual references."""
    more = f"+{hash(repository.allowed):x}" if repository.allowed else ""
    return ObjectRef(f"{repository.directory}/@session.{session_id}{more}", "")


def _discarded(document: SessionDocument) -> SessionDocument:
    is_marked = isinstance(document.state, Discarded)
    return document if is_marked else replace(document, state=Discarded(), nodes={})
