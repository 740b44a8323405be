"""Logins of people: tokens and cookies with the rules that these fulfil.

A cookie opens pages of this service and what they read from the API. It opens neither data nor
writes, because browsers send it with requests of other sites as well.
"""

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from fastapi import Request, Response
from starlette.requests import cookie_parser

from shardgate.auth.access import Caller, Datasets, Identity
from shardgate.auth.token_records import TokenRecords
from shardgate.auth.tokens import TokenSigner, reader
from shardgate.errors import ForbiddenError, TokenRecordsError
from shardgate.server.address import Address, address_of
from shardgate.server.request import Request as GatewayRequest
from shardgate.settings import Settings

VIEWER: Final = "shardgate-viewer"
LOGIN_COOKIE: Final = "shardgate-session"  # a new name would sign everybody out
# Headers of requests that fill a window, in browsers that send them.
NAVIGATION: Final = (("sec-fetch-dest", "document"), ("sec-fetch-mode", "navigate"))
_OWN_SITES: Final = ("same-origin", "none")


class BrowserLogin(NamedTuple):
    """Login of a person in one browser."""

    login_id: str
    caller: Caller


class LoginTokens(TokenSigner):
    """Signs tokens and cookies of people who have signed in, and verifies them.

    A token names the rules of datasets that its bearer fulfils, and lets read what the current
    settings allow by them.
    """

    def __init__(
        self,
        settings: Settings,
        datasets: Datasets,
        records: TokenRecords,
        now: Callable[[], float] = time.time,
    ) -> None:
        issuer = settings.issuers[settings.login.issuer or ""]
        # Tokens of another issuer, or of another client there, are not taken after a change.
        audience = f"{issuer.url} {settings.login.client_id}"
        super().__init__(settings.tokens.secret, records, now, audience)
        self.lifetime_s = min(settings.login.lifetime_s, settings.tokens.longest_s)
        self._private = [dataset for dataset in datasets if not dataset.is_public]

    def rights_of(
        self, caller: Caller, login: BrowserLogin | None = None
    ) -> Mapping[str, Any] | None:
        """Return claims of what *caller* may read in *login*, or else a new one; `None` if that
        is public only.
        """
        known = frozenset[str]().union(*(dataset.readers for dataset in self._private))
        if not (rules := sorted(known & caller.grants)):
            return None
        login_id = secrets.token_urlsafe(16) if login is None else login.login_id
        return {"sub": caller.name, "rules": rules, "sid": login_id}

    async def identify(self, token: str) -> Identity | None:
        """Return the bearer of a *token* for viewers or commands; see `identify_reader`."""
        return await self.identify_reader(VIEWER, token, self._readable_names)

    async def login(self, cookie: str) -> BrowserLogin | None:
        """Return the login of a *cookie*; `None` if it has ended. Raises: `TokenRecordsError`."""
        if (claims := await self.verify(LOGIN_COOKIE, cookie)) is None:
            return None
        return BrowserLogin(claims["sid"], reader(claims["sub"], self._readable_names(claims)))

    async def login_of(self, request: Request) -> BrowserLogin | None:
        """Return the login of the browser that sent *request*; see `login`."""
        return await self.login(cookie_of(request, LOGIN_COOKIE))

    async def end(self, login: BrowserLogin) -> None:
        """Refuse tokens and cookies of *login* from now on. Raises: `TokenRecordsError`."""
        await self._records.end(login.login_id, self._now() + self.lifetime_s)

    def _readable_names(self, claims: Mapping[str, Any]) -> Sequence[str]:
        rules = frozenset(claims["rules"])
        return [each.name for each in self._private if not each.readers.isdisjoint(rules)]


def _cookie_name(kind: str, address: Address) -> str:
    """Return a name that over https no other host and no plain http can set."""
    # Browsers take a name with this prefix over https only, from the host itself (RFC 6265bis).
    prefix, default_port = ("__Host-", "443") if address.is_secure else ("", "80")
    port = address.origin.rpartition(":")[2]
    if not port.isdecimal():
        port = default_port
    # Browsers send cookies to all services of a host. No path has an exclamation mark.
    path = address.root_path.replace("/", "!")
    return f"{prefix}{kind}-{port}{path}"


def cookie_of(request: Request, kind: str) -> str:
    """Return the cookie *kind* of *request*; empty for none."""
    return request.cookies.get(_cookie_name(kind, address_of(request)), "")


def kinds_of(request: Request, kind: str) -> Sequence[str]:
    """Return the kinds of cookies of *request* that begin with *kind* and a hyphen, the oldest
    first (RFC 6265 §5.4).
    """
    before, after = map(re.escape, _cookie_name("*", address_of(request)).split("*"))
    # In the cookies of services below other paths an exclamation mark follows.
    pattern = f"{before}({kind}-[^!]+){after}"
    found = (re.fullmatch(pattern, name) for name in request.cookies)
    return [each[1] for each in found if each is not None]


def set_cookie(
    response: Response, address: Address, kind: str, value: str, lifetime_s: int
) -> None:
    """Set the cookie *kind* for HTTP and requests of this site only; 0 s removes it."""
    response.set_cookie(
        _cookie_name(kind, address),
        value,
        max_age=lifetime_s,
        path="/",
        secure=address.is_secure,
        httponly=True,
        samesite="lax",
    )


async def caller_of_page(tokens: LoginTokens, request: GatewayRequest) -> Caller | None:
    """Return the caller of the cookie, if *request* is for a page or reads the API for one, and it
    is known that the login has not ended.
    """
    headers = request.headers
    is_navigation = all(headers.get(name.encode()) == mode.encode() for name, mode in NAVIGATION)
    is_own = headers.get(b"sec-fetch-site", b"none").decode("latin-1") in _OWN_SITES
    if not is_page(request) or not (is_own or is_navigation):
        return None
    host = headers.get(b"host", b"").decode("latin-1")
    cookies = cookie_parser(headers.get(b"cookie", b"").decode("latin-1"))
    # The scheme may be unknown behind a proxy; only over https can the last name be set.
    cookie = ""
    for scheme in ("http", "https"):
        address = Address.of(host, scheme, quote(request.root_path), None)
        if address.is_trustworthy:
            cookie = cookies.get(_cookie_name(LOGIN_COOKIE, address), cookie)
    try:
        login = await tokens.login(cookie)
    except TokenRecordsError:
        return None
    return None if login is None else login.caller


def is_page(request: GatewayRequest) -> bool:
    """Return whether *request* is for a page, or reads the API for one."""
    if request.method not in {"GET", "HEAD"} or request.segment is not None:
        return False
    if request.needs_asgi:
        return request.name in {"api", ""}
    return request.opens_page


def demand_own_page(request: Request, action: str) -> None:
    """Check that no page of another origin sent *request*. Raises: `ForbiddenError`."""
    origin = request.headers.get("origin")
    is_own = request.headers.get("sec-fetch-site", "none") in _OWN_SITES
    host = request.headers.get("host")
    if not is_own or (origin is not None and origin.partition("://")[2] != host):
        raise ForbiddenError(f"only pages of this service {action}")
