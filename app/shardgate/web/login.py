"""Signing in from a viewer: Neuroglancer's ``middleauth`` protocol, and the tokens it hands out.

A page of a viewer reads ``/auth_info``, opens ``/login/api/v1/authorize`` in a window, and waits
for a message of that window, which goes to the origins of the settings only.
"""

import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse, RedirectResponse

from shardgate.auth.access import Caller
from shardgate.auth.logins import (
    LOGIN_COOKIE,
    NAVIGATION,
    VIEWER,
    LoginTokens,
    cookie_of,
    demand_own_page,
    kinds_of,
    set_cookie,
)
from shardgate.auth.oidc_client import CHOOSER, Attempt, OidcClient, next_prompt
from shardgate.errors import (
    BadParameterError,
    ForbiddenError,
    IssuerUnavailableError,
    ShardgateError,
    TokenRecordsError,
)
from shardgate.observability.logging import log_failure
from shardgate.observability.metrics import note_caller
from shardgate.server.address import Address, address_of
from shardgate.server.problems import status_of
from shardgate.web.rendering import PageTemplate

_ATTEMPT_S: Final = 600  # longest time to sign in at the issuer
_ATTEMPT: Final = "shardgate-attempt"
_OTHER: Final = "other"  # query parameter for a sign-in as another person
_LOGIN: Final = "/login"
_AUTHORIZE: Final = f"{_LOGIN}/api/v1/authorize"
CODE: Final = "shardgate-code"
# Path of a page of this service; browsers take two slashes, or backslashes, for another host.
_PAGE: Final = re.compile(r"/(?!/)[!-\[\]-~]{0,1000}")
_CHALLENGE: Final = re.compile("[A-Za-z0-9_-]{43}")
_PORT: Final = re.compile("([1-9][0-9]{3,4})?")
_LAST_PORT: Final = 65_535
_log = logging.getLogger(__name__)


class ForViewer(NamedTuple):
    """Sign-in for the page of a viewer, which has opened the window."""

    opener: str | None
    """Origin of that page, if the browser tells it."""


class ForPages(NamedTuple):
    """Sign-in for pages of this service."""

    page: str
    """Path of the page at which it ends."""


class ForCommand(NamedTuple):
    """Sign-in for the command on the machine of the browser."""

    challenge: str
    port: str
    """Port that the command listens on; empty for none."""


type Purpose = ForViewer | ForPages | ForCommand
# Claim ``for`` of the cookie of an attempt.
_KINDS: Final = {ForViewer: VIEWER, ForPages: LOGIN_COOKIE, ForCommand: CODE}


class BegunLogin(NamedTuple):
    """Sign-in that a browser has begun, as the claims of its cookie say."""

    purpose: Purpose
    attempt: Attempt
    prompt: str

    @classmethod
    def of(cls, claims: Mapping[str, Any]) -> Self:
        """Return the sign-in of verified *claims*."""
        purpose: Purpose
        if claims["for"] == VIEWER:
            purpose = ForViewer(claims["opener"])
        elif claims["for"] == LOGIN_COOKIE:
            purpose = ForPages(claims["page"])
        else:
            purpose = ForCommand(claims["challenge"], claims["port"])
        attempt = Attempt(*(claims[name] for name in Attempt._fields))
        return cls(purpose, attempt, claims.get("prompt", ""))

    @property
    def claims(self) -> Mapping[str, object]:
        """Claims of the cookie."""
        named = {"for": _KINDS[type(self.purpose)], "prompt": self.prompt}
        return named | self.purpose._asdict() | self.attempt._asdict()


class LoginPages:
    """Sends browsers to the issuer, and answers when they come back."""

    def __init__(self, flow: OidcClient, tokens: LoginTokens, viewers: Sequence[str]) -> None:
        self._flow = flow
        self._tokens = tokens
        self._viewers = viewers
        self._page = PageTemplate("login.html", "login.js", is_sandboxed=True)

    async def begin_in_viewer(self, request: Request) -> Response:
        """Begin to sign in for the page that has opened the window. Raises: see `_begin`."""
        opener = _opener(request)
        self._targets(opener)
        return await self._begin(request, ForViewer(opener), _prompt_of(request))

    async def begin_in_page(self, request: Request) -> Response:
        """Begin to sign in for pages of this service; it ends at the page that the query names.

        Raises: see `_begin`.
        """
        return await self._begin(request, ForPages(_page_of(request)), _prompt_of(request))

    async def begin_in_command(self, request: Request) -> Response:
        """Begin to sign in for the command on the machine of the browser, which may listen.

        Raises: `BadParameterError`, see `_begin`.
        """
        if request.headers.get("sec-fetch-site", "none") != "none" or "referer" in request.headers:
            raise ForbiddenError("a page has led here; enter the URL that the command prints")
        challenge = request.query_params.get("challenge", "")
        port = request.query_params.get("port", "")
        is_port = _PORT.fullmatch(port) and int(port or 0) <= _LAST_PORT
        if not _CHALLENGE.fullmatch(challenge) or not is_port:
            raise BadParameterError("the command sends a challenge, and may send a port")
        return await self._begin(request, ForCommand(challenge, port))

    async def _begin(self, request: Request, purpose: Purpose, prompt: str = "") -> Response:
        """Send the browser to the issuer. Raises: `ForbiddenError`, `IssuerUnavailableError`."""
        address = _demand_window(request)
        attempt = Attempt.new()
        location = await self._flow.begin(attempt, _callback(address), prompt)
        response = RedirectResponse(location, HTTPStatus.SEE_OTHER)
        claims = BegunLogin(purpose, attempt, prompt).claims
        cookie = self._tokens.sign(_ATTEMPT, claims, _ATTEMPT_S)
        set_cookie(response, address, _attempt_of(attempt.state), cookie, _ATTEMPT_S)
        # Three attempts at most, as each may take 3 KiB of the 16 that nginx takes.
        for kind in kinds_of(request, _ATTEMPT)[:-2]:
            set_cookie(response, address, kind, "", 0)
        return response

    async def finish(self, request: Request) -> Response:
        """Return the response to the issuer's redirect. Raises: `ForbiddenError`."""
        address = _demand_window(request)
        state = request.query_params.get("state", "")
        kind = _attempt_of(state)
        claims = await self._tokens.verify(_ATTEMPT, cookie_of(request, kind))
        # Any site can lead here, but only the issuer knows the state.
        if claims is None or not hmac.compare_digest(claims["state"].encode(), state.encode()):
            raise ForbiddenError(
                "this browser has begun no sign-in here, or it took too long; begin again"
            )
        begun = BegunLogin.of(claims)
        sign_in = partial(self._sign_in, begun, address)
        response = await self.explain(sign_in, begun.purpose, request)
        set_cookie(response, address, kind, "", 0)
        return response

    async def _sign_in(self, begun: BegunLogin, address: Address, request: Request) -> Response:
        """Return the response to the person, with the cookie of a login."""
        purpose = begun.purpose
        answer = request.query_params
        if len(answer) < len(answer.multi_items()):
            raise BadParameterError("a parameter is repeated")
        if prompt := next_prompt(begun.prompt, answer.get("error", "")):
            return await self._begin(request, purpose, prompt)
        claims = await self._flow.finish(begun.attempt, _callback(address), answer)
        caller = self._flow.issuer.caller_of(claims)
        login = await self._tokens.login_of(request)
        is_same = login is not None and login.caller.name == caller.name
        rights = self._tokens.rights_of(caller, login if is_same else None)
        if login is not None and (rights is None or not is_same):
            await self._tokens.end(login)
        if rights is None:
            response = await self._refuse(without_rights(caller), purpose, request)
            set_cookie(response, address, LOGIN_COOKIE, "", 0)
            return response
        cookie = self._tokens.sign(LOGIN_COOKIE, rights, self._tokens.lifetime_s)
        most_nbytes = 3800  # browsers drop cookies above 4,096 bytes, name and attributes included
        fits = len(cookie) <= most_nbytes
        if not fits and isinstance(purpose, ForPages):
            raise ForbiddenError(f"{caller.name} fulfils more rules than a cookie can hold")
        response = await self._hand_out(purpose, rights, address)
        if fits:
            set_cookie(response, address, LOGIN_COOKIE, cookie, self._tokens.lifetime_s)
        return response

    async def _hand_out(
        self, purpose: Purpose, rights: Mapping[str, Any], address: Address
    ) -> Response:
        """Return the wanted page, a code for the command, or a message with a token for viewers."""
        name = rights["sub"]
        match purpose:
            case ForPages(page):
                return RedirectResponse(f"{address.root_path}{page}", HTTPStatus.SEE_OTHER)
            case ForCommand(challenge, port):
                # The command exchanges its code at once: two minutes are enough for a slow network.
                code = self._tokens.sign(CODE, {**rights, "challenge": challenge}, 2 * 60)
                return await self._render(
                    f"{name} has signed in. The command shardgate login may read with it.",
                    code=code,
                    link=f"http://127.0.0.1:{port}/?code={code}" if port else "",
                )
            case ForViewer(opener):
                token = self._tokens.sign(VIEWER, rights, self._tokens.lifetime_s)
                return await self._render(
                    f"{name} has signed in. This window may be closed.",
                    message=orjson.dumps({"token": token, "app_urls": [address.origin]}).decode(),
                    origins=orjson.dumps(self._targets(opener)).decode(),
                )

    async def end(self, request: Request) -> Response:
        """End the login of the browser, and its tokens. Raises: `ForbiddenError` to others."""
        demand_own_page(request, "sign out")
        response = Response(status_code=HTTPStatus.NO_CONTENT)
        try:
            if (login := await self._tokens.login_of(request)) is not None:
                note_caller(login.caller.name)
                await self._tokens.end(login)
        except TokenRecordsError as error:
            status = status_of(error)
            log_failure(status, error)
            response = JSONResponse({"detail": str(error)}, status)
        set_cookie(response, address_of(request), LOGIN_COOKIE, "", 0)
        return response

    async def explain(
        self,
        answer: Callable[[Request], Awaitable[Response]],
        purpose: Purpose,
        request: Request,
    ) -> Response:
        """Return the answer to *request*, or the page that explains its error; see `_ways_on`."""
        try:
            with issuer_hidden():
                return await answer(request)
        except ShardgateError as error:
            return await self._refuse(error, purpose, request)

    async def _refuse(self, error: ShardgateError, purpose: Purpose, request: Request) -> Response:
        status = status_of(error)
        log_failure(status, error)
        ways = _ways_on(purpose, address_of(request))
        return await self._render(f"You are not signed in: {error}.", status, **ways)

    async def _render(
        self, text: str, status: HTTPStatus = HTTPStatus.OK, **values: str
    ) -> Response:
        """Return the page that says *text*; *values* are the others of ``login.html``."""
        names = ("message", "origins", "code", "link", "again", "other", "start")
        named = dict.fromkeys(names, "") | values
        is_refused = status != HTTPStatus.OK
        return await self._page.respond(
            status, home=named["start"], text=text, is_refused=is_refused, **named
        )

    def _targets(self, opener: str | None) -> Sequence[str]:
        """Return the origins that get the token: that of the *opener* if the browser names it, else
        all of the settings. Raises: `ForbiddenError` if there is none, or it is not listed.
        """
        if opener is None and self._viewers:
            return self._viewers
        if opener is not None and opener in self._viewers:
            return [opener]
        raise ForbiddenError(f"login.viewers does not name {opener or 'any page'}")


@contextmanager
def issuer_hidden() -> Iterator[None]:
    """Log an `IssuerUnavailableError`, and raise one without URLs and reasons of the issuer."""
    try:
        yield
    except IssuerUnavailableError as error:
        _log.warning("signing in fails at the issuer %s", error)
        reason = "the issuer cannot be asked at the moment; try again in a minute"
        raise IssuerUnavailableError(reason) from error


def _opener(request: Request) -> str | None:
    """Return the origin of the page that has opened the window, if the browser tells it."""
    if (referer := request.headers.get("referer")) is not None:
        return "/".join(referer.split("/")[:3])
    is_own = request.headers.get("sec-fetch-site") == "same-origin"
    return address_of(request).origin if is_own else None


def _demand_window(request: Request) -> Address:
    """Return the address of the service, if the response is for a window, not a frame or script.

    Raises: `ForbiddenError`, see `demand_https`.
    """
    if any(request.headers.get(name, expected) != expected for name, expected in NAVIGATION):
        raise ForbiddenError("signing in needs a window of its own")
    return demand_https(request)


def demand_https(request: Request) -> Address:
    """Return the address of the service; it must be https or local. Raises: `ForbiddenError`."""
    address = address_of(request)
    if not address.is_trustworthy:
        raise ForbiddenError("signing in needs https")
    return address


def without_rights(caller: Caller) -> ForbiddenError:
    """Return the error of a sign-in by which nothing private may be read."""
    return ForbiddenError(f"{caller.name} has signed in, but may read no dataset here")


def _prompt_of(request: Request) -> str:
    return CHOOSER if _OTHER in request.query_params else ""


def _page_of(request: Request) -> str:
    page = request.query_params.get("page", "")
    return page if _PAGE.fullmatch(page) else "/"


def _attempt_of(state: str) -> str:
    """Return the kind of the cookie of an attempt: each window has its own."""
    return f"{_ATTEMPT}-{state[:8]}"  # enough to tell attempts of one browser apart


def _ways_on(purpose: Purpose, address: Address) -> Mapping[str, str]:
    """Return the URLs to begin *again*, and as *other* person, for *purpose*, and of the *start*
    page. For a command, whose sign-in begins in no page, *other* only signs in here.
    """
    root = address.root_path
    match purpose:
        case ForViewer():
            again = f"{root}{_AUTHORIZE}"
            other = f"{again}?{_OTHER}="
        case ForPages(page):
            again = f"{root}{_LOGIN}?{urlencode({'page': page})}"
            other = f"{again}&{_OTHER}="
        case ForCommand():
            again = ""
            other = f"{root}{_LOGIN}?{_OTHER}="
    return {"again": again, "other": other, "start": f"{root}/"}


def _callback(address: Address) -> str:
    return f"{address.root}/login/callback"


def build_login(flow: OidcClient, tokens: LoginTokens, viewers: Sequence[str]) -> APIRouter:
    """Build the routes of signing in."""
    router = APIRouter(include_in_schema=False)
    pages = LoginPages(flow, tokens, viewers)

    @router.get("/auth_info")
    async def describe_login(request: Request) -> dict[str, str]:
        return {"login_url": f"{address_of(request).root}/login"}

    async def begin_in_page(request: Request) -> Response:
        return await pages.explain(pages.begin_in_page, ForPages(_page_of(request)), request)

    router.add_route(_LOGIN, begin_in_page)
    for path, answer, purpose in (
        (_AUTHORIZE, pages.begin_in_viewer, ForViewer(None)),
        (f"{_LOGIN}/command", pages.begin_in_command, ForCommand("", "")),
        # Without the cookie of an attempt its purpose is not known: begin at the start page.
        (f"{_LOGIN}/callback", pages.finish, ForCommand("", "")),
    ):
        router.add_route(path, partial(pages.explain, answer, purpose))
    router.add_route("/login/end", pages.end, methods=["POST"])
    return router
