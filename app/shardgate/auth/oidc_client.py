"""Client of the OpenID Connect issuer where people sign in: authorization code flow with PKCE, and
device authorization (RFC 6749, 7636, 8628, 9207).
"""

import hmac
import re
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from http import HTTPStatus
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote_plus, urlencode

import cachetools
import httpx
import jwt
import orjson
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from shardgate.auth.oidc import (
    TIMEOUT_S,
    Claims,
    Issuer,
    Published,
    asking,
    discover,
    exchange,
    open_client,
    slash_fault,
)
from shardgate.concurrency import run_in_thread
from shardgate.errors import ConfigurationError, ForbiddenError, IssuerUnavailableError
from shardgate.settings import LoginSettings

# Statuses of OAuth errors (RFC 6749 §5.2), and 403, whatever their bodies.
_REFUSALS: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# Values of ``prompt`` with which an issuer asks who signs in (OpenID Connect Core §3.1.2.1).
CHOOSER: Final = "select_account"
LOGIN: Final = "login"


class Attempt(NamedTuple):
    """Secrets of one sign-in, known only to the browser that began it."""

    state: str
    """Binds the answer of the issuer to the browser."""
    nonce: str
    """Binds the ID token to the attempt."""
    verifier: str
    """Binds the code to the attempt (PKCE)."""

    @staticmethod
    def new() -> "Attempt":
        """Return new secrets."""
        return Attempt(*(secrets.token_urlsafe(32) for _ in Attempt._fields))


def challenge_of(verifier: str) -> str:
    """Return the S256 challenge of a *verifier* (RFC 7636 §4.2)."""
    return urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()


_Printable = Annotated[str, Field(pattern="^[ -~]{1,2048}$")]


class DeviceAuthorization(BaseModel):
    """Codes of one sign-in on another device, and its page (RFC 8628 §3.2)."""

    device_code: Annotated[str, Field(repr=False)]
    """Secret of the device that waits."""
    user_code: _Printable
    """Code to enter on the page."""
    # The second name is from drafts of RFC 8628; Google still sends it.
    verification_uri: Annotated[
        _Printable, Field(validation_alias=AliasChoices("verification_uri", "verification_url"))
    ]
    verification_uri_complete: _Printable | None = None
    """URL of the page with the code in it, if the issuer has one."""
    expires_in: Annotated[int, Field(ge=1, le=2**31)]
    """Seconds for which the codes are valid."""
    interval: Annotated[int, Field(ge=0, le=600)] = 5
    """Seconds between two requests for a token."""


class _Endpoints(NamedTuple):
    authorization: str
    token: str
    device: str | None
    """URL for sign-in on another device, if the issuer offers that."""
    takes_basic: bool
    """Whether the secret of the client goes into a header; else into the form."""
    sends_iss: bool
    """Whether each answer names the issuer (RFC 9207)."""
    chooser: str
    """Value of ``prompt`` for `CHOOSER`."""
    userinfo: str | None
    """URL of the userinfo endpoint, if rules are compared with its claims."""


class OidcClient:
    """Signs people in at the issuer of the settings."""

    def __init__(
        self, issuer: Issuer, settings: LoginSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Sign in at the issuer of *settings*. Raises: `ConfigurationError`."""
        self._client = open_client(TIMEOUT_S)
        self.issuer = issuer
        self._settings = settings
        self._client_id = settings.client_id or ""
        self._configuration = Published("configuration", self._read_endpoints, clock)
        self._finished = cachetools.FIFOCache[str, None](4096)  # states of attempts that are over

    async def aclose(self) -> None:
        """End reads in progress, and close the connections."""
        await self._configuration.aclose()
        await self._client.aclose()

    async def begin(self, attempt: Attempt, redirect_uri: str, prompt: str = "") -> str:
        """Return the URL of the issuer to send a browser to; with a *prompt*, `CHOOSER` or `LOGIN`,
        the issuer asks who signs in, even if it knows the browser.

        Raises: `IssuerUnavailableError`.
        """
        endpoints = await self._configuration.get()
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
        if prompt:
            query["prompt"] = endpoints.chooser if prompt == CHOOSER else prompt
        # The endpoint may have a query of its own, which stays (RFC 6749 §3.1).
        url, _, own_query = endpoints.authorization.partition("?")
        return f"{url}?{urlencode(dict(parse_qsl(own_query)) | query)}"

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
        self._finished[attempt.state] = None
        endpoints = await self._configuration.get()
        url = self.issuer.settings.url
        sent = answer.get("iss")
        if sent != url and (sent is not None or endpoints.sends_iss):
            fault = slash_fault(sent, url)
            reason = "the answer is not from the issuer that was asked"
            raise ForbiddenError(f"{reason}: {fault}" if fault else reason)
        if "error" in answer or not answer.get("code"):
            raise _refused(answer, "code")
        form = {
            "grant_type": "authorization_code",
            "code": answer["code"],
            "redirect_uri": redirect_uri,
            "code_verifier": attempt.verifier,
        }
        tokens = await self._post(endpoints.token, form, endpoints)
        return await self._read_claims(tokens, attempt.nonce, endpoints)

    async def begin_on_device(self) -> DeviceAuthorization:
        """Begin a sign-in on another device.

        Raises: `ForbiddenError` if the issuer does not offer it, `IssuerUnavailableError`.
        """
        endpoints = await self._configuration.get()
        if endpoints.device is None:
            raise ForbiddenError("the issuer offers no sign-in on another device")
        form = {"scope": " ".join(self._settings.scopes)}
        codes = await self._post(endpoints.device, form, endpoints)
        try:
            return DeviceAuthorization.model_validate(codes)
        except ValidationError:
            raise _refused(codes, "codes for another device") from None

    async def finish_on_device(self, device_code: str) -> Claims | str:
        """Return the verified claims, as `finish` does, or the error that asks to wait.

        Raises: `ForbiddenError`, `UnauthenticatedError`, `IssuerUnavailableError`.
        """
        endpoints = await self._configuration.get()
        form = {
            "grant_type": "urn:ietf:params:oauth:grant-type:device_code",
            "device_code": device_code,
        }
        tokens = await self._post(endpoints.token, form, endpoints)
        error = tokens.get("error")
        if error in ("authorization_pending", "slow_down"):  # see RFC 8628 §3.5
            return str(error)
        return await self._read_claims(tokens, None, endpoints)

    async def _read_claims(
        self, tokens: Mapping[str, Any], nonce: str | None, endpoints: _Endpoints
    ) -> Claims:
        """Return the verified claims of an answer with *tokens*; *nonce* is that of the attempt."""
        token = tokens.get("id_token")
        if not isinstance(token, str):
            raise _refused(tokens, "ID token")
        try:
            claimed = jwt.decode_complete(token, options={"verify_signature": False})
        except (jwt.PyJWTError, RecursionError):  # of deeply nested claims
            raise ForbiddenError("the issuer sent no ID token") from None
        claims = await self.issuer.verify(token, claimed, self._client_id)
        self._check(claims, nonce)
        if endpoints.userinfo is None:
            return claims
        access_token = tokens.get("access_token")
        if not isinstance(access_token, str):
            raise ForbiddenError("the issuer sent no access token for its userinfo endpoint")
        return await self._read_userinfo(endpoints.userinfo, access_token, claims["sub"])

    def _check(self, claims: Claims, nonce: str | None) -> None:
        """Check what ID tokens have beyond other tokens (OpenID Connect Core §3.1.3.7)."""
        if claims.get("nonce") != nonce:
            raise ForbiddenError("the ID token belongs to another sign-in")
        audience = claims["aud"]
        # A token for several services must say by `azp` which one it was issued to.
        is_for_several = isinstance(audience, list) and len(audience) > 1
        if (is_for_several or "azp" in claims) and claims.get("azp") != self._client_id:
            raise ForbiddenError("the ID token was issued to another service")

    async def _post(
        self, endpoint_url: str, form: Mapping[str, str], endpoints: _Endpoints
    ) -> Mapping[str, Any]:
        """Send a *form* with the credentials of the client; return the answer, which has tokens, or
        an ``error`` (RFC 6749 §5).
        """
        secret = await self._secret()
        auth = None
        sent = dict(form)
        if secret is not None and endpoints.takes_basic:
            auth = httpx.BasicAuth(quote_plus(self._client_id), quote_plus(secret))
        else:
            sent["client_id"] = self._client_id
            if secret is not None:
                sent["client_secret"] = secret
        url = self.issuer.settings.url
        async with asking(url, TIMEOUT_S):
            status, body = await exchange(self._client, "POST", endpoint_url, data=sent, auth=auth)
            is_known = status == HTTPStatus.OK or status in _REFUSALS
            document: Any = orjson.loads(body) if is_known or body.startswith(b"{") else None
            answer = document if isinstance(document, dict) else {}
            if status == HTTPStatus.OK:
                return answer
            error = answer.get("error")
            # Issuers have further statuses for OAuth errors: 428 for `authorization_pending`.
            is_refusal = isinstance(error, str) and status in range(400, 500)
            if not is_known and not is_refusal:
                raise IssuerUnavailableError(f"{url}: {endpoint_url} answers {status}")
        return {"error": error}

    async def _read_userinfo(self, endpoint_url: str, access_token: str, subject: str) -> Claims:
        """Read the claims of the userinfo endpoint (OpenID Connect Core §5.3)."""
        url = self.issuer.settings.url
        headers = {"Authorization": f"Bearer {access_token}"}
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

    async def _read_endpoints(self) -> _Endpoints:
        async with asking(self.issuer.settings.url, TIMEOUT_S):
            found = await discover(self._client, self.issuer.settings)
            # Browsers go there: it is encrypted as the issuer is, whatever an inner name allows.
            outer = found._replace(url=self.issuer.settings.url)
            published = found.document
            methods = published.get("token_endpoint_auth_methods_supported")
            prompts = published.get("prompt_values_supported")
            can_choose = not isinstance(prompts, list) or CHOOSER in prompts
            device = "device_authorization_endpoint"
            return _Endpoints(
                outer.endpoint("authorization_endpoint"),
                found.endpoint("token_endpoint"),
                None if published.get(device) is None else found.endpoint(device),
                takes_basic=not isinstance(methods, list) or "client_secret_basic" in methods,
                sends_iss=published.get("authorization_response_iss_parameter_supported") is True,
                chooser=CHOOSER if can_choose else LOGIN,
                userinfo=found.endpoint("userinfo_endpoint") if self._settings.userinfo else None,
            )


def next_prompt(prompt: str, error: str) -> str:
    """Return the ``prompt`` to ask with again after an *error* of the issuer; empty for none."""
    # Some issuers refuse the chooser by any error but these.
    others = ("", "access_denied", "server_error", "temporarily_unavailable")
    is_refused = prompt == CHOOSER and error not in others
    # Some issuers ask people only if told to (OpenID Connect Core §3.1.2.6).
    unasked = ("login_required", "interaction_required", "account_selection_required")
    is_missing = not prompt and error in unasked
    return LOGIN if is_refused or is_missing else ""


def _refused(answer: Mapping[str, Any], wanted: str) -> ForbiddenError:
    """Return the error for an answer of the issuer that lacks the *wanted* member."""
    error = answer.get("error")
    if not isinstance(error, str):
        return ForbiddenError(f"the issuer sent no {wanted}")
    # It may come through the browser: only what is spelled like a code is shown.
    reason = f": {error}" if re.fullmatch("[a-z_]{1,64}", error) else ""
    return ForbiddenError(f"the issuer refused the sign-in{reason}")
