"""Bounded decompression of gzip (RFC 1952), Zstandard (RFC 8878) and others; checks of frames.

Window and output are checked before memory is allocated for them. Gzip is inflated by zlib-ng: a
minishard index of 100,000 random ids takes 3 ms, with zlib 6.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from typing import Final

import brotli
import zstandard
from zlib_ng import gzip_ng, zlib_ng

from shardgate.formats.reading import DecodeError

CODINGS: Final = frozenset({"gzip", "deflate", "br", "zstd"})
"""Content codings that `decode_content` removes."""
_RAW_DEFLATE: Final = "raw DEFLATE"  # unlike codings of HTTP, which are in lower case
_USUAL_RATIO: Final = 16  # a guess for codings that do not announce the size
_PIECE_NBYTES: Final = 256 * 1024
_RAW_WBITS: Final = -15
_GZIP_WBITS: Final = 31

_MAX_WINDOW_NBYTES: Final = 2**27  # that of Zstandard's highest level
_BLOSC: Final = struct.Struct("<B3xIII")
"""Version, flags and type size; the sizes of the data, of a block and of the frame."""


def deflate(data: bytes) -> bytes:
    """Compress *data* to one gzip member without time and name."""
    # At level 5, 100,000 ids of a minishard index take 19 ms and 399 kB; at 6, 56 ms and 396 kB.
    member = zlib_ng.compressobj(5, zlib_ng.DEFLATED, _GZIP_WBITS)
    return member.compress(data) + member.flush()


def inflated_nbytes(data: bytes) -> int:
    """Return the size in the trailer of *data*: untrusted, and of the last member only."""
    return int.from_bytes(data[-4:], "little")


def raw_deflate(nbytes: int, crc: int) -> str:
    """Return the coding of *nbytes* bytes with this CRC-32, deflated without a frame, as in zip."""
    return f"{_RAW_DEFLATE} {nbytes} {crc}"


def is_sendable(coding: str) -> bool:
    """Return whether *coding* may be one of HTTP's: of a `raw_deflate` clients get the content."""
    return not coding.startswith(_RAW_DEFLATE)


def announced_nbytes(coding: str, data: bytes) -> int:
    """Return the decoded size that *coding* or *data* announces, or a guess: untrusted."""
    if not is_sendable(coding):
        return _numbers_of(coding)[0]
    if coding == "gzip":
        return inflated_nbytes(data)
    if coding == "zstd":
        with suppress(zstandard.ZstdError):  # unknown, or damaged
            return max(zstandard.frame_content_size(data), 0) or _USUAL_RATIO * len(data)
    return _USUAL_RATIO * len(data)


def find_excess(coding: str, most_nbytes: int) -> str:
    """Return why a `raw_deflate` of more than *most_nbytes* is refused; empty for all others."""
    if is_sendable(coding):
        return ""
    nbytes, _ = _numbers_of(coding)
    if nbytes <= most_nbytes:
        return ""
    return f"{nbytes} bytes once inflated, more than {most_nbytes}"


def decode_content(coding: str, data: bytes, most_nbytes: int) -> bytes:
    """Remove *coding*. Raises: `DecodeError`, also if unknown, or for more than *most_nbytes*."""
    if not is_sendable(coding):
        if reason := find_excess(coding, most_nbytes):
            raise DecodeError(reason)
        return _inflate_checked(data, *_numbers_of(coding))
    match coding:
        case "gzip":
            return inflate(data, most_nbytes)
        case "deflate":  # as in browsers without the frame too, though RFC 9110 asks for it
            # A zlib stream begins with its method, 8 (RFC 1950); no encoder begins DEFLATE so.
            is_framed = data[:1] and data[0] & 0xF == zlib_ng.DEFLATED
            wbits = zlib_ng.MAX_WBITS if is_framed else _RAW_WBITS
            return bytes(inflate_to_array(data, most_nbytes, wbits=wbits))
        case "br":
            return _decompress_brotli(data, most_nbytes)
        case "zstd":
            return decompress_zstd(data, most_nbytes)
    raise DecodeError(f"no decoder for the content coding {coding}")


def _numbers_of(coding: str) -> tuple[int, int]:
    *_, nbytes, crc = coding.split(" ")
    return int(nbytes), int(crc)


def _inflate_checked(data: bytes, nbytes: int, crc: int) -> bytes:
    content = inflate_to_array(data, nbytes, wbits=_RAW_WBITS)
    if len(content) != nbytes or zlib_ng.crc32(content) != crc:
        found = f"{len(content)} bytes once inflated"
        raise DecodeError(f"{found}, instead of {nbytes} with the CRC-32 {crc:08x}")
    return bytes(content)


def _decompress_brotli(data: bytes, most_nbytes: int) -> bytes:
    decoder = brotli.Decompressor()
    pieces: list[bytes] = []
    room = most_nbytes
    try:
        piece = decoder.process(data, output_buffer_limit=_PIECE_NBYTES)
        while (room := room - len(piece)) >= 0:
            pieces.append(piece)
            if decoder.is_finished():
                return b"".join(pieces)
            if not piece:
                raise DecodeError("the br data ends early")
            piece = decoder.process(b"", output_buffer_limit=_PIECE_NBYTES)
    except brotli.error as error:
        raise DecodeError(f"no br: {error}") from None
    raise DecodeError(f"more than {most_nbytes} bytes once inflated")


def inflate(data: bytes, most_nbytes: int) -> bytes:
    """Inflate gzip members. Raises: `DecodeError`, also for more than *most_nbytes*."""
    return bytes(inflate_to_array(data, most_nbytes))


def inflate_to_array(data: bytes, most_nbytes: int, *, wbits: int = _GZIP_WBITS) -> bytearray:
    """Inflate as `inflate` does, to bytes that may be changed; *wbits* tells zlib the frame."""
    rest = memoryview(data)
    room = most_nbytes
    name = "gzip" if wbits == _GZIP_WBITS else "deflate"
    # DEFLATE makes at most 1,032 bytes of one, whatever the trailer says.
    inflated = bytearray(min(inflated_nbytes(data), most_nbytes, 1032 * len(data)))
    end = 0
    # Encoders write members of many KiB; each takes time, even if it is empty.
    for _ in range(4096 + most_nbytes // 1024):
        member = zlib_ng.decompressobj(wbits)
        input_nbytes = 4096  # little at first, as input behind the end of a member is copied
        while not member.eof:
            if not rest:
                raise DecodeError(f"the {name} data ends early")
            head = rest[:input_nbytes]
            try:
                piece = member.decompress(head, room + 1)  # one byte more shows that it is too much
            except zlib_ng.error as error:  # type: ignore[misc]  # its stub says instance
                raise DecodeError(f"no {name}: {error}") from None
            room -= len(piece)
            if room < 0:
                raise DecodeError(f"more than {most_nbytes} bytes once inflated")
            inflated[end : end + len(piece)] = piece
            end += len(piece)
            rest = rest[len(head) - len(member.unused_data) :]
            # More input inflates to pieces for which malloc asks the kernel each time.
            input_nbytes = min(2 * input_nbytes, 32 * 1024)
        if not rest:
            del inflated[end:]
            return inflated
    raise DecodeError(f"the {name} data have more members than there can be")


def zstd_decompressor(
    dictionary: bytes | None = None, max_window_nbytes: int = _MAX_WINDOW_NBYTES
) -> zstandard.ZstdDecompressor:
    """Create a decompressor that refuses frames with a larger window."""
    if dictionary is None:
        return zstandard.ZstdDecompressor(max_window_size=max_window_nbytes)
    try:
        trained = zstandard.ZstdCompressionDict(dictionary)
        return zstandard.ZstdDecompressor(trained, max_window_nbytes)
    except zstandard.ZstdError as error:
        raise DecodeError(f"damaged zstd dictionary: {error}") from None


def decompress_frame(
    decompressor: zstandard.ZstdDecompressor, frame: bytes | memoryview, max_nbytes: int
) -> bytes:
    """Decompress a single zstd *frame*, which may declare and hold at most *max_nbytes*."""
    try:
        if (declared := zstandard.frame_content_size(frame)) > max_nbytes:
            raise DecodeError(f"a zstd frame declares {declared} bytes, more than {max_nbytes}")
        return decompressor.decompress(frame, max_nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecodeError(f"damaged zstd, or more than {max_nbytes} bytes: {error}") from None


def decompress_zstd(data: bytes | memoryview, max_nbytes: int) -> bytes:
    """Decompress all zstd frames of *data*, which may hold *max_nbytes*, whatever they declare."""
    pieces: list[bytes] = []
    left = max_nbytes
    decompressor = zstd_decompressor()
    for frame, capacity in _frames(memoryview(data), max_nbytes):
        piece = decompress_frame(decompressor, frame, min(capacity, max(left, 1)))
        left -= len(piece)
        if left < 0:
            raise DecodeError(f"more than {max_nbytes} bytes once decompressed")
        pieces.append(piece)
    return b"".join(pieces)


def zstd_capacity(data: bytes | memoryview, max_nbytes: int) -> int:
    """Return how many bytes `decompress_zstd` may yield of *data*, by its blocks."""
    return min(max_nbytes, sum(capacity for _, capacity in _frames(memoryview(data), max_nbytes)))


def _frames(data: memoryview, max_nbytes: int) -> Iterator[tuple[memoryview, int]]:
    """Split *data* into frames that are not empty, each with the capacity of its blocks."""
    at = 0
    # Encoders write blocks of 8 KiB and more; a file of many small ones is refused.
    most_blocks = 4096 + max_nbytes // 1024
    while at < len(data):
        if most_blocks <= 0:
            raise DecodeError("damaged zstd: more frames than there can be")
        start = at
        if _number(data, at, 4) in range(0x184D2A50, 0x184D2A60):  # a frame to be skipped
            blocks = 0
            at += 8 + _number(data, at + 4, 4)
        else:
            blocks, at = _measure_frame(data, at, most_blocks)
        most_blocks -= blocks + 1
        if at > len(data):
            raise DecodeError("damaged zstd: it is truncated")
        if blocks:
            yield data[start:at], blocks * 128 * 1024  # the most that a block holds


def _measure_frame(data: memoryview, at: int, most_blocks: int) -> tuple[int, int]:
    """Return the number of blocks of the frame at *at*, and its end."""
    if _number(data, at, 4) != 0xFD2FB528:  # noqa: PLR2004  magic number, RFC 8878 §3.1.1
        raise DecodeError("damaged zstd: no frame begins here")
    descriptor = _number(data, at + 4, 1)  # RFC 8878 §3.1.1.1
    is_single_segment = descriptor >> 5 & 1
    has_checksum = descriptor >> 2 & 1
    dictionary_nbytes = (0, 1, 2, 4)[descriptor & 3]
    size_nbytes = (0, 2, 4, 8)[descriptor >> 6] or is_single_segment
    window_nbytes = 1 - is_single_segment
    at += 5 + window_nbytes + dictionary_nbytes + size_nbytes
    for blocks in range(1, most_blocks + 1):
        header = _number(data, at, 3)
        kind = header >> 1 & 3
        nbytes = 1 if kind == 1 else header >> 3  # kind 1 is one byte that is repeated
        at += 3 + nbytes
        if header & 1:  # the last block
            return blocks, at + 4 * has_checksum
    raise DecodeError("damaged zstd: more blocks than there can be")


def _number(data: memoryview, at: int, nbytes: int) -> int:
    if at + nbytes > len(data):
        raise DecodeError("damaged zstd: it is truncated")
    return int.from_bytes(data[at : at + nbytes], "little")


def _measure_gzip(data: bytes, most_nbytes: int) -> int:
    try:
        with gzip_ng.GzipNGFile(fileobj=BytesIO(data)) as file:  # type: ignore[no-untyped-call]
            return _count_bytes(file.read, most_nbytes)
    except (EOFError, OSError, zlib_ng.error) as error:  # type: ignore[misc]  # as above
        raise DecodeError(f"damaged gzip: {error}") from None


def _measure_zstd(data: bytes, most_nbytes: int) -> int | None:
    nbytes = 0
    for frame, _ in _frames(memoryview(data), most_nbytes):
        try:
            header = zstandard.get_frame_parameters(frame)
            if header.window_size > _MAX_WINDOW_NBYTES:
                return None
            with zstd_decompressor().stream_reader(frame) as file:
                nbytes += _count_bytes(file.read, most_nbytes - nbytes)
        except zstandard.ZstdError as error:
            raise DecodeError(f"damaged zstd: {error}") from None
    return nbytes


def _measure_blosc(data: bytes, _: int) -> int:
    if len(data) < _BLOSC.size:
        raise DecodeError(f"damaged blosc: {len(data)} bytes are too few for a header")
    version, nbytes, block_nbytes, frame_nbytes = _BLOSC.unpack_from(data)
    if version not in range(1, 6):
        raise DecodeError(f"damaged blosc: the header tells version {version}")
    if frame_nbytes != len(data):
        raise DecodeError(f"damaged blosc: the header tells {frame_nbytes} bytes of {len(data)}")
    if nbytes and not 0 < block_nbytes <= nbytes:
        raise DecodeError(f"damaged blosc: blocks of {block_nbytes} bytes in {nbytes}")
    return int(nbytes)


def _count_bytes(read: Callable[[int], bytes], most_nbytes: int) -> int:
    """Return how many bytes *read* returns, or a number above *most_nbytes*; keep none of them."""
    nbytes = 0
    while nbytes <= most_nbytes and (piece := read(_PIECE_NBYTES)):
        nbytes += len(piece)
    return nbytes


MEASURES: Final[Mapping[str, Callable[[bytes, int], int | None]]] = {
    "blosc": _measure_blosc,
    "gzip": _measure_gzip,
    "zstd": _measure_zstd,
}
"""By the name of a codec, a check of its frame, and of the checksum in it. Returns the size of the
decoded data, or one above a limit; `None` if it takes too much memory. Raises: `DecodeError`."""
