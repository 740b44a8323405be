"""The framing of bodies that S3 clients sign, or sum up, as they send them.

``size;chunk-signature=…`` in hexadecimal, CRLF, as many bytes, CRLF; a chunk of no bytes ends it,
and behind that may be trailers. Signatures are not looked at here.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from app.errors import BadBodyError

_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,12}")
_END: Final = b"\r\n"
_LONGEST_LINE: Final = 1024
_LONGEST_TRAILERS: Final = 16 * 1024


class Framed(NamedTuple):
    """What was in the frames, and the trailers by name."""

    body: bytes
    trailers: Mapping[bytes, bytes]


def decode(data: bytes, length: int) -> Framed:
    """Take the frames off *data*, in which there should be *length* bytes.

    Raises: `BadBodyError`.
    """
    pieces, at = [], 0
    while True:
        size, at = _size(data, at)
        if size == 0:
            break
        piece = data[at : at + size]
        at += size
        if len(piece) < size or data[at : at + len(_END)] != _END:
            raise BadBodyError("a chunk of the aws-chunked body has another size than it says")
        at += len(_END)
        pieces.append(piece)
    body = b"".join(pieces)
    if len(body) != length:
        raise BadBodyError("the body has not x-amz-decoded-content-length bytes")
    return Framed(body, _trailers(data[at:]))


def _size(data: bytes, at: int) -> tuple[int, int]:
    """Read the line that begins a chunk, and tell where the chunk does."""
    end = data.find(_END, at, at + _LONGEST_LINE)
    size, _, _ = data[at : max(at, end)].partition(b";")
    if not _SIZE.fullmatch(size):
        raise BadBodyError("the aws-chunked body is truncated, or malformed")
    return int(size, 16), end + len(_END)


def _trailers(data: bytes) -> Mapping[bytes, bytes]:
    if not (data == _END or data.endswith(b"\n" + _END)) or len(data) > _LONGEST_TRAILERS:
        raise BadBodyError("the trailers of the aws-chunked body are truncated, or too long")
    trailers = {}
    for line in data.split(b"\n"):
        if line.strip():
            name, colon, value = line.partition(b":")
            if not colon:
                raise BadBodyError("a trailer of the aws-chunked body is malformed")
            trailers[name.strip().lower()] = value.strip()
    return trailers
