"""Signing in from a viewer: Neuroglancer's ``middleauth`` protocol, and the tokens it hands out.

A page of a viewer reads ``/auth_info``, opens ``/login/api/v1/authorize`` in a window, and waits
for a message of that window, which goes to the origins of the settings only.
"""

import hmac
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import cachetools
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, RedirectResponse

from shardgate.auth.access import Caller
from shardgate.auth.login_sessions import (
    NAVIGATION,
    SESSION,
    VIEWER,
    LoginTokens,
    cookie_of,
    demand_own_page,
    kinds_of,
    set_cookie,
)
from shardgate.auth.oidc_client import (
    CHOOSER,
    Attempt,
    DeviceAuthorization,
    OidcClient,
    challenge_of,
    next_prompt,
)
from shardgate.errors import (
    BadParameterError,
    ForbiddenError,
    IssuerUnavailableError,
    ShardgateError,
    TokenRecordsError,
    TooManyRequestsError,
)
from shardgate.observability.logging import log_failure
from shardgate.server.address import Address, address_of
from shardgate.server.body import RequestBodyReader, RequestDocument
from shardgate.server.problems import status_of
from shardgate.server.request import Networks, client_of
from shardgate.web.rendering import PageTemplate

_ATTEMPT_S: Final = 600
"""Longest time to sign in at the issuer."""
_ATTEMPT: Final = "shardgate-attempt"
_LONGEST_COOKIE: Final = 3800
"""Browsers drop longer ones, which have 4,096 bytes with their names and attributes."""
_MOST_ATTEMPTS: Final = 3
"""Most sign-ins of one browser at a time: each may take 3 KiB of the 16 that nginx takes."""
_OTHER: Final = "other"
"""Query parameter for a sign-in as another person."""
_NAMED_LETTERS: Final = 8
"""Letters of a state that tell attempts of one browser apart."""
_LOGIN: Final = "/login"
_AUTHORIZE: Final = f"{_LOGIN}/api/v1/authorize"
_WAYS: Final = ("again", "other", "start")
_CODE: Final = "shardgate-code"
_CODE_S: Final = 120
"""Longest time from the end of a sign-in in the browser to the exchange of its code."""
_LONGEST_CODE: Final = 16 * 1024
_DEVICE: Final = "shardgate-device"
_DEVICE_S: Final = 1800
"""Longest time to sign in on another device."""
_MOST_DEVICES: Final = 20
_MINUTE_S: Final = 60.0
_MOST_CLIENTS: Final = 4096
"""Most clients whose requests are counted."""
_PAGE: Final = re.compile(r"/(?!/)[!-\[\]-~]{0,1000}")
"""Path of a page of this service; browsers take two slashes, or backslashes, for another host."""
_CHALLENGE: Final = re.compile("[A-Za-z0-9_-]{43}")
_PORT: Final = re.compile("([1-9][0-9]{3,4})?")
_LAST_PORT: Final = 65_535
_log = logging.getLogger(__name__)


class LoginPages:
    """Sends browsers to the issuer, and answers when they come back."""

    def __init__(self, flow: OidcClient, tokens: LoginTokens, viewers: Sequence[str]) -> None:
        self._flow = flow
        self._tokens = tokens
        self._viewers = viewers
        self._page = PageTemplate("login.html", "login.js")

    async def begin_in_viewer(self, request: Request) -> Response:
        """Begin to sign in for the page that has opened the window. Raises: see `_begin`."""
        opener = _opener(request)
        self._targets(opener)
        return await self._begin(request, {"for": VIEWER, "opener": opener}, _prompt_of(request))

    async def begin_in_page(self, request: Request) -> Response:
        """Begin to sign in for pages of this service; it ends at the page that the query names.

        Raises: see `_begin`.
        """
        purpose = {"for": SESSION, "page": _page_of(request)}
        return await self._begin(request, purpose, _prompt_of(request))

    async def begin_in_command(self, request: Request) -> Response:
        """Begin to sign in for the command on the machine of the browser, which may listen.

        Raises: `BadParameterError`, see `_begin`.
        """
        headers = request.headers
        if headers.get("sec-fetch-site", "none") != "none" or "referer" in headers:
            raise ForbiddenError("a page has led here; enter the URL that the command prints")
        challenge = request.query_params.get("challenge", "")
        port = request.query_params.get("port", "")
        is_port = _PORT.fullmatch(port) and int(port or 0) <= _LAST_PORT
        if not _CHALLENGE.fullmatch(challenge) or not is_port:
            raise BadParameterError("the command sends a challenge, and may send a port")
        return await self._begin(request, {"for": _CODE, "challenge": challenge, "port": port})

    async def _begin(
        self, request: Request, purpose: Mapping[str, object], prompt: str = ""
    ) -> Response:
        """Send the browser to the issuer. Raises: `ForbiddenError`, `IssuerUnavailableError`."""
        address = _demand_window(request)
        attempt = Attempt.new()
        location = await self._flow.begin(attempt, _callback(address), prompt)
        response = RedirectResponse(location, HTTPStatus.SEE_OTHER)
        claims = {**purpose, **attempt._asdict(), "prompt": prompt}
        cookie = self._tokens.sign(_ATTEMPT, claims, _ATTEMPT_S)
        set_cookie(response, address, _attempt_of(attempt.state), cookie, _ATTEMPT_S)
        for kind in kinds_of(request, _ATTEMPT)[: 1 - _MOST_ATTEMPTS]:
            set_cookie(response, address, kind, "", 0)
        return response

    async def finish(self, request: Request) -> Response:
        """Return the response to the issuer's redirect. Raises: `ForbiddenError`."""
        address = _demand_window(request)
        state = request.query_params.get("state", "")
        for kind in (_attempt_of(state), _ATTEMPT):  # the latter is that of the version before
            begun = await self._tokens.verify(_ATTEMPT, cookie_of(request, kind))
            # Any site can lead here, but only the issuer knows the state.
            if begun is not None and hmac.compare_digest(begun["state"].encode(), state.encode()):
                break
        else:
            raise ForbiddenError(
                "this browser has begun no sign-in here, or it took too long; begin again"
            )
        response = await self.explain(partial(self._sign_in, begun, address), begun, request)
        set_cookie(response, address, kind, "", 0)
        return response

    async def _sign_in(
        self, begun: Mapping[str, Any], address: Address, request: Request
    ) -> Response:
        """Return the response to the person, with the cookie of a session.

        *begun* are the claims of the attempt: its secrets and its purpose.
        """
        attempt, answer = Attempt(*(begun[name] for name in Attempt._fields)), request.query_params
        if len(answer) < len(answer.multi_items()):
            raise BadParameterError("a parameter is repeated")
        if prompt := next_prompt(begun.get("prompt", ""), answer.get("error", "")):
            return await self._begin(request, begun, prompt)
        claims = await self._flow.finish(attempt, _callback(address), answer)
        caller = self._flow.issuer.caller_of(claims)
        session = await self._tokens.session_of(request)
        is_same = session is not None and session.caller.name == caller.name
        rights = self._tokens.rights_of(caller, session if is_same else None)
        if session is not None and (rights is None or not is_same):
            await self._tokens.end(session)
        if rights is None:
            response = await self._refuse(_without_rights(caller), begun, request)
            set_cookie(response, address, SESSION, "", 0)
            return response
        cookie = self._tokens.sign(SESSION, rights, self._tokens.lifetime_s)
        fits = len(cookie) <= _LONGEST_COOKIE
        if not fits and begun["for"] == SESSION:
            raise ForbiddenError(f"{caller.name} fulfils more rules than a cookie can hold")
        response = await self._hand_out(begun, rights, address)
        if fits:
            set_cookie(response, address, SESSION, cookie, self._tokens.lifetime_s)
        return response

    async def _hand_out(
        self, begun: Mapping[str, Any], rights: Mapping[str, Any], address: Address
    ) -> Response:
        """Return the wanted page, a code for the command, or a message with a token for viewers."""
        name = rights["sub"]
        if begun["for"] == SESSION:
            location = f"{address.root_path}{begun['page']}"
            return RedirectResponse(location, HTTPStatus.SEE_OTHER)
        if begun["for"] == _CODE:
            claims, port = {**rights, "challenge": begun["challenge"]}, begun["port"]
            code = self._tokens.sign(_CODE, claims, _CODE_S)
            return await self._render(
                f"{name} has signed in. The command shardgate login may read with it.",
                code=code,
                link=f"http://127.0.0.1:{port}/?code={code}" if port else "",
            )
        token = self._tokens.sign(VIEWER, rights, self._tokens.lifetime_s)
        return await self._render(
            f"{name} has signed in. This window may be closed.",
            message=orjson.dumps({"token": token, "app_urls": [address.origin]}).decode(),
            origins=orjson.dumps(self._targets(begun["opener"])).decode(),
        )

    async def end(self, request: Request) -> Response:
        """End the session of the browser, and its tokens. Raises: `ForbiddenError` to others."""
        demand_own_page(request, "sign out")
        response = Response(status_code=HTTPStatus.NO_CONTENT)
        try:
            if (session := await self._tokens.session_of(request)) is not None:
                await self._tokens.end(session)
        except TokenRecordsError as error:
            status = status_of(error)
            log_failure(status, error)
            response = JSONResponse({"detail": str(error)}, status)
        set_cookie(response, address_of(request), SESSION, "", 0)
        return response

    async def explain(
        self,
        answer: Callable[[Request], Awaitable[Response]],
        purpose: Mapping[str, Any],
        request: Request,
    ) -> Response:
        """Return the answer to *request*, or the page that explains its error; see `_ways_on`."""
        try:
            with _issuer_hidden():
                return await answer(request)
        except ShardgateError as error:
            return await self._refuse(error, purpose, request)

    async def _refuse(
        self, error: ShardgateError, purpose: Mapping[str, Any], request: Request
    ) -> Response:
        status = status_of(error)
        log_failure(status, error)
        ways = _ways_on({"page": _page_of(request), **purpose}, address_of(request))
        return await self._render(f"You are not signed in: {error}.", status, **ways)

    async def _render(
        self, text: str, status: HTTPStatus = HTTPStatus.OK, **values: str
    ) -> Response:
        """Return the page that says *text*; *values* are the others of ``login.html``."""
        response = await self._page.respond(
            status,
            **dict.fromkeys(("message", "origins", "code", "link", *_WAYS), "") | values,
            text=text,
            is_refused=status != HTTPStatus.OK,
        )
        # Of no origin, so that scripts of this service's own pages cannot look into the window.
        response.headers["content-security-policy"] += "; sandbox allow-scripts"
        return response

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
def _issuer_hidden() -> Iterator[None]:
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

    Raises: `ForbiddenError`, see `_demand_https`.
    """
    if any(request.headers.get(name, expected) != expected for name, expected in NAVIGATION):
        raise ForbiddenError("signing in needs a window of its own")
    return _demand_https(request)


def _demand_https(request: Request) -> Address:
    """Return the address of the service; it must be https or local. Raises: `ForbiddenError`."""
    address = address_of(request)
    if not address.is_trustworthy:
        raise ForbiddenError("signing in needs https")
    return address


def _without_rights(caller: Caller) -> ForbiddenError:
    return ForbiddenError(f"{caller.name} has signed in, but may read no dataset here")


def _prompt_of(request: Request) -> str:
    return CHOOSER if _OTHER in request.query_params else ""


def _page_of(request: Request) -> str:
    page = request.query_params.get("page", "")
    return page if _PAGE.fullmatch(page) else "/"


def _attempt_of(state: str) -> str:
    """Return the kind of the cookie of an attempt: each window has its own."""
    return f"{_ATTEMPT}-{state[:_NAMED_LETTERS]}"


def _ways_on(purpose: Mapping[str, Any], address: Address) -> Mapping[str, str]:
    """Return the URLs to begin *again*, and as *other* person, for *purpose*, and of the *start*
    page. For a command, whose sign-in begins in no page, *other* only signs in here.
    """
    begin, query = f"{address.root_path}{_LOGIN}", {"page": purpose["page"]}
    if purpose["for"] == VIEWER:
        begin, query = f"{address.root_path}{_AUTHORIZE}", {}
    again = "" if purpose["for"] == _CODE else f"{begin}?{urlencode(query)}".removesuffix("?")
    other = f"{begin}?{urlencode({**query, _OTHER: ''})}"
    return {"again": again, "other": other, "start": f"{address.root_path}/"}


def _callback(address: Address) -> str:
    return f"{address.root}/login/callback"


class IssuedToken(BaseModel):
    """A token for the command."""

    token: Annotated[str, Field(repr=False)]
    expires_at: datetime


class CodeExchange(RequestDocument):
    """Code from the browser, and the verifier of the challenge with which the command began."""

    code: Annotated[str, Field(max_length=_LONGEST_CODE, repr=False)]
    verifier: Annotated[str, Field(max_length=128, repr=False)]


class DeviceExchange(RequestDocument):
    """Device code that `/login/device` has returned."""

    device_code: Annotated[str, Field(max_length=_LONGEST_CODE, repr=False)]


class DeviceLimiter:
    """Admits `_MOST_DEVICES` requests for device codes of each client in a minute and process: each
    of them asks the issuer.
    """

    def __init__(self, proxies: Networks, clock: Callable[[], float] = time.monotonic) -> None:
        self._proxies = proxies
        self._clock = clock
        self._counts = cachetools.FIFOCache[str, tuple[int, float]](_MOST_CLIENTS)
        """Number of requests, and the end of their minute, by client."""

    def admit(self, request: Request) -> None:
        """Count *request*. Raises: `TooManyRequestsError`."""
        sent = request.scope["responder"].request
        if not sent.peer:  # of a local socket, which admission does not limit either
            return
        client, now = client_of(sent.peer.decode(), sent.headers, self._proxies), self._clock()
        count, until = self._counts.get(client, (0, -math.inf))
        if until <= now:
            count, until = 0, now + _MINUTE_S
        if count >= _MOST_DEVICES:
            reason = f"too many device codes for this client (limit {_MOST_DEVICES} in a minute)"
            raise TooManyRequestsError(reason, math.ceil(until - now))
        self._counts[client] = count + 1, until


def build_login(
    flow: OidcClient,
    tokens: LoginTokens,
    viewers: Sequence[str],
    bodies: RequestBodyReader,
    proxies: Networks = (),
) -> APIRouter:
    """Build the routes of signing in."""
    router = APIRouter(include_in_schema=False)
    pages = LoginPages(flow, tokens, viewers)

    @router.get("/auth_info")
    async def describe_login(request: Request) -> dict[str, str]:
        return {"login_url": f"{address_of(request).root}/login"}

    for path, answer, kind in (
        (_AUTHORIZE, pages.begin_in_viewer, VIEWER),
        (_LOGIN, pages.begin_in_page, SESSION),
        (f"{_LOGIN}/command", pages.begin_in_command, _CODE),
        (f"{_LOGIN}/callback", pages.finish, _CODE),
    ):
        router.add_route(path, partial(pages.explain, answer, {"for": kind}))
    router.add_route("/login/end", pages.end, methods=["POST"])
    _add_command_routes(router, flow, tokens, bodies, DeviceLimiter(proxies))
    return router


def _add_command_routes(
    router: APIRouter,
    flow: OidcClient,
    tokens: LoginTokens,
    bodies: RequestBodyReader,
    limiter: DeviceLimiter,
) -> None:
    """Add the routes that give the command its token, for a code from the browser or a device code.

    Browsers keep the code in their history, so it does not contain the token.
    """

    def issue(rights: Mapping[str, Any]) -> IssuedToken:
        expires_at = datetime.now(UTC) + timedelta(seconds=tokens.lifetime_s)
        return IssuedToken(
            token=tokens.sign(VIEWER, rights, tokens.lifetime_s), expires_at=expires_at
        )

    @router.post("/login/token")
    async def redeem(request: Request) -> IssuedToken:
        sent = await bodies.read_document(request, CodeExchange)
        claims = await tokens.verify(_CODE, sent.code)
        challenge = challenge_of(sent.verifier)
        if claims is None or not hmac.compare_digest(claims["challenge"], challenge):
            raise ForbiddenError("the code is not of this sign-in, or took too long; begin again")
        return issue({name: claims[name] for name in ("sub", "rules", "sid")})

    @router.post("/login/device")
    async def begin_on_device(request: Request) -> DeviceAuthorization:
        _demand_https(request)
        limiter.admit(request)
        with _issuer_hidden():
            begun = await flow.begin_on_device()
        lifetime_s = min(begun.expires_in, _DEVICE_S)
        signed = tokens.sign(_DEVICE, {"device_code": begun.device_code}, lifetime_s)
        return begun.model_copy(update={"device_code": signed, "expires_in": lifetime_s})

    @router.post("/login/device/token", response_model=None)
    async def finish_on_device(request: Request) -> IssuedToken | Response:
        sent = await bodies.read_document(request, DeviceExchange)
        if (begun := await tokens.verify(_DEVICE, sent.device_code)) is None:
            raise ForbiddenError("the code is not of this service, or took too long; begin again")
        with _issuer_hidden():
            claims = await flow.finish_on_device(begun["device_code"])
        if isinstance(claims, str):
            return JSONResponse({"error": claims}, HTTPStatus.ACCEPTED)
        caller = flow.issuer.caller_of(claims)
        if (rights := tokens.rights_of(caller)) is None:
            raise _without_rights(caller)
        return issue(rights)
