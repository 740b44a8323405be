"""The bytes of entities: from memory, read whole, or passed on in pieces."""

from collections.abc import AsyncIterator
from typing import Final

from app.model import ByteRange, Inline, Stored
from app.resolve.chunks import ChunkReader
from app.resolve.entity import Body, Entity
from app.resolve.opening import Held
from app.storage.contract import Found, ObjectReader

_PIECE_BYTES: Final = 1024**2


class BodyReader:
    """Gives the bytes of entities; those of more than *stream_bytes* in pieces."""

    def __init__(self, store: ObjectReader, chunks: ChunkReader, *, stream_bytes: int) -> None:
        self._store = store
        self._chunks = chunks
        self._stream_bytes = stream_bytes

    def at_hand(self, entity: Entity, wanted: ByteRange | None) -> bytes | None:
        """Give the bytes *wanted* of *entity* if they need no reading; none wanted are none."""
        if wanted is None:
            return b""
        if isinstance(entity.source, Inline):
            return entity.source.data[wanted.start : wanted.stop]
        whole = self._chunks.cached(entity.source)
        if whole is None or wanted.length == len(whole):
            return whole
        return whole[wanted.start : wanted.stop]

    async def read(self, held: Held, entity: Entity, wanted: ByteRange | None) -> Body:
        """Read the bytes *wanted* of *entity*; what that takes is *held*.

        Raises: `VersionChangedError`, `StorageError`, `BusyError`.
        """
        at_hand = self.at_hand(entity, wanted)
        if at_hand is not None or wanted is None or isinstance(entity.source, Inline):
            return at_hand or b""
        if wanted.length > self._stream_bytes:
            return await self._stream(held, entity, entity.source, wanted)
        await held.reserve(wanted.length)
        data = _part(entity.first, wanted)
        if data is None:
            place = entity.source.byte_range.narrow(wanted)
            chunk = Stored(entity.source.ref, place, entity.source.etag)
            data = await self._chunks.read(chunk)
        if wanted.length == entity.length:
            self._chunks.keep(entity.source, data)
        return data

    async def _stream(
        self, held: Held, entity: Entity, source: Stored, wanted: ByteRange
    ) -> AsyncIterator[bytes]:
        head = _part(entity.first, ByteRange(wanted.start, wanted.start + self._stream_bytes))
        rest = ByteRange(wanted.start + len(head or b""), wanted.stop)
        place = source.byte_range.narrow(rest)
        tail = await held.enter(self._store.stream(source.ref, place, if_match=source.etag))
        await held.reserve(_PIECE_BYTES + len(head or b""))
        return tail if head is None else _chain(head, tail)


async def _chain(head: bytes, tail: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for piece in tail:
        yield piece


def _part(found: Found | None, wanted: ByteRange) -> bytes | None:
    """Cut *wanted* out of *found* if it is all there."""
    if found is None or not (
        found.byte_range.start <= wanted.start and wanted.stop <= found.byte_range.stop
    ):
        return None
    start = wanted.start - found.byte_range.start
    return found.data[start : start + wanted.length]
