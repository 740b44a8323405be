"""CORS on every answer: without it Neuroglancer takes an error for a missing chunk."""

from collections.abc import Sequence
from typing import Final

type Headers = list[tuple[bytes, bytes]]

_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"ETag, Content-Range, Content-Length, Content-Encoding, X-Request-ID",
)
_FOR_ALL: Final[Headers] = [(b"access-control-allow-origin", b"*"), _EXPOSED]
_PREFLIGHT: Final[Headers] = [
    (
        b"access-control-allow-headers",
        b"Authorization, Cache-Control, Content-Type, If-Match, If-None-Match, If-Range, Range",
    ),
    (b"access-control-max-age", b"86400"),
    (b"access-control-allow-private-network", b"true"),
]


class Cors:
    """Says which origins may read answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, origin: bytes | None) -> Headers:
        """Give the headers of any answer to a page of *origin*."""
        if self._any:
            return _FOR_ALL
        if origin is None or origin not in self._origins:
            return [(b"vary", b"Origin")]
        return [(b"access-control-allow-origin", origin), _EXPOSED, (b"vary", b"Origin")]

    def preflight(self, allow: bytes) -> Headers:
        """Give what an answer to OPTIONS says besides, where the methods *allow* are served."""
        return [(b"access-control-allow-methods", allow), *_PREFLIGHT]
