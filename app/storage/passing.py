"""The writing side of stores that wrap another one, and leave writes to it."""

from collections.abc import Sequence

from app.model import ETag, ObjectRef, Piece
from app.storage.contract import NO_HEADERS, Conflict, Expected, ObjectHeaders, ObjectWriter


class WritesPass:
    """Hands writes on as they are, once."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    async def demand_safety(self, root: ObjectRef) -> None:
        """Ask the inner store."""
        await self._writer.demand_safety(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:
        """Ask the inner store."""
        return self._writer.keeps_headers(ref)

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Write to the inner store."""
        return await self._writer.put(ref, pieces, expected=expected, headers=headers)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove from the inner store."""
        return await self._writer.delete(ref, expected=expected)
