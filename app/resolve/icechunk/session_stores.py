"""All sessions behind one store: each has a bucket of its own."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import cachetools

from app.errors import StorageUnavailableError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from app.resolve.icechunk.session_store import SessionStore
from app.storage.contract import Conflict, Expected, Found, Listed, NotModified, Stat

_MOST_KNOWN: Final = 1024


class SessionStores:
    """Routes by bucket; of sessions that nobody has asked for of late it knows nothing."""

    def __init__(self) -> None:
        self._known: cachetools.LRUCache[str, SessionStore] = cachetools.LRUCache(_MOST_KNOWN)

    def find(self, root: ObjectRef) -> SessionStore | None:
        """Find the session whose keys are below *root*."""
        return self._known.get(root.bucket)

    def add(self, root: ObjectRef, store: SessionStore) -> SessionStore:
        """Know a session whose keys are below *root*."""
        self._known[root.bucket] = store
        return store

    async def demand_safety(self, root: ObjectRef) -> None:
        """Ask the session."""
        await self._of(root).demand_safety(root)

    def keeps_gzip(self, ref: ObjectRef) -> bool:
        """Ask the session."""
        return self._of(ref).keeps_gzip(ref)

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read from the session."""
        store = self._of(ref)
        return await store.get(ref, request, if_match=if_match, if_none_match=if_none_match)

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Stream from the session."""
        return self._of(ref).stream(ref, byte_range, if_match=if_match)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask the session."""
        return await self._of(ref).stat(ref)

    def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List the session."""
        return self._of(prefix).list(prefix, delimiter=delimiter, after=after)

    async def reach(self, root: ObjectRef) -> None:
        """Ask the session."""
        await self._of(root).reach(root)

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        is_gzip: bool = False,
    ) -> ETag | Conflict:
        """Write to the session."""
        return await self._of(ref).put(ref, pieces, expected=expected, is_gzip=is_gzip)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove from the session."""
        return await self._of(ref).delete(ref, expected=expected)

    async def aclose(self) -> None:
        """Have nothing to give back: others close the store."""

    def _of(self, ref: ObjectRef) -> SessionStore:
        try:
            return self._known[ref.bucket]
        except KeyError:
            raise StorageUnavailableError(ref, "the session was not asked for") from None
