"""Commit of a session: seal the document, gather the changes, commit, mark the document.

The committer holds a lease. After its end another one may take over: both put the same write id
into the snapshot, by which the second finds the commit of the first. An attempt that certainly
failed opens the session again, and the next attempt has another write id.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

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
from app.formats.icechunk.repo_writer import WriteId
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
from app.formats.icechunk.snapshot import Chunks
from app.resolve.icechunk.commit import CommitResult
from app.resolve.icechunk.session import Session, poll_pauses

_LEASE_S: Final = 20.0
_READS_AT_ONCE: Final = 32
_CERTAIN_FAILURES: Final = (
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
"""Errors after which nothing was committed; after others the outcome is unknown."""

type CommitChanges = Callable[[SessionDocument, ChangeSet, WriteId], Awaitable[CommitResult]]
"""Commit a change set, or find the commit made before with the same write id."""


@dataclass(frozen=True, slots=True)
class SessionCommit:
    """One request to commit *session*."""

    session: Session
    commit: CommitChanges
    key: str | None
    """Idempotency key; without one any commit of the session is the result."""
    _owner: str = field(default_factory=lambda: secrets.token_hex(8), init=False)

    async def run(self) -> CommitResult:
        """Commit the session, or wait for another request that does, and return the result."""
        pauses = poll_pauses()
        while True:
            view = await self.session.refresh()
            if isinstance(state := view.session.state, Committed):
                return self._result(state)
            if self._is_mine(sealed := await self._seal()):
                return await self._commit(sealed.attempt)
            await asyncio.sleep(next(pauses))

    def _result(self, state: Committed) -> CommitResult:
        if self.key is not None and state.key != self.key:
            raise ConflictError(f"the session is already committed, as {state.snapshot_id}")
        return CommitResult(state.snapshot_id, state.parent_id)

    async def _seal(self) -> SessionDocument:
        def edit(state: State, now_s: float) -> State:
            is_expired = isinstance(state, Sealed) and state.until_s <= now_s
            return self._sealed(now_s) if is_expired or isinstance(state, Open) else state

        return await self._set_state(edit)

    async def _commit(self, attempt: int) -> CommitResult:
        try:
            made = await self._with_lease(self._gather_and_commit())
        except _CERTAIN_FAILURES:
            with suppress(ShardgateError):  # or another request does, when the lease has ended
                await self._reopen()
            raise
        except Exception:
            with suppress(ShardgateError):  # the next request takes over and learns the outcome
                await self._set_state(
                    lambda state, now_s: (
                        Sealed(now_s, self._owner) if self._is_owner(state) else state
                    )
                )
            raise
        await self._mark_committed(made, attempt)
        return made

    async def _gather_and_commit(self) -> CommitResult:
        session = self.session
        view = await self._require_lease()
        attempt = view.session.attempt
        write_id = session.location.session_id + (f".{attempt}" if attempt else "")
        try:
            chunks = await gather_chunks(session, view)
        except StorageError:
            await self._require_lease()
            raise
        await self._require_lease()  # without it the journal may have been cleared by now
        return await self.commit(view.session, make_changes(view, chunks), WriteId(write_id))

    async def _require_lease(self) -> SessionView:
        view = await self.session.refresh()
        if not self._is_mine(view.session):
            raise BusyError("another request has taken over the commit of the session")
        return view

    async def _with_lease[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run *work* and renew the lease until it is done; cancel it if the lease is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._keep_lease())
                done = await group.create_task(work)
                renewing.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return done

    async def _keep_lease(self) -> None:
        """Renew the lease until cancelled; raise when it is lost, or about to end."""

        def edit(state: State, now_s: float) -> State:
            return self._sealed(now_s) if self._is_owner(state) else state

        clock, pause_s = self.session.clock, _LEASE_S / 4
        renewed_s = clock()
        while True:
            await asyncio.sleep(pause_s)
            began_s = clock()
            try:
                if not self._is_mine(await self._set_state(edit)):
                    raise BusyError("another request has taken over the commit of the session")
                renewed_s = began_s
            except StorageError:
                if clock() > renewed_s + _LEASE_S - pause_s:
                    raise

    async def _reopen(self) -> None:
        def edit(document: SessionDocument) -> SessionDocument:
            if not self._is_mine(document):
                return document
            return replace(document, state=OPEN, attempt=document.attempt + 1)

        await self._edit(edit)

    async def _mark_committed(self, made: CommitResult, attempt: int) -> None:
        """Mark the session unless it was reopened; a later request finds an unmarked commit."""

        def edit(document: SessionDocument) -> SessionDocument:
            if isinstance(document.state, Committed) or document.attempt != attempt:
                return document
            return replace(document, state=Committed(made.snapshot_id, made.parent_id, self.key))

        with suppress(ShardgateError):
            await self._edit(edit)

    async def _set_state(self, set_state: Callable[[State, float], State]) -> SessionDocument:
        session = self.session

        def edit(document: SessionDocument) -> SessionDocument:
            state = set_state(document.state, session.clock())
            if state is document.state:
                return document
            return replace(session.renewed(document), state=state)

        return await self._edit(edit)

    async def _edit(self, edit: Callable[[SessionDocument], SessionDocument]) -> SessionDocument:
        session = self.session
        edited = await session.documents.edit(lambda document: edit(session.require_live(document)))
        return session.require_live(edited)

    def _sealed(self, now_s: float) -> Sealed:
        return Sealed(now_s + _LEASE_S, self._owner)

    def _is_owner(self, state: State) -> bool:
        return isinstance(state, Sealed) and state.by == self._owner

    def _is_mine(self, document: SessionDocument) -> bool:
        return self._is_owner(document.state)


async def gather_chunks(session: Session, view: SessionView) -> dict[bytes, ChunkChanges]:
    """Read the changed chunks of *view* from the journal, by node id.

    Entries outside of the current shape are left out, and deletions of chunks that the parent
    does not have.
    """
    found: dict[bytes, ChunkChanges] = {}
    for node in view.among(await session.journal.arrays()):
        if node.chunks is not None:
            changes = await _gather_array(session, node, node.chunks)
            if len(changes.payloads):
                found[node.node_id] = changes
    return found


async def _gather_array(session: Session, node: ViewedNode, chunks: Chunks) -> ChunkChanges:
    journal = session.journal
    payloads: dict[tuple[int, ...], Native | Inlaid | None] = {}

    async def read(coords: tuple[int, ...]) -> None:
        address = ChunkAddress(node, coords)
        if (stored := await journal.get(address, listed[coords].etag)) is None:
            raise StorageUnavailableError(journal.ref(address), "was listed, and does not exist")
        if stored.entry is not None or await session.lookup(address) is not None:
            payloads[coords] = stored.entry

    listed = await journal.entries(node.node_id)
    inside = [coords for coords in listed if chunks.has(coords)]
    await bounded_gather(read, inside, limit=_READS_AT_ONCE)
    return await asyncio.to_thread(_sorted_changes, payloads, len(chunks.grid))


def _sorted_changes(
    payloads: Mapping[tuple[int, ...], Native | Inlaid | None], ndim: int
) -> ChunkChanges:
    ordered = sorted(payloads)
    rows = np.array(ordered, np.uint32).reshape(len(ordered), ndim)
    return ChunkChanges(rows, Payloads.of(payloads[coords] for coords in ordered))
