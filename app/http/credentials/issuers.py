"""Bearer tokens that OpenID Connect issuers have signed (JWT, RFC 7519, RFC 8725)."""

import functools
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import jwt
from jwt import exceptions

from app.errors import UnauthenticatedError
from app.http.credentials.bearers import Known
from app.http.credentials.caller import Caller
from app.http.credentials.claims import grants
from app.http.credentials.issuer_documents import open_client, read_keys
from app.http.credentials.jwks import Jwks
from app.http.credentials.verification_keys import ALGORITHMS, VerificationKey
from app.settings import IssuerSettings

TIMEOUT_S: Final = 5.0
"""Longest wait for the keys of an issuer."""

LEEWAY_S: Final = 60
"""Clocks of issuers may differ from ours by this."""

KNOWN_S: Final = 300.0
"""Whose a token is has to be asked again after this, for its key may be withdrawn."""

_TYPES: Final = frozenset({"jwt", "application/jwt", "at+jwt", "application/at+jwt"})
"""Issuers sign other things as well, and say so (RFC 8725 §3.11)."""

_REQUIRED: Final = ("iss", "aud", "sub", "exp")
_LONGEST_NAME: Final = 255

_WRONG: Final[Mapping[type[Exception], str]] = {
    exceptions.ExpiredSignatureError: "has expired",
    exceptions.ImmatureSignatureError: "is not valid yet",
    exceptions.InvalidAudienceError: "is for another audience",
    exceptions.InvalidSignatureError: "is not signed by its issuer",
}


class _Issuer(NamedTuple):
    name: str
    settings: IssuerSettings
    jwks: Jwks


class Issuers:
    """Tells whose a token is that one of the issuers has signed."""

    def __init__(
        self, settings: Mapping[str, IssuerSettings], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._issuers: dict[str, _Issuer] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if not self._settings:
            return self
        client = await self._stack.enter_async_context(open_client(self._timeout_s))
        for name, issuer in self._settings.items():
            jwks = Jwks(functools.partial(read_keys, client, issuer, self._timeout_s))
            self._stack.push_async_callback(jwks.aclose)
            self._issuers[issuer.url] = _Issuer(name, issuer, jwks)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def identify(self, token: str) -> Known | None:
        """Tell whose *token* is; `None` if it does not say that it is of one of the issuers.

        Raises: `UnauthenticatedError`, and `IssuerUnavailableError` if nobody can tell.
        """
        try:
            claimed = jwt.decode_complete(token, options={"verify_signature": False})
        except jwt.PyJWTError:
            return None
        url = claimed["payload"].get("iss")
        issuer = self._issuers.get(url) if isinstance(url, str) else None
        if issuer is None:
            return None
        key = await _find_key(issuer.jwks, claimed["header"])
        return _tell(issuer, _verify(token, key, issuer.settings))


async def _find_key(jwks: Jwks, header: Mapping[str, Any]) -> VerificationKey:
    kind, algorithm = header.get("typ", "jwt"), header.get("alg")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise UnauthenticatedError("the token is of a type that is not taken")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise UnauthenticatedError("the token is signed by an algorithm that is not taken")
    key = await jwks.find(header.get("kid"), algorithm)
    if key is None:
        raise UnauthenticatedError("the token is signed by a key that its issuer does not have")
    return key


def _verify(token: str, key: VerificationKey, issuer: IssuerSettings) -> Mapping[str, Any]:
    """Give the claims of *token*, now that they are to be believed."""
    try:
        return jwt.decode(
            token,
            key.key,
            algorithms=sorted(key.algorithms),
            options={"require": list(_REQUIRED), "enforce_minimum_key_length": True},
            audience=issuer.audience,
            issuer=issuer.url,
            leeway=LEEWAY_S,
        )
    except jwt.MissingRequiredClaimError as error:
        raise UnauthenticatedError(f"the token has no {error.claim}") from None
    except jwt.PyJWTError as error:
        wrong = _WRONG.get(type(error), "is not as its issuer makes them")
        raise UnauthenticatedError(f"the token {wrong}") from None


def _tell(issuer: _Issuer, claims: Mapping[str, Any]) -> Known:
    subject: str = claims["sub"]
    if not (subject.isprintable() and 0 < len(subject) <= _LONGEST_NAME):
        raise UnauthenticatedError("the token has a sub that cannot be a name")
    caller = Caller(f"{issuer.name}:{subject}", grants(issuer.name, claims, issuer.settings.claims))
    return Known(caller, min(int(claims["exp"]) + LEEWAY_S, time.time() + KNOWN_S))
