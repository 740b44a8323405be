"""CORS on every answer: without it Neuroglancer takes an error for a missing chunk.

And the names under which the service counts as the origin of its own pages.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from app.http.heads import encode_headers

type Headers = list[tuple[bytes, bytes]]

_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"ETag, Content-Range, Content-Length, Content-Encoding, X-Request-ID",
)
_FOR_ALL: Final[Headers] = [(b"access-control-allow-origin", b"*"), _EXPOSED]
_HEAD_FOR_ALL: Final = encode_headers(_FOR_ALL)
_ALLOWED: Final = (
    b"Authorization, Cache-Control, Content-Encoding, Content-MD5, Content-Type, Idempotency-Key,"
    b" If-Match, If-None-Match, If-Range, Range, X-Request-ID"
)
_OF_S3: Final = re.compile(rb"(?i:x-amz-|amz-sdk-)[A-Za-z0-9-]+")
_PREFLIGHT: Final[Headers] = [
    (b"access-control-max-age", b"86400"),
    (b"access-control-allow-private-network", b"true"),
]
_HOST: Final = re.compile(r"(?:\[(.+)\]|([^:]+?)\.?)(?::[0-9]*)?")
_HOST_NBYTES: Final = 300
"""More is no name of a host, and not kept."""
_ADDRESS: Final = ""
"""Stands for all IP addresses."""


class Hosts:
    """Names that the service answers to.

    A page of another site, whose name is pointed here afterwards (DNS rebinding), is of the same
    origin as the service under that name. No name server can do this to an address.
    """

    def __init__(self, host: str, names: Sequence[str]) -> None:
        """Answer to *names*, or to all with `*`, and to *host*, which is listened on."""
        self._any = "*" in names
        self._names = frozenset({_ADDRESS, "localhost", host.lower(), *names})

    def admits(self, host: bytes) -> bool:
        """Return whether *host*, the value of ``Host``, is a name of the service, with any port."""
        return self._any or _name_of(host[:_HOST_NBYTES]) in self._names


@lru_cache(maxsize=1024)
def _name_of(host: bytes) -> str | None:
    """Normalize the name in the value of ``Host``; `None` if there is none."""
    found = _HOST.fullmatch(host.decode("latin-1").lower())
    if found is None:
        return None
    address, name = found.groups()
    try:
        ip_address(address or name)
    except ValueError:
        return name
    return _ADDRESS


class Cors:
    """Says which origins may read answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def admits(self, origin: bytes) -> bool:
        """Tell whether pages of *origin* may read answers."""
        return self._any or origin in self._origins

    def headers(self, origin: bytes | None) -> Headers:
        """Give the headers of any answer to a page of *origin*."""
        if self._any:
            return _FOR_ALL
        if origin is None or not self.admits(origin):
            return [(b"vary", b"Origin")]
        return [(b"access-control-allow-origin", origin), _EXPOSED, (b"vary", b"Origin")]

    def head(self, origin: bytes | None) -> bytes:
        """Give the same as they are written."""
        return _HEAD_FOR_ALL if self._any else encode_headers(self.headers(origin))

    def preflight(self, allow: bytes, asked: bytes | None = None) -> Headers:
        """Give what an answer to OPTIONS says besides, where the methods *allow* are served.

        Of the headers *asked* for those of S3 are allowed, which have too many names to list.
        """
        of_s3 = [
            name for each in (asked or b"").split(b",") if _OF_S3.fullmatch(name := each.strip())
        ]
        headers = b", ".join([_ALLOWED, *of_s3])
        return [
            (b"access-control-allow-methods", allow),
            (b"access-control-allow-headers", headers),
            *_PREFLIGHT,
        ]
