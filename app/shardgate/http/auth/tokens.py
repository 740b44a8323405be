"""Short-lived tokens for paths of viewers: JWTs that only this service signs and verifies."""

import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, NamedTuple, Self
from urllib.parse import quote

import jwt
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, PositiveInt, model_validator

from shardgate.errors import BadBodyError, ForbiddenError, UnauthenticatedError
from shardgate.http.api.openapi import RequestDocument, new_router, reads
from shardgate.http.auth.access import NOBODY, Caller, Datasets, Identity
from shardgate.http.auth.token_records import TokenList, TokenRecord, TokenRecords
from shardgate.http.body import RequestBodyReader
from shardgate.settings import PUBLIC, TokenSettings

_ALGORITHM: Final = "HS256"
_TYPE: Final = "shardgate+jwt"
_ISSUER: Final = "shardgate"
"""No URL, as issuers that can be configured are."""
_PURPOSE: Final = b"shardgate: minted tokens"
MADE: Final = "~"
"""Grant of callers of tokens that are made here, which make, list and revoke none; it begins those
for datasets, too.
"""
_DEFAULT_S: Final = 3600
_ID_NBYTES: Final = 9
_MOST_DATASETS: Final = 32


class Token(BaseModel, use_attribute_docstrings=True):
    """A token that lets its bearer read."""

    token_id: str
    """By which it is revoked."""
    token: Annotated[str, Field(repr=False)]
    """For `Authorization: Bearer`, or a path."""
    expires_at: datetime
    paths: Annotated[dict[str, str], Field(repr=False)]
    """Path of each dataset for clients that can send no header."""


class TokenSigner:
    """Signs tokens that let their bearer read datasets, and verifies them."""

    def __init__(
        self,
        settings: TokenSettings,
        records: TokenRecords,
        now: Callable[[], float] = time.time,
    ) -> None:
        secret = settings.secret.get_secret_value().encode()
        self._key = hmac.digest(secret, _PURPOSE, "sha256")
        self._records = records
        self._now = now
        self.longest_s = settings.longest_s
        self.default_s = min(_DEFAULT_S, settings.longest_s)

    def sign(
        self, caller_name: str, dataset_names: Sequence[str], lifetime_s: int, root_path: str = ""
    ) -> Token:
        """Return a token by which *caller_name* lets others read; *root_path* begins its paths."""
        token_id = secrets.token_urlsafe(_ID_NBYTES)
        expires_at_s = int(self._now()) + lifetime_s
        claims = {
            "iss": _ISSUER,
            "sub": caller_name,
            "jti": token_id,
            "exp": expires_at_s,
            "datasets": dataset_names,
        }
        token = jwt.encode(claims, self._key, _ALGORITHM, {"typ": _TYPE})
        return Token(
            token_id=token_id,
            token=token,
            expires_at=datetime.fromtimestamp(expires_at_s, UTC),
            paths={name: f"{root_path}/~{token}/{name}/" for name in dataset_names},
        )

    async def identify(self, token: str) -> Identity | None:
        """Return the signer and grants; `None` for other types.

        Raises: `UnauthenticatedError`, `TokenRecordsError`.
        """
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
                options={"require": ["sub", "jti", "exp", "datasets"], "verify_exp": False},
            )
        except jwt.PyJWTError:
            raise UnauthenticatedError("the token was not signed by this service") from None
        if claims["exp"] <= self._now():
            raise UnauthenticatedError("the token has expired")
        await self._records.refresh()
        if self._records.has_ended(claims["jti"]):
            raise UnauthenticatedError("the token has been revoked")
        grants = frozenset({PUBLIC, MADE, *map(read_grant, claims["datasets"])})
        until_s = min(claims["exp"], self._now() + self._records.fresh_s)
        return Identity(Caller(claims["sub"], grants), until_s)


def read_grant(dataset_name: str) -> str:
    """Return the grant of a token for the dataset, which no rule of settings can be called."""
    return f"{MADE}{dataset_name}"


type _DatasetName = Annotated[str, Field(min_length=1)]
_SEVERAL: Final = Field(min_length=1, max_length=_MOST_DATASETS)


class TokenOptions(RequestDocument):
    """Datasets that a token lets read, and its lifetime."""

    dataset: _DatasetName | None = None
    """One dataset; either this or `datasets`."""
    datasets: Annotated[list[_DatasetName], _SEVERAL] | None = None
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


class TokenMint(NamedTuple):
    """Makes tokens for callers, and records them."""

    datasets: Datasets
    signer: TokenSigner
    records: TokenRecords

    async def make(self, caller: Caller, options: TokenOptions, root_path: str) -> Token:
        """Make a token for datasets that *caller* may read.

        Raises: `BadBodyError`, `UnknownDatasetError`, see `TokenRecords.add`.
        """
        signer = self.signer
        for name in options.names:
            self.datasets.find(name, caller)
        lifetime_s = options.expires_in_s or signer.default_s
        if lifetime_s > signer.longest_s:
            raise BadBodyError(f"expires_in_s: tokens live {signer.longest_s} s at most")
        token = signer.sign(caller.name, options.names, lifetime_s, quote(root_path))
        record = TokenRecord(
            token_id=token.token_id, datasets=list(token.paths), expires_at=token.expires_at
        )
        await self.records.add(caller.name, record)
        return token


def build_tokens(tokens: TokenMint, bodies: RequestBodyReader) -> APIRouter:
    """Build the routes of tokens."""
    router = new_router("/api/tokens", "Tokens")

    @router.post("", status_code=201, openapi_extra=reads(TokenOptions))
    async def mint_token(request: Request, response: Response) -> Token:
        """Make a short-lived token to read datasets that the caller may read."""
        caller = _demand_maker(request)
        options = await bodies.read_document(request, TokenOptions)
        response.headers["Cache-Control"] = "no-store"
        return await tokens.make(caller, options, request.scope["root_path"])

    @router.get("")
    async def list_tokens(request: Request) -> TokenList:
        """List the valid tokens that the caller has made; it does not tell the tokens."""
        return await tokens.records.list(_demand_maker(request).name)

    @router.delete("/{token_id}", status_code=204)
    async def revoke_token(request: Request, token_id: str) -> None:
        """Revoke a token that the caller has made; processes that share the records of tokens
        refuse it within 10 s.
        """
        await tokens.records.revoke(_demand_maker(request).name, token_id)

    return router


def _demand_maker(request: Request) -> Caller:
    """Return the caller of *request*, if it may make, list and revoke tokens.

    Raises: `UnauthenticatedError`, `ForbiddenError`.
    """
    caller: Caller = request.scope["caller"]
    if caller == NOBODY:
        raise UnauthenticatedError("credentials are needed for tokens")
    if MADE in caller.grants:
        raise ForbiddenError("a token made here makes, lists and revokes none")
    return caller
