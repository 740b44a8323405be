"""Sessions as stores of plain Zarr: ``a/zarr.json``, ``a/c/0/0``, in a bucket for each session."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from app.concurrency import bounded_gather
from app.errors import BadKeyError, ConflictError, DamagedError, VersionChangedError
from app.formats.icechunk.ids import NODE_ID_NBYTES
from app.formats.icechunk.session import (
    ChunkAddress,
    SessionDocument,
    SessionView,
    delete_nodes,
    node_path,
    put_node,
    version_of,
)
from app.formats.listing import Window
from app.model import (
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    Inline,
    ObjectRef,
    Piece,
    condition_of,
)
from app.resolve.bodies import Entity
from app.resolve.icechunk.session import Change, Session, demand_open
from app.resolve.icechunk.session_chunks import delete_chunk, find_chunk, write_chunk
from app.resolve.icechunk.session_listing import list_keys
from app.storage.conditions import check_condition, check_write, clamp, is_as_expected
from app.storage.contract import (
    CONFLICT,
    NO_HEADERS,
    NOT_MODIFIED,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    Stat,
)
from app.storage.spans import assemble, plan_spans

_READS_AT_ONCE: Final = 4


class _LostError(Exception):
    """A document is in another version than was expected."""


class SessionStore:
    """One session. Nobody has to be asked for its nodes: that was done when a request began."""

    def __init__(self, session: Session) -> None:
        self.session = session

    async def verify_conditional_writes(self, _: ObjectRef) -> None:
        """Ask the store that the session is kept in."""
        await self.session.store.verify_conditional_writes(self.session.place.directory)

    def keeps_headers(self, _: ObjectRef) -> bool:
        """Say no: references have no headers."""
        return False

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read a document, or the chunk that is referred to."""
        entity = await self._find(ref.key, if_match)
        if entity is None:
            if if_match is not None:
                raise VersionChangedError(ref)
            return None
        check_condition(ref, if_match, entity.etag, None)
        if entity.etag == if_none_match:
            return NOT_MODIFIED
        wanted = clamp(ref, request, entity.length, if_match)
        data = await self._read(entity, wanted)
        return Found(data, wanted, entity.length, entity.etag)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Stream from what is referred to."""
        entity = await self._find(ref.key, if_match)
        if entity is None or entity.length < byte_range.stop:
            raise VersionChangedError(ref)
        check_condition(ref, if_match, entity.etag, None)
        if isinstance(place := entity.source, Inline):
            yield _piece(place.data[byte_range.start : byte_range.stop])
            return
        inner, condition = place.byte_range.narrow(byte_range), condition_of(place.version)
        async with self.session.store.stream(place.ref, inner, if_match=condition) as pieces:
            yield pieces

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Find out what is referred to."""
        entity = await self._find(ref.key, None)
        return None if entity is None else Stat(entity.length, entity.etag)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List documents and chunks."""
        view = await self.session.view()
        window = Window(prefix.key, after, delimiter)
        async for key, nbytes, etag in list_keys(self.session, view, window):
            yield Listed(ObjectRef(prefix.bucket, key), nbytes, etag)

    async def check_reachable(self, _: ObjectRef) -> None:
        """Ask for the session."""
        await self.session.refresh()

    async def aclose(self) -> None:
        """Have nothing to give back."""

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Write a document or a chunk.

        Raises: `BadKeyError` for all else, `BadBodyError`, `ConflictError`, `BusyError`,
        `UnknownSessionError`, `StorageError`.
        """
        if headers != NO_HEADERS:
            raise ValueError(f"{ref}: a reference has no headers")
        view = await self.session.view()
        demand_open(view.session)
        path = node_path(ref.key)
        address = None if path is not None else _demand_chunk(view, ref.key)
        try:
            data = await self._joined(ref, pieces, expected)
        except VersionChangedError:
            return CONFLICT
        if address is not None:
            return await write_chunk(self.session, view, address, data, expected)
        new_id = secrets.token_bytes(NODE_ID_NBYTES)
        put = partial(put_node, path=path or "", document=data, new_id=new_id)
        etag = version_of(data)
        return etag if await self._change(path or "", expected, put) else CONFLICT

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Take a node away, with all that is below it, or a chunk."""
        view = await self.session.view()
        demand_open(view.session)
        if (path := node_path(ref.key)) is not None:
            if view.node(path) is None:
                return expected is None or CONFLICT
            return await self._change(path, expected, partial(delete_nodes, path=path)) or CONFLICT
        if (address := view.address(ref.key)) is None:
            return expected is None or CONFLICT
        return await delete_chunk(self.session, view, address, expected) or True

    async def is_whole_chunk(self, key: str) -> bool:
        """Tell whether *key* is that of a chunk which is stored as clients see it."""
        address = (await self.session.view()).address(key)
        return address is not None and not address.may_be_shard

    async def erase(self, path: str) -> int:
        """Take the node at *path* away, and all below it; tell how many nodes that are."""
        view = await self.session.view()
        count = sum(1 for _ in view.below(path)) + (view.node(path) is not None)
        if count:
            await self.session.change(partial(delete_nodes, path=path))
        return count

    async def _change(self, path: str, expected: Expected, change: Change) -> bool:
        """Change nodes, if the one at *path* is in the version *expected*."""

        def checked(view: SessionView) -> SessionDocument:
            node = view.node(path)
            if not is_as_expected(None if node is None else node.etag, expected):
                raise _LostError
            return change(view)

        try:
            await self.session.change(checked)
        except _LostError:
            return False
        return True

    async def _find(self, key: str, if_match: Condition | None) -> Entity | None:
        session = self.session
        if isinstance(if_match, str) and (known := session.recall(key, if_match)) is not None:
            return known
        view = await session.view()
        if (path := node_path(key)) is not None:
            node = view.node(path)
            return None if node is None else Entity.at(Inline(node.document, node.etag))
        if (address := view.address(key)) is None:
            return None
        entity, _ = await find_chunk(session, view, address)
        if entity is not None:
            session.remember(key, entity)
        return entity

    async def _read(self, entity: Entity, wanted: ByteRange) -> bytes:
        if isinstance(place := entity.source, Inline):
            return place.data[wanted.start : wanted.stop]
        if not wanted.length:
            return b""
        inner, condition = place.byte_range.narrow(wanted), condition_of(place.version)
        found = await self.session.store.get(place.ref, inner, if_match=condition)
        if not isinstance(found, Found) or found.byte_range != inner:
            raise DamagedError(place.ref, "does not exist, or is too short, and is referred to")
        return found.data

    async def _joined(self, ref: ObjectRef, pieces: Sequence[Piece], expected: Expected) -> bytes:
        """Put *pieces* together; ranges are read from the version *expected*."""
        spans = plan_spans(piece for piece in pieces if isinstance(piece, ByteRange))
        if not spans:
            return b"".join(piece for piece in pieces if isinstance(piece, bytes))
        check_write(ref, pieces, expected)
        entity = await self._find(ref.key, expected if isinstance(expected, str) else None)
        if entity is None or entity.etag != expected:
            raise VersionChangedError(ref)
        read = await bounded_gather(partial(self._read, entity), spans, limit=_READS_AT_ONCE)
        return assemble(pieces, spans, read)


def _demand_chunk(view: SessionView, key: str) -> ChunkAddress:
    """Find the chunk that *key* names.

    Raises: `BadKeyError`, `ConflictError` where there is no array.
    """
    if (address := view.address(key)) is not None:
        return address
    node, rest = view.around(key)
    if node is None or node.grid is None:
        raise ConflictError(f"{key}: no zarr.json, and no array is there that it could be of")
    if node.grid.keys.parse(rest) is not None:
        shape = list(node.grid.shape)
        raise BadKeyError(f"{key}: the array /{node.path} has room for {shape} chunks only")
    raise BadKeyError(f"{key}: neither zarr.json nor a chunk, and a repository has nothing else")


async def _piece(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data
