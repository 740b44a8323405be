"""Signing in from a viewer: Neuroglancer's ``middleauth`` protocol, and the tokens it hands out.

A page of a viewer reads ``/auth_info``, opens ``/login/api/v1/authorize`` in a window, and waits
for a message of that window, which goes to the origins of the settings only.
"""

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import jwt
import orjson
from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from shardgate.errors import (
    BadParameterError,
    ForbiddenError,
    ShardgateError,
    UnauthenticatedError,
)
from shardgate.http.auth.access import Caller, Datasets, Identity
from shardgate.http.auth.code_flow import Attempt, CodeFlow
from shardgate.http.auth.tokens import read_grant
from shardgate.http.pages.rendering import PageTemplate
from shardgate.http.pages.viewer import Address, address_of
from shardgate.http.problems import status_of
from shardgate.observability.logging import log_failure
from shardgate.settings import PUBLIC, LoginSettings, TokenSettings

ATTEMPT_S: Final = 600
"""Longest time to sign in at the issuer."""
_ALGORITHM: Final = "HS256"
_ISSUER: Final = "shardgate"
_PURPOSE: Final = b"shardgate: signing in: "
_VIEWER: Final = "viewer"
_ATTEMPT: Final = "attempt"
_SAFE_MODES: Final = {"sec-fetch-dest": "document", "sec-fetch-mode": "navigate"}


class LoginTokens:
    """Signs what is handed out to people who sign in, and verifies it.

    Each kind has a key of its own. A token names the rules of datasets that its bearer fulfils, and
    lets read what the current settings allow by them.
    """

    def __init__(
        self,
        settings: TokenSettings,
        login: LoginSettings,
        datasets: Datasets,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._secret = settings.secret.get_secret_value().encode()
        self._audience = f"{login.issuer}/{login.client_id}"
        self._lifetime_s = min(login.lifetime_s, settings.longest_s)
        self._now = now
        self._private = [dataset for dataset in datasets if not dataset.is_public]

    def sign(self, caller: Caller) -> str | None:
        """Return a token to read what *caller* may read; `None` if that is public only."""
        known = frozenset[str]().union(*(dataset.readers for dataset in self._private))
        if not (rules := sorted(known & caller.grants)):
            return None
        return self.seal(_VIEWER, {"sub": caller.name, "rules": rules}, self._lifetime_s)

    async def identify(self, token: str) -> Identity | None:
        """Return who has signed in; `None` for other tokens. Raises: `UnauthenticatedError`."""
        try:
            if jwt.get_unverified_header(token).get("typ") != _type(_VIEWER):
                return None
        except jwt.PyJWTError:
            return None
        claims = self.unseal(_VIEWER, token)
        if claims is None:
            raise UnauthenticatedError("the token has expired, or is not of this service")
        rules = frozenset(claims["rules"])
        readable = [each for each in self._private if not each.readers.isdisjoint(rules)]
        grants = {PUBLIC, *(read_grant(dataset.name) for dataset in readable)}
        return Identity(Caller(claims["sub"], frozenset(grants)), claims["exp"])

    def seal(self, kind: str, claims: Mapping[str, object], lifetime_s: int) -> str:
        """Sign *claims* for *lifetime_s*."""
        expires_at_s = int(self._now()) + lifetime_s
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


class LoginPages:
    """Sends browsers to the issuer, and answers when they come back."""

    def __init__(self, flow: CodeFlow, tokens: LoginTokens, viewers: Sequence[str]) -> None:
        self._flow = flow
        self._tokens = tokens
        self._viewers = viewers
        self._page = PageTemplate("login.html", "login.js")

    async def begin(self, request: Request) -> Response:
        """Send the browser to the issuer. Raises: `ForbiddenError`, `IssuerUnavailableError`."""
        address = _demand_address(request)
        _demand_navigation(request)
        opener = _opener(request)
        self._targets(opener, address)
        attempt = Attempt.new()
        response = RedirectResponse(
            await self._flow.begin(attempt, _callback(address)), HTTPStatus.SEE_OTHER
        )
        sealed = self._tokens.seal(_ATTEMPT, {**attempt._asdict(), "opener": opener}, ATTEMPT_S)
        _set_cookie(response, address, sealed, ATTEMPT_S)
        return response

    async def finish(self, request: Request) -> Response:
        """Hand a token to the window that has opened this one. Raises: `ShardgateError`."""
        address = _demand_address(request)
        _demand_navigation(request)
        sealed = self._tokens.unseal(_ATTEMPT, request.cookies.get(_cookie_name(address), ""))
        if sealed is None:
            raise ForbiddenError(
                "this browser has begun no sign-in here, or it took too long; begin again"
            )
        attempt = Attempt(*(sealed[name] for name in Attempt._fields))
        claims = await self._flow.finish(attempt, _callback(address), _answer_in(request))
        caller = self._flow.issuer.caller_of(claims)
        if (token := self._tokens.sign(caller)) is None:
            raise ForbiddenError(f"{caller.name} has signed in, but may read no dataset here")
        return await self._render(
            f"{caller.name} has signed in. This window may be closed.",
            message={"token": token, "app_urls": [address.origin]},
            origins=self._targets(sealed["opener"], address),
        )

    async def refuse(self, error: ShardgateError) -> Response:
        """Say why nobody was signed in."""
        status = status_of(error)
        log_failure(status, error)
        return await self._render(f"You are not signed in: {error}.", status)

    async def _render(
        self,
        text: str,
        status: HTTPStatus = HTTPStatus.OK,
        *,
        message: Mapping[str, object] | None = None,
        origins: Sequence[str] = (),
    ) -> Response:
        content = await self._page.render(
            text=text,
            is_refused=message is None,
            message="" if message is None else orjson.dumps(message).decode(),
            origins=orjson.dumps(origins).decode(),
        )
        headers = {name.decode(): value.decode() for name, value in self._page.headers}
        return Response(content, status, headers, "text/html")

    def _targets(self, opener: str | None, address: Address) -> Sequence[str]:
        """Return the origins that may get the token, of which *opener* is one, where the browser
        names it. Raises: `ForbiddenError`.
        """
        allowed = [*self._viewers, address.origin]
        if opener is None:
            return allowed
        if opener not in allowed:
            raise ForbiddenError(f"login.viewers does not name {opener}, where you come from")
        return [opener]


def _opener(request: Request) -> str | None:
    """Return the origin of the page that has opened the window, if the browser names it."""
    if (referer := request.headers.get("referer")) is None:
        return None
    return "/".join(referer.split("/")[:3])


def _demand_address(request: Request) -> Address:
    """Return the address of the service, where nobody can listen. Raises: `ForbiddenError`."""
    address = address_of(request)
    if not address.is_trustworthy:
        raise ForbiddenError("signing in needs https")
    return address


def _demand_navigation(request: Request) -> None:
    """Check that a window shows the response, no frame of a page. Raises: `ForbiddenError`."""
    for name, expected in _SAFE_MODES.items():
        if request.headers.get(name, expected) != expected:
            raise ForbiddenError("signing in needs a window of its own")


def _answer_in(request: Request) -> Mapping[str, str]:
    """Return the parameters of the issuer's answer. Raises: `BadParameterError` for repeated."""
    answer = dict(request.query_params.multi_items())
    if len(answer) < len(request.query_params.multi_items()):
        raise BadParameterError("a parameter is repeated")
    return answer


def _callback(address: Address) -> str:
    return f"{address.origin}{address.root_path}/login/callback"


def _cookie_name(address: Address) -> str:
    """Return a name that no other host and no plain http can set, where there is https."""
    prefix = "__Host-" if address.origin.startswith("https://") else ""
    return f"{prefix}shardgate-{_ATTEMPT}"


def _set_cookie(response: Response, address: Address, value: str, lifetime_s: int) -> None:
    response.set_cookie(
        _cookie_name(address),
        value,
        max_age=lifetime_s,
        path="/",
        secure=address.origin.startswith("https://"),
        httponly=True,
        samesite="lax",
    )


def build_login(pages: LoginPages) -> APIRouter:
    """Build the routes of signing in."""
    router = APIRouter(include_in_schema=False)

    @router.get("/auth_info")
    async def describe_login(request: Request) -> dict[str, str]:
        address = address_of(request)
        return {"login_url": f"{address.origin}{address.root_path}/login"}

    @router.get("/login/api/v1/authorize")
    async def begin_login(request: Request) -> Response:
        try:
            return await pages.begin(request)
        except ShardgateError as error:
            return await pages.refuse(error)

    @router.get("/login/callback")
    async def finish_login(request: Request) -> Response:
        try:
            response = await pages.finish(request)
        except ShardgateError as error:
            response = await pages.refuse(error)
        _set_cookie(response, address_of(request), "", 0)
        return response

    return router
