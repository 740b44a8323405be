"""Session of a repository: its current state, and its chunks in the journal or the parent."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, NamedTuple

from shardgate.concurrency import Backoff, bounded_gather
from shardgate.errors import (
    BadBodyError,
    BusyError,
    ConflictError,
    DamagedError,
    StorageError,
    UnknownSessionError,
)
from shardgate.formats.icechunk.manifest import InlineChunk, Native, Reference
from shardgate.formats.icechunk.repository_files import Repository, named_by
from shardgate.formats.icechunk.snapshot import StoredSnapshot
from shardgate.formats.reading import Fetch
from shardgate.icechunk.chunk_files import new_object_id, put_new
from shardgate.icechunk.repository import read_snapshot
from shardgate.icechunk.sessions.document import (
    ChunkAddress,
    Committed,
    Discarded,
    Open,
    Sealed,
    SessionDocument,
    SessionView,
    is_journaled,
    require_open,
    version_of,
)
from shardgate.icechunk.sessions.entries import (
    MAX_FRAGMENTS,
    Fragment,
    Fragmented,
    JournalEntry,
    cut,
    rearrange,
)
from shardgate.icechunk.sessions.journal import (
    SessionDocumentStore,
    SessionJournal,
    SessionLocation,
)
from shardgate.model import (
    ByteRange,
    ETag,
    Inline,
    Part,
    Piece,
    Referenced,
    Stored,
    UnmodifiedSince,
    condition_of,
)
from shardgate.read.bodies import Entity
from shardgate.read.budget import ByteBudget
from shardgate.storage.contract import (
    ABSENT,
    CONFLICT,
    OBJECT,
    Conflict,
    Expected,
    Found,
    ObjectStore,
    is_as_expected,
)

LIFETIME_S: Final = 24 * 3600.0
"""Life of a session after its last write."""
MAX_AGE_S: Final = 7 * 24 * 3600.0
"""Longest life of a session, whatever is written to it.

Garbage collection must leave younger chunk files alone: no commit refers to them yet.
"""
_COMMIT_S: Final = 30.0
_POLL: Final = Backoff(first_s=0.1, longest_s=1.0, at_once=0)

type ViewEdit = Callable[[SessionView], SessionDocument]


class SessionChunk(NamedTuple):
    """Version, length and place of the bytes of a chunk, or of a document."""

    etag: ETag
    length: int
    source: Inline | Stored | tuple[Fragment, ...]
    """`Stored` for a virtual chunk, which is outside of the repository."""


class ReplacedChunk(NamedTuple):
    """A chunk that a write replaces."""

    chunk: SessionChunk | None = None
    """`None` for a chunk that is absent, or may be in any version."""
    entry: Expected = None
    """The expected version of its entry in the journal."""

    def is_whole(self, pieces: Sequence[Piece]) -> bool:
        """Return whether *pieces* are the whole chunk."""
        return self.chunk is not None and list(pieces) == [ByteRange(0, self.chunk.length)]


@dataclass(eq=False)
class OpenedSession:
    """State of a session as last read, and the means to read and change it."""

    location: SessionLocation
    repository: Repository
    store: ObjectStore
    fetch: Fetch
    journal: SessionJournal
    documents: SessionDocumentStore
    joining: ByteBudget
    """For shards that a commit joins; writes hold room of another one while they wait for it."""
    clock: Callable[[], float]
    committing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the commit in this process; those of others may run at the same time."""
    _view: SessionView | None = field(default=None, init=False)
    _viewed: SessionDocument | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        """Estimate the bytes of memory held."""
        return self.documents.nbytes + (0 if self._view is None else self._view.parent.nbytes)

    @property
    def is_known_open(self) -> bool:
        """True if the session was open when its document was last read, and its end is far, or as
        late as it may be: no other replica can have postponed an end that comes during a commit.
        """
        known = self.documents.known
        if known is None or known.expires_at_s <= self.clock():
            return False
        return isinstance(known.state, Open) and self.renewed(known) is known

    async def read(self) -> SessionDocument:
        """Read the current document."""
        return self.require_live(await self.documents.read())

    async def refresh(self) -> SessionView:
        """Read the current document, and return its view."""
        await self.read()
        return await self.view()

    async def view(self) -> SessionView:
        """Return the view of the document last read."""
        while self._view is None or self._viewed is not self.documents.known:
            document = self.require_live(self.documents.known)
            if isinstance(document.state, Committed):
                base = await self._snapshot(document.state.snapshot_id)
                view = self._view_of(replace(document, nodes={}), base)
            else:
                view = self._view_of(document, await self._snapshot(document.parent_id))
            # Another request may have read a newer document during the read of its snapshot.
            if self.documents.known is document:
                self._view, self._viewed = view, document
        return self._view

    async def edit(self, edit: ViewEdit) -> None:
        """Replace the document of an open session."""
        parent = (await self.view()).parent

        def edit_document(document: SessionDocument | None) -> SessionDocument:
            document = self.require_live(document)
            require_open(document)
            return self.renewed(edit(self._view_of(document, parent)))

        await self.documents.edit(edit_document)

    async def renew(self, document: SessionDocument) -> None:
        """Postpone the end of the session in the store, if the gain is worth a write."""
        if self.renewed(document) is not document:
            await self.edit(lambda view: view.session)

    def require_live(self, document: SessionDocument | None) -> SessionDocument:
        """Return *document* if the session exists and has not ended."""
        if document is None or isinstance(document.state, Discarded):
            raise UnknownSessionError(f"there is no session {self.location.session_id}")
        if document.expires_at_s <= self.clock():
            raise UnknownSessionError(f"the session {self.location.session_id} has expired")
        return document

    def renewed(self, document: SessionDocument) -> SessionDocument:
        """Postpone the end of *document*, up to `MAX_AGE_S`, if the gain is worth a write."""
        until_s = min(self.clock() + LIFETIME_S, document.created_at_s + MAX_AGE_S)
        # Each renewal writes the document: at most 24 in a `LIFETIME_S`.
        if until_s - document.expires_at_s < LIFETIME_S / 24:
            return document
        return replace(document, expires_at_s=until_s)

    def _view_of(self, document: SessionDocument, parent: StoredSnapshot) -> SessionView:
        return SessionView(document, parent, self.location.document)

    async def _snapshot(self, snapshot_id: str) -> StoredSnapshot:
        found = await read_snapshot(self.repository, snapshot_id, self.fetch)
        if found is None:
            name = self.repository.directory.join(f"snapshots/{snapshot_id}")
            raise DamagedError(name, "does not exist, and a session is based on it")
        return found

    async def find_chunk(
        self, view: SessionView, address: ChunkAddress
    ) -> tuple[SessionChunk | None, ETag | None]:
        """Look up a chunk in the journal, then the parent; return also the version of its entry."""
        node, coords = address
        if is_journaled(view.session):
            stored = await self.journal.get(address)
            if stored is not None:
                chunk = None if stored.entry is None else self.chunk_of(stored.entry)
                return chunk, stored.etag
        reference = await self.lookup(address)
        if isinstance(reference, Native | InlineChunk):
            return self.chunk_of(reference), None
        if reference is None or node.chunks is None:
            return None, None
        found = await self.repository.find(node.node_id, node.chunks, coords, self.fetch)
        return (None if found is None else await self._virtual_chunk(found[1])), None

    def chunk_of(self, entry: Native | InlineChunk | Fragmented) -> SessionChunk:
        """Return the chunk that a journal entry, or the parent, refers to."""
        match entry:
            case InlineChunk(data):
                etag = version_of(data)
                return SessionChunk(etag, len(data), Inline(data, etag))
            case Native(chunk_id, byte_range):
                fragments = (Fragment(chunk_id, byte_range, is_chunk_file=True),)
                etag = self.place(fragments[0]).etag
                return SessionChunk(etag, byte_range.length, fragments)
            case Fragmented(_, fragments):
                return self.chunk_of(entry.joined)._replace(source=fragments)

    def places(self, source: Stored | tuple[Fragment, ...], wanted: ByteRange) -> list[Stored]:
        """Return where the bytes *wanted* of a chunk are, in their order."""
        if isinstance(source, Stored):
            inner = source.byte_range.narrow(wanted)
            return [source._replace(byte_range=inner)] if inner.length else []
        (fragments,) = cut(source, wanted)
        return list(map(self.place, fragments))

    def place(self, fragment: Fragment) -> Stored:
        """Return the file and range of *fragment*."""
        file_id, byte_range, is_chunk_file = fragment
        file = self.location.fragments(file_id)
        if is_chunk_file:
            file = self.repository.file("chunks", file_id)
        return Stored(file, byte_range, named_by(file_id))

    async def write_chunk(
        self, view: SessionView, address: ChunkAddress, data: bytes, replaced: ReplacedChunk
    ) -> ETag | Conflict:
        """Write a chunk and return its version; once this returns, the chunk is in the commit."""
        if not data:
            raise BadBodyError("a chunk must have at least one byte")
        entry: InlineChunk | Native = InlineChunk(data)
        if len(data) > view.session.inline_nbytes:
            entry = Native(new_object_id(), ByteRange(0, len(data)))
            await put_new(self.store, self.repository.file("chunks", entry.chunk_id), data)
        lost = await self._put_entry(address, entry, replaced.entry)
        return self.chunk_of(entry).etag if lost is None else lost

    async def rearrange_chunk(
        self,
        view: SessionView,
        address: ChunkAddress,
        pieces: Sequence[Piece],
        replaced: ReplacedChunk,
    ) -> ETag | Conflict | None:
        """Write the new bytes of a shard, and refer to the kept ones; return as `write_chunk`, or
        `None` for a shard that has to be written as a whole: a virtual, small or scattered one.
        """
        source = replaced.chunk and replaced.chunk.source
        is_new = ByteRange not in map(type, pieces)
        if source is None or is_new or isinstance(source, Inline | Stored):
            return None
        file_id = new_object_id()
        fragments = rearrange(source, pieces, file_id)
        entry = Fragmented(new_object_id(), tuple(fragments))
        is_small = entry.joined.byte_range.length <= view.session.inline_nbytes
        if is_small or len(fragments) > MAX_FRAGMENTS:
            return None
        if data := b"".join(piece for piece in pieces if isinstance(piece, bytes)):
            await put_new(self.store, self.location.fragments(file_id), data)
        lost = await self._put_entry(address, entry, replaced.entry)
        if lost is None:
            return self.chunk_of(entry).etag
        with suppress(StorageError):  # it is removed with the journal
            await self.store.delete(self.location.fragments(file_id), expected=None)
        return lost

    async def join(self, entry: Fragmented) -> Native:
        """Write the chunk file of a shard, unless another request has. Raises: `DamagedError`."""
        file = self.repository.file("chunks", entry.chunk_id)
        if await self.store.stat(file) is None:
            places = list(map(self.place, entry.fragments))
            async with self.joining.room(entry.joined.byte_range.length):
                read = await bounded_gather(self.read_place, places, limit=4)
                # A conflict is another request's file, which has the same bytes.
                await self.store.put(file, read, expected=ABSENT)
        return entry.joined

    async def read_place(self, place: Stored, kind: str = OBJECT) -> bytes:
        """Read a part of a file that the session refers to. Raises: `DamagedError`."""
        ref, byte_range, version = place
        found = await self.store.get(ref, byte_range, if_match=condition_of(version), kind=kind)
        if not isinstance(found, Found) or found.byte_range != byte_range:
            raise DamagedError(ref, "is missing or too short, and a chunk refers to it")
        return found.data

    async def keep_chunk(
        self, address: ChunkAddress, replaced: ReplacedChunk
    ) -> ETag | Conflict | None:
        """Enter a chunk of the parent into the journal, without a copy of its bytes; return its
        version, `None` for a virtual chunk, which has to be written.
        """
        if replaced.chunk is None or isinstance(replaced.entry, str):  # it is entered already
            return replaced.chunk and replaced.chunk.etag
        entry = await self.lookup(address)
        if not isinstance(entry, Native | InlineChunk):
            return None
        return await self._put_entry(address, entry, ABSENT) or replaced.chunk.etag

    async def delete_chunk(
        self, view: SessionView, address: ChunkAddress, expected: Expected
    ) -> Conflict | None:
        """Delete a chunk; see `write_chunk`. The deletion of an absent one is in the commit too,
        since another commit may have written it.
        """
        replaced = await self.find_replaced(view, address, expected)
        if isinstance(replaced, Conflict):
            return replaced
        has_entry = isinstance(replaced.entry, str)
        if replaced.chunk is None and has_entry:  # the entry says that it is deleted
            return None
        # A chunk of a new array needs no entry: absence is its state without one.
        if expected is not None or view.is_in_parent(address.node):
            return await self._put_entry(address, None, replaced.entry)
        await self.journal.remove(address)
        await self._confirm(address, None)
        return None

    async def find_replaced(
        self, view: SessionView, address: ChunkAddress, expected: Expected
    ) -> ReplacedChunk | Conflict:
        """Find the chunk in the version *expected*, which a write replaces."""
        if expected is None:
            return ReplacedChunk()
        chunk, entry_etag = await self.find_chunk(view, address)
        if not is_as_expected(None if chunk is None else chunk.etag, expected):
            return CONFLICT
        return ReplacedChunk(chunk, entry_etag or ABSENT)

    async def lookup(self, address: ChunkAddress) -> Reference | None:
        """Look up a chunk of the parent."""
        node, coords = address
        if node.chunks is None:
            return None
        found = await self.repository.lookup(node.node_id, node.chunks, coords, self.fetch)
        return found and found[1]

    async def _put_entry(
        self, address: ChunkAddress, entry: JournalEntry, expected: Expected
    ) -> Conflict | None:
        lost = await self.journal.put(address, entry, expected=expected)
        if lost is None:
            try:
                await self._confirm(address, entry)
            except UnknownSessionError:
                await self._remove_late_files()
                raise
        return lost

    async def _remove_late_files(self) -> None:
        """Remove what was written after the session was discarded: no sweep would find it."""
        document = self.documents.known
        # One that has expired by this clock only may be renewed by another replica.
        if document is None or isinstance(document.state, Discarded):
            with suppress(StorageError):
                await self.journal.clear()

    async def _confirm(self, address: ChunkAddress, entry: JournalEntry) -> None:
        """Check that *entry*, written before this call, is or will be in the commit."""
        try:
            # After longer the process that commits has probably ended.
            async with asyncio.timeout(_COMMIT_S):
                view = await self._wait_for_commit()
        except TimeoutError:
            raise BusyError("a commit of the session was interrupted: commit it again") from None
        if isinstance(view.session.state, Open):
            await self.renew(view.session)
        elif not await self._is_committed(view, address, entry):
            raise ConflictError("the session was committed before this write")

    async def _wait_for_commit(self) -> SessionView:
        for number in count():
            view = await self.refresh()
            if not isinstance(view.session.state, Sealed):
                break
            await _POLL.pause(number)
        return view

    async def _is_committed(
        self, view: SessionView, address: ChunkAddress, entry: JournalEntry
    ) -> bool:
        node = next(iter(view.among({address.node.node_id})), None)
        if node is None:
            return False
        committed = entry.joined if isinstance(entry, Fragmented) else entry
        return committed == await self.lookup(ChunkAddress(node, address.coords))

    async def _virtual_chunk(self, referenced: Referenced) -> SessionChunk:
        """Return the chunk of a virtual reference, whose ETag may take a request."""
        place = referenced.place
        if isinstance(place, Part):
            ref, byte_range, version = place
            stat = await self.store.stat(ref)
            if stat is None or stat.size < byte_range.stop or _is_newer(stat.modified_s, version):
                raise DamagedError(ref, "is missing or has changed since it was referenced")
            place = Stored(ref, byte_range, stat.etag)
        entity = Entity.at(place).referenced(referenced.reference_id, is_immutable=False)
        return SessionChunk(entity.etag, entity.length, entity.source)


def _is_newer(modified_s: int | None, version: UnmodifiedSince | None) -> bool:
    return version is not None and (modified_s is None or modified_s > version.epoch_s)
