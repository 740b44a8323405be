"""Where clients reach the service, as their request for the page tells it."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from fastapi import Request

from app.http.neuroglancer import PUBLIC_PAGE
from app.http.viewer import PAGE

_HOST: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_THIS_MACHINE: Final = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?")
_SCHEMES: Final = ("http", "https")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of the page."""

    base: str
    """The URL below which the datasets are, with the token if one is in the path."""
    viewer: str | None
    """The page of the viewer; `None` where none can read from here."""


def address_of(request: Request, *, has_viewer: bool) -> Address:
    """Tell under which address *request* came to a service that has a viewer itself, or has none.

    Who forges its headers deceives nobody else: the page is in no cache. A proxy says that it
    was asked by ``https`` with ``X-Forwarded-Proto``.
    """
    token = request.scope.get("token")
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        host = ":".join(map(str, request.scope["server"] or ("localhost",)))
    forwarded = request.headers.get("x-forwarded-proto", "")
    scheme = forwarded if forwarded in _SCHEMES else request.scope["scheme"]
    below = "" if token is None else f"/~{quote(token, safe='%')}"
    above = "./" if token is None else "../"
    is_readable = scheme == "https" or _THIS_MACHINE.fullmatch(host)
    public = PUBLIC_PAGE if is_readable else None
    return Address(f"{scheme}://{host}{below}", f"{above}{PAGE}" if has_viewer else public)
