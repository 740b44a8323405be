"""Signing in from a viewer: Neuroglancer's ``middleauth`` protocol, and the tokens it hands out.

A page of a viewer reads ``/auth_info``, opens ``/login/api/v1/authorize`` in a window, and waits
for a message of that window, which goes to the origins of the settings only.
"""

import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, RedirectResponse

from shardgate.errors import (
    BadParameterError,
    ForbiddenError,
    IssuerUnavailableError,
    ShardgateError,
    TokenRecordsError,
)
from shardgate.http.api.openapi import RequestDocument
from shardgate.http.auth.access import Caller
from shardgate.http.auth.login_sessions import (
    NAVIGATION,
    SESSION,
    VIEWER,
    LoginTokens,
    cookie_of,
    demand_own_page,
    set_cookie,
)
from shardgate.http.auth.oidc_client import (
    Attempt,
    DeviceAuthorization,
    OidcClient,
    challenge_of,
)
from shardgate.http.body import RequestBodyReader
from shardgate.http.pages.rendering import PageTemplate
from shardgate.http.pages.viewer import Address, address_of
from shardgate.http.problems import status_of
from shardgate.observability.logging import log_failure

ATTEMPT_S: Final = 600
"""Longest time to sign in at the issuer."""
_ATTEMPT: Final = "shardgate-attempt"
_LONGEST_COOKIE: Final = 3800
"""Browsers drop longer ones, which have 4,096 bytes with their names and attributes."""
_OTHER: Final = "other"
"""Parameter of a sign-in in which the person is chosen anew."""
_CODE: Final = "shardgate-code"
_CODE_S: Final = 120
"""Longest time from the end of a sign-in in the browser to the exchange of its code."""
_LONGEST_CODE: Final = 16 * 1024
_DEVICE: Final = "shardgate-device"
_DEVICE_S: Final = 1800
"""Longest time to sign in on another device."""
_PAGE: Final = re.compile(r"/(?!/)[!-\[\]-~]{0,1000}")
"""Path of a page of this service; browsers take two slashes, or backslashes, for another host."""
_CHALLENGE: Final = re.compile("[A-Za-z0-9_-]{43}")
_PORT: Final = re.compile("([1-9][0-9]{3,4})?")
_LAST_PORT: Final = 65_535
_log = logging.getLogger(__name__)


class LoginPages:
    """Sends browsers to the issuer, and answers when they come back."""

    def __init__(
        self,
        flow: OidcClient,
        tokens: LoginTokens,
        viewers: Sequence[str],
    ) -> None:
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
        return await self._begin(request, {"for": VIEWER, "opener": opener})

    async def begin_in_page(self, request: Request) -> Response:
        """Begin to sign in for pages of this service, at the end the one that the query names.

        Raises: see `_begin`.
        """
        page = request.query_params.get("page", "")
        is_own = _PAGE.fullmatch(page) is not None
        return await self._begin(request, {"for": SESSION, "page": page if is_own else "/"})

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
        attempt, chooses = Attempt.new(), _OTHER in request.query_params
        location = await self._flow.begin(attempt, _callback(address), chooses_person=chooses)
        response = RedirectResponse(location, HTTPStatus.SEE_OTHER)
        sealed = self._tokens.sign(_ATTEMPT, {**attempt._asdict(), **purpose}, ATTEMPT_S)
        set_cookie(response, address, _ATTEMPT, sealed, ATTEMPT_S)
        return response

    async def finish(self, request: Request) -> Response:
        """Hand out what the browser was sent to the issuer for. Raises: `ShardgateError`."""
        address = _demand_address(request)
        _demand_navigation(request)
        sealed = await self._tokens.verify(_ATTEMPT, cookie_of(request, _ATTEMPT))
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
            set_cookie(response, address, _ATTEMPT, "", 0)
        return response

    async def _sign_in(
        self, request: Request, sealed: Mapping[str, Any], address: Address
    ) -> Response:
        """Return the response to the issuer's answer to *sealed*, with the cookie of a session."""
        attempt = Attempt(*(sealed[name] for name in Attempt._fields))
        claims = await self._flow.finish(attempt, _callback(address), _answer_in(request))
        caller = self._flow.issuer.caller_of(claims)
        session = await self._tokens.session_of(request)
        if session is not None and session.caller.name != caller.name:
            await self._tokens.end(session)
            session = None
        session_id = _new_session_id() if session is None else session.session_id
        rights = self._tokens.rights_of(caller, session_id)
        if rights is None:
            if session is not None:
                await self._tokens.end(session)
            response = await self.refuse(_without_rights(caller), _other_sign_in(sealed, address))
            set_cookie(response, address, SESSION, "", 0)
            return response
        cookie = self._tokens.sign(SESSION, rights, self._tokens.lifetime_s)
        fits = len(cookie) <= _LONGEST_COOKIE
        if not fits and sealed["for"] == SESSION:
            raise ForbiddenError(f"{caller.name} fulfils more rules than a cookie can hold")
        response = await self._hand_out(sealed, rights, address)
        if fits:
            set_cookie(response, address, SESSION, cookie, self._tokens.lifetime_s)
        return response

    async def _hand_out(
        self, sealed: Mapping[str, Any], rights: Mapping[str, Any], address: Address
    ) -> Response:
        """Return the response to the browser that has begun with *sealed*."""
        name = rights["sub"]
        if sealed["for"] == SESSION:
            location = f"{address.root_path}{sealed['page']}"
            return RedirectResponse(location, HTTPStatus.SEE_OTHER)
        if sealed["for"] == _CODE:
            claims, port = {**rights, "challenge": sealed["challenge"]}, sealed["port"]
            code = self._tokens.sign(_CODE, claims, _CODE_S)
            return await self._render(
                f"{name} has signed in. The command shardgate login may read with it.",
                code=code,
                link=f"http://127.0.0.1:{port}/?code={code}" if port else "",
            )
        message = {"token": self._issue(rights).token, "app_urls": [address.origin]}
        return await self._render(
            f"{name} has signed in. This window may be closed.",
            message=orjson.dumps(message).decode(),
            origins=orjson.dumps(self._targets(sealed["opener"])).decode(),
        )

    async def redeem(self, code: str, verifier: str) -> "IssuedToken":
        """Return the token that the command gets for a *code*, which has no token in it: it comes
        through the browser, which remembers it. Raises: `ForbiddenError`, `TokenRecordsError`.
        """
        claims = await self._tokens.verify(_CODE, code)
        challenge = "" if claims is None else claims["challenge"]
        if claims is None or not hmac.compare_digest(challenge, challenge_of(verifier)):
            raise ForbiddenError("the code is not of this sign-in, or took too long; begin again")
        return self._issue({name: claims[name] for name in ("sub", "rules", "sid")})

    def _issue(self, rights: Mapping[str, Any]) -> "IssuedToken":
        expires_at = datetime.now(UTC) + timedelta(seconds=self._tokens.lifetime_s)
        token = self._tokens.sign(VIEWER, rights, self._tokens.lifetime_s)
        return IssuedToken(token=token, expires_at=expires_at)

    async def begin_on_device(self, request: Request) -> DeviceAuthorization:
        """Begin to sign in by a device code of the issuer.

        Raises: `ForbiddenError` if it has none for this service, `IssuerUnavailableError`.
        """
        _demand_address(request)
        begun = await self._flow.begin_on_device()
        lifetime_s = min(begun.expires_in, _DEVICE_S)
        sealed = self._tokens.sign(_DEVICE, {"device_code": begun.device_code}, lifetime_s)
        return begun.model_copy(update={"device_code": sealed, "expires_in": lifetime_s})

    async def finish_on_device(self, device_code: str) -> "IssuedToken | str":
        """Return the token for the command, or the error of the issuer that asks to wait.

        Raises: `ForbiddenError`, `UnauthenticatedError`, `IssuerUnavailableError`.
        """
        if (sealed := await self._tokens.verify(_DEVICE, device_code)) is None:
            raise ForbiddenError("the code is not of this service, or took too long; begin again")
        found = await self._flow.finish_on_device(sealed["device_code"])
        if isinstance(found, str):
            return found
        caller = self._flow.issuer.caller_of(found)
        rights = self._tokens.rights_of(caller, _new_session_id())
        if rights is None:
            raise _without_rights(caller)
        return self._issue(rights)

    async def end(self, request: Request) -> Response:
        """End the session of the browser, and its tokens. Raises: `ForbiddenError` to others."""
        demand_own_page(request, "sign out")
        address = address_of(request)
        response = Response(status_code=HTTPStatus.NO_CONTENT)
        try:
            if (session := await self._tokens.session_of(request)) is not None:
                await self._tokens.end(session)
        except TokenRecordsError as error:
            response = await self.refuse(error)
        set_cookie(response, address, SESSION, "", 0)
        return response

    async def refuse(self, error: ShardgateError, other: str = "") -> Response:
        """Return the page that explains *error*; *other* is the URL to sign in as somebody else."""
        status, reason = status_of(error), str(error)
        log_failure(status, error)
        if isinstance(error, IssuerUnavailableError):
            _log.warning("signing in fails at the issuer %s", error)
            reason = "the issuer cannot be asked at the moment; try again in a minute"
        return await self._render(f"You are not signed in: {reason}.", status, other=other)

    async def _render(
        self, text: str, status: HTTPStatus = HTTPStatus.OK, **values: str
    ) -> Response:
        """Return the page that says *text*; *values* are the others of ``login.html``."""
        response = await self._page.respond(
            status,
            **{"message": "", "origins": "", "code": "", "link": "", "other": ""} | values,
            text=text,
            is_refused=status != HTTPStatus.OK,
        )
        # Of no origin, so that scripts of this service's own pages cannot look into the window.
        response.headers["content-security-policy"] += "; sandbox allow-scripts"
        return response

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
    for name, expected in NAVIGATION:
        if request.headers.get(name, expected) != expected:
            raise ForbiddenError("signing in needs a window of its own")


def _answer_in(request: Request) -> Mapping[str, str]:
    """Return the parameters of the issuer's answer. Raises: `BadParameterError` for repeated."""
    answer = dict(request.query_params.multi_items())
    if len(answer) < len(request.query_params.multi_items()):
        raise BadParameterError("a parameter is repeated")
    return answer


def _new_session_id() -> str:
    return secrets.token_urlsafe(16)


def _without_rights(caller: Caller) -> ForbiddenError:
    return ForbiddenError(f"{caller.name} has signed in, but may read no dataset here")


def _other_sign_in(sealed: Mapping[str, Any], address: Address) -> str:
    """Return the URL to sign in as somebody else, for the purpose of *sealed*; empty for a command,
    which no page may begin for.
    """
    if sealed["for"] == VIEWER:
        return f"{address.root_path}/login/api/v1/authorize?{_OTHER}="
    if sealed["for"] == SESSION:
        return f"{address.root_path}/login?{urlencode({'page': sealed['page'], _OTHER: ''})}"
    return ""


def _callback(address: Address) -> str:
    return f"{address.origin}{address.root_path}/login/callback"


class IssuedToken(BaseModel):
    """A token for the command."""

    token: Annotated[str, Field(repr=False)]
    expires_at: datetime


class CodeExchange(RequestDocument):
    """Code that the browser brought to the command, and the secret of the command."""

    code: Annotated[str, Field(max_length=_LONGEST_CODE, repr=False)]
    verifier: Annotated[str, Field(max_length=128, repr=False)]


class DeviceExchange(RequestDocument):
    """Code of the command for a sign-in on another device."""

    device_code: Annotated[str, Field(max_length=_LONGEST_CODE, repr=False)]


async def _describe_login(request: Request) -> dict[str, str]:
    address = address_of(request)
    return {"login_url": f"{address.origin}{address.root_path}/login"}


def build_login(pages: LoginPages, bodies: RequestBodyReader) -> APIRouter:
    """Build the routes of signing in."""
    router = APIRouter(include_in_schema=False)
    router.add_api_route("/auth_info", _describe_login)
    for path, answer in (
        ("/login/api/v1/authorize", pages.begin_in_viewer),
        ("/login", pages.begin_in_page),
        ("/login/command", pages.begin_in_command),
        ("/login/callback", pages.finish),
    ):
        router.add_api_route(path, _explained(pages, answer))
    router.add_api_route("/login/end", pages.end, methods=["POST"])

    @router.post("/login/token")
    async def redeem(request: Request) -> IssuedToken:
        sent = await bodies.read_document(request, CodeExchange)
        return await pages.redeem(sent.code, sent.verifier)

    @router.post("/login/device")
    async def begin_on_device(request: Request) -> DeviceAuthorization:
        return await pages.begin_on_device(request)

    @router.post("/login/device/token", response_model=None)
    async def finish_on_device(request: Request) -> IssuedToken | Response:
        sent = await bodies.read_document(request, DeviceExchange)
        found = await pages.finish_on_device(sent.device_code)
        if isinstance(found, IssuedToken):
            return found
        return JSONResponse({"error": found}, HTTPStatus.ACCEPTED)

    return router


def _explained(
    pages: LoginPages, answer: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that answers, or explains its error by a page."""

    async def route(request: Request) -> Response:
        try:
            return await answer(request)
        except ShardgateError as error:
            return await pages.refuse(error)

    return route
