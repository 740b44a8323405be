"""Heads that differ from the one before on their connection in the path only.

Who reads an array asks for chunk after chunk with the same fields, a token among them. To see that
they are the same, byte by byte, takes 0.4 µs; to parse two of them takes 3, and a request takes 4
less of 41. Who asks otherwise each time, as caches do with the version that they have, shall not
pay for that: fields that were kept at once cost a 304 another 9 µs, so they have to come twice.
"""

import re
from typing import Final

from app.http.answer import Headers

_END: Final = b"\r\n\r\n"
_LINE: Final = re.compile(rb"GET (/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*) HTTP/1\.1")
"""A request line whose target is a path and no more (RFC 9112 §3, RFC 3986 §3.3)."""
_NBYTES: Final = 4096
"""More is not kept for connections, which may be many, and idle."""


def fields_of(data: bytes, headers: Headers) -> bytes | None:
    """Give what follows the first line of *data*, if that is just a head with *headers*.

    The beginning of that line may have come before. What has other lines than one for each
    header is none: it holds a body, or more than one head.
    """
    lines = len(headers) + 2
    if len(data) > _NBYTES or not data.endswith(_END):
        return None
    if not data.count(b"\r\n") == data.count(b"\n") == lines:
        return None
    return data[data.index(b"\r\n") :]


def path_before(fields: bytes, data: bytes) -> bytes | None:
    """Give the path of *data* if that is just the head of a GET with the same *fields*."""
    if not data.endswith(fields):
        return None
    line = _LINE.fullmatch(data, 0, len(data) - len(fields))
    return None if line is None else line[1]
