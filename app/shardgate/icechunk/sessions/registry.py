"""Sessions of all repositories: created, opened on any replica, discarded, swept when expired.

A session is a dataset of plain Zarr, whose root is a volatile bucket of its own: keys such as
``@session.ID/a/c/0/0`` are routed to it once, and then read and written like all others.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, cast
from weakref import WeakValueDictionary

import cachetools

from shardgate.concurrency import SingleFlight
from shardgate.errors import (
    BusyError,
    ClockSkewError,
    ShardgateError,
    UnknownRefError,
    UnknownSessionError,
)
from shardgate.formats.contract import Format
from shardgate.formats.icechunk.ids import decode_id, encode_id
from shardgate.formats.icechunk.keys import SESSION, Branch, session_prefix
from shardgate.formats.icechunk.layout import RepositoryLayout
from shardgate.formats.icechunk.repository_files import RepoRefs, Repository
from shardgate.formats.reading import Fetch
from shardgate.icechunk.chunk_files import new_object_id, put_new
from shardgate.icechunk.commit import config_of
from shardgate.icechunk.repo_swap import RepoSwaps
from shardgate.icechunk.repository import OpenedRepository
from shardgate.icechunk.sessions.document import (
    Committed,
    Discarded,
    Sealed,
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
from shardgate.icechunk.sessions.session import LIFETIME_S, OpenedSession
from shardgate.icechunk.sessions.store import SessionStore
from shardgate.model import SHARDED, ObjectRef, VirtualKey, VolatileBucket
from shardgate.read.budget import ByteBudget
from shardgate.read.containers import Container, Containers, Dataset, Prefetch, split_sharded
from shardgate.read.metadata_cache import SizedLRUCache
from shardgate.storage.contract import ObjectStore

_SWEEP_S: Final = 600.0
"""Time after which a session is checked, since its document was modified or it was checked.

Requests of any replica that began before a commit may read files of the session for so long.
"""
# A sweep lists every session of a day: many clients that begin one each second share it.
_SWEEPS_APART_S: Final = 60.0
_MAX_STORES_NBYTES: Final = 64 * 1024**2


def _store_nbytes(_: str, store: SessionStore) -> int:
    """Estimate the bytes of memory of a session, within bounds so that some are always kept."""
    return max(_MAX_STORES_NBYTES // 1024, min(store.session.nbytes, _MAX_STORES_NBYTES // 2))


@dataclass(frozen=True, slots=True)
class SessionContainers(Containers):
    """Containers of the session in *store*, which recognizes chunks without a search."""

    store: SessionStore = field(kw_only=True)

    async def find(
        self, root: ObjectRef, key: VirtualKey, fetch: Fetch, prefetch: Prefetch = lambda _: None
    ) -> Container:
        """Return the container of *key*; a chunk that is no shard is served as a plain object."""
        if await self.store.is_whole_chunk(key):
            return Container(self.passthrough(root), key)
        return await Containers.find(self, root, key, fetch, prefetch)


class Sessions:
    """Creates, opens and ends sessions, whose stores are put into *stores*, by bucket.

    The containers of sessions are of *formats*. *on_event* is called with ``begun`` and
    ``discarded``.
    """

    def __init__(
        self,
        swaps: RepoSwaps,
        stores: WeakValueDictionary[str, ObjectStore],
        formats: Sequence[Format],
        joining: ByteBudget,
        on_event: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._swaps = swaps
        self._store = swaps.store
        self._reads = swaps.reads
        self._clock = swaps.clock
        self._stores = stores
        """Includes evicted stores that requests still use."""
        self._named = WeakValueDictionary[str, SessionStore]()
        """The same stores, by the names of their datasets: ``em/@session.ID``."""
        self._recent = SizedLRUCache[str, SessionStore](_MAX_STORES_NBYTES, _store_nbytes)
        self._formats = formats
        self._joining = joining
        self._on_event = on_event
        self._entries: EntryCache = SizedLRUCache(32 * 1024**2, entry_nbytes)
        self._sweep_at = cachetools.LRUCache[SessionLocation, float](maxsize=10_000)
        """When a session has to be checked for expiry again."""
        self._sweeps = SingleFlight[ObjectRef]()
        """By the directory of the repository."""
        self._swept_at = cachetools.LRUCache[ObjectRef, float](maxsize=10_000)
        """When the last sweep that ended began."""

    async def create(self, opened: OpenedRepository, branch: str) -> tuple[str, SessionDocument]:
        """Create a session at the tip of *branch*, and return its id and document."""
        await self._store.verify_conditional_writes(opened.directory)
        # The parent must be the tip of now, not of some seconds ago.
        self._reads.forget(opened.repo)
        info = await opened.writable_info()
        tip = await opened.repository.refs.resolve(Branch(branch), opened.fetch)
        if tip is None:
            raise UnknownRefError(f"there is no branch {branch} in {opened.directory}")
        inline_nbytes = config_of(opened, info).inline_chunk_threshold_bytes
        now_s = self._clock()
        document = SessionDocument(
            branch, tip.snapshot_id, inline_nbytes, now_s, now_s + LIFETIME_S
        )
        session_id = encode_id(new_object_id())
        name = SessionLocation(opened.directory, session_id).document
        await put_new(self._store, name, encode_session(document))
        try:
            await self._swaps.compare_clocks(name, now_s)
        except ClockSkewError:
            await self._store.delete(name, expected=None)
            raise
        is_swept = abs(now_s - self._swept_at.get(opened.directory, 0.0)) < _SWEEPS_APART_S
        if opened.directory not in self._sweeps and not is_swept:
            self._sweeps.start(opened.directory, partial(self._sweep, opened))
        self._on_event("begun")
        return session_id, document

    async def open(
        self, repository: Repository, session_id: str, fetch: Fetch, *, is_edited: bool = False
    ) -> SessionStore:
        """Open a session and read its document; its parent may no longer exist.

        With *is_edited* the caller replaces the document next, which confirms a known one.

        Raises: `UnknownSessionError`, `OfflineError`.
        """
        if decode_id(session_id) is None:
            raise UnknownSessionError(f"there is no session {session_id}")
        root = _root_of(repository, session_id)
        if (store := self._find(root)) is None:
            location = SessionLocation(repository.directory, session_id)
            session = OpenedSession(
                location,
                repository,
                self._store,
                fetch,
                SessionJournal(self._store, location, self._entries),
                self._documents(repository, session_id),
                self._joining,
                self._clock,
            )
            store = SessionStore(session, root)
        return await self._enter(store, is_edited=is_edited)

    async def _enter(self, store: SessionStore, *, is_edited: bool = False) -> SessionStore:
        self.keep(store)
        session = store.session
        if isinstance(refs := session.repository.refs, RepoRefs):
            await refs.info(session.fetch)  # raises if it is offline
        if not (is_edited and session.is_known_open):
            await session.read()
        return store

    def _find(self, root: ObjectRef) -> SessionStore | None:
        return cast("SessionStore | None", self._stores.get(root.bucket))

    def keep(self, store: SessionStore) -> None:
        """Make *store* the most recently used one."""
        is_new = store.root.bucket not in self._stores
        self._stores[store.root.bucket] = store
        if is_new:
            # Sessions grow: those that are cached are weighed again, in the same order.
            for each in self._recent.values():
                self._recent.put(each.root.bucket, each)
        self._recent.put(store.root.bucket, store)

    async def route[D: Dataset](self, dataset: D, key: VirtualKey) -> tuple[D, VirtualKey]:
        """Return the session that *key* names as a dataset, and the key within it: with `SHARDED`
        before the session, the session as it is stored.

        For a key that names no session, return *dataset* and *key*.
        """
        face, path = split_sharded(dataset, key)
        if (prefix := session_prefix(path)) is None:
            return dataset, key
        name = f"{dataset.name}/{prefix}"
        if (store := self._named.get(name)) is not None:
            await self._enter(store)
        else:
            claimed = await dataset.containers.open_claimed(dataset.root, path, self._reads)
            if claimed is None or not isinstance(layout := claimed.layout, RepositoryLayout):
                return dataset, key
            session_id = claimed.rest.partition("/")[0].removeprefix(SESSION)
            store = await self.open(layout.repository, session_id, self._reads)
            self._named[name] = store
        containers = SessionContainers(self._formats, store=store)
        inner = replace(dataset, name=name, root=store.root, containers=containers)
        if face.containers.is_sharded:
            inner, _ = split_sharded(inner, VirtualKey(SHARDED))
        return inner, VirtualKey(path.removeprefix(f"{prefix}/"))

    async def erase(self, dataset: Dataset, prefix: VirtualKey) -> int:
        """Delete the node *prefix* of a session, and all below; return their number, 0 if there is
        none, or *dataset* is no session, or one as it is stored.
        """
        store = None if dataset.containers.is_sharded else self._find(dataset.root)
        return 0 if store is None else await store.erase(prefix.rstrip("/"))

    async def discard(self, session: OpenedSession) -> None:
        """End *session* and delete its document and journal.

        Raises: `BusyError` during a commit, also one that was interrupted: it may be made already.
        """
        await session.documents.edit(lambda document: _ended(session.require_live(document)))
        await self._remove(session.location)
        self._on_event("discarded")

    async def aclose(self) -> None:
        """Cancel all sweeps."""
        await self._sweeps.aclose()

    async def _sweep(self, opened: OpenedRepository) -> None:
        """Remove what is left of sessions that have ended; the begin of another one continues."""
        began_at = self._clock()
        listed = [each async for each in list_sessions(self._store, opened.directory)]
        # The session that just began has the time of now by the store's clock.
        now_s = max((modified_s for _, modified_s in listed if modified_s), default=0.0)
        for session_id, modified_s in listed:
            is_young = modified_s is not None and modified_s > now_s - _SWEEP_S
            location = SessionLocation(opened.directory, session_id)
            if is_young or self._sweep_at.get(location, 0.0) > self._clock():
                continue
            again_s = self._clock() + _SWEEP_S
            with suppress(ShardgateError):
                documents = self._documents(opened.repository, session_id)
                again_s = max(again_s, await self._tidy(location, documents))
            self._sweep_at[location] = again_s
        self._swept_at[opened.directory] = began_at

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
    # Another dataset may serve the same repository with other permissions.
    more = f"+{hash(repository.allowed):x}" if repository.allowed else ""
    name = f"volatile+{repository.directory}/{SESSION}{session_id}{more}"
    return ObjectRef(VolatileBucket(name, f"{SESSION}{session_id}"), "")


def _ended(document: SessionDocument) -> SessionDocument:
    """Return *document* as discarded by a client. Raises: `BusyError` during a commit."""
    if isinstance(document.state, Sealed):
        raise BusyError("the session is being committed; if the commit failed, commit again")
    return _discarded(document)


def _discarded(document: SessionDocument) -> SessionDocument:
    is_marked = isinstance(document.state, Discarded)
    return document if is_marked else replace(document, state=Discarded(), nodes={})
