"""The commit of a session: it is sealed, all that it changed is gathered, and it is marked.

Who seals it holds a lease. When that is over another may go on in his place: both write the same
id into the snapshot, by which the second one finds what the first one did. An attempt that has
failed for certain opens the session again, and the next one has another id.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from app.concurrency import bounded_gather
from app.errors import (
    BusyError,
    ClockSkewError,
    CommitConflictError,
    ConflictError,
    DamagedError,
    LockedError,
    NotAllowedError,
    ReadOnlyError,
    RequestError,
    ShardgateError,
    StorageError,
    StorageUnavailableError,
    UnwritableError,
)
from app.formats.icechunk.changes import ChangeSet, ChunkChanges
from app.formats.icechunk.manifest import Native
from app.formats.icechunk.payloads import Inlaid, Payloads
from app.formats.icechunk.session import (
    OPEN,
    ChunkAddress,
    Committed,
    Open,
    Sealed,
    SessionDocument,
    SessionView,
    State,
    ViewedNode,
    make_changes,
)
from app.resolve.icechunk.session import Session
from app.resolve.icechunk.session_chunks import has_parent_chunk

LEASE_S: Final = 20.0
_FIRST_POLL_S: Final = 0.05
_LONGEST_POLL_S: Final = 1.0
_READS_AT_ONCE: Final = 32
_FAILED: Final = (
    ClockSkewError,
    CommitConflictError,
    ConflictError,
    DamagedError,
    LockedError,
    NotAllowedError,
    ReadOnlyError,
    RequestError,
    UnwritableError,
)
"""After these nothing was committed, for certain; after others nobody knows."""


class Made(NamedTuple):
    """The snapshot that a session has become."""

    snapshot_id: str
    parent_id: str | None


type Make = Callable[[SessionDocument, ChangeSet, str], Awaitable[Made]]
"""Commits what is gathered, with the id of the write, unless that was done before."""


@dataclass(frozen=True, slots=True)
class SessionCommit:
    """One request to commit *session*."""

    session: Session
    make: Make
    key: str | None
    """Tells a request from others; without it any commit of the session is the one meant."""
    lease_s: float = LEASE_S

    async def run(self) -> Made:
        """Commit the session, or wait for who does, and tell what it has become.

        Raises: `CommitConflictError`, `ConflictError`, `UnknownSessionError`, `BusyError`, and
        what *make* does.
        """
        by, pause_s = secrets.token_hex(8), _FIRST_POLL_S
        while True:
            view = await self.session.refresh()
            if isinstance(state := view.session.state, Committed):
                return self._told(state)
            sealed = await self._seal(by)
            if _holds(sealed, by):
                return await self._commit(by, sealed.attempt)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_POLL_S, 2 * pause_s)

    def _told(self, state: Committed) -> Made:
        if self.key is not None and state.key != self.key:
            raise ConflictError(f"the session is committed already, as {state.snapshot_id}")
        return Made(state.snapshot_id, state.parent_id)

    async def _seal(self, by: str) -> SessionDocument:
        """Take the lease if nobody holds it; tell how the session stands then."""

        def edit(state: State, now_s: float) -> State:
            is_free = isinstance(state, Open)
            is_over = isinstance(state, Sealed) and state.until_s <= now_s
            return Sealed(now_s + self.lease_s, by) if is_free or is_over else state

        return await self._mark(edit)

    async def _commit(self, by: str, attempt: int) -> Made:
        try:
            made = await self._leased(by, self._make(by))
        except _FAILED:
            with suppress(ShardgateError):  # or others will, when the lease is over
                await self._reopen(by)
            raise
        except Exception:
            with suppress(ShardgateError):
                await self._let_go(by)
            raise
        await self._finish(made, attempt)
        return made

    async def _make(self, by: str) -> Made:
        """Gather what the session comes to, and commit it."""
        session = self.session
        view = await self._held(by)
        attempt = view.session.attempt
        write_id = session.place.session_id + (f".{attempt}" if attempt else "")
        try:
            chunks = await gather_chunks(session, view)
        except StorageError:
            await self._held(by)
            raise
        await self._held(by)  # or the journal may have been cleared meanwhile
        return await self.make(view.session, make_changes(view, chunks), write_id)

    async def _held(self, by: str) -> SessionView:
        view = await self.session.refresh()
        if not _holds(view.session, by):
            raise BusyError("another one has gone on with the commit of the session")
        return view

    async def _leased[T](self, by: str, work: Coroutine[Any, Any, T]) -> T:
        """Do *work* and renew the lease meanwhile; break the work off where it is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(by))
                done = await group.create_task(work)
                renewing.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return done

    async def _renew(self, by: str) -> None:
        """Renew the lease again and again.

        Raises: `BusyError` where another one has it, `StorageError` where it is soon over.
        """

        def edit(state: State, now_s: float) -> State:
            return Sealed(now_s + self.lease_s, by) if _is_of(state, by) else state

        clock, pause_s = self.session.clock, self.lease_s / 4
        renewed_s = clock()
        while True:
            await asyncio.sleep(pause_s)
            began_s = clock()
            try:
                if not _holds(await self._mark(edit), by):
                    raise BusyError("another one has gone on with the commit of the session")
                renewed_s = began_s
            except StorageError:
                if clock() > renewed_s + self.lease_s - pause_s:
                    raise

    async def _reopen(self, by: str) -> None:
        def edit(document: SessionDocument | None) -> SessionDocument:
            document = self.session.demand_there(document)
            if not _holds(document, by):
                return document
            return replace(document, state=OPEN, attempt=document.attempt + 1)

        await self.session.ledger.change(edit)

    async def _let_go(self, by: str) -> None:
        """Let others go on at once, who will find what was done."""
        await self._mark(lambda state, now_s: Sealed(now_s, by) if _is_of(state, by) else state)

    async def _finish(self, made: Made, attempt: int) -> None:
        """Mark the session; where that fails the next one who commits it finds the snapshot.

        If another one has opened it again it may have been written to, and is to be committed.
        """

        def edit(document: SessionDocument | None) -> SessionDocument:
            document = self.session.demand_there(document)
            if isinstance(document.state, Committed) or document.attempt != attempt:
                return document
            return replace(document, state=Committed(*made, self.key))

        with suppress(ShardgateError):
            await self.session.ledger.change(edit)

    async def _mark(self, edit: Callable[[State, float], State]) -> SessionDocument:
        session = self.session

        def change(document: SessionDocument | None) -> SessionDocument:
            document = session.demand_there(document)
            state = edit(document.state, session.clock())
            if state is document.state:
                return document
            return replace(session.renewed(document), state=state)

        return session.demand_there(await session.ledger.change(change))


async def gather_chunks(session: Session, view: SessionView) -> dict[bytes, ChunkChanges]:
    """Read from the journal which chunks of *view* were changed, by the ids of arrays.

    What is out of an array by now, or gone and was never in the parent, is left out.

    Raises: `StorageUnavailableError` where an entry is listed and is not there, `DamagedError`.
    """
    found: dict[bytes, ChunkChanges] = {}
    for node in view.among(await session.journal.arrays(session.place)):
        if node.grid is not None:
            changes = await _gather_array(session, node)
            if len(changes.payloads):
                found[node.node_id] = changes
    return found


async def _gather_array(session: Session, node: ViewedNode) -> ChunkChanges:
    place, journal = session.place, session.journal
    payloads: dict[tuple[int, ...], Native | Inlaid | None] = {}

    async def read(coords: tuple[int, ...]) -> None:
        kept = await journal.get(place, node.node_id, coords, etags[coords])
        if kept is None:
            entry = place.entry(node.node_id, coords)
            raise StorageUnavailableError(entry, "it was listed, and is not there")
        is_gone = kept.entry is None
        if not is_gone or await has_parent_chunk(session, ChunkAddress(node, coords)):
            payloads[coords] = kept.entry

    listed = journal.listed(place, node.node_id)
    etags = {each.coords: each.etag async for each in listed if _has(node, each.coords)}
    await bounded_gather(read, list(etags), limit=_READS_AT_ONCE)
    ndim = len(node.grid.shape) if node.grid is not None else 0
    return await asyncio.to_thread(_in_order, payloads, ndim)


def _in_order(
    payloads: Mapping[tuple[int, ...], Native | Inlaid | None], ndim: int
) -> ChunkChanges:
    ordered = sorted(payloads)
    rows = np.array(ordered, np.uint32).reshape(len(ordered), ndim)
    return ChunkChanges(rows, Payloads.of(payloads[coords] for coords in ordered))


def _has(node: ViewedNode, coords: tuple[int, ...]) -> bool:
    return node.grid is not None and node.grid.has(coords)


def _is_of(state: State, by: str) -> bool:
    return isinstance(state, Sealed) and state.by == by


def _holds(document: SessionDocument, by: str) -> bool:
    return _is_of(document.state, by)
