"""Signing in from a viewer: Neuroglancer's ``middleauth`` protocol, and the tokens it hands out.

A page of a viewer reads ``/auth_info``, opens ``/login/api/v1/authorize`` in a window, and waits
for a message of that window, which goes to the origins of the settings only.
"""

import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Final, NamedTuple

import jwt
import orjson
from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, Field
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse

from shardgate.errors import (
    BadParameterError,
    ForbiddenError,
    IssuerUnavailableError,
    ShardgateError,
    UnauthenticatedError,
)
from shardgate.http.api.openapi import RequestDocument
from shardgate.http.auth.access import Caller, Datasets, Identity
from shardgate.http.auth.code_flow import Attempt, CodeFlow, challenge_of
from shardgate.http.auth.tokens import read_grant
from shardgate.http.body import RequestBodyReader
from shardgate.http.pages.rendering import PageTemplate
from shardgate.http.pages.viewer import Address, address_of
from shardgate.http.problems import status_of
from shardgate.http.request import Request as GatewayRequest
from shardgate.observability.logging import log_failure
from shardgate.settings import PUBLIC, RESERVED, Settings

ATTEMPT_S: Final = 600
"""Longest time to sign in at the issuer."""
_ALGORITHM: Final = "HS256"
_ISSUER: Final = "shardgate"
_PURPOSE: Final = b"shardgate: signing in: "
_VIEWER: Final = "viewer"
_ATTEMPT: Final = "attempt"
_SESSION: Final = "session"
_LONGEST_COOKIE: Final = 3800
"""Browsers drop longer ones, which have 4,096 bytes with their names and attributes."""
_CODE: Final = "code"
_CODE_S: Final = 120
"""Longest time from the end of a sign-in in the browser to the exchange of its code."""
_LONGEST_CODE: Final = 16 * 1024
_CHALLENGE: Final = re.compile("[A-Za-z0-9_-]{43}")
_PORT: Final = re.compile("([1-9][0-9]{3,4})?")
_LAST_PORT: Final = 65_535
_SAFE_MODES: Final = (("sec-fetch-dest", "document"), ("sec-fetch-mode", "navigate"))
_OWN_SITES: Final = ("same-origin", "none")
_log = logging.getLogger(__name__)


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
        now: Callable[[], float] = time.time,
    ) -> None:
        login, shared = settings.login, settings.tokens
        self._secret = shared.secret.get_secret_value().encode()
        self._audience = f"{settings.issuers[login.issuer or ''].url} {login.client_id}"
        self.lifetime_s = min(login.lifetime_s, shared.longest_s)
        self._now = now
        self._ended: dict[str, float] = {}
        """Sessions that people have ended, until their tokens expire."""
        self._private = [dataset for dataset in datasets if not dataset.is_public]

    def rights_of(self, caller: Caller, session_id: str) -> Mapping[str, Any] | None:
        """Return claims of what *caller* may read in a session; `None` if that is public only."""
        known = frozenset[str]().union(*(dataset.readers for dataset in self._private))
        rules = sorted(known & caller.grants)
        return {"sub": caller.name, "rules": rules, "sid": session_id} if rules else None

    async def identify(self, token: str) -> Identity | None:
        """Identify a *token*; `None` for other kinds. Raises: `UnauthenticatedError`."""
        try:
            if jwt.get_unverified_header(token).get("typ") != _type(_VIEWER):
                return None
        except jwt.PyJWTError:
            return None
        claims = self.unseal(_VIEWER, token)
        if claims is None:
            raise UnauthenticatedError("the token has expired, or is not of this service")
        return Identity(self._caller_of(claims), claims["exp"])

    def session(self, cookie: str) -> BrowserSession | None:
        """Return the session of a *cookie*; `None` if it has ended."""
        claims = self.unseal(_SESSION, cookie)
        return None if claims is None else BrowserSession(claims["sid"], self._caller_of(claims))

    def end(self, session_id: str) -> None:
        """Refuse tokens and cookies of a session from now on, in this process."""
        now = self._now()
        ended = {each: until_s for each, until_s in self._ended.items() if until_s > now}
        self._ended = {**ended, session_id: now + self.lifetime_s}

    def _caller_of(self, claims: Mapping[str, Any]) -> Caller:
        rules = frozenset(claims["rules"])
        readable = [each for each in self._private if not each.readers.isdisjoint(rules)]
        grants = {PUBLIC, *(read_grant(dataset.name) for dataset in readable)}
        return Caller(claims["sub"], frozenset(grants))

    def seal(self, kind: str, claims: Mapping[str, object], lifetime_s: int | None = None) -> str:
        """Sign *claims*, which stay readable, for *lifetime_s*; default: that of the settings."""
        expires_at_s = int(self._now()) + (lifetime_s or self.lifetime_s)
        named = {**claims, "iss": _ISSUER, "aud": self._audience, "exp": expires_at_s}
        return jwt.encode(named, self._key(kind), _ALGORITHM, {"typ": _type(kind)})

    def unseal(self, kind: str, token: str) -> Mapping[str, Any] | None:
        """Return the claims that `seal` has signed as *kind*; `None` if ended or not."""
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
        is_over = claims["exp"] <= self._now() or claims.get("sid") in self._ended
        return None if is_over else claims

    def _key(self, kind: str) -> bytes:
        return hmac.digest(self._secret, _PURPOSE + kind.encode(), "sha256")


def _type(kind: str) -> str:
    return f"shardgate-{kind}+jwt"


class LoginPages:
    """Sends browsers to the issuer, and answers when they come back."""

    def __init__(
        self,
        flow: CodeFlow,
        tokens: LoginTokens,
        viewers: Sequence[str],
        on_end: Callable[[], None],
    ) -> None:
        """*on_end* is called when tokens end before their time."""
        self._on_end = on_end
        self._flow = flow
        self._tokens = tokens
        self._viewers = viewers
        self._page = PageTemplate("login.html", "login.js")

    async def begin_in_viewer(self, request: Request) -> Response:
        """Begin to sign in for the page that has opened the window. Raises: see `_begin`."""
        opener = _opener(request)
        if opener is None and request.headers.get("sec-fetch-site") == "same-origin":
            opener = address_of(request).origin
        self._targets(opener)
        return await self._begin(request, {"for": _VIEWER, "opener": opener})

    async def begin_in_page(self, request: Request) -> Response:
        """Begin to sign in for pages of this service. Raises: see `_begin`."""
        return await self._begin(request, {"for": _SESSION})

    async def begin_in_command(self, request: Request) -> Response:
        """Begin to sign in for the command on the machine of the browser, which may listen.

        Raises: `BadParameterError`, see `_begin`.
        """
        if request.headers.get("sec-fetch-site", "none") != "none" or _opener(request) is not None:
            raise ForbiddenError("a page has led here; enter the URL that the command prints")
        challenge = request.query_params.get("challenge", "")
        port = request.query_params.get("port", "")
        is_port = _PORT.fullmatch(port) and int(port or 0) <= _LAST_PORT
        if not _CHALLENGE.fullmatch(challenge) or not is_port:
            raise BadParameterError("the command sends a challenge, and may send a port")
        return await self._begin(request, {"for": _CODE, "challenge": challenge, "port": port})

    async def _begin(self, request: Request, purpose: Mapping[str, object]) -> Response:
        """Send the browser to the issuer. Raises: `ForbiddenError`, `IssuerUnavailableError`."""
        address = _demand_address(request)
        _demand_navigation(request)
        attempt = Attempt.new()
        location = await self._flow.begin(attempt, _callback(address))
        response = RedirectResponse(location, HTTPStatus.SEE_OTHER)
        sealed = self._tokens.seal(_ATTEMPT, {**attempt._asdict(), **purpose}, ATTEMPT_S)
        _set_cookie(response, address, _ATTEMPT, sealed, ATTEMPT_S)
        return response

    async def finish(self, request: Request) -> Response:
        """Hand out what the browser was sent to the issuer for. Raises: `ShardgateError`."""
        address = _demand_address(request)
        _demand_navigation(request)
        sealed = self._tokens.unseal(_ATTEMPT, _cookie(request, address, _ATTEMPT))
        if sealed is None:
            raise ForbiddenError(
                "this browser has begun no sign-in here, or it took too long; begin again"
            )
        try:
            response = await self._sign_in(request, sealed, address)
        except ShardgateError as error:
            response = await self.refuse(error)
        # Any site can lead here, but only the issuer knows the state.
        if request.query_params.get("state") == sealed["state"]:
            _set_cookie(response, address, _ATTEMPT, "", 0)
        return response

    async def _sign_in(
        self, request: Request, sealed: Mapping[str, Any], address: Address
    ) -> Response:
        """Return the response to the issuer's answer to *sealed*, with the cookie of a session."""
        attempt = Attempt(*(sealed[name] for name in Attempt._fields))
        claims = await self._flow.finish(attempt, _callback(address), _answer_in(request))
        caller = self._flow.issuer.caller_of(claims)
        known = self._tokens.session(_cookie(request, address, _SESSION))
        is_same = known is not None and known.caller.name == caller.name
        session_id = known.session_id if known and is_same else secrets.token_urlsafe(16)
        rights = self._tokens.rights_of(caller, session_id)
        if rights is None or not is_same:
            self._end(known)
        if rights is None:
            name = caller.name
            error = ForbiddenError(f"{name} has signed in, but may read no dataset here")
            response = await self.refuse(error)
            _set_cookie(response, address, _SESSION, "", 0)
            return response
        cookie = self._tokens.seal(_SESSION, rights)
        fits = len(cookie) <= _LONGEST_COOKIE
        if not fits and sealed["for"] == _SESSION:
            raise ForbiddenError(f"{caller.name} fulfils more rules than a cookie can hold")
        response = await self._hand_out(sealed, rights, address)
        if fits:
            _set_cookie(response, address, _SESSION, cookie, self._tokens.lifetime_s)
        return response

    async def _hand_out(
        self, sealed: Mapping[str, Any], rights: Mapping[str, Any], address: Address
    ) -> Response:
        """Return the response to the browser that has begun with *sealed*."""
        name = rights["sub"]
        match sealed["for"]:
            case "session":
                return RedirectResponse(f"{address.root_path}/", HTTPStatus.SEE_OTHER)
            case "code":
                claims, port = {**rights, "challenge": sealed["challenge"]}, sealed["port"]
                code = self._tokens.seal(_CODE, claims, _CODE_S)
                return await self._render(
                    f"{name} has signed in. The command shardgate login may read with it.",
                    code=code,
                    link=f"http://127.0.0.1:{port}/?code={code}" if port else "",
                )
        message = {"token": self._tokens.seal(_VIEWER, rights), "app_urls": [address.origin]}
        return await self._render(
            f"{name} has signed in. This window may be closed.",
            message=orjson.dumps(message).decode(),
            origins=orjson.dumps(self._targets(sealed["opener"])).decode(),
        )

    def redeem(self, code: str, verifier: str) -> "IssuedToken":
        """Return the token that the command gets for a *code*. Raises: `ForbiddenError`.

        The code itself has no token in it: it comes through the browser, which remembers it.
        """
        claims = self._tokens.unseal(_CODE, code)
        challenge = "" if claims is None else claims["challenge"]
        if claims is None or not hmac.compare_digest(challenge, challenge_of(verifier)):
            raise ForbiddenError("the code is not of this sign-in, or took too long; begin again")
        rights = {name: claims[name] for name in ("sub", "rules", "sid")}
        expires_at = datetime.now(UTC) + timedelta(seconds=self._tokens.lifetime_s)
        return IssuedToken(token=self._tokens.seal(_VIEWER, rights), expires_at=expires_at)

    def end(self, request: Request) -> Response:
        """End the session of the browser, and its tokens. Raises: `ForbiddenError` to others."""
        if request.headers.get("sec-fetch-site", "none") not in _OWN_SITES:
            raise ForbiddenError("only pages of this service sign out")
        address = address_of(request)
        self._end(self._tokens.session(_cookie(request, address, _SESSION)))
        response = Response(status_code=HTTPStatus.NO_CONTENT)
        _set_cookie(response, address, _SESSION, "", 0)
        return response

    def _end(self, session: BrowserSession | None) -> None:
        if session is not None:
            self._tokens.end(session.session_id)
            self._on_end()

    async def refuse(self, error: ShardgateError) -> Response:
        """Return the page that explains *error*."""
        status, reason = status_of(error), str(error)
        log_failure(status, error)
        if isinstance(error, IssuerUnavailableError):
            _log.warning("nobody can sign in at the issuer %s", error)
            reason = "the issuer cannot be asked at the moment; try again in a minute"
        return await self._render(f"You are not signed in: {reason}.", status)

    async def _render(
        self, text: str, status: HTTPStatus = HTTPStatus.OK, **values: str
    ) -> Response:
        """Return the page that says *text*; *values* are the others of ``login.html``."""
        content = await self._page.render(
            **{"message": "", "origins": "", "code": "", "link": ""} | values,
            text=text,
            is_refused=status != HTTPStatus.OK,
        )
        headers = {name.decode(): value.decode() for name, value in self._page.headers}
        # Of no origin, so that scripts of this service's own pages cannot look into the window.
        headers["content-security-policy"] += "; sandbox allow-scripts"
        return Response(content, status, headers, "text/html")

    def _targets(self, opener: str | None) -> Sequence[str]:
        """Return the origins that may get the token, of which *opener* is one, where the browser
        names it. Raises: `ForbiddenError`.
        """
        if opener is None and self._viewers:
            return self._viewers
        if opener is not None and opener in self._viewers:
            return [opener]
        raise ForbiddenError(f"login.viewers does not name {opener or 'any page'}")


def _opener(request: Request) -> str | None:
    """Return the origin of the page that has opened the window, if the browser names it."""
    if (referer := request.headers.get("referer")) is None:
        return None
    return "/".join(referer.split("/")[:3])


def _demand_address(request: Request) -> Address:
    """Return the address of the service; it must be https or local. Raises: `ForbiddenError`."""
    address = address_of(request)
    if not address.is_trustworthy:
        raise ForbiddenError("signing in needs https")
    return address


def _demand_navigation(request: Request) -> None:
    """Check that a window shows the response, no frame of a page. Raises: `ForbiddenError`."""
    for name, expected in _SAFE_MODES:
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


def _cookie_name(kind: str, address: Address) -> str:
    """Return a name that over https no other host and no plain http can set.

    Over plain http it has the port: browsers send cookies to all ports of a host.
    """
    if address.is_secure:
        return f"__Host-shardgate-{kind}"
    port = address.origin.rpartition(":")[2]
    return f"shardgate-{kind}-{port if port.isdecimal() else 80}"


def _cookie(request: Request, address: Address, kind: str) -> str:
    return request.cookies.get(_cookie_name(kind, address), "")


def _set_cookie(
    response: Response, address: Address, kind: str, value: str, lifetime_s: int
) -> None:
    response.set_cookie(
        _cookie_name(kind, address),
        value,
        max_age=lifetime_s,
        path="/",
        secure=address.is_secure,
        httponly=True,
        samesite="lax",
    )


def caller_of_page(tokens: LoginTokens, request: GatewayRequest) -> Caller | None:
    """Return the caller of the session cookie, if *request* is for a page or reads the API for one.

    A cookie opens neither data nor writes: browsers send it with requests that others make.
    """
    headers = request.headers
    is_navigation = all(headers.get(name.encode()) == mode.encode() for name, mode in _SAFE_MODES)
    is_own = headers.get(b"sec-fetch-site", b"none").decode("latin-1") in _OWN_SITES
    if not _is_page(request) or not (is_own or is_navigation):
        return None
    host = headers.get(b"host", b"").decode("latin-1")
    cookies = cookie_parser(headers.get(b"cookie", b"").decode("latin-1"))
    # Behind a proxy the scheme is not known here: only https can have set the former.
    addresses = [Address.of(host, scheme, "", None) for scheme in ("https", "http")]
    named = [cookies.get(_cookie_name(_SESSION, each)) for each in addresses if each.is_trustworthy]
    sent = next((cookie for cookie in named if cookie is not None), "")
    session = tokens.session(sent)
    return None if session is None else session.caller


def _is_page(request: GatewayRequest) -> bool:
    if request.method not in {"GET", "HEAD"} or request.segment is not None:
        return False
    if request.name in RESERVED or request.raw_path in {b"/", b""}:
        return request.name in {"api", ""}
    is_folder = request.fault is None and (request.key or "/").endswith("/") and not request.query
    return is_folder and b"text/html" in request.headers.get(b"accept", b"").lower()


class IssuedToken(BaseModel):
    """A token for the command."""

    token: Annotated[str, Field(repr=False)]
    expires_at: datetime


class CodeExchange(RequestDocument):
    """Code that the browser brought to the command, and the secret of the command."""

    code: Annotated[str, Field(max_length=_LONGEST_CODE, repr=False)]
    verifier: Annotated[str, Field(max_length=128, repr=False)]


async def _describe_login(request: Request) -> dict[str, str]:
    address = address_of(request)
    return {"login_url": f"{address.origin}{address.root_path}/login"}


async def _refuse_slash() -> None:
    """Answer 404, not with a redirect, which would take a code to http:// behind TLS."""
    raise HTTPException(HTTPStatus.NOT_FOUND)


def build_login(pages: LoginPages, bodies: RequestBodyReader) -> APIRouter:
    """Build the routes of signing in."""
    router = APIRouter(include_in_schema=False)
    router.add_api_route("/auth_info", _describe_login)
    for path in ("/auth_info/", "/login/", "/login/{path:path}/"):
        router.add_api_route(path, _refuse_slash)

    async def explained(answering: Awaitable[Response]) -> Response:
        """Return the response, or the page that explains its error."""
        try:
            return await answering
        except ShardgateError as error:
            return await pages.refuse(error)

    @router.get("/login/api/v1/authorize")
    async def begin_in_viewer(request: Request) -> Response:
        return await explained(pages.begin_in_viewer(request))

    @router.get("/login")
    async def begin_in_page(request: Request) -> Response:
        return await explained(pages.begin_in_page(request))

    @router.get("/login/command")
    async def begin_in_command(request: Request) -> Response:
        return await explained(pages.begin_in_command(request))

    @router.get("/login/callback")
    async def finish(request: Request) -> Response:
        return await explained(pages.finish(request))

    @router.post("/login/token")
    async def redeem(request: Request) -> IssuedToken:
        sent = await bodies.read_document(request, CodeExchange)
        return pages.redeem(sent.code, sent.verifier)

    @router.post("/login/end")
    async def end(request: Request) -> Response:
        return pages.end(request)

    return router
