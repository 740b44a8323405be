"""The framing of bodies that S3 clients sign, or sum up, as they send them.

``size;chunk-signature=…`` in hexadecimal, CRLF, as many bytes, CRLF; a chunk of no bytes ends it,
and behind that may be trailers.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from app.errors import BadBodyError, SignatureError
from app.http.credentials.seals import Chain

_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,12}")
_END: Final = b"\r\n"
_SIGNATURE: Final = b"chunk-signature="
_OF_TRAILERS: Final = b"x-amz-trailer-signature"
_LONGEST_LINE: Final = 1024
_LONGEST_TRAILERS: Final = 16 * 1024


class Framed(NamedTuple):
    """What was in the frames, and the trailers by name."""

    body: bytes
    trailers: Mapping[bytes, bytes]


def decode(data: bytes, length: int, chain: Chain | None = None) -> Framed:
    """Take the frames off *data*, in which there should be *length* bytes.

    Their signatures are asked of *chain*, or not looked at.

    Raises: `BadBodyError`, `SignatureError`.
    """
    pieces, at, view = [], 0, memoryview(data)
    while True:
        size, signature, at = _begin(data, at)
        piece = view[at : at + size]
        if chain is not None:
            chain.check_chunk(piece, signature)
        if size == 0:
            break
        at += size
        if len(piece) < size or data[at : at + len(_END)] != _END:
            raise BadBodyError("a chunk of the aws-chunked body has another size than it says")
        at += len(_END)
        pieces.append(piece)
    body = b"".join(pieces)
    if len(body) != length:
        raise BadBodyError("the body has not x-amz-decoded-content-length bytes")
    trailers = _trailers(data[at:])
    if chain is not None:
        _check_trailers(chain, trailers)
    return Framed(body, dict(trailers))


def _begin(data: bytes, at: int) -> tuple[int, bytes, int]:
    """Read the line that begins a chunk: its size, its signature if any, and where it begins."""
    end = data.find(_END, at, at + _LONGEST_LINE)
    size, _, extension = data[at : max(at, end)].partition(b";")
    if not _SIZE.fullmatch(size):
        raise BadBodyError("the aws-chunked body is truncated, or malformed")
    return int(size, 16), extension.removeprefix(_SIGNATURE), end + len(_END)


def _trailers(data: bytes) -> Sequence[tuple[bytes, bytes]]:
    if not (data == _END or data.endswith(b"\n" + _END)) or len(data) > _LONGEST_TRAILERS:
        raise BadBodyError("the trailers of the aws-chunked body are truncated, or too long")
    trailers = []
    for line in data.split(b"\n"):
        if line.strip():
            name, colon, value = line.partition(b":")
            if not colon:
                raise BadBodyError("a trailer of the aws-chunked body is malformed")
            trailers.append((name.strip().lower(), value.strip()))
    return trailers


def _check_trailers(chain: Chain, trailers: Sequence[tuple[bytes, bytes]]) -> None:
    """Ask *chain* for the signature, which comes last; where none is due there are no trailers."""
    if not chain.is_trailed:
        if trailers:
            raise SignatureError("SignatureDoesNotMatch", "the trailers are not signed")
        return
    *signed, (name, signature) = trailers or [(b"", b"")]
    if name != _OF_TRAILERS:
        raise SignatureError("SignatureDoesNotMatch", "the trailers end without a signature")
    chain.check_trailers(b"".join(b"%b:%b\n" % trailer for trailer in signed), signature)
