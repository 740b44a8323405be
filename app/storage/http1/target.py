"""A URL as a request needs it: whom to connect to, and what to write, prepared once."""

import re
from typing import Final, NamedTuple, Self
from urllib.parse import quote, urljoin, urlsplit

from app.storage.http1.errors import BadUrlError

_PORTS: Final = {"http": 80, "https": 443}
_PRINTABLE: Final = re.compile(r"[!-~]+")
_RESERVED: Final = "!#$%&'()*+,/:;=?@[]~"


class Origin(NamedTuple):
    """Who is connected to."""

    scheme: str
    host: str
    port: int


class Target:
    """Where one URL leads; its representation does not tell, for it may hold a signature."""

    __slots__ = ("_url", "head", "origin", "path")

    def __init__(self, url: str) -> None:
        """Take apart *url*, which is percent-encoded already.

        Raises: `BadUrlError`.
        """
        if _PRINTABLE.fullmatch(url) is None:
            raise BadUrlError("no proper URL")
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname or ""
            host.encode("idna")  # as connecting will
        except ValueError:
            raise BadUrlError("no proper URL") from None
        if parts.scheme not in _PORTS or not host or port == 0 or "@" in parts.netloc:
            raise BadUrlError("no proper URL")
        self._url = url
        self.origin: Final = Origin(parts.scheme, host, port or _PORTS[parts.scheme])
        self.path: Final = parts.path or "/"
        asked = f"{self.path}{'?' if parts.query else ''}{parts.query}"
        self.head: Final = (
            f"{asked} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Accept-Encoding: identity\r\nUser-Agent: shardgate\r\n"
        ).encode()
        """What follows the method in every request for it."""

    @property
    def without_query(self) -> str:
        """The URL as far as it holds no secret."""
        return re.split("[?#]", self._url, maxsplit=1)[0]

    def redirected(self, location: str) -> Self:
        """Go where ``Location``, decoded as Latin-1, leads, but never from TLS to plain text.

        Raises: `BadUrlError`.
        """
        try:
            url = urljoin(self._url, quote(location, _RESERVED, "latin-1"))
        except ValueError:
            raise BadUrlError("redirected to no proper URL") from None
        found = type(self)(url)
        if self.origin.scheme == "https" != found.origin.scheme:
            raise BadUrlError("redirected away from TLS")
        return found
