"""Short-lived tokens for paths of viewers: JWTs that only this service signs and verifies."""

import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Self
from urllib.parse import quote

import jwt
from pydantic import BaseModel, Field, PositiveInt, SecretStr, model_validator

from shardgate.auditing import note
from shardgate.auth.access import Caller, Datasets, Identity
from shardgate.auth.token_records import TokenRecord, TokenRecords
from shardgate.errors import BadBodyError, UnauthenticatedError
from shardgate.formats.reading import DecodeError, check_format
from shardgate.server.body import RequestDocument
from shardgate.settings import PUBLIC, TokenSettings

_ALGORITHM: Final = "HS256"
_ISSUER: Final = "shardgate"  # distinct from configured issuers, whose names are URLs
_LINK: Final = "shardgate"  # kind of the tokens that callers make
MADE: Final = "~"
"""Grant of all bearers of tokens made here, which keeps them from making, listing and revoking
tokens; also the prefix of their grants of datasets.
"""


class TokenSigner:
    """Signs tokens that only this service verifies; each kind of them has a key of its own.

    The claims stay readable. ``sub`` names the caller; a token with ``jti`` ends with its record,
    and one with ``sid`` with its login. The header may name the ``format`` of the claims; it is
    left out for 1, since paths are short.
    """

    def __init__(
        self,
        secret: SecretStr,
        records: TokenRecords,
        now: Callable[[], float] = time.time,
        audience: str | None = None,
    ) -> None:
        """Derive keys from *secret*; tokens for another *audience* are refused."""
        self._secret = secret.get_secret_value().encode()
        self._records = records
        self._now = now
        self._audience = audience

    def sign(self, kind: str, claims: Mapping[str, object], lifetime_s: int) -> str:
        """Return a token of *kind* with *claims*, which is valid for *lifetime_s*."""
        named = {"iss": _ISSUER, **claims, "exp": int(self._now()) + lifetime_s}
        if self._audience is not None:
            named["aud"] = self._audience
        return jwt.encode(named, next(self._keys(kind)), _ALGORITHM, {"typ": _type(kind)})

    async def verify(self, kind: str, token: str) -> Mapping[str, Any] | None:
        """Return the claims of a token of *kind*; `None` if it is none, has expired or was ended.

        Raises: `TokenRecordsError`.
        """
        decoded = (self._decode(token, key) for key in self._keys(kind))
        claims = next((found for found in decoded if found is not None), None)
        if claims is None or claims["exp"] <= self._now():
            return None
        ids = [claims[name] for name in ("jti", "sid") if name in claims]
        if ids:
            await self._records.refresh()
        return None if any(map(self._records.has_ended, ids)) else claims

    def _decode(self, token: str, key: bytes) -> Mapping[str, Any] | None:
        options: Any = {"require": ["exp"], "verify_exp": False}  # by our clock, see `verify`
        try:
            decoded = jwt.decode_complete(
                token,
                key,
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                audience=self._audience,
                options=options,
            )
            check_format(decoded["header"])
        except (jwt.PyJWTError, DecodeError, RecursionError):  # the last of deeply nested claims
            return None
        claims: Mapping[str, Any] = decoded["payload"]
        return claims

    async def identify_reader(
        self, kind: str, token: str, names_in: Callable[[Mapping[str, Any]], Iterable[str]]
    ) -> Identity | None:
        """Return who reads the datasets that *names_in* finds in the claims of a token of *kind*;
        `None` for another kind.

        Raises: `UnauthenticatedError`, `TokenRecordsError`.
        """
        try:
            header = jwt.get_unverified_header(token)
            if header.get("typ") != _type(kind):
                return None
            check_format(header)
        except (jwt.PyJWTError, RecursionError):
            return None
        except DecodeError as error:
            raise UnauthenticatedError(f"the token is of {error}") from None
        if (claims := await self.verify(kind, token)) is None:
            raise UnauthenticatedError(
                "the token has expired, was revoked, or was not signed by this service"
            )
        until_s = min(claims["exp"], self._now() + self._records.fresh_s)
        return Identity(reader(claims["sub"], names_in(claims)), until_s)

    def _keys(self, kind: str) -> Iterator[bytes]:
        """Return the key of *kind*, and that of the version before, whose tokens stay valid."""
        # Only the purposes differed. The next change of the format keeps this one in its place.
        purpose = f"shardgate: key of tokens: {kind}"
        before = f"shardgate: signing in: {kind.removeprefix('shardgate-')}"
        if kind == _LINK:
            before = "shardgate: minted tokens"
        for each in (purpose, before):
            yield hmac.digest(self._secret, each.encode(), "sha256")


def _type(kind: str) -> str:
    return f"{kind}+jwt"


def reader(name: str, dataset_names: Iterable[str]) -> Caller:
    """Return the caller *name* with the right to read the datasets by a token made here."""
    return Caller(name, frozenset({PUBLIC, MADE, *map(read_grant, dataset_names)}))


def read_grant(dataset_name: str) -> str:
    """Return the grant of a token for the dataset, which no rule of settings can be called."""
    return f"{MADE}{dataset_name}"


class Token(BaseModel, use_attribute_docstrings=True):
    """A token that lets its bearer read."""

    token_id: str
    """Id to revoke it by."""
    token: Annotated[str, Field(repr=False)]
    """The token, for `Authorization: Bearer` or a path."""
    expires_at: datetime
    paths: Annotated[dict[str, str], Field(repr=False)]
    """Path of each dataset for clients that cannot send headers."""


type _DatasetName = Annotated[str, Field(min_length=1)]


class TokenOptions(RequestDocument):
    """Datasets that a token grants to read, and its lifetime."""

    dataset: _DatasetName | None = None
    """One dataset; either this or `datasets`."""
    datasets: Annotated[list[_DatasetName], Field(min_length=1, max_length=32)] | None = None
    """Several datasets."""
    expires_in_s: PositiveInt | None = None
    """At most `tokens.longest_s` of the settings; default: an hour, or less if that is less."""

    @model_validator(mode="after")
    def _names_datasets(self) -> Self:
        if (self.dataset is None) == (self.datasets is None):
            raise ValueError("give either dataset or datasets")
        return self

    @property
    def names(self) -> Sequence[str]:
        """Each name once."""
        return list(dict.fromkeys(self.datasets or filter(None, [self.dataset])))


class TokenMint(TokenSigner):
    """Makes tokens with which callers let others read, records and identifies them."""

    def __init__(
        self,
        settings: TokenSettings,
        datasets: Datasets,
        records: TokenRecords,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(settings.secret, records, now)
        self.datasets = datasets
        self.records = records
        self._longest_s = settings.longest_s

    async def make(self, caller: Caller, options: TokenOptions, root_path: str) -> Token:
        """Make a token for datasets that *caller* may read.

        Raises: `BadBodyError`, `UnknownDatasetError`, see `TokenRecords.add`.
        """
        for name in options.names:
            self.datasets.find(name, caller)
        lifetime_s = options.expires_in_s or min(3600, self._longest_s)
        if lifetime_s > self._longest_s:
            raise BadBodyError(f"expires_in_s: tokens live {self._longest_s} s at most")
        token = self.mint(caller.name, options.names, lifetime_s, quote(root_path))
        record = TokenRecord(
            token_id=token.token_id, datasets=list(token.paths), expires_at=token.expires_at
        )
        note(token_id=token.token_id, datasets=record.datasets)
        await self.records.add(caller.name, record)
        return token

    def mint(
        self, caller_name: str, dataset_names: Sequence[str], lifetime_s: int, root_path: str = ""
    ) -> Token:
        """Return a token by which *caller_name* lets others read; *root_path* begins its paths."""
        token_id = secrets.token_urlsafe(9)
        expires_at = datetime.fromtimestamp(int(self._now()) + lifetime_s, UTC)
        claims = {"sub": caller_name, "jti": token_id, "datasets": dataset_names}
        token = self.sign(_LINK, claims, lifetime_s)
        paths = {name: f"{root_path}/~{token}/{name}/" for name in dataset_names}
        return Token(token_id=token_id, token=token, expires_at=expires_at, paths=paths)

    async def identify(self, token: str) -> Identity | None:
        """Return the maker of *token* with the grants of the token; see `identify_reader`."""
        return await self.identify_reader(_LINK, token, lambda claims: claims["datasets"])
