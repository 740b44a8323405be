"""Perform described reads, and remember nothing."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from app.errors import DamagedError, RangeNotSatisfiedError, VersionChangedError, lost
from app.formats.compression import inflate
from app.formats.reading import DecodeError, Read, Versioned, Weighable
from app.model import ByteRange, ETag, Fixed, condition_of
from app.storage.contract import NOT_MODIFIED, Found, NotModified, ObjectReader

_AT_ONCE_NBYTES: Final = 32 * 1024**2
"""Of what may be larger, the rest is read once there is room for it."""
_DECODE_IN_THREAD_NBYTES: Final = 256 * 1024
"""Larger reads are decoded off the event loop."""
_COMPRESSED_IN_THREAD_NBYTES: Final = {b"\x1f\x8b": 4 * 1024, "ICE🧊CHUNK".encode(): 0}
"""So are larger ones that begin like gzip, which may hold a thousand times as much, or zstd."""
_SLOW_KINDS: Final = frozenset({"config"})
"""So are these, whatever their size: YAML takes some ten microseconds a byte."""

type Room = AbstractAsyncContextManager[object]
"""Is entered to hold what may take much memory."""

UNBOUNDED: Final[Room] = nullcontext()


async def perform[T: Weighable](
    store: ObjectReader, read: Read[T], known: ETag | None = None, room: Room = UNBOUNDED
) -> Versioned[T] | NotModified | None:
    """Perform *read*, see `Fetch`; `NotModified` if the object still is the version *known*."""
    version, request = read.version, read.request
    if isinstance(request, ByteRange) and request.length > _AT_ONCE_NBYTES:
        request = ByteRange(request.start, request.start + _AT_ONCE_NBYTES)
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
    store: ObjectReader, read: Read[T], found: Found, room: Room
) -> Versioned[T]:
    """Decode what was *found*, off the event loop where that is much, and there in turn."""
    request, decode = read.request, read.decode
    wanted = min(request.stop, found.size) if isinstance(request, ByteRange) else 0
    is_all = found.byte_range.stop >= wanted
    if found.is_gzip and isinstance(request, ByteRange) and found.byte_range.length == found.size:
        decode = partial(_decode_gzip, read.decode, request.length)
    try:
        if is_all and len(found.data) <= _most_nbytes_at_once(read.kind, found.data):
            return Versioned(decode(found.data), found.etag, found.size, found.modified_s)
        async with room:
            parts = [found.data]
            if not is_all:
                parts.append(await _read_on(store, read, found, wanted))
            value = await asyncio.to_thread(lambda: decode(b"".join(parts)))
        return Versioned(value, found.etag, found.size, found.modified_s)
    except DecodeError as error:
        raise DamagedError(read.ref, str(error)) from error


async def _read_on(store: ObjectReader, read: Read[Any], found: Found, stop: int) -> bytes:
    """Read what is behind *found* up to *stop*, of the same version."""
    rest = ByteRange(found.byte_range.stop, stop)
    more = await store.get(read.ref, rest, if_match=found.etag)
    if not isinstance(more, Found) or more.byte_range != rest:
        raise VersionChangedError(read.ref)
    return more.data


def _most_nbytes_at_once(kind: str, data: bytes) -> int:
    if kind in _SLOW_KINDS:
        return 0
    for magic, nbytes in _COMPRESSED_IN_THREAD_NBYTES.items():
        if data.startswith(magic):
            return nbytes
    return _DECODE_IN_THREAD_NBYTES


def _decode_gzip[T](decode: Callable[[bytes], T], most_nbytes: int, data: bytes) -> T:
    """Decode what was uploaded as gzip, and no more of it than would have been read."""
    return decode(inflate(data, most_nbytes))
