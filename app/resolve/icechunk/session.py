"""A session of a repository, as one replica knows it."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from app.errors import BusyError, ConflictError, DamagedError, UnknownSessionError
from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.repository import Repository
from app.formats.icechunk.session import (
    Committed,
    Discarded,
    Open,
    Sealed,
    SessionDocument,
    SessionView,
)
from app.formats.icechunk.snapshot import StoredSnapshot, StoredSnapshotDecoder
from app.formats.reading import Fetch
from app.model import ETag, Inline
from app.resolve.bodies import Entity
from app.resolve.icechunk.journal import Journal, Place
from app.resolve.icechunk.ledger import Ledger
from app.resolve.metadata_cache import SizedLRUCache
from app.storage.contract import ObjectStore

_ENTITY_NBYTES: Final = 1024
MAX_AGE_S: Final = 7 * 24 * 3600.0
"""No session lasts longer from its beginning, whatever is written to it.

Who collects garbage leaves alone what is younger: chunks of sessions are in no commit yet.
"""
_RENEWED: Final = 24
"""A session that is written to is renewed so many times while it would last."""

type Change = Callable[[SessionView], SessionDocument]
type Entities = SizedLRUCache[tuple[object, str, ETag], Entity]
"""What keys were in versions that never change, by the sessions they are in."""


def weigh_entity(key: tuple[object, str, ETag], entity: Entity) -> int:
    """Tell how many bytes of memory an entity holds, roughly."""
    data = entity.source.data if isinstance(entity.source, Inline) else b""
    return _ENTITY_NBYTES + len(key[1]) + len(data)


class Session:
    """The state of a session that was asked for last, and the means to read and to write it."""

    def __init__(  # noqa: PLR0913 - its parts
        self,
        place: Place,
        repository: Repository,
        store: ObjectStore,
        fetch: Fetch,
        journal: Journal,
        *,
        entities: Entities,
        lifetime_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.place = place
        self.repository = repository
        self.store = store
        self.fetch = fetch
        self.journal = journal
        self.ledger = Ledger(store, place.document, limit_nbytes=repository.limit_nbytes)
        self.clock = clock
        self._entities = entities
        self._name = object()
        self._lifetime_s = lifetime_s
        self._view: SessionView | None = None
        self._viewed: SessionDocument | None = None
        self._weighed: tuple[SessionDocument | None, int] = None, 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held, apart from the parent, roughly."""
        document, nbytes = self._weighed
        if document is not self.ledger.known:
            document = self.ledger.known
            nbytes = 0 if document is None else document.nbytes
            self._weighed = document, nbytes
        return nbytes

    @property
    def parent(self) -> StoredSnapshot | None:
        """Give the snapshot that the session was last seen to build on."""
        return None if self._view is None else self._view.parent

    async def refresh(self) -> SessionView:
        """Ask how the session stands, at some time from now on.

        Raises: `UnknownSessionError`, `DamagedError`, `StorageError`.
        """
        await self.ask()
        return await self.view()

    async def ask(self) -> SessionDocument:
        """Ask how the session stands, at some time from now on, apart from what is in it.

        Raises: `UnknownSessionError`, `DamagedError`, `StorageError`.
        """
        return self.demand_there(await self.ledger.ask())

    async def view(self) -> SessionView:
        """Show the session as it was known last."""
        while True:
            document = self.demand_there(self.ledger.known)
            if self._view is not None and self._viewed is document:
                return self._view
            view = await self._see(document)
            if self.ledger.known is document:
                self._view, self._viewed = view, document

    async def change(self, change: Change) -> None:
        """Replace the document, as long as the session is open.

        Raises: what *change* does, `ConflictError`, `UnknownSessionError`, `BusyError`.
        """
        parent = (await self.view()).parent

        def edit(document: SessionDocument | None) -> SessionDocument:
            document = self.demand_there(document)
            demand_open(document)
            return self.renewed(change(self._shown(document, parent)))

        await self.ledger.change(edit)

    async def renew(self, document: SessionDocument) -> None:
        """Let the session last longer, if that is worth a write."""
        if self.renewed(document) is not document:
            await self.change(lambda view: view.session)

    def demand_there(self, document: SessionDocument | None) -> SessionDocument:
        """Give *document* if there is such a session, and it goes on.

        Raises: `UnknownSessionError`.
        """
        if document is None or isinstance(document.state, Discarded):
            raise UnknownSessionError(f"there is no session {self.place.session_id}")
        if document.expires_at_s <= self.clock():
            raise UnknownSessionError(f"the session {self.place.session_id} has expired")
        return document

    def renewed(self, document: SessionDocument) -> SessionDocument:
        """Let *document* last longer, up to `MAX_AGE_S`, if that is worth a write."""
        until_s = min(self.clock() + self._lifetime_s, document.created_at_s + MAX_AGE_S)
        if until_s - document.expires_at_s < self._lifetime_s / _RENEWED:
            return document
        return replace(document, expires_at_s=until_s)

    def recall(self, key: str, etag: ETag) -> Entity | None:
        """Tell what *key* was in the version *etag*, if that is remembered."""
        return self._entities.get((self._name, key, etag))

    def remember(self, key: str, entity: Entity) -> None:
        """Keep what *key* is now."""
        self._entities.put((self._name, key, entity.etag), entity)

    async def _see(self, document: SessionDocument) -> SessionView:
        """Show what is committed as the snapshot that it has become."""
        if isinstance(document.state, Committed):
            parent = await self.snapshot(document.state.snapshot_id)
            return self._shown(replace(document, nodes={}), parent)
        return self._shown(document, await self.snapshot(document.parent_id))

    def _shown(self, document: SessionDocument, parent: StoredSnapshot) -> SessionView:
        return SessionView(document, parent, self.place.document)

    async def snapshot(self, spelled: str) -> StoredSnapshot:
        """Read a snapshot of the repository.

        Raises: `DamagedError`, also if it is gone.
        """
        object_id = decode_id(spelled) or b""
        decode = StoredSnapshotDecoder(object_id, self.repository.limit_nbytes)
        found = await self.repository.read("snapshots", object_id, decode, self.fetch)
        if found is None:
            name = self.repository.file("snapshots", object_id)
            raise DamagedError(name, "does not exist, and a session builds on it")
        return found


def demand_open(document: SessionDocument) -> None:
    """Return if what is written now will be in the commit.

    Raises: `BusyError`, `ConflictError`.
    """
    match document.state:
        case Open():
            return
        case Sealed():
            raise BusyError("the session is being committed; if that broke off, commit it again")
        case _:
            raise ConflictError("the session is committed, and takes no more")


def is_journaled(document: SessionDocument) -> bool:
    """Tell whether entries of the journal lie over the parent."""
    return not isinstance(document.state, Committed)
