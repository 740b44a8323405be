"""Short-lived tokens for paths of viewers: JWTs that only this service signs and verifies."""

import hmac
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, Self
from urllib.parse import quote

import jwt
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, PositiveInt, model_validator

from shardgate.errors import BadBodyError, ForbiddenError, UnauthenticatedError
from shardgate.http.api.openapi import RequestDocument, new_router, reads
from shardgate.http.auth.access import NOBODY, Caller, Datasets, Identity
from shardgate.http.body import RequestBodyReader
from shardgate.settings import PUBLIC, TokenSettings

_ALGORITHM: Final = "HS256"
_TYPE: Final = "shardgate+jwt"
_ISSUER: Final = "shardgate"
"""No URL, as issuers that can be configured are."""
_PURPOSE: Final = b"shardgate: minted tokens"
_GRANT: Final = "~"
_DEFAULT_S: Final = 3600
_MOST_DATASETS: Final = 32


class Token(BaseModel, use_attribute_docstrings=True):
    """A token that lets its bearer read."""

    token: Annotated[str, Field(repr=False)]
    """For `Authorization: Bearer`, or a path."""
    expires_at: datetime
    paths: Annotated[dict[str, str], Field(repr=False)]
    """Path of each dataset for clients that can send no header."""


class TokenSigner:
    """Signs tokens that let their bearer read datasets, and verifies them."""

    def __init__(self, settings: TokenSettings, now: Callable[[], float] = time.time) -> None:
        secret = settings.secret.get_secret_value().encode()
        self._key = hmac.digest(secret, _PURPOSE, "sha256")
        self._now = now
        self.longest_s = settings.longest_s

    def sign(
        self, caller_name: str, dataset_names: Sequence[str], lifetime_s: int, root_path: str = ""
    ) -> Token:
        """Return a token by which *caller_name* lets others read; *root_path* begins its paths."""
        expires_at_s = int(self._now()) + lifetime_s
        claims = {
            "iss": _ISSUER,
            "sub": caller_name,
            "exp": expires_at_s,
            "datasets": dataset_names,
        }
        token = jwt.encode(claims, self._key, _ALGORITHM, {"typ": _TYPE})
        return Token(
            token=token,
            expires_at=datetime.fromtimestamp(expires_at_s, UTC),
            paths={name: f"{root_path}/~{token}/{name}/" for name in dataset_names},
        )

    async def identify(self, token: str) -> Identity | None:
        """Return the signer and grants; `None` for other types. Raises: `UnauthenticatedError`."""
        try:
            if jwt.get_unverified_header(token).get("typ") != _TYPE:
                return None
        except jwt.PyJWTError:
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
            raise UnauthenticatedError("the token was not signed by this service") from None
        if claims["exp"] <= self._now():
            raise UnauthenticatedError("the token has expired")
        grants = frozenset({PUBLIC, *map(read_grant, claims["datasets"])})
        return Identity(Caller(claims["sub"], grants), claims["exp"])


def read_grant(dataset_name: str) -> str:
    """Return the grant of a token for the dataset, which no rule of settings can be called."""
    return f"{_GRANT}{dataset_name}"


class TokenOptions(RequestDocument):
    """Datasets that a token lets read, and its lifetime."""

    dataset: str | None = None
    """One dataset; either this or `datasets`."""
    datasets: Annotated[list[str], Field(min_length=1, max_length=_MOST_DATASETS)] | None = None
    """Several."""
    expires_in_s: PositiveInt | None = None
    """At most `tokens.longest_s` of the settings; default: an hour, or that."""

    @model_validator(mode="after")
    def _names_datasets(self) -> Self:
        if (self.dataset is None) == (self.datasets is None):
            raise ValueError("give either dataset or datasets")
        return self

    @property
    def names(self) -> Sequence[str]:
        """Each name once."""
        return list(dict.fromkeys(self.datasets or filter(None, [self.dataset])))


def build_tokens(datasets: Datasets, signer: TokenSigner, bodies: RequestBodyReader) -> APIRouter:
    """Build the route of tokens."""
    router = new_router("/api/tokens", "Tokens")

    @router.post("", status_code=201, openapi_extra=reads(TokenOptions))
    async def mint_token(request: Request, response: Response) -> Token:
        """Make a short-lived token to read datasets that the caller may read.

        It cannot be revoked: its bearer has what it allows until it expires.
        """
        caller = request.scope["caller"]
        if caller == NOBODY:
            raise UnauthenticatedError("credentials are needed to make a token")
        if any(grant.startswith(_GRANT) for grant in caller.grants):
            raise ForbiddenError("a token made here makes no other")
        options = await bodies.read_document(request, TokenOptions)
        for name in options.names:
            datasets.find(name, caller)
        lifetime_s = options.expires_in_s or min(_DEFAULT_S, signer.longest_s)
        if lifetime_s > signer.longest_s:
            raise BadBodyError(f"expires_in_s: tokens live {signer.longest_s} s at most")
        response.headers["Cache-Control"] = "no-store"
        root_path = quote(request.scope["root_path"])
        return signer.sign(caller.name, options.names, lifetime_s, root_path)

    return router
