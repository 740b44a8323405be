"""The frame of every metadata file: a header, then zstd ("Binary File Format")."""

from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

import zstandard

from app.formats.reading import DecodeError

HEADER_NBYTES: Final = 39
MAGIC: Final = "ICE🧊CHUNK".encode()
_VERSION_AT: Final = 36
_TYPE_AT: Final = 37
_COMPRESSION_AT: Final = 38
_VERSIONS: Final = (1, 2)

_WRITER: Final = b"shardgate"
_LEVEL: Final = 3

_FRAME: Final = 0xFD2FB528
_SKIPPABLE: Final = range(0x184D2A50, 0x184D2A60)
_DICTIONARY_NBYTES: Final = (0, 1, 2, 4)
_SIZE_NBYTES: Final = (0, 2, 4, 8)
_RLE: Final = 1
_MAX_BLOCK_NBYTES: Final = 128 * 1024
_MAX_WINDOW_NBYTES: Final = 2**27
_LEAST_BLOCKS: Final = 4096
_BYTES_PER_BLOCK: Final = 1024
"""Writers make blocks of 8 KiB and more; many small ones would only keep us busy."""


class FileType(IntEnum):
    """What a file says that it is."""

    SNAPSHOT = 1
    MANIFEST = 2
    TRANSACTION_LOG = 4
    REPO_INFO = 6


class Envelope(NamedTuple):
    """What was in a file."""

    version: int
    """Of the specification that the file follows: 1, or 2 (also for 2.1)."""
    payload: bytes
    """A FlatBuffer."""


def open_envelope(data: bytes, file_type: FileType, limit_nbytes: int) -> Envelope:
    """Take a file of *file_type* apart, whose payload may have *limit_nbytes*.

    The library refuses uncompressed payloads though the specification has them: they are read.

    Raises: `DecodeError`.
    """
    if len(data) < HEADER_NBYTES or not data.startswith(MAGIC):
        raise DecodeError("no file of Icechunk: it does not begin like one")
    version, found, compression = data[_VERSION_AT:HEADER_NBYTES]
    if version not in _VERSIONS:
        raise DecodeError(f"the file follows version {version} of the specification, not 1 or 2")
    if found != file_type:
        name = file_type.name.lower().replace("_", " ")
        raise DecodeError(f"the file is of type {found}, which is no {name}")
    if compression > 1:
        raise DecodeError(f"the file is compressed by unknown algorithm {compression}")
    body = memoryview(data)[HEADER_NBYTES:]
    if compression:
        return Envelope(version, _decompress(body, limit_nbytes))
    if len(body) > limit_nbytes:
        raise DecodeError(f"the file holds more than {limit_nbytes} bytes")
    return Envelope(version, bytes(body))


def seal_envelope(file_type: FileType, payload: bytes | bytearray, level: int = _LEVEL) -> bytes:
    """Make a file of *payload*, a FlatBuffer: always compressed, for the library reads no other."""
    head = MAGIC + _WRITER.ljust(_VERSION_AT - len(MAGIC)) + bytes((2, file_type, 1))
    return head + zstandard.ZstdCompressor(level).compress(payload)


def fits(data: bytes, limit_nbytes: int) -> bool:
    """Tell whether a file that was just sealed can be opened by who reads *limit_nbytes*."""
    held = zstandard.frame_content_size(memoryview(data)[HEADER_NBYTES:])
    return max(len(data), held) <= limit_nbytes


def _decompress(data: memoryview, limit_nbytes: int) -> bytes:
    """Inflate frame after frame, each at once into no more memory than its blocks can fill.

    Files of older writers do not tell the size of what they hold; no size that is told is believed.
    """
    pieces: list[bytes] = []
    left = limit_nbytes
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES)
    for frame, capacity in _frames(data, _LEAST_BLOCKS + limit_nbytes // _BYTES_PER_BLOCK):
        try:
            told = zstandard.frame_content_size(frame)
            if told > capacity:
                raise DecodeError(f"damaged zstd: {len(frame)} bytes cannot hold {told}")
            if told > left:
                raise DecodeError(f"the file holds more than {limit_nbytes} bytes")
            piece = decompressor.decompress(frame, max_output_size=min(capacity, left + 1))
        except zstandard.ZstdError as error:
            raise DecodeError(f"damaged zstd, or more than {limit_nbytes} bytes: {error}") from None
        left -= len(piece)
        if left < 0:
            raise DecodeError(f"the file holds more than {limit_nbytes} bytes")
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _frames(data: memoryview, most_blocks: int) -> Iterator[tuple[memoryview, int]]:
    """Give each frame that is not to be skipped, and how many bytes its blocks hold at most."""
    at = 0
    while at < len(data):
        if most_blocks <= 0:
            raise DecodeError("damaged zstd: more frames than there can be")
        start = at
        if _number(data, at, 4) in _SKIPPABLE:
            blocks, at = 0, at + 8 + _number(data, at + 4, 4)
        else:
            blocks, at = _measure_frame(data, at, most_blocks)
        most_blocks -= blocks + 1
        if at > len(data):
            raise DecodeError("damaged zstd: it is truncated")
        if blocks:
            yield data[start:at], blocks * _MAX_BLOCK_NBYTES


def _measure_frame(data: memoryview, at: int, most_blocks: int) -> tuple[int, int]:
    """Count the blocks of the frame at *at*, and find where it ends."""
    if _number(data, at, 4) != _FRAME:
        raise DecodeError("damaged zstd: no frame begins here")
    descriptor = _number(data, at + 4, 1)
    is_single_segment, has_checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    size_nbytes = _SIZE_NBYTES[descriptor >> 6] or is_single_segment
    at += 5 + (not is_single_segment) + _DICTIONARY_NBYTES[descriptor & 3] + size_nbytes
    for blocks in range(1, most_blocks + 1):
        header = _number(data, at, 3)
        is_last, kind, nbytes = header & 1, header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _RLE else nbytes)
        if is_last:
            return blocks, at + 4 * has_checksum
    raise DecodeError("damaged zstd: more blocks than there can be")


def _number(data: memoryview, at: int, nbytes: int) -> int:
    if at + nbytes > len(data):
        raise DecodeError("damaged zstd: it is truncated")
    return int.from_bytes(data[at : at + nbytes], "little")
