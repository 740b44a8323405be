"""Authorization code flow of OpenID Connect with PKCE, the client's side (RFC 6749, 7636, 9207)."""

import hmac
import logging
import re
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from hashlib import sha256
from http import HTTPStatus
from math import inf
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote_plus, urlencode

import httpx
import jwt
import orjson

from shardgate.concurrency import SingleFlight, run_in_thread
from shardgate.errors import ConfigurationError, ForbiddenError, IssuerUnavailableError
from shardgate.http.auth.oidc import (
    KEYS_S,
    RETRY_S,
    TIMEOUT_S,
    Claims,
    Issuer,
    Issuers,
    asking,
    discover,
    endpoint,
    exchange,
    open_client,
)
from shardgate.settings import LoginSettings

_REFUSALS: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
"""Statuses of OAuth errors: those of RFC 6749 §5.2, and 403, as some issuers have it."""
_ERROR: Final = re.compile("[a-z_]{1,64}")
_SECRET_NBYTES: Final = 32
_MOST_FINISHED: Final = 4096
_READ: Final = "configuration"
_log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """Secrets of one sign-in, each known to the browser that began it only."""

    state: str
    """Binds the answer of the issuer to the browser."""
    nonce: str
    """Binds the ID token to the attempt."""
    verifier: str
    """Binds the code to the attempt (PKCE)."""

    @staticmethod
    def new() -> "Attempt":
        """Return new secrets."""
        return Attempt(*(secrets.token_urlsafe(_SECRET_NBYTES) for _ in Attempt._fields))


def challenge_of(verifier: str) -> str:
    """Return the S256 challenge of a *verifier* (RFC 7636 §4.2)."""
    return urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()


class _Endpoints(NamedTuple):
    authorization: str
    token: str
    takes_basic: bool
    """Whether the secret of the client goes into a header; else into the form."""
    sends_iss: bool
    """Whether each answer names the issuer (RFC 9207)."""
    userinfo: str | None
    """URL of the userinfo endpoint, if rules are compared with its claims."""


class CodeFlow:
    """Signs people in at the issuer of the settings."""

    def __init__(
        self,
        issuers: Issuers,
        settings: LoginSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._issuers = issuers
        self._settings = settings
        self._client_id = settings.client_id or ""
        self._known: _Endpoints | None = None
        self._stale_at = -inf
        self._reads = SingleFlight[str](outlasts=True)
        self._finished: dict[str, None] = {}
        """States of attempts that are over, the oldest first."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._client = await self._stack.enter_async_context(open_client(TIMEOUT_S))
        self._stack.push_async_callback(self._reads.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def issuer(self) -> Issuer:
        """Issuer where people sign in."""
        return self._issuers.named(self._settings.issuer or "")

    async def begin(self, attempt: Attempt, redirect_uri: str) -> str:
        """Return the URL of the issuer that a browser is sent to.

        Raises: `IssuerUnavailableError`.
        """
        endpoints = await self._endpoints()
        query = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(self._settings.scopes),
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": challenge_of(attempt.verifier),
            "code_challenge_method": "S256",
        }
        return f"{endpoints.authorization}?{urlencode(query)}"

    async def finish(
        self, attempt: Attempt, redirect_uri: str, answer: Mapping[str, str]
    ) -> Claims:
        """Return the verified claims that rules are compared with; *answer* is the query of the
        redirect.

        Raises: `ForbiddenError`, `UnauthenticatedError`, `IssuerUnavailableError`.
        """
        if not hmac.compare_digest(answer.get("state", "").encode(), attempt.state.encode()):
            raise ForbiddenError("the answer of the issuer belongs to another sign-in")
        if attempt.state in self._finished:
            raise ForbiddenError("this sign-in is over; begin again")
        if len(self._finished) >= _MOST_FINISHED:
            del self._finished[next(iter(self._finished))]
        self._finished[attempt.state] = None
        endpoints, issuer = await self._endpoints(), self.issuer
        sent = answer.get("iss")
        if sent != issuer.settings.url and (sent is not None or endpoints.sends_iss):
            raise ForbiddenError("the answer is not from the issuer that was asked")
        if "error" in answer:
            raise ForbiddenError(f"the issuer refused the sign-in{_reason(answer['error'])}")
        if not (code := answer.get("code")):
            raise ForbiddenError("the answer of the issuer has no code")
        token, access_token = await self._redeem(endpoints, code, attempt.verifier, redirect_uri)
        try:
            claimed = jwt.decode_complete(token, options={"verify_signature": False})
        except jwt.PyJWTError:
            raise ForbiddenError("the issuer sent no ID token") from None
        claims = await issuer.verify(token, claimed, self._client_id)
        self._check(claims, attempt.nonce)
        if endpoints.userinfo is None:
            return claims
        if not isinstance(access_token, str):
            raise ForbiddenError("the issuer sent no access token for its userinfo endpoint")
        return await self._read_userinfo(endpoints.userinfo, access_token, claims["sub"])

    def _check(self, claims: Claims, nonce: str) -> None:
        """Check what ID tokens have beyond other tokens (OpenID Connect Core §3.1.3.7)."""
        if claims.get("nonce") != nonce:
            raise ForbiddenError("the ID token belongs to another sign-in")
        has_several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if claims.get("azp", None if has_several else self._client_id) != self._client_id:
            raise ForbiddenError("the ID token was issued to another service")

    async def _redeem(
        self, endpoints: _Endpoints, code: str, verifier: str, redirect_uri: str
    ) -> tuple[str, object]:
        """Exchange the *code* for an ID token, and an access token if the issuer sends one."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        auth, secret = None, await self._secret()
        if secret is not None and endpoints.takes_basic:
            auth = httpx.BasicAuth(quote_plus(self._client_id), quote_plus(secret))
        else:
            form["client_id"] = self._client_id
            form |= {} if secret is None else {"client_secret": secret}
        url = self.issuer.settings.url
        async with asking(url, TIMEOUT_S):
            status, body = await exchange(
                self._client, "POST", endpoints.token, data=form, auth=auth
            )
            if status not in {HTTPStatus.OK, *_REFUSALS}:
                raise IssuerUnavailableError(f"{url}: its token_endpoint answers {status}")
            document: Any = orjson.loads(body)
        match document:
            case {"id_token": str(token)} if status == HTTPStatus.OK:
                return token, document.get("access_token")
            case {"error": str(error)}:
                raise ForbiddenError(f"the issuer refused the sign-in{_reason(error)}")
            case _:
                raise ForbiddenError("the issuer sent no ID token")

    async def _read_userinfo(self, endpoint_url: str, access_token: str, subject: str) -> Claims:
        """Read the claims of the userinfo endpoint (OpenID Connect Core §5.3)."""
        url, headers = self.issuer.settings.url, {"Authorization": f"Bearer {access_token}"}
        async with asking(url, TIMEOUT_S):
            status, body = await exchange(self._client, "GET", endpoint_url, headers=headers)
            if status != HTTPStatus.OK:
                raise IssuerUnavailableError(f"{url}: its userinfo_endpoint answers {status}")
            document: Any = orjson.loads(body)
        if not isinstance(document, dict) or document.get("sub") != subject:
            raise ForbiddenError("the userinfo of the issuer is of another subject")
        return document

    async def _secret(self) -> str | None:
        if (file := self._settings.client_secret_file) is not None:
            try:
                return (await run_in_thread(file.read_text, "utf-8")).strip()
            except (OSError, ValueError) as error:
                raise ConfigurationError("login.client_secret_file cannot be read") from error
        secret = self._settings.client_secret
        return None if secret is None else secret.get_secret_value()

    async def _endpoints(self) -> _Endpoints:
        """Return the endpoints, which are read once an hour, or `RETRY_S` after a failure.

        Raises: `IssuerUnavailableError` if they were never read.
        """
        is_first = self._known is None and _READ in self._reads
        if is_first or self._clock() >= self._stale_at:
            await self._reads.run(_READ, self._read)
        if self._known is None:
            raise IssuerUnavailableError(f"{self.issuer.settings.url}: did not answer before")
        return self._known

    async def _read(self) -> None:
        self._stale_at = self._clock() + RETRY_S
        url = self.issuer.settings.url
        try:
            async with asking(url, TIMEOUT_S):
                said = await discover(self._client, url)
                wants_userinfo = self._settings.userinfo
                methods = said.get("token_endpoint_auth_methods_supported")
                self._known = _Endpoints(
                    endpoint(said, "authorization_endpoint"),
                    endpoint(said, "token_endpoint"),
                    takes_basic=not isinstance(methods, list) or "client_secret_basic" in methods,
                    sends_iss=said.get("authorization_response_iss_parameter_supported") is True,
                    userinfo=endpoint(said, "userinfo_endpoint") if wants_userinfo else None,
                )
        except IssuerUnavailableError as error:
            _log.warning("no configuration of the issuer %s", error)
        else:
            self._stale_at = self._clock() + KEYS_S


def _reason(error: str) -> str:
    """Return an error code of the issuer, if it is one, which comes through the browser."""
    return f": {error}" if _ERROR.fullmatch(error) else ""
