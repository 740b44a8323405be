"""Address of the service, as a client reached it."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from starlette.requests import Request as RouteRequest

from shardgate.server.request import Request

_HOST: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_THIS_MACHINE: Final = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the service, as a client reached it.

    Forged headers deceive only their sender: pages are not cached.
    """

    origin: str
    """Scheme and host."""
    root_path: str
    """Percent-encoded path that the service is mounted below."""
    token: str | None = None
    """Token in the path, percent-encoded."""

    @staticmethod
    def of(host: str, scheme: str, root_path: str, token: str | None) -> "Address":
        """Return the address for the header Host, and the *scheme* that a proxy reports in
        X-Forwarded-Proto.
        """
        nearest = scheme.partition(",")[0].strip()
        known_scheme = nearest if nearest == "https" else "http"
        known_host = host if _HOST.fullmatch(host) else "localhost"
        return Address(f"{known_scheme}://{known_host}", root_path, token)

    @property
    def root(self) -> str:
        """URL that the pages of the service are below."""
        return f"{self.origin}{self.root_path}"

    @property
    def base(self) -> str:
        """URL that the datasets are below, with the token if one is in the path."""
        return self.root if self.token is None else f"{self.root}/~{self.token}"

    @property
    def is_secure(self) -> bool:
        """Return whether it is encrypted."""
        return self.origin.startswith("https://")

    @property
    def is_trustworthy(self) -> bool:
        """Return whether the way is encrypted, or within this machine."""
        host = self.origin.partition("://")[2]
        return self.is_secure or _THIS_MACHINE.fullmatch(host) is not None


def address_of(request: RouteRequest) -> Address:
    """Return the address that *request* of a route came to."""
    return address_reached_by(request.scope["responder"].request)


def address_reached_by(request: Request) -> Address:
    """Return the address that *request* came to."""
    headers = request.headers
    token = request.token
    scheme = "http" if request.asgi is None else request.asgi.scope["scheme"]
    return Address.of(
        headers.get(b"host", b"").decode("latin-1"),
        headers.get(b"x-forwarded-proto", scheme.encode()).decode("latin-1"),
        quote(request.root_path),
        None if token is None else quote(token, safe="%"),
    )
