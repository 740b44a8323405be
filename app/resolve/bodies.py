"""The bytes of entities: from memory, read whole, or passed on in pieces."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final, cast

from app.errors import DamagedError, RangeNotSatisfiedError, VersionChangedError, lost
from app.formats.compression import inflate, inflated_nbytes
from app.formats.reading import DecodeError
from app.model import ByteRange, Fixed, Inline, Stored, condition_of
from app.resolve.chunks import ChunkReader
from app.resolve.entity import Body, Coding, Entity
from app.resolve.opening import Held
from app.storage.contract import Found, ObjectReader

_PIECE_BYTES: Final = 1024**2
_INFLATE_IN_THREAD_NBYTES: Final = 64 * 1024
"""More is inflated off the event loop."""


class BodyReader:
    """Gives the bytes of entities; those of more than *stream_bytes* in pieces.

    What is gzip is inflated up to *decoded_bytes*.
    """

    def __init__(
        self, store: ObjectReader, chunks: ChunkReader, *, stream_bytes: int, decoded_bytes: int
    ) -> None:
        self._store = store
        self._chunks = chunks
        self._stream_bytes = stream_bytes
        self._decoded_bytes = decoded_bytes

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
        is_whole = wanted.length == entity.length
        if (data := _part(entity.first, wanted)) is not None:
            if is_whole:
                self._chunks.keep(entity.source, data)
            return data
        place = entity.source.byte_range.narrow(wanted)
        chunk = Stored(entity.source.ref, place, entity.source.version)
        return await self._chunks.read(chunk, keep=is_whole)

    async def inflate(self, held: Held, entity: Entity) -> Entity:
        """Read the gzip that *entity* is, and give what that holds in its place.

        Raises: `DamagedError` for no gzip, or too much of it; what `read` raises.
        """
        source = cast("Stored", entity.source)
        try:
            data = await self._inflate(held, entity)
        except DecodeError as error:
            await self._confirm(source)
            raise DamagedError(source.ref, f"{source.byte_range}: {error}") from error
        inflated = Inline(data, entity.etag)
        return entity._replace(
            length=len(data), source=inflated, first=None, coding=Coding.INFLATED
        )

    async def _inflate(self, held: Held, entity: Entity) -> bytes:
        if entity.length > self._decoded_bytes:
            raise DecodeError(f"{entity.length} bytes of gzip are too many to inflate")
        body = await self.read(held, entity, ByteRange(0, entity.length))
        if not isinstance(body, bytes):
            await held.reserve(entity.length)
            body = b"".join([piece async for piece in body])
        told_nbytes = min(inflated_nbytes(body), self._decoded_bytes)
        await held.reserve(len(body) + told_nbytes)
        data = None
        if max(len(body), told_nbytes) <= _INFLATE_IN_THREAD_NBYTES:
            with suppress(DecodeError):  # several members, or a lie
                data = inflate(body, told_nbytes)
        if data is None:
            data = await asyncio.to_thread(inflate, body, self._decoded_bytes)
        await held.reserve(len(body) + len(data))
        return data

    async def _confirm(self, source: Stored) -> None:
        """Return if *source* is there still: not all that is found damaged has just been read.

        Raises: `VersionChangedError`, `StorageError`.
        """
        if isinstance(source.version, Fixed):
            return
        stat = await self._store.stat(source.ref)
        if stat is None or stat.etag != source.version:
            raise VersionChangedError(source.ref)

    async def _stream(
        self, held: Held, entity: Entity, source: Stored, wanted: ByteRange
    ) -> AsyncIterator[bytes]:
        head = _part(entity.first, ByteRange(wanted.start, wanted.start + self._stream_bytes))
        rest = ByteRange(wanted.start + len(head or b""), wanted.stop)
        place = source.byte_range.narrow(rest)
        condition = condition_of(source.version)
        try:
            tail = await held.enter(self._store.stream(source.ref, place, if_match=condition))
        except (RangeNotSatisfiedError, VersionChangedError) as error:
            raise lost(source.ref, source.version) from error
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
