"""Entities that virtual keys name, and their bodies: cached, read whole, or streamed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Final, NamedTuple

from shardgate.concurrency import divide
from shardgate.errors import DamagedError, RangeNotSatisfiedError, VersionChangedError, lost
from shardgate.formats.compression import announced_nbytes, decode_content, find_excess
from shardgate.formats.reading import DecodeError
from shardgate.model import ByteRange, Coded, ETag, Fixed, Inline, ObjectRef, Stored, condition_of
from shardgate.read.budget import ByteReservation
from shardgate.read.chunks import ChunkReader
from shardgate.storage.contract import NO_HEADERS, Found, ObjectHeaders, ObjectReader

_PIECE_BYTES: Final = 1024**2
_CACHE_PARTS: Final = 16
"""A larger part of the cache is not given to one chunk that is streamed."""
_INFLATE_IN_THREAD_NBYTES: Final = 64 * 1024
type Pieces = AsyncIterator[bytes | memoryview]
type Body = bytes | Pieces

type Demand = Callable[[Sequence[ETag]], str | None]
"""Precondition of a request: takes all ETags of the current version of a key, none where the key
is absent, and returns the reason why the request may not proceed."""


class Entity(NamedTuple):
    """Version, length and location of the bytes that a key names."""

    etag: ETag
    length: int
    source: Stored | Inline
    first: Found | None = None
    """Bytes that were read along with size and version, for this request only."""
    coding: str = ""
    """Content coding of the source; a client may accept it so."""
    is_inflated: bool = False
    """Whether the source had a content coding, which was removed."""
    is_immutable: bool = False
    """Whether the key will always name the same bytes."""
    modified_s: int | None = None
    """Time of the object's last modification, where known: whole seconds since 1970 in UTC."""
    headers: ObjectHeaders = NO_HEADERS

    @staticmethod
    def at(place: Stored | Coded | Inline, modified_s: int | None = None) -> "Entity":
        """Make the entity of a part of an object; see `Stored.etag`."""
        if isinstance(place, Inline):
            return Entity(place.etag, len(place.data), place, modified_s=modified_s)
        if isinstance(place, Coded):
            entity = Entity.at(place.place, modified_s)
            return entity._replace(etag=place.etag or entity.etag, coding=place.coding)
        start, stop = place.byte_range
        return Entity(place.etag, stop - start, place, modified_s=modified_s)

    def referenced(self, reference_id: str, *, is_immutable: bool) -> "Entity":
        """Return the entity with *reference_id* in its ETag; see `Referenced`."""
        etag = ETag(f'{self.etag[:-1]}-{reference_id}"') if reference_id else self.etag
        return self._replace(etag=etag, is_immutable=is_immutable)

    @property
    def names(self) -> tuple[ETag, ...]:
        """All ETags that clients may know this version by."""
        return forms_of(self.etag)

    @property
    def inflated_etag(self) -> ETag:
        """ETag of the inflated form; *etag* is that of the stored one."""
        return forms_of(self.etag)[1]


def forms_of(etag: ETag) -> tuple[ETag, ETag]:
    """Return the ETags of the stored and of the inflated form of the version *etag*."""
    return etag, ETag(f'{etag[:-1]}-identity"')


class Selection(NamedTuple):
    """Status of a response, and the part of the entity that is its body."""

    status: HTTPStatus
    part: ByteRange | None = None
    """Part that the headers describe; `None` for responses without a representation."""
    reads: ByteRange | None = None
    """Part that is sent: *part*, or nothing for HEAD."""
    coding: str = ""
    """Content coding of the representation."""
    is_s3: bool = False
    """Whether it has the coding whatever the client accepts."""


class Opened(NamedTuple):
    """An entity, the selection from it, and the selected bytes."""

    entity: Entity
    selection: Selection
    body: Body


class BodyReader:
    """Reads the bytes of entities, more than *stream_bytes* in pieces; removes content codings.

    A chunk that is streamed is cached too if it takes a small part of the cache, and the budget has
    room for all of it. It is sent in pieces again, so that it does not hold up other responses.
    """

    def __init__(
        self, store: ObjectReader, chunks: ChunkReader, *, stream_bytes: int, decoded_bytes: int
    ) -> None:
        self._store = store
        self._chunks = chunks
        self._stream_bytes = stream_bytes
        self._decoded_bytes = decoded_bytes

    def cached_body(self, entity: Entity, wanted: ByteRange | None) -> bytes | None:
        """Return the bytes *wanted* of *entity* if they are in memory; for `None` no bytes."""
        if wanted is None:
            return b""
        if isinstance(entity.source, Inline):
            return entity.source.data[wanted.start : wanted.stop]
        nbytes = wanted.stop - wanted.start
        if nbytes > self._stream_bytes:
            return None
        whole = self._chunks.cached(entity.source)
        if whole is None or nbytes == len(whole):
            return whole
        return whole[wanted.start : wanted.stop]

    async def read(self, held: ByteReservation, entity: Entity, wanted: ByteRange | None) -> Body:
        """Read the bytes *wanted* of *entity*, reserved in *held*; raise if the version is gone."""
        chunk = entity.source
        if wanted is None or isinstance(chunk, Inline):
            return self.cached_body(entity, wanted) or b""
        nbytes = wanted.stop - wanted.start
        if nbytes > self._stream_bytes:
            return await self._stream(held, entity, chunk, wanted)
        if (whole := self._chunks.cached(chunk)) is not None:
            return whole[wanted.start : wanted.stop]
        await held.reserve(nbytes)
        is_whole = nbytes == entity.length
        if entity.first is not None and (data := _cut(entity.first, wanted)) is not None:
            if is_whole:
                self._chunks.cache.put(chunk, data)
            return data
        if not is_whole:
            chunk = chunk._replace(byte_range=chunk.byte_range.narrow(wanted))
        return await self._chunks.read(chunk, keep=is_whole)

    async def inflate(self, held: ByteReservation, entity: Entity, named: ObjectRef) -> Entity:
        """Remove the coding of *entity*, which is *named* if it lies in no object. Raises:
        `DamagedError` for invalid or too much data, and as `read`.
        """
        try:
            data = await self._inflate(held, entity)
        except DecodeError as error:
            if isinstance(source := entity.source, Inline):
                raise DamagedError(named, str(error)) from error
            await self._check_version(source)
            raise DamagedError(source.ref, f"{source.byte_range}: {error}") from error
        etag = entity.inflated_etag
        inflated = entity._replace(etag=etag, length=len(data), source=Inline(data, etag))
        return inflated._replace(first=None, coding="", is_inflated=True)

    async def _inflate(self, held: ByteReservation, entity: Entity) -> bytes:
        coding = entity.coding
        if reason := find_excess(coding, self._decoded_bytes):
            raise DecodeError(reason)
        if entity.length > self._decoded_bytes:
            raise DecodeError(f"{entity.length} bytes of {coding} are too many to inflate")
        body = await self.read(held, entity, ByteRange(0, entity.length))
        if not isinstance(body, bytes):
            await held.reserve(entity.length)
            body = b"".join([piece async for piece in body])
        expected_nbytes = min(announced_nbytes(coding, body), self._decoded_bytes)
        await held.reserve(len(body) + expected_nbytes)
        data = None
        if max(len(body), expected_nbytes) <= _INFLATE_IN_THREAD_NBYTES:
            with suppress(DecodeError):  # it holds more than it announces
                data = decode_content(coding, body, expected_nbytes)
        if data is None:
            data = await asyncio.to_thread(decode_content, coding, body, self._decoded_bytes)
        await held.reserve(len(body) + len(data))
        return data

    async def _check_version(self, source: Stored) -> None:
        """Raise `VersionChangedError` if *source*, perhaps read a while ago, was replaced."""
        if isinstance(source.version, Fixed):
            return
        stat = await self._store.stat(source.ref)
        if stat is None or stat.etag != source.version:
            raise VersionChangedError(source.ref)

    async def _stream(
        self, held: ByteReservation, entity: Entity, source: Stored, wanted: ByteRange
    ) -> Pieces:
        if (whole := self._chunks.cached(source)) is not None:
            await held.reserve(_PIECE_BYTES)
            return divide(memoryview(whole)[wanted.start : wanted.stop], _PIECE_BYTES)
        start = ByteRange(wanted.start, wanted.start + self._stream_bytes)
        head = None if entity.first is None else _cut(entity.first, start)
        rest = ByteRange(wanted.start + len(head or b""), wanted.stop)
        place = source.byte_range.narrow(rest)
        condition = condition_of(source.version)
        try:
            tail = await held.enter(self._store.stream(source.ref, place, if_match=condition))
        except (RangeNotSatisfiedError, VersionChangedError) as error:
            raise lost(source.ref, source.version, error) from error
        await held.reserve(_PIECE_BYTES + len(head or b""))
        pieces = tail if head is None else _chain(head, tail)
        is_kept = wanted.length == entity.length <= self._chunks.cache.maxsize // _CACHE_PARTS
        return self._kept(source, pieces) if is_kept and held.take(entity.length) else pieces

    async def _kept(self, chunk: Stored, pieces: Pieces) -> Pieces:
        """Pass on the *pieces* of *chunk*, and cache it once all have come."""
        kept = []
        async for piece in pieces:
            kept.append(piece)
            yield piece
        self._chunks.cache.put(chunk, await asyncio.to_thread(b"".join, kept))


async def _chain(head: bytes, tail: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for piece in tail:
        yield piece


def _cut(found: Found, wanted: ByteRange) -> bytes | None:
    start, stop = found.byte_range
    if wanted.start < start or wanted.stop > stop:
        return None
    return found.data[wanted.start - start : wanted.stop - start]
