"""One store that is many: each bucket is in one of them."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from app.storage.contract import (
    NO_HEADERS,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    ObjectStore,
    Stat,
)


class ByBucket(ABC):
    """Hands each call on to the store that the bucket is in."""

    @abstractmethod
    def store_of(self, ref: ObjectRef) -> ObjectStore:
        """Find the store of the bucket of *ref*.

        Raises: `StorageUnavailableError` where there is none.
        """

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read from the store of the bucket."""
        store = self.store_of(ref)
        return await store.get(ref, request, if_match=if_match, if_none_match=if_none_match)

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Stream from the store of the bucket."""
        return self.store_of(ref).stream(ref, byte_range, if_match=if_match)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask the store of the bucket."""
        return await self.store_of(ref).stat(ref)

    def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List from the store of the bucket."""
        return self.store_of(prefix).list(prefix, delimiter=delimiter, after=after)

    async def reach(self, root: ObjectRef) -> None:
        """Ask the store of the bucket."""
        await self.store_of(root).reach(root)

    async def demand_safety(self, root: ObjectRef) -> None:
        """Ask the store of the bucket."""
        await self.store_of(root).demand_safety(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:
        """Ask the store of the bucket."""
        return self.store_of(ref).keeps_headers(ref)

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Write to the store of the bucket."""
        return await self.store_of(ref).put(ref, pieces, expected=expected, headers=headers)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove from the store of the bucket."""
        return await self.store_of(ref).delete(ref, expected=expected)
