"""Short-lived tokens of our own, for the paths of viewers: JWTs that only we can sign and check."""

import hmac
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import jwt

from app.errors import UnauthenticatedError
from app.http.credentials.bearers import Known
from app.http.credentials.caller import Caller
from app.setting_fields import PUBLIC
from app.settings import TokenSettings

_ALGORITHM: Final = "HS256"
_TYPE: Final = "shardgate+jwt"
_ISSUER: Final = "shardgate"
"""No URL, as issuers that can be configured are."""

_PURPOSE: Final = b"shardgate: minted tokens"
_GRANT: Final = "~"


@dataclass(frozen=True, slots=True)
class Minted:
    """A token that was just made."""

    token: str = field(repr=False)
    expires_at_s: int
    """In seconds since 1970."""


class Minter:
    """Makes tokens that let whoever has them read datasets, and knows them again."""

    def __init__(self, settings: TokenSettings, now: Callable[[], float] = time.time) -> None:
        secret = settings.secret.get_secret_value().encode()
        self._key = hmac.digest(secret, _PURPOSE, "sha256")
        self._now = now
        self.longest_s = settings.longest_s

    def mint(self, caller_name: str, dataset_names: Iterable[str], lifetime_s: int) -> Minted:
        """Make a token by which *caller_name* lets others read."""
        expires_at_s = int(self._now()) + lifetime_s
        claims = {
            "iss": _ISSUER,
            "sub": caller_name,
            "exp": expires_at_s,
            "datasets": list(dataset_names),
        }
        token = jwt.encode(claims, self._key, _ALGORITHM, {"typ": _TYPE})
        return Minted(token, expires_at_s)

    async def identify(self, token: str) -> Known | None:
        """Tell who made *token*, and for what; `None` if it does not say that it is of ours.

        Raises: `UnauthenticatedError`.
        """
        if not _is_ours(token):
            return None
        try:
            claims = jwt.decode(
                token,
                self._key,
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                options={"require": ["sub", "exp", "datasets"], "verify_exp": False},
            )
        except jwt.PyJWTError:
            raise UnauthenticatedError("the token was not minted here") from None
        if claims["exp"] <= self._now():
            raise UnauthenticatedError("the token has expired")
        return Known(Caller(claims["sub"], _grants(claims["datasets"])), claims["exp"])


def grant_to_read(dataset_name: str) -> str:
    """Name the rule that a token minted for the dataset keeps; no rule of settings is one."""
    return f"{_GRANT}{dataset_name}"


def is_minted(caller: Caller) -> bool:
    """Tell whether *caller* came with a minted token."""
    return any(grant.startswith(_GRANT) for grant in caller.grants)


def _grants(dataset_names: Iterable[str]) -> frozenset[str]:
    return frozenset({PUBLIC, *map(grant_to_read, dataset_names)})


def _is_ours(token: str) -> bool:
    try:
        return jwt.get_unverified_header(token).get("typ") == _TYPE
    except jwt.PyJWTError:
        return False
