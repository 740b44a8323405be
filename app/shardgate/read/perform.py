"""Perform the reads that formats describe, without a cache."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from shardgate.errors import DamagedError, RangeNotSatisfiedError, VersionChangedError, lost
from shardgate.formats.compression import CODINGS, decode_content
from shardgate.formats.reading import DecodeError, Read, Versioned, Weighable
from shardgate.formats.surveying import MissingBytes
from shardgate.model import ByteRange, ByteRequest, ETag, condition_of
from shardgate.read.budget import ByteBudget, ByteReservation
from shardgate.storage.contract import Found, NotModified, ObjectReader, read_exactly

_FIRST_READ_NBYTES: Final = 32 * 1024**2
"""The rest of a longer read is requested once the budget has room to decode all of it."""
_CONTENT_NBYTES: Final = 128 * 1024**2
_DECODE_IN_THREAD_NBYTES: Final = 256 * 1024
"""Longer data is decoded off the event loop."""
_GZIP: Final = b"\x1f\x8b"
_COMPRESSED_IN_THREAD_NBYTES: Final = 4 * 1024
"""Longer compressed data too, which may inflate a thousandfold."""
_FAR_INFLATED: Final = frozenset({"br", "zstd"})
"""Codings of which a few bytes may inflate to any number."""


async def perform[T: Weighable](
    store: ObjectReader,
    read: Read[T],
    known: ETag | None = None,
    decoding: ByteBudget | None = None,
) -> Versioned[T] | NotModified | None:
    """Perform *read*; `NotModified` if the ETag is *known*. Large reads reserve in *decoding*."""
    request = read.request
    held = ByteReservation(decoding or ByteBudget(2**63, wait_s=0))
    try:
        if isinstance(request, ByteRange) and request.length > _FIRST_READ_NBYTES:
            request = ByteRange(request.start, request.start + _FIRST_READ_NBYTES)
            await held.reserve(_FIRST_READ_NBYTES)
        found = await _get(store, read, request, known)
        if not isinstance(found, Found):
            return found
        # There is room for two decoders of unknown needs.
        unknown_nbytes = 0 if decoding is None else decoding.max_bytes // 2
        return await _decode(store, read, found, held, unknown_nbytes)
    finally:
        await held.release()


async def _get(
    store: ObjectReader, read: Read[Any], request: ByteRequest | None, known: ETag | None
) -> Found | NotModified | None:
    version = read.version
    try:
        return await store.get(
            read.ref,
            request,
            if_match=condition_of(version),
            if_none_match=known,
            kind=read.kind,
        )
    except VersionChangedError as error:
        raise error if version is None else lost(read.ref, version, error) from error
    except RangeNotSatisfiedError as error:
        reason = MissingBytes(f"{error.size} bytes are too few for its {read.kind}")
        raise DamagedError(read.ref, reason) from error


async def _decode[T: Weighable](
    store: ObjectReader, read: Read[T], found: Found, held: ByteReservation, unknown_nbytes: int
) -> Versioned[T]:
    """Decode *found*, in a thread if that may take long, and read the rest of a long request."""
    request = read.request
    decode = read.decode
    stop = min(request.stop, found.size) if isinstance(request, ByteRange) else 0
    is_complete = found.byte_range.stop >= stop
    coding = ""
    if (
        found.coding in CODINGS
        and isinstance(request, ByteRange)
        and (request.start, stop) == (0, found.size)
    ):
        coding = found.coding
        decode = partial(_decode_coded, coding, read.decode, request.length)
    try:
        if is_complete and len(found.data) <= max_nbytes_on_loop(read, found.data, found.coding):
            value = decode(found.data)
        else:
            nbytes = await _memory_nbytes(read, found if is_complete and not coding else None)
            await held.grow(unknown_nbytes if nbytes is None else nbytes)
            parts = [found.data]
            if not is_complete:
                rest = ByteRange(found.byte_range.stop, stop)
                more = await read_exactly(store, read.ref, rest, found.etag, read.kind)
                parts.append(more.data)
            value = await asyncio.to_thread(lambda: decode(b"".join(parts)))
        return Versioned(value, found.etag, found.size, found.modified_s, coding)
    except DecodeError as error:
        reason = str(error)  # the traceback of the error refers to decompressed data
    if found.coding and not coding:
        reason += f" (it is stored with Content-Encoding: {found.coding})"
    raise DamagedError(read.ref, reason)


async def _memory_nbytes(read: Read[Any], complete: Found | None) -> int | None:
    """Return the memory that decoding takes; `None` where only the decoder finds out."""
    if not isinstance(read.request, ByteRange) or read.memory_nbytes is None:
        return None
    data = None if complete is None else complete.data
    return await asyncio.to_thread(read.memory_nbytes, data, read.request.length)


def max_nbytes_on_loop(read: Read[Any], data: bytes, coding: str = "") -> int:
    """Return the length up to which *data*, stored with *coding*, may be decoded on the loop."""
    if read.is_slow or read.memory_nbytes is not None or coding in _FAR_INFLATED:
        return 0
    is_compressed = coding or data.startswith(_GZIP)
    return _COMPRESSED_IN_THREAD_NBYTES if is_compressed else _DECODE_IN_THREAD_NBYTES


def _decode_coded[T](coding: str, decode: Callable[[bytes], T], max_nbytes: int, data: bytes) -> T:
    """Decode up to *max_nbytes* of the content, as of an object without a coding."""
    # All of it is inflated, as a part cannot be.
    content = decode_content(coding, data, max(max_nbytes, _CONTENT_NBYTES))
    return decode(content[:max_nbytes])
