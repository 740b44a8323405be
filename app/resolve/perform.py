"""Perform described reads, and remember nothing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from app.errors import DamagedError, RangeNotSatisfiedError, VersionChangedError
from app.formats.contract import DecodeError, Read, Versioned, Weighable
from app.formats.gzipped import inflate
from app.model import ByteRange, ETag
from app.storage.contract import NOT_MODIFIED, Found, NotModified, ObjectReader

_DECODE_IN_THREAD_NBYTES: Final = 256 * 1024
"""Larger reads are decoded off the event loop."""
_GZIP_IN_THREAD_NBYTES: Final = 4 * 1024
"""So are larger ones of gzip, which may hold a thousand times as much, whatever it says."""
_GZIP_MAGIC: Final = b"\x1f\x8b"


async def perform[T: Weighable](
    store: ObjectReader, read: Read[T], known: ETag | None = None
) -> Versioned[T] | NotModified | None:
    """Perform *read*, see `Fetch`; `NotModified` if the object still is the version *known*."""
    try:
        found = await store.get(read.ref, read.request, if_match=read.if_match, if_none_match=known)
    except RangeNotSatisfiedError as error:
        raise DamagedError(
            read.ref, f"{error.size} bytes are too few for its {read.kind}"
        ) from error
    if isinstance(found, NotModified):
        return NOT_MODIFIED
    if found is not None:
        return Versioned(await _decode(read, found), found.etag, found.size)
    if read.if_match is not None:
        raise VersionChangedError(read.ref)
    return None


@dataclass(frozen=True, slots=True)
class DirectFetch:
    """A `Fetch` that asks *store* each time."""

    store: ObjectReader

    async def __call__[T: Weighable](self, read: Read[T], /) -> Versioned[T] | None:
        """Perform *read*."""
        found = await perform(self.store, read)
        return None if isinstance(found, NotModified) else found


async def _decode[T: Weighable](read: Read[T], found: Found) -> T:
    decode, request = read.decode, read.request
    if found.is_gzip and isinstance(request, ByteRange) and found.byte_range.length == found.size:
        decode = partial(_decode_gzip, read.decode, request.length)
    try:
        if len(found.data) > _most_nbytes_at_once(found.data):
            return await asyncio.to_thread(decode, found.data)
        return decode(found.data)
    except DecodeError as error:
        raise DamagedError(read.ref, str(error)) from error


def _most_nbytes_at_once(data: bytes) -> int:
    is_gzip = data.startswith(_GZIP_MAGIC)
    return _GZIP_IN_THREAD_NBYTES if is_gzip else _DECODE_IN_THREAD_NBYTES


def _decode_gzip[T](decode: Callable[[bytes], T], most_nbytes: int, data: bytes) -> T:
    """Decode what was uploaded as gzip, and no more of it than would have been read."""
    return decode(inflate(data, most_nbytes))
