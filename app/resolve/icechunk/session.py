"""A session of a repository, as one replica knows it."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import cachetools

from app.errors import BusyError, ConflictError, DamagedError, UnknownSessionError
from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.repository import Repository
from app.formats.icechunk.session_document import (
    Committed,
    Discarded,
    Open,
    Sealed,
    SessionDocument,
)
from app.formats.icechunk.session_view import SessionView
from app.formats.icechunk.snapshot_reading import StoredSnapshotDecoder
from app.formats.icechunk.stored_nodes import StoredSnapshot
from app.formats.reading import Fetch
from app.model import ETag
from app.resolve.entity import Entity
from app.resolve.icechunk.journal import Journal, Place
from app.resolve.icechunk.ledger import Ledger
from app.storage.contract import ObjectStore

_MOST_PLACES: Final = 1024
_RENEWED: Final = 24
"""A session that is written to is renewed so many times while it would last."""

type Change = Callable[[SessionView], SessionDocument]


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
        self.entities: cachetools.LRUCache[tuple[str, ETag], Entity] = cachetools.LRUCache(
            _MOST_PLACES
        )
        """What keys were in versions that never change."""
        self._lifetime_s = lifetime_s
        self._view: SessionView | None = None
        self._viewed: SessionDocument | None = None

    async def refresh(self) -> SessionView:
        """Ask how the session stands, at some time from now on.

        Raises: `UnknownSessionError`, `DamagedError`, `StorageError`.
        """
        await self.ledger.ask()
        return await self.view()

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
            return self.renewed(change(SessionView(document, parent)))

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
        """Let *document* last longer, if that is worth a write."""
        lasts_s = document.expires_at_s - self.clock()
        if lasts_s > self._lifetime_s * (1 - 1 / _RENEWED):
            return document
        return replace(document, expires_at_s=self.clock() + self._lifetime_s)

    async def _see(self, document: SessionDocument) -> SessionView:
        """Show what is committed as the snapshot that it has become."""
        if isinstance(document.state, Committed):
            parent = await self.snapshot(document.state.snapshot_id)
            return SessionView(replace(document, nodes={}), parent)
        return SessionView(document, await self.snapshot(document.parent_id))

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
