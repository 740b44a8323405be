"""Session as an object store of plain Zarr with a bucket of its own.

Keys are ``a/zarr.json`` and ``a/c/0/0``. Documents are in the session document or the parent
snapshot, chunks in the journal or the manifests of that snapshot; see `OpenedSession.find_chunk`.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from shardgate.concurrency import bounded_gather
from shardgate.errors import BadKeyError, ConflictError, VersionChangedError
from shardgate.formats.icechunk.coords import Coords, distinct_rows, inside, rows_in
from shardgate.formats.icechunk.ids import NODE_ID_NBYTES
from shardgate.formats.icechunk.keys import DOCUMENT
from shardgate.formats.icechunk.layout import KeyBlock, key_blocks
from shardgate.formats.icechunk.manifest import InlineChunk, Native, Virtual
from shardgate.formats.icechunk.snapshot import Chunks
from shardgate.formats.listing import Grid, GridAxis, Window
from shardgate.icechunk.sessions.document import (
    ChunkAddress,
    SessionDocument,
    SessionView,
    ViewedNode,
    delete_nodes,
    is_journaled,
    may_have_shards,
    node_path,
    put_node,
    require_open,
    version_of,
)
from shardgate.icechunk.sessions.entries import Fragmented, JournalEntry
from shardgate.icechunk.sessions.journal import Entries, ListedEntry
from shardgate.icechunk.sessions.session import (
    OpenedSession,
    SessionChunk,
    ViewEdit,
)
from shardgate.model import (
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    Inline,
    ObjectRef,
    Piece,
    Stored,
    condition_of,
)
from shardgate.storage.contract import (
    CONFLICT,
    NO_HEADERS,
    NOT_MODIFIED,
    OBJECT,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    Stat,
    assemble,
    check_condition,
    check_write,
    clamp,
    is_as_expected,
    plan_spans,
    stream_of,
)


@dataclass(eq=False)
class SessionStore:
    """Object store of one session, whose keys lie below *root*, a bucket of their own."""

    session: OpenedSession
    root: ObjectRef

    async def verify_conditional_writes(self, _: ObjectRef) -> None:
        await self.session.store.verify_conditional_writes(self.session.location.directory)

    def keeps_headers(self, _: ObjectRef) -> bool:
        return False

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
        kind: str = OBJECT,
    ) -> Found | NotModified | None:
        chunk = await self._find(ref.key)
        check_condition(ref, if_match, chunk and chunk.etag)
        if chunk is None:
            return None
        if chunk.etag == if_none_match:
            return NOT_MODIFIED
        wanted = clamp(ref, request, chunk.length, if_match)
        data = await self._read(chunk, wanted, kind)
        return Found(data, wanted, chunk.length, chunk.etag)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        chunk = await self._find(ref.key)
        if chunk is None or chunk.length < byte_range.stop:
            raise VersionChangedError(ref)
        check_condition(ref, if_match, chunk.etag)
        if isinstance(source := chunk.source, Inline):
            yield stream_of(source.data[byte_range.start : byte_range.stop])
            return
        places = self.session.places(source, byte_range)
        async with aclosing(self._stream(places)) as pieces:
            yield pieces

    async def _stream(self, places: Sequence[Stored]) -> AsyncGenerator[bytes]:
        for ref, byte_range, version in places:
            condition = condition_of(version)
            stream = self.session.store.stream(ref, byte_range, if_match=condition)
            async with stream as pieces:
                async for piece in pieces:
                    yield piece

    async def stat(self, ref: ObjectRef) -> Stat | None:
        chunk = await self._find(ref.key)
        return None if chunk is None else Stat(chunk.length, chunk.etag)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        view = await self.session.view()
        window = Window(prefix.key, after, delimiter)
        async for listed in _SessionListing(self.session, view, window, prefix.bucket).run():
            yield listed

    async def check_reachable(self, _: ObjectRef) -> None:
        await self.session.refresh()

    async def aclose(self) -> None:
        """Do nothing: the underlying store is closed by its owner."""

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Write a document or a chunk; raise `BadKeyError` for any other key."""
        if headers != NO_HEADERS:
            raise ValueError(f"{ref}: a chunk reference has no headers")
        view = await self.session.view()
        require_open(view.session)
        try:
            if (path := node_path(ref.key)) is None:
                return await self._put_chunk(view, ref, pieces, expected)
            data = await self._joined(ref, pieces, expected, _document(view, path))
        except VersionChangedError:
            return CONFLICT
        new_id = secrets.token_bytes(NODE_ID_NBYTES)
        put = partial(put_node, path=path, document=data, new_id=new_id)
        return version_of(data) if await self._edit(path, expected, put) else CONFLICT

    async def _put_chunk(
        self, view: SessionView, ref: ObjectRef, pieces: Sequence[Piece], expected: Expected
    ) -> ETag | Conflict:
        if (address := view.address(ref.key)) is None:
            raise _no_chunk(view, ref.key)
        replaced = await self.session.find_replaced(view, address, expected)
        if isinstance(replaced, Conflict):
            return replaced
        # The chunk as it is: a commit then conflicts with others that wrote it.
        if replaced.is_whole(pieces):
            kept = await self.session.keep_chunk(address, replaced)
            if kept is not None:
                return kept
        written = await self.session.rearrange_chunk(view, address, pieces, replaced)
        if written is not None:
            return written
        data = await self._joined(ref, pieces, expected, replaced.chunk)
        return await self.session.write_chunk(view, address, data, replaced)

    async def delete(self, ref: ObjectRef, *, expected: Expected) -> bool | Conflict:
        """Delete a chunk, or a node with all nodes below it."""
        view = await self.session.view()
        require_open(view.session)
        if (path := node_path(ref.key)) is not None:
            if view.node(path) is None:
                return is_as_expected(None, expected) or CONFLICT
            return await self._edit(path, expected, partial(delete_nodes, path=path)) or CONFLICT
        if (address := view.address(ref.key)) is None:
            return is_as_expected(None, expected) or CONFLICT
        return await self.session.delete_chunk(view, address, expected) or True

    async def is_whole_chunk(self, key: str) -> bool:
        """Return whether *key* names a chunk that is stored as clients see it, not a shard."""
        address = (await self.session.view()).address(key)
        return address is not None and not may_have_shards(address.node.document)

    async def erase(self, path: str) -> int:
        """Delete the node at *path* and all below it; return the number of nodes."""
        view = await self.session.view()
        count = sum(1 for _ in view.below(path)) + (view.node(path) is not None)
        if count:
            await self.session.edit(partial(delete_nodes, path=path))
        return count

    async def _edit(self, path: str, expected: Expected, edit: ViewEdit) -> bool:
        is_expected = False

        def checked(view: SessionView) -> SessionDocument:
            nonlocal is_expected
            node = view.node(path)
            is_expected = is_as_expected(None if node is None else node.etag, expected)
            return edit(view) if is_expected else view.session

        await self.session.edit(checked)
        return is_expected

    async def _find(self, key: str) -> SessionChunk | None:
        view = await self.session.view()
        if (path := node_path(key)) is not None:
            return _document(view, path)
        if (address := view.address(key)) is None:
            return None
        return (await self.session.find_chunk(view, address))[0]

    async def _read(self, chunk: SessionChunk, wanted: ByteRange, kind: str = OBJECT) -> bytes:
        if isinstance(source := chunk.source, Inline):
            return source.data[wanted.start : wanted.stop]
        read_place = partial(self.session.read_place, kind=kind)
        read = await bounded_gather(read_place, self.session.places(source, wanted), limit=4)
        return read[0] if len(read) == 1 else b"".join(read)

    async def _joined(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        expected: Expected,
        chunk: SessionChunk | None,
    ) -> bytes:
        """Join *pieces*, whose ranges are of *chunk*, if that is as *expected*."""
        if not (ranges := [piece for piece in pieces if isinstance(piece, ByteRange)]):
            return b"".join([piece for piece in pieces if isinstance(piece, bytes)])
        spans = plan_spans(ranges)
        check_write(ref, pieces, expected)
        if chunk is None or chunk.etag != expected:
            raise VersionChangedError(ref)
        read = await bounded_gather(partial(self._read, chunk), spans, limit=4)
        return assemble(pieces, spans, read)


def _document(view: SessionView, path: str) -> SessionChunk | None:
    if (node := view.node(path)) is None:
        return None
    return SessionChunk(node.etag, len(node.document), Inline(node.document, node.etag))


def _no_chunk(view: SessionView, key: str) -> BadKeyError | ConflictError:
    """Return the reason why *key* cannot be written."""
    node, rest = view.around(key)
    if node is None or node.chunks is None:
        return ConflictError(f"{key} is not a zarr.json, and no array of the session contains it")
    if node.chunks.keys.parse(rest) is not None:
        shape = list(node.chunks.grid)
        return BadKeyError(
            f"{key}: outside of the chunk grid of /{node.path}, whose shape is {shape}"
        )
    return BadKeyError(f"{key} is neither a zarr.json nor a chunk; repositories hold nothing else")


@dataclass(frozen=True, slots=True)
class _SessionListing:
    session: OpenedSession
    view: SessionView
    window: Window
    bucket: str

    async def run(self) -> AsyncGenerator[Listed]:
        folded = None
        window = self.window
        for block in await asyncio.to_thread(self._blocks):
            start = window.fold(block.start)
            if start is None or window.begins_in(start):
                async for listed in self._list(block):
                    if listed.size is not None or listed.ref.key != folded:
                        yield listed
                    folded = listed.ref.key if listed.size is None else folded
            elif start != folded and start > window.after and await self._has_keys(block, start):
                folded = start
                yield self._listed(start, None)

    def _listed(
        self,
        key: str,
        nbytes: int | None,
        etag: ETag | None = None,
        modified_s: float | None = None,
    ) -> Listed:
        """List a key; without an entry in the journal its time is the begin of the session."""
        modified_s = modified_s or self.view.session.created_at_s
        return Listed(ObjectRef(self.bucket, key), nbytes, etag, modified_s)

    def _blocks(self) -> list[KeyBlock[ViewedNode]]:
        found = (self.view.node(path) for path in self.view.paths())
        return key_blocks(((each.path, each, each.chunks) for each in found if each), self.window)

    async def _has_keys(self, block: KeyBlock[ViewedNode], folded: str) -> bool:
        if block.chunks is None or (block.folder + DOCUMENT).startswith(folded):
            return True
        return len((await self._chunks(block.node, block.chunks))[0]) > 0

    async def _list(self, block: KeyBlock[ViewedNode]) -> AsyncGenerator[Listed]:
        _, folder, node, chunks = block
        window = self.window
        if chunks is None:
            if not window.admits(block.start):
                return
            if (start := window.fold(block.start)) is None:
                yield self._listed(block.start, len(node.document), node.etag)
            else:
                yield self._listed(start, None)
            return
        rows, journaled = await self._chunks(node, chunks)
        axes = tuple(map(GridAxis, chunks.grid))
        grid = Grid.of(rows, axes, lambda at: folder + chunks.keys.beginning(at))
        walk = grid.cells(window)

        async def look_up(coords: tuple[int, ...]) -> Listed | None:
            key = grid.spell(coords)
            if not window.admits(key):
                return None
            if (folded := window.fold(key)) is not None:
                return self._listed(folded, None) if window.opens(folded) else None
            return await self._look_up(ChunkAddress(node, coords), key, journaled.get(coords))

        while batch := await asyncio.to_thread(lambda: list(islice(walk, 256))):
            for listed in await bounded_gather(look_up, batch):
                if listed is not None:
                    yield listed

    async def _chunks(self, node: ViewedNode, chunks: Chunks) -> tuple[Coords, Entries]:
        """Return the coords of an array's chunks, ``(count, ndim)`` in C order, and its journal."""
        session = self.session
        journaled: Entries = {}
        if is_journaled(self.view.session):
            journaled = await session.journal.entries(node.node_id)
        stored = []
        for object_id, _ in chunks.manifests:
            manifest = await session.repository.manifest(object_id, session.fetch)
            stored.append(manifest.coords(node.node_id, len(chunks.grid)))
        return await asyncio.to_thread(_overlay, chunks.grid, stored, journaled), journaled

    async def _look_up(
        self, address: ChunkAddress, key: str, entry: ListedEntry | None
    ) -> Listed | None:
        """Return the size of a chunk, and its ETag unless that takes a request for the object."""
        session = self.session
        reference: JournalEntry | Virtual
        if entry is None:
            reference = await session.lookup(address)
        else:
            kept = await session.journal.get(address, entry.etag)
            reference = kept and kept.entry
        match reference:
            case InlineChunk() | Native() | Fragmented():
                chunk = session.chunk_of(reference)
                modified_s = None if entry is None else entry.modified_s
                return self._listed(key, chunk.length, chunk.etag, modified_s)
            case Virtual(_, byte_range, _):
                return self._listed(key, byte_range.length)
        return None


def _overlay(grid: tuple[int, ...], stored: list[Coords], journaled: Entries) -> Coords:
    """Merge the coords in the journal with those *stored* in the parent, ``(count, ndim)``."""
    ndim = len(grid)
    fitting = [coords for coords in journaled if len(coords) == ndim]
    changed = np.array(fitting, np.uint32).reshape(len(fitting), ndim)
    is_present = np.array([not journaled[each].is_deletion for each in fitting], np.bool_)
    old = distinct_rows(np.concatenate([np.empty((0, ndim), np.uint32), *stored]))
    rows = np.concatenate([old[~rows_in(old, changed)], changed[is_present]])
    return distinct_rows(rows[inside(rows, grid)])
