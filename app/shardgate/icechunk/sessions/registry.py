"""Sessions of all repositories: created, opened on any replica, discarded, swept when expired.

Keys of sessions, ``@session.ID/a/c/0/0``, are routed to readers and writers of their own; those of
all other keys know nothing of sessions. A session is read and written as a dataset of plain Zarr
over `SessionStores`.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import cachetools

from shardgate.errors import (
    ClockSkewError,
    DamagedError,
    ShardgateError,
    StorageError,
    StorageUnavailableError,
    UnknownRefError,
    UnknownSessionError,
)
from shardgate.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id, encode_id
from shardgate.formats.icechunk.keys import SESSION, Branch, session_prefix
from shardgate.formats.icechunk.layout import RepositoryLayout
from shardgate.formats.icechunk.repository_files import Repository
from shardgate.formats.listing import Window
from shardgate.formats.reading import DecodeError, Fetch
from shardgate.icechunk.chunk_files import put_new
from shardgate.icechunk.repo_swap import demand_clock
from shardgate.icechunk.repository import OpenedRepository
from shardgate.icechunk.sessions.document import (
    Committed,
    Discarded,
    SessionDocument,
    encode_session,
)
from shardgate.icechunk.sessions.journal import (
    EntryCache,
    SessionDocumentStore,
    SessionJournal,
    SessionLocation,
    entry_nbytes,
    list_sessions,
)
from shardgate.icechunk.sessions.session import LIFETIME_S, Session
from shardgate.icechunk.sessions.store import SessionStore
from shardgate.model import ETag, ObjectRef, VirtualKey
from shardgate.read.containers import Containers, Dataset
from shardgate.read.listing import Page
from shardgate.read.metadata_cache import ReadCache, SizedLRUCache
from shardgate.read.resolver import Resolver
from shardgate.storage.contract import NO_HEADERS, ObjectHeaders, ObjectStore
from shardgate.storage.wrappers import StoreWrapper
from shardgate.write.writer import Eraser, KeyWrite, Outcome, Writer

_MAX_SWEPT: Final = 100
_SWEEP_S: Final = 2.0
_SWEEP_AGAIN_S: Final = 600.0
_MAX_CHECKED: Final = 10_000
_JOURNAL_NBYTES: Final = 32 * 1024**2
_MAX_STORES_NBYTES: Final = 64 * 1024**2


class SessionStores(StoreWrapper):
    """Stores of recently used sessions, each behind a bucket of its own."""

    def __init__(self) -> None:
        self._recent = SizedLRUCache[str, SessionStore](_MAX_STORES_NBYTES, _store_nbytes)
        self._alive = WeakValueDictionary[str, SessionStore]()
        """Includes evicted stores that requests still use."""

    def find(self, root: ObjectRef) -> SessionStore | None:
        return self._alive.get(root.bucket)

    def keep(self, store: SessionStore) -> None:
        """Keep *store* until others have been used since; a new one finds all as large as they are
        by then.
        """
        is_new = store.root.bucket not in self._alive
        self._alive[store.root.bucket] = store
        for each in [*self._recent.values(), store] if is_new else [store]:
            self._recent.put(each.root.bucket, each)

    def store_of(self, ref: ObjectRef) -> SessionStore:
        if (store := self._alive.get(ref.bucket)) is None:
            raise StorageUnavailableError(ref, "the session was not opened")
        return store

    async def aclose(self) -> None:
        """Do nothing: the underlying store is closed by its owner."""


def _store_nbytes(_: str, store: SessionStore) -> int:
    """Estimate the bytes of memory of a session, within bounds so that some are always kept."""
    return max(_MAX_STORES_NBYTES // 1024, min(store.session.nbytes, _MAX_STORES_NBYTES // 2))


class Sessions:
    """Creates, opens and ends sessions; their keys are served by *stores*.

    *on_event* is called with ``begun`` and ``discarded``.
    """

    def __init__(
        self,
        store: ObjectStore,
        fetch: ReadCache,
        *,
        clock: Callable[[], float] = time.time,
        on_event: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._on_event = on_event
        self._clock = clock
        self._entries: EntryCache = SizedLRUCache(_JOURNAL_NBYTES, entry_nbytes)
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
        if isinstance(info.config, DecodeError):  # nothing could be committed
            raise DamagedError(opened.repo, str(info.config))
        now_s, inline_nbytes = self._clock(), info.config.inline_chunk_threshold_bytes
        document = SessionDocument(
            branch, tip.snapshot_id, inline_nbytes, now_s, now_s + LIFETIME_S
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
                self._documents(repository, session_id),
                self._clock,
            )
            store = SessionStore(session, root)
        self.stores.keep(store)
        await store.session.read()
        return store

    async def discard(self, session: Session) -> None:
        """End *session* and delete its document and journal."""

        def edit(document: SessionDocument | None) -> SessionDocument:
            return _discarded(session.require_live(document))

        await session.documents.edit(edit)
        await self._remove(session.location)
        self._on_event("discarded")

    async def _sweep(self, opened: OpenedRepository) -> None:
        count = 0
        async for session_id in list_sessions(self._store, opened.directory):
            location = SessionLocation(opened.directory, session_id)
            if self._sweep_at.get(location, 0.0) > self._clock():
                continue
            again_s = self._clock() + _SWEEP_AGAIN_S
            with suppress(ShardgateError):
                documents = self._documents(opened.repository, session_id)
                again_s = max(again_s, await self._tidy(location, documents))
            self._sweep_at[location] = again_s
            count += 1
            if count == _MAX_SWEPT:
                return

    def _documents(self, repository: Repository, session_id: str) -> SessionDocumentStore:
        name = SessionLocation(repository.directory, session_id).document
        return SessionDocumentStore(self._store, name, repository.limit_nbytes)

    async def _tidy(self, location: SessionLocation, documents: SessionDocumentStore) -> float:
        """Remove one session if it has ended, or its journal if it is committed, and return until
        when nothing more is to be done.

        The document is marked before anything is removed: a write or commit at the same time
        either postpones the end before, or sees the mark.
        """

        def discard_expired(document: SessionDocument | None) -> SessionDocument | None:
            is_live = document is None or document.expires_at_s > self._clock()
            return document if is_live or document is None else _discarded(document)

        if (document := await documents.edit(discard_expired)) is None:
            return 0
        if isinstance(document.state, Discarded):
            await self._remove(location)
        elif isinstance(document.state, Committed):
            await SessionJournal(self._store, location, self._entries).clear()
            return document.expires_at_s
        return 0

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


class KeyHandlers(NamedTuple):
    """Reader and writers of keys."""

    resolver: Resolver
    writer: Writer
    eraser: Eraser


class _Routed[D: Dataset](NamedTuple):
    handlers: KeyHandlers
    dataset: D
    """For keys of a session, the session as a dataset of plain Zarr."""
    lead: str = ""
    """Beginning of the keys of the session, with the slash."""
    store: SessionStore | None = None

    def rest(self, key: str) -> VirtualKey:
        return VirtualKey(key.removeprefix(self.lead))

    def inside(self, write: KeyWrite) -> KeyWrite:
        return write._replace(key=self.rest(write.key))


@dataclass(frozen=True, slots=True)
class KeyRouter:
    """Sends keys of sessions to the handlers *of_sessions*, and all others to those of *plain*."""

    plain: KeyHandlers
    of_sessions: KeyHandlers
    sessions: Sessions
    containers: Containers
    fetch: ReadCache

    async def route[D: Dataset](
        self, dataset: D, key: VirtualKey
    ) -> tuple[Resolver, D, VirtualKey]:
        """Return the reader of *key*, with the dataset and the key that it takes.

        The dataset is another one for a key of a session.
        """
        routed = await self._find(dataset, key)
        return routed.handlers.resolver, routed.dataset, routed.rest(key)

    async def page(self, dataset: Dataset, window: Window, limit: int) -> Page:
        """List keys as `Resolver.page` does; those of a session where the prefix names one."""
        routed = await self._find(dataset, window.prefix)
        lead = routed.lead
        if not (lead and window.prefix.startswith(lead)):
            return await self.plain.resolver.page(dataset, window, limit)
        if window.after > lead and not window.after.startswith(lead):
            return Page([], None)
        after = routed.rest(window.after) if window.after.startswith(lead) else ""
        inner = window._replace(prefix=routed.rest(window.prefix), after=after)
        page = await self.of_sessions.resolver.page(routed.dataset, inner, limit)
        entries = [entry._replace(key=lead + entry.key) for entry in page.entries]
        return Page(entries, None if page.after is None else lead + page.after)

    async def put(self, dataset: Dataset, write: KeyWrite) -> ETag | None:
        """Write one key as `Writer.put` does."""
        routed = await self._find(dataset, write.key)
        inside, writer = routed.inside(write), routed.handlers.writer
        if routed.store is not None and await routed.store.is_whole_chunk(inside.key):
            return await writer.put_whole(routed.dataset, inside)
        return await writer.put(routed.dataset, inside)

    async def check_writable(
        self, dataset: Dataset, key: VirtualKey, headers: ObjectHeaders = NO_HEADERS
    ) -> None:
        """Raise what `put` would for *key*, whatever the body."""
        routed = await self._find(dataset, key)
        await routed.handlers.writer.check_writable(routed.dataset, routed.rest(key), headers)

    async def put_each(self, dataset: Dataset, writes: Sequence[KeyWrite]) -> list[Outcome]:
        """Write or delete many keys as `Writer.put_each` does."""
        by_session: defaultdict[str, list[KeyWrite]] = defaultdict(list)
        for each in writes:
            by_session[session_prefix(each.key) or ""].append(each)
        outcomes: dict[VirtualKey, Outcome] = {}
        for prefix, some in by_session.items():
            try:
                routed = await self._find(dataset, f"{prefix}/")
            except ShardgateError as error:
                outcomes |= {each.key: error for each in some}
                continue
            inside = list(map(routed.inside, some))
            found = await routed.handlers.writer.put_each(routed.dataset, inside)
            outcomes |= zip((each.key for each in some), found, strict=True)
        return [outcomes[each.key] for each in writes]

    async def erase(self, dataset: Dataset, prefix: VirtualKey) -> int:
        """Delete all keys below *prefix*; in a session return the number of nodes if any."""
        routed = await self._find(dataset, prefix)
        rest = routed.rest(prefix)
        if routed.store is not None:
            count = await routed.store.erase(rest.rstrip("/"))
            if count or not rest:
                return count
        return await routed.handlers.eraser.erase(routed.dataset, rest)

    async def _find[D: Dataset](self, dataset: D, key: str) -> _Routed[D]:
        """Open the session that *key* belongs to; other keys belong to *dataset* itself."""
        plain = _Routed(self.plain, dataset)
        if (prefix := session_prefix(key)) is None:
            return plain
        claimed = await dataset.containers.claimed(dataset.root, VirtualKey(key), self.fetch)
        if claimed is None or not claimed.rest.startswith(SESSION):
            return plain
        if not isinstance(layout := claimed.layout, RepositoryLayout):
            return plain
        session_id = claimed.rest.partition("/")[0].removeprefix(SESSION)
        store = await self.sessions.open(layout.repository, session_id, self.fetch)
        inner = replace(
            dataset,
            name=f"{dataset.name}/{prefix}",
            root=store.root,
            containers=self.containers,
        )
        return _Routed(self.of_sessions, inner, f"{prefix}/", store)
