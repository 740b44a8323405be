"""Signing in by ``shardgate login``: exchanges of codes of browsers, and of device codes."""

import hmac
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Final

import cachetools
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from shardgate.auth.logins import VIEWER, LoginTokens
from shardgate.auth.oidc_client import DeviceAuthorization, OidcClient, challenge_of
from shardgate.errors import ForbiddenError, TooManyRequestsError
from shardgate.observability.metrics import note_caller
from shardgate.server.body import RequestBodyReader, RequestDocument
from shardgate.server.request import Networks, client_of
from shardgate.web.login import CODE, demand_https, issuer_hidden, without_rights

_LONGEST_CODE: Final = 16 * 1024
_DEVICE: Final = "shardgate-device"
_MOST_DEVICES: Final = 20


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

    def __init__(self, proxies: Networks) -> None:
        self._proxies = proxies
        # Number of requests, and the end of their minute, of so many clients.
        self._counts = cachetools.FIFOCache[str, tuple[int, float]](4096)

    def admit(self, request: Request) -> None:
        """Count *request*. Raises: `TooManyRequestsError`."""
        sent = request.scope["responder"].request
        if not sent.peer:  # of a local socket, which admission does not limit either
            return
        client = client_of(sent.peer.decode(), sent.headers, self._proxies)
        now = time.monotonic()
        count, until = self._counts.get(client, (0, -math.inf))
        if until <= now:
            count = 0
            until = now + 60
        if count >= _MOST_DEVICES:
            reason = f"too many device codes for this client (limit {_MOST_DEVICES} in a minute)"
            raise TooManyRequestsError(reason, math.ceil(until - now))
        self._counts[client] = count + 1, until


def build_command_login(
    flow: OidcClient, tokens: LoginTokens, bodies: RequestBodyReader, proxies: Networks = ()
) -> APIRouter:
    """Build the routes that give the command its token, for a code from the browser or a device
    code.

    Browsers keep the code in their history, so it does not contain the token.
    """
    router = APIRouter(include_in_schema=False)
    limiter = DeviceLimiter(proxies)

    def issue(rights: Mapping[str, Any]) -> IssuedToken:
        note_caller(rights["sub"])
        expires_at = datetime.now(UTC) + timedelta(seconds=tokens.lifetime_s)
        token = tokens.sign(VIEWER, rights, tokens.lifetime_s)
        return IssuedToken(token=token, expires_at=expires_at)

    @router.post("/login/token")
    async def redeem(request: Request) -> IssuedToken:
        sent = await bodies.read_document(request, CodeExchange)
        claims = await tokens.verify(CODE, sent.code)
        challenge = challenge_of(sent.verifier)
        if claims is None or not hmac.compare_digest(claims["challenge"], challenge):
            raise ForbiddenError("the code is not of this sign-in, or took too long; begin again")
        return issue({name: claims[name] for name in ("sub", "rules", "sid")})

    @router.post("/login/device")
    async def begin_on_device(request: Request) -> DeviceAuthorization:
        demand_https(request)
        limiter.admit(request)
        with issuer_hidden():
            begun = await flow.begin_on_device()
        lifetime_s = min(begun.expires_in, 1800)  # half an hour to sign in on the other device
        signed = tokens.sign(_DEVICE, {"device_code": begun.device_code}, lifetime_s)
        return begun.model_copy(update={"device_code": signed, "expires_in": lifetime_s})

    @router.post("/login/device/token", response_model=None)
    async def finish_on_device(request: Request) -> IssuedToken | Response:
        sent = await bodies.read_document(request, DeviceExchange)
        if (begun := await tokens.verify(_DEVICE, sent.device_code)) is None:
            raise ForbiddenError("the code is not of this service, or took too long; begin again")
        with issuer_hidden():
            claims = await flow.finish_on_device(begun["device_code"])
        if isinstance(claims, str):
            return JSONResponse({"error": claims}, HTTPStatus.ACCEPTED)
        caller = flow.issuer.caller_of(claims)
        if (rights := tokens.rights_of(caller)) is None:
            raise without_rights(caller)
        return issue(rights)

    return router
