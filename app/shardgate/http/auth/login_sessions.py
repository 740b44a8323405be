"""Sessions of people who have signed in: tokens and cookies that name what these may read.

A cookie opens pages of this service and reads the API for them, neither data nor writes: browsers
send it with requests that others make.
"""

import hmac
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jwt
from fastapi import Request, Response
from starlette.requests import cookie_parser

from shardgate.errors import ForbiddenError, TokenRecordsError, UnauthenticatedError
from shardgate.http.auth.access import Caller, Datasets, Identity
from shardgate.http.auth.token_records import TokenRecords
from shardgate.http.auth.tokens import MADE, read_grant
from shardgate.http.pages.viewer import Address
from shardgate.http.request import Request as GatewayRequest
from shardgate.settings import PUBLIC, RESERVED, Settings

VIEWER: Final = "viewer"
SESSION: Final = "session"
NAVIGATION: Final = (("sec-fetch-dest", "document"), ("sec-fetch-mode", "navigate"))
"""Headers of requests that fill a window, in browsers that send them."""
_ALGORITHM: Final = "HS256"
_ISSUER: Final = "shardgate"
_PURPOSE: Final = b"shardgate: signing in: "
_OWN_SITES: Final = ("same-origin", "none")


class BrowserSession(NamedTuple):
    """Session of a person in one browser."""

    session_id: str
    caller: Caller


class LoginTokens:
    """Signs tokens and cookies of people who have signed in, and verifies them.

    Each kind has a key of its own. A token names the rules of datasets that its bearer fulfils, and
    lets read what the current settings allow by them.
    """

    def __init__(
        self,
        settings: Settings,
        datasets: Datasets,
        records: TokenRecords,
        now: Callable[[], float] = time.time,
    ) -> None:
        login, shared = settings.login, settings.tokens
        self._secret = shared.secret.get_secret_value().encode()
        self._audience = f"{settings.issuers[login.issuer or ''].url} {login.client_id}"
        self.lifetime_s = min(login.lifetime_s, shared.longest_s)
        self._now = now
        self._records = records
        self._private = [dataset for dataset in datasets if not dataset.is_public]

    def rights_of(self, caller: Caller, session_id: str) -> Mapping[str, Any] | None:
        """Return claims of what *caller* may read in a session; `None` if that is public only."""
        known = frozenset[str]().union(*(dataset.readers for dataset in self._private))
        rules = sorted(known & caller.grants)
        return {"sub": caller.name, "rules": rules, "sid": session_id} if rules else None

    async def identify(self, token: str) -> Identity | None:
        """Identify a *token*; `None` for other kinds.

        Raises: `UnauthenticatedError`, `TokenRecordsError`.
        """
        try:
            if jwt.get_unverified_header(token).get("typ") != _type(VIEWER):
                return None
        except jwt.PyJWTError:
            return None
        claims = await self.unseal_live(VIEWER, token)
        if claims is None:
            raise UnauthenticatedError("the token has expired, or is not of this service")
        until_s = min(claims["exp"], self._now() + self._records.fresh_s)
        return Identity(self._caller_of(claims), until_s)

    async def session(self, cookie: str) -> BrowserSession | None:
        """Return the session of a *cookie*; `None` if it has ended. Raises: `TokenRecordsError`."""
        claims = await self.unseal_live(SESSION, cookie)
        return None if claims is None else BrowserSession(claims["sid"], self._caller_of(claims))

    async def end(self, session_id: str) -> None:
        """Refuse tokens and cookies of a session from now on. Raises: `TokenRecordsError`."""
        await self._records.end(session_id, self._now() + self.lifetime_s)

    async def unseal_live(self, kind: str, token: str) -> Mapping[str, Any] | None:
        """Return the claims that `seal` has signed as *kind*, unless their session has ended.

        Raises: `TokenRecordsError`.
        """
        if (claims := self.unseal(kind, token)) is None:
            return None
        await self._records.refresh()
        return None if self._records.has_ended(claims["sid"]) else claims

    def _caller_of(self, claims: Mapping[str, Any]) -> Caller:
        rules = frozenset(claims["rules"])
        readable = [each for each in self._private if not each.readers.isdisjoint(rules)]
        grants = {PUBLIC, MADE, *(read_grant(dataset.name) for dataset in readable)}
        return Caller(claims["sub"], frozenset(grants))

    def seal(self, kind: str, claims: Mapping[str, object], lifetime_s: int | None = None) -> str:
        """Sign *claims*, which stay readable, for *lifetime_s*; default: that of the settings."""
        expires_at_s = int(self._now()) + (lifetime_s or self.lifetime_s)
        named = {**claims, "iss": _ISSUER, "aud": self._audience, "exp": expires_at_s}
        return jwt.encode(named, self._key(kind), _ALGORITHM, {"typ": _type(kind)})

    def unseal(self, kind: str, token: str) -> Mapping[str, Any] | None:
        """Return the claims that `seal` has signed as *kind*; `None` if expired or not."""
        options: Any = {"require": ["exp"], "verify_exp": False}
        try:
            claims = jwt.decode(
                token,
                self._key(kind),
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                audience=self._audience,
                options=options,
            )
        except jwt.PyJWTError:
            return None
        return claims if claims["exp"] > self._now() else None

    def _key(self, kind: str) -> bytes:
        return hmac.digest(self._secret, _PURPOSE + kind.encode(), "sha256")


def _type(kind: str) -> str:
    return f"shardgate-{kind}+jwt"


def _cookie_name(kind: str, address: Address) -> str:
    """Return a name that over https no other host and no plain http can set.

    It has the port: browsers send cookies to all ports of a host.
    """
    prefix, default = ("__Host-", 443) if address.is_secure else ("", 80)
    port = address.origin.rpartition(":")[2]
    return f"{prefix}shardgate-{kind}-{port if port.isdecimal() else default}"


def cookie_of(request: Request, address: Address, kind: str) -> str:
    """Return the cookie *kind* that came to *address*; empty for none."""
    return request.cookies.get(_cookie_name(kind, address), "")


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
    """Return the caller of the session cookie, if *request* is for a page or reads the API for one,
    and it is known that the session has not ended.
    """
    headers = request.headers
    is_navigation = all(headers.get(name.encode()) == mode.encode() for name, mode in NAVIGATION)
    is_own = headers.get(b"sec-fetch-site", b"none").decode("latin-1") in _OWN_SITES
    if not is_page(request) or not (is_own or is_navigation):
        return None
    host = headers.get(b"host", b"").decode("latin-1")
    cookies = cookie_parser(headers.get(b"cookie", b"").decode("latin-1"))
    # Behind a proxy the scheme is not known here: only https can have set the former.
    addresses = [Address.of(host, scheme, "", None) for scheme in ("https", "http")]
    named = [cookies.get(_cookie_name(SESSION, each)) for each in addresses if each.is_trustworthy]
    sent = next((cookie for cookie in named if cookie is not None), "")
    try:
        session = await tokens.session(sent)
    except TokenRecordsError:
        return None
    return None if session is None else session.caller


def is_page(request: GatewayRequest) -> bool:
    """Return whether *request* is for a page, or reads the API for one."""
    if request.method not in {"GET", "HEAD"} or request.segment is not None:
        return False
    if request.name in RESERVED or request.raw_path in {b"/", b""}:
        return request.name in {"api", ""}
    is_folder = request.fault is None and (request.key or "/").endswith("/") and not request.query
    return is_folder and b"text/html" in request.headers.get(b"accept", b"").lower()


def demand_own_page(request: Request, action: str) -> None:
    """Check that no page of another origin sent *request*. Raises: `ForbiddenError`."""
    origin, host = request.headers.get("origin"), request.headers.get("host")
    is_own = request.headers.get("sec-fetch-site", "none") in _OWN_SITES
    if not is_own or (origin is not None and origin.partition("://")[2] != host):
        raise ForbiddenError(f"only pages of this service {action}")
