"""Commit of a session.

A commit seals the document, gathers the changes, commits them, and marks the document. Any request
may go on with a commit that another one has begun: both put the same write id into the snapshot, by
which the second finds the commit of the first. An attempt that certainly failed opens the session
again, and the next attempt has another write id.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from shardgate.concurrency import bounded_gather, is_many, run_in_thread
from shardgate.errors import (
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
    StorageUnavailableError,
    UnwritableError,
)
from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.manifest import InlineChunk, Native
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.repo_writer import WriteId
from shardgate.formats.icechunk.snapshot import Chunks
from shardgate.icechunk.chunk_files import chunk_lengths
from shardgate.icechunk.commit import CommitResult
from shardgate.icechunk.sessions.document import (
    OPEN,
    ChunkAddress,
    Committed,
    Sealed,
    SessionDocument,
    SessionView,
    ViewedNode,
    make_changes,
    may_have_shards,
)
from shardgate.icechunk.sessions.entries import Fragmented, JournalEntry
from shardgate.icechunk.sessions.journal import Entries
from shardgate.icechunk.sessions.session import OpenedSession

_YOUNG_S: Final = 3600.0
"""Age up to which chunk files are not looked up: garbage collection that is set up right spares
them."""
_SOON_S: Final = 5.0
"""Time in which no sweep clears the journal, whoever commits. Another request may take over at any
time until the branch moves: the write id of the attempt is the same."""
_MAX_NAMED: Final = 10
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

type Commit = Callable[[SessionDocument, ChangeSet, WriteId], Awaitable[CommitResult]]
"""Commit a change set, or find the commit made before with the same write id."""


@dataclass(frozen=True, slots=True)
class SessionCommit:
    """One request to commit *session*."""

    session: OpenedSession
    commit: Commit
    key: str | None
    """Idempotency key; without one any commit of the session is the result."""

    async def run(self) -> CommitResult:
        """Commit the session, or go on with its commit, and return the result."""
        began_s = self.session.clock()
        async with self.session.committing:
            sealed = await self._edit(self._seal)
            if isinstance(sealed.state, Committed):
                return self._result(sealed.state)
            attempt = sealed.attempt
            try:
                made = await self._gather_and_commit(attempt, began_s)
            except _CERTAIN_FAILURES:
                left: SessionDocument | None = None
                with suppress(ShardgateError):  # or another request opens it again
                    left = await self._edit(partial(self._reopen, attempt))
                # Another request may have committed it, and its files may be removed since.
                if left is not None and isinstance(left.state, Committed):
                    return self._result(left.state)
                raise
            try:
                marked = await self._edit(partial(self._mark, attempt, made))
            except ShardgateError:  # a later request finds an unmarked commit
                return made
            if isinstance(marked.state, Committed):
                return self._result(marked.state)
            return made  # another attempt has the session by now; this commit stands

    def _result(self, state: Committed) -> CommitResult:
        if self.key is not None and state.key != self.key:
            raise ConflictError(f"the session is already committed, as {state.snapshot_id}")
        return CommitResult(state.snapshot_id, state.parent_id)

    def _seal(self, document: SessionDocument) -> SessionDocument:
        if isinstance(document.state, Committed) or self._is_sealed(document):
            return document
        return replace(self.session.renewed(document), state=Sealed(self.key))

    def _is_sealed(self, document: SessionDocument) -> bool:
        state = document.state
        return isinstance(state, Sealed) and self.key in (None, state.key)

    async def _gather_and_commit(self, attempt: int, began_s: float) -> CommitResult:
        session = self.session
        view = await session.view()
        chunks = await gather_chunks(session, view)
        document = view.session
        # The journal may have been cleared, or written to, by now.
        if not 0 <= session.clock() - began_s < _SOON_S:
            document = await session.read()
        if isinstance(document.state, Committed):
            return self._result(document.state)
        if document.attempt != attempt or not self._is_sealed(document):
            raise BusyError("another request has taken over the commit of the session")
        write_id = session.location.session_id + (f".{attempt}" if attempt else "")
        return await self.commit(document, make_changes(view, chunks), WriteId(write_id))

    def _reopen(self, attempt: int, document: SessionDocument) -> SessionDocument:
        """Open the session after *attempt*, unless a request with another key goes on with it."""
        if document.attempt != attempt or not self._is_sealed(document):
            return document
        return replace(document, state=OPEN, attempt=attempt + 1)

    def _mark(self, attempt: int, made: CommitResult, document: SessionDocument) -> SessionDocument:
        """Mark the session as committed, by the key of this request if it has one."""
        state = document.state
        if document.attempt != attempt or not isinstance(state, Sealed):
            return document
        key = self.key or state.key
        return replace(document, state=Committed(made.snapshot_id, made.parent_id, key))

    async def _edit(self, edit: Callable[[SessionDocument], SessionDocument]) -> SessionDocument:
        session = self.session
        edited = await session.documents.edit(lambda document: edit(session.require_live(document)))
        return session.require_live(edited)


async def gather_chunks(session: OpenedSession, view: SessionView) -> dict[bytes, ChunkChanges]:
    """Read the changed chunks of *view* from the journal, by node id.

    Entries outside of the current shape are left out. Raises: `ConflictError` for chunk files that
    are gone.
    """
    found: dict[bytes, ChunkChanges] = {}
    entries = await session.journal.all_entries()
    for node in view.among(entries):
        if node.chunks is not None:
            listed = entries[node.node_id]
            changes = await _gather_array(session, node, node.chunks, listed)
            if len(changes.payloads):
                found[node.node_id] = changes
    return found


async def _gather_array(
    session: OpenedSession, node: ViewedNode, chunks: Chunks, listed: Entries
) -> ChunkChanges:
    journal = session.journal
    payloads: dict[tuple[int, ...], Native | InlineChunk | None] = {}
    fragmented: dict[tuple[int, ...], Fragmented] = {}

    async def read(coords: tuple[int, ...]) -> None:
        address = ChunkAddress(node, coords)
        if (stored := await journal.get(address, listed[coords].etag)) is None:
            raise StorageUnavailableError(journal.ref(address), "was listed, and does not exist")
        if isinstance(stored.entry, Fragmented):
            fragmented[coords] = stored.entry
        else:
            payloads[coords] = stored.entry

    async def join(coords: tuple[int, ...]) -> None:
        payloads[coords] = await session.join(fragmented[coords])

    inside = [coords for coords in listed if chunks.has(coords)]
    await bounded_gather(read, inside, limit=32)
    await _check_files(session, node, payloads, listed)
    await bounded_gather(join, list(fragmented))
    is_long = is_many(len(payloads))
    return await run_in_thread(_sorted_changes, payloads, len(chunks.grid), is_long=is_long)


async def _check_files(
    session: OpenedSession,
    node: ViewedNode,
    payloads: Mapping[tuple[int, ...], JournalEntry],
    listed: Entries,
) -> None:
    """Check that chunk files exist that garbage collection may have removed: those of entries older
    than `_YOUNG_S`, or of unknown age.
    """
    since_s = session.clock() - _YOUNG_S
    references = {
        at: entry
        for at, entry in payloads.items()
        if isinstance(entry, Native) and (listed[at].modified_s or 0) < since_s
    }
    wanted = [entry.chunk_id for entry in references.values()]
    lengths = await chunk_lengths(session.store, session.repository, wanted)
    lost = [
        f"chunk {list(at)} in chunks/{encode_id(entry.chunk_id)}"
        for at, entry in sorted(references.items())
        if lengths.get(entry.chunk_id, 0) < entry.byte_range.stop
    ]
    if lost:
        more = f" and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""
        named = ", ".join(lost[:_MAX_NAMED])
        # An inner chunk is written into its shard, whose index is lost.
        remedy = "write these chunks again"
        if may_have_shards(node.document):
            remedy = "write the chunks of these shards in another session"
        raise ConflictError(
            f"/{node.path}: garbage collection has removed files that the session wrote: "
            f"{named}{more}; {remedy}"
        )


def _sorted_changes(
    payloads: Mapping[tuple[int, ...], Native | InlineChunk | None], ndim: int
) -> ChunkChanges:
    ordered = sorted(payloads)
    rows = np.array(ordered, np.uint32).reshape(len(ordered), ndim)
    return ChunkChanges(rows, Payloads.of(payloads[coords] for coords in ordered))
