"""Checksums that clients send beside a body, or behind it."""

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Final

import crc32c

from app.errors import DigestError

_CRC_NBYTES: Final = 4
_SHA256: Final = re.compile(rb"[0-9a-f]{64}")
_SIGNED: Final = b"x-amz-content-sha256"
"""A digest, or how the body was signed instead."""


def _crc32(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CRC_NBYTES, "big")


def _crc32c(data: bytes) -> bytes:
    return int(crc32c.crc32c(data)).to_bytes(_CRC_NBYTES, "big")


_ALGORITHMS: Final[Mapping[bytes, Callable[[bytes], bytes]]] = {
    b"content-md5": lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
    b"x-amz-checksum-crc32": _crc32,
    b"x-amz-checksum-crc32c": _crc32c,
    b"x-amz-checksum-sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
    b"x-amz-checksum-sha256": lambda data: hashlib.sha256(data).digest(),
    b"x-amz-checksum-sha512": lambda data: hashlib.sha512(data).digest(),
}
"""Those that the libraries at hand compute; what others say is not looked at."""


def check(received: bytes, body: bytes, told: Mapping[bytes, bytes]) -> None:
    """Return if all that is *told* of *body*, and of *received*, which it came in, is so.

    Raises: `DigestError`.
    """
    for name, compute in _ALGORITHMS.items():
        if name in told and base64.b64encode(compute(body)) != told[name].strip():
            raise DigestError(f"the body is not what {name.decode()} says")
    signed = told.get(_SIGNED, b"")
    if _SHA256.fullmatch(signed) and hashlib.sha256(received).hexdigest().encode() != signed:
        raise DigestError(f"the body is not what {_SIGNED.decode()} says")
