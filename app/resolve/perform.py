"""Perform described reads, and remember nothing."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from app.errors import DamagedError, RangeNotSatisfiedError, VersionChangedError, lost
from app.formats.compression import inflate
from app.formats.reading import DecodeError, Read, Versioned, Weighable
from app.model import ByteRange, ByteRequest, ETag, Fixed, condition_of
from app.resolve.budget import ByteBudget
from app.storage.contract import NOT_MODIFIED, Found, NotModified, ObjectReader

_AT_ONCE_NBYTES: Final = 32 * 1024**2
"""Of what may be larger, the rest is read when there is room to decode it."""
_DECODE_IN_THREAD_NBYTES: Final = 256 * 1024
"""Larger reads are decoded off the event loop."""
_GZIP: Final = b"\x1f\x8b"
_GZIP_IN_THREAD_NBYTES: Final = 4 * 1024
"""So are larger ones that begin like gzip, which may hold a thousand times as much."""
_LARGE_AT_ONCE: Final = 2
"""So many reads are decoded at a time of which nobody knows what they will take."""
_SLOW_KINDS: Final = frozenset({"config"})
"""So are these, whatever their size: YAML takes some ten microseconds a byte."""


async def perform[T: Weighable](
    store: ObjectReader,
    read: Read[T],
    known: ETag | None = None,
    decoding: ByteBudget | None = None,
) -> Versioned[T] | NotModified | None:
    """Perform *read*, see `Fetch`; `NotModified` if the object still is the version *known*.

    What is large, or may become so, is held in memory only as far as *decoding* has room for it.
    """
    request = read.request
    if not isinstance(request, ByteRange) or request.length <= _AT_ONCE_NBYTES:
        return await _perform(store, read, request, known, _Room(decoding))
    request = ByteRange(request.start, request.start + _AT_ONCE_NBYTES)
    async with _Room(decoding).more(_AT_ONCE_NBYTES) as room:
        return await _perform(store, read, request, known, room)


@dataclass(frozen=True, slots=True)
class _Room:
    """The bytes that a read holds of a budget, if there is one."""

    budget: ByteBudget | None
    nbytes: int = 0

    @asynccontextmanager
    async def more(self, nbytes: int | None) -> AsyncGenerator["_Room"]:
        """Hold *nbytes* more while the block lasts; `None` is half of the budget."""
        if self.budget is None:
            yield self
            return
        if nbytes is None:
            nbytes = self.budget.max_bytes // _LARGE_AT_ONCE
        await self.budget.acquire(nbytes, held_nbytes=self.nbytes)
        try:
            yield _Room(self.budget, self.nbytes + nbytes)
        finally:
            self.budget.release(nbytes)


async def _perform[T: Weighable](
    store: ObjectReader,
    read: Read[T],
    request: ByteRequest | None,
    known: ETag | None,
    room: _Room,
) -> Versioned[T] | NotModified | None:
    version = read.version
    try:
        found = await store.get(
            read.ref, request, if_match=condition_of(version), if_none_match=known
        )
    except VersionChangedError as error:
        raise error if version is None else lost(read.ref, version) from error
    except RangeNotSatisfiedError as error:
        raise DamagedError(
            read.ref, f"{error.size} bytes are too few for its {read.kind}"
        ) from error
    if isinstance(found, NotModified):
        return NOT_MODIFIED
    if found is not None:
        return await _understand(store, read, found, room)
    if version is not None and not isinstance(version, Fixed):
        raise VersionChangedError(read.ref)
    return None


@dataclass(frozen=True, slots=True)
class DirectFetch:
    """A `Fetch` that asks *store* each time."""

    store: ObjectReader

    async def __call__[T: Weighable](
        self,
        read: Read[T],
        /,
        *,
        ever: bool = False,  # noqa: ARG002  the protocol's argument
    ) -> Versioned[T] | None:
        """Perform *read*."""
        found = await perform(self.store, read)
        return None if isinstance(found, NotModified) else found


async def _understand[T: Weighable](
    store: ObjectReader, read: Read[T], found: Found, room: _Room
) -> Versioned[T]:
    """Decode what was *found*, off the event loop where that is much, as far as there is *room*."""
    request, decode = read.request, read.decode
    wanted = min(request.stop, found.size) if isinstance(request, ByteRange) else 0
    is_all = found.byte_range.stop >= wanted
    if found.is_gzip and isinstance(request, ByteRange) and found.byte_range.length == found.size:
        decode = partial(_decode_gzip, read.decode, request.length)
    try:
        if is_all and len(found.data) <= _most_nbytes_at_once(read, found.data):
            return Versioned(decode(found.data), found.etag, found.size, found.modified_s)
        async with room.more(await _memory_nbytes(read, found, is_all=is_all)):
            parts = [found.data]
            if not is_all:
                parts.append(await _read_on(store, read, found, wanted))
            value = await asyncio.to_thread(lambda: decode(b"".join(parts)))
        return Versioned(value, found.etag, found.size, found.modified_s)
    except DecodeError as error:
        reason = str(error)  # the traceback of the error holds what was decompressed
    raise DamagedError(read.ref, reason)


async def _read_on(store: ObjectReader, read: Read[Any], found: Found, stop: int) -> bytes:
    """Read what is behind *found* up to *stop*, of the same version."""
    rest = ByteRange(found.byte_range.stop, stop)
    more = await store.get(read.ref, rest, if_match=found.etag)
    if not isinstance(more, Found) or more.byte_range != rest:
        raise VersionChangedError(read.ref)
    return more.data


async def _memory_nbytes(read: Read[Any], found: Found, *, is_all: bool) -> int | None:
    """Return how much memory decoding may take; `None` where only the decoder knows.

    Raises: `DecodeError`.
    """
    if not isinstance(read.request, ByteRange) or read.memory_nbytes is None:
        return None
    data = found.data if is_all else None
    return await asyncio.to_thread(read.memory_nbytes, data, read.request.length)


def _most_nbytes_at_once(read: Read[Any], data: bytes) -> int:
    if read.kind in _SLOW_KINDS or read.memory_nbytes is not None:
        return 0
    return _GZIP_IN_THREAD_NBYTES if data.startswith(_GZIP) else _DECODE_IN_THREAD_NBYTES


def _decode_gzip[T](decode: Callable[[bytes], T], most_nbytes: int, data: bytes) -> T:
    """Decode what was uploaded as gzip, and no more of it than would have been read."""
    return decode(inflate(data, most_nbytes))
