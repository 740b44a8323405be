"""Bearer tokens signed by OpenID Connect issuers (JWT, RFC 7519 and RFC 8725)."""

import asyncio
import functools
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from math import inf
from typing import Any, Final, NamedTuple

import httpx
import jwt
import orjson
from cryptography.exceptions import UnsupportedAlgorithm
from jwt import exceptions
from jwt.algorithms import AllowedPublicKeys

from shardgate.auth.access import Caller, Identity
from shardgate.concurrency import SingleFlight
from shardgate.errors import ConfigurationError, IssuerUnavailableError, UnauthenticatedError
from shardgate.settings import CLAIM_RULES, EMAIL, GROUP, PUBLIC, IssuerSettings, inner_url

TIMEOUT_S: Final = 5.0  # longest wait for the keys of an issuer
LEEWAY_S: Final = 60  # tolerated difference of an issuer's clock
IDENTITY_S: Final = 300.0  # tokens are verified again then, as their keys may have been withdrawn
KEYS_S: Final = 3600.0  # longest time for which a withdrawn key, or configuration, is used
RETRY_S: Final = 60.0  # time for which they are used once more if the issuer cannot be reached
APART_S: Final = 10.0  # shortest time between two reads of them
_RSA: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_CURVES: Final = {
    "P-256": frozenset({"ES256"}),
    "P-384": frozenset({"ES384"}),
    "P-521": frozenset({"ES512"}),
    "Ed25519": frozenset({"EdDSA"}),
    "Ed448": frozenset({"EdDSA"}),
}
# Asymmetric algorithms only: whoever can verify a symmetric signature can forge it.
ALGORITHMS: Final = _RSA.union(*_CURVES.values())
_REASONS: Final[Mapping[type[Exception], str]] = {
    exceptions.ExpiredSignatureError: "has expired",
    exceptions.ImmatureSignatureError: "is not valid yet",
    exceptions.InvalidAudienceError: "is for another audience",
}
_MOST_NBYTES: Final = 1024**2
_ENCRYPTED: Final = "https://"
_log = logging.getLogger(__name__)


class VerificationKey(NamedTuple):
    """A public key, and the algorithms that may be used with it, whatever a token says."""

    kid: str | None
    algorithms: frozenset[str]
    key: AllowedPublicKeys


type Claims = Mapping[str, Any]
type ReadKeys = Callable[[], Awaitable[Sequence[VerificationKey]]]


class Issuer(NamedTuple):
    """An issuer, and its keys."""

    name: str
    settings: IssuerSettings
    keys: "IssuerKeys"

    async def verify(self, token: str, claimed: Mapping[str, Any], audience: str) -> Claims:
        """Verify a *token* for *audience*, whose parts are *claimed*; return its claims.

        Raises: `UnauthenticatedError`, `IssuerUnavailableError`.
        """
        for _ in range(2):
            key = await _find_key(self.keys, claimed["header"])
            try:
                return _verify(token, key, self.settings.url, audience)
            except jwt.InvalidSignatureError:
                await self.keys.refresh()  # a new key may have the id of the old one, or none
        raise UnauthenticatedError("the token is not signed by its issuer")

    def caller_of(self, claims: Claims) -> Caller:
        """Return the caller that verified *claims* are of."""
        is_assumed = self.settings.email_verified == "assumed"
        granted = grants(self.name, claims, self.settings.claims, assumes_verified=is_assumed)
        return Caller(f"{self.name}:{claims['sub']}", granted)


class Issuers:
    """Identifies the callers of tokens that one of the issuers has signed."""

    def __init__(
        self, settings: Mapping[str, IssuerSettings], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Take the issuers of the settings by name. Raises: `ConfigurationError`."""
        self._client = open_client(timeout_s) if settings else None
        self.by_name: dict[str, Issuer] = {}
        if self._client is not None:
            for name, issuer in settings.items():
                read = functools.partial(read_keys, self._client, issuer, timeout_s)
                self.by_name[name] = Issuer(name, issuer, IssuerKeys(read))
        self._by_url = {issuer.settings.url: issuer for issuer in self.by_name.values()}

    async def aclose(self) -> None:
        """Cancel reads of keys, and close the connections."""
        for issuer in self.by_name.values():
            await issuer.keys.aclose()
        if self._client is not None:
            await self._client.aclose()

    async def identify(self, token: str) -> Identity | None:
        """Return the identity of *token*; `None` if its ``iss`` is none of the issuers.

        Raises: `UnauthenticatedError`, `IssuerUnavailableError` if no keys can be read.
        """
        try:
            claimed = jwt.decode_complete(token, options={"verify_signature": False})
        except (jwt.PyJWTError, RecursionError):  # of deeply nested claims
            return None
        url = claimed["payload"].get("iss")
        issuer = self._by_url.get(url) if isinstance(url, str) else None
        if issuer is None:
            for known in self._by_url:
                if fault := slash_fault(url, known):
                    raise UnauthenticatedError(f"the token is of another issuer: {fault}")
            return None
        claims = await issuer.verify(token, claimed, issuer.settings.audience)
        until_s = min(int(claims["exp"]) + LEEWAY_S, time.time() + IDENTITY_S)
        return Identity(issuer.caller_of(claims), until_s)


async def _find_key(keys: "IssuerKeys", header: Mapping[str, Any]) -> VerificationKey:
    kind = header.get("typ", "jwt")
    # Issuers sign other things as well (RFC 8725 §3.11).
    accepted = {"jwt", "application/jwt", "at+jwt", "application/at+jwt"}
    if not isinstance(kind, str) or kind.lower() not in accepted:
        raise UnauthenticatedError("the type of the token is not accepted")
    algorithm = header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise UnauthenticatedError("the algorithm of the token is not accepted")
    key = await keys.find(header.get("kid"), algorithm)
    if key is None:
        raise UnauthenticatedError("the token is signed by a key that its issuer does not have")
    return key


def _verify(token: str, key: VerificationKey, issuer_url: str, audience: str) -> Claims:
    """Return the verified claims of *token*. Raises: `jwt.InvalidSignatureError`."""
    try:
        claims = jwt.decode(
            token,
            key.key,
            algorithms=sorted(key.algorithms),
            options={"require": ["iss", "aud", "sub", "exp"], "enforce_minimum_key_length": True},
            audience=audience,
            issuer=issuer_url,
            leeway=LEEWAY_S,
        )
    except jwt.InvalidSignatureError:
        raise
    except jwt.MissingRequiredClaimError as error:
        raise UnauthenticatedError(f"the token has no {error.claim}") from None
    except (jwt.PyJWTError, OverflowError, TypeError) as error:  # of `exp` such as 1e999 or []
        reason = _REASONS.get(type(error), "is malformed")
        raise UnauthenticatedError(f"the token {reason}") from None
    subject: str = claims["sub"]
    # OpenID Connect Core §2 bounds the length.
    if not subject.isprintable() or len(subject) not in range(1, 256):
        raise UnauthenticatedError("the sub of the token cannot be a name")
    return claims


def grants(
    issuer: str, claims: Claims, names: Sequence[str], *, assumes_verified: bool = False
) -> frozenset[str]:
    """Return `public`, and rules of *issuer* that the *claims* fulfil: ``ISSUER:VALUE`` for the
    values of claims called *names*, ``ISSUER:group=VALUE``, and ``ISSUER:email=VALUE`` if verified,
    or if *assumes_verified* and the issuer does not say.

    A value that is spelled like the latter two fulfils neither: people choose some claims.
    """
    named = {value for name in names for value in _claim_values(claims, name)}
    values = {value for value in named if not value.startswith(CLAIM_RULES)}
    values |= {f"{GROUP}{value}" for value in _claim_values(claims, "groups")}
    verified = claims.get("email_verified")
    # Some issuers send all claims as text.
    is_verified = verified is True or verified == "true" or (verified is None and assumes_verified)
    if is_verified and isinstance(claims.get("email"), str):
        values.add(f"{EMAIL}{claims['email']}")
    return frozenset({PUBLIC, *(f"{issuer}:{value}" for value in values)})


def _claim_values(claims: Mapping[str, Any], name: str) -> Iterator[str]:
    match _find_claim(claims, name):
        case str(text) if name in {"scope", "scp"}:  # separated by spaces (RFC 8693 §4.2)
            yield from text.split()
        case str(text):
            yield text
        case list(values):
            yield from (value for value in values if isinstance(value, str))
        case dict(roles):  # by name: some issuers say of each role where it was granted
            yield from (role for role, where in roles.items() if where)


def _find_claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return the claim *name*, dots and all, or else ``a.b`` as ``b`` within ``a``."""
    if name in claims:
        return claims[name]
    for dot in re.finditer(r"\.", name):
        inner = claims.get(name[: dot.start()])
        found = _find_claim(inner, name[dot.end() :]) if isinstance(inner, dict) else None
        if found is not None:
            return found
    return None


class Published[T]:
    """Value that an issuer publishes, read when needed, and kept for an hour and any outage.

    A read continues when the request that began it is cancelled: else clients that disconnect early
    could keep the value from all others.
    """

    def __init__(
        self, name: str, read: Callable[[], Awaitable[T]], clock: Callable[[], float]
    ) -> None:
        """*name* is that of the value in logs."""
        self._name = name
        self._read_value = read
        self._clock = clock
        self._value: T | None = None
        self._fault = ""
        self._stale_at = -inf
        self._quiet_until = -inf
        self._reads = SingleFlight[str](outlasts=True)

    async def get(self) -> T:
        """Return the value, after a read if it is stale.

        Raises: `IssuerUnavailableError` or `ConfigurationError` if it was never read.
        """
        if self._clock() >= self._stale_at:
            await self.refresh()
        if self._value is None:
            if self._fault:
                raise ConfigurationError(self._fault)
            raise IssuerUnavailableError(f"the {self._name} of the issuer cannot be read")
        return self._value

    async def refresh(self) -> None:
        """Read the value, unless it was read less than `APART_S` ago."""
        # A read under way is joined, however recent the last one was.
        if self._clock() >= self._quiet_until or self._name in self._reads:
            await self._reads.run(self._name, self._read)

    async def aclose(self) -> None:
        """Cancel a read."""
        await self._reads.aclose()

    async def _read(self) -> None:
        try:
            self._value = await self._read_value()
            self._stale_at = self._clock() + KEYS_S
        except (ConfigurationError, IssuerUnavailableError) as error:
            _log.warning("no %s of the issuer %s", self._name, error)
            self._fault = str(error) if isinstance(error, ConfigurationError) else ""
            self._stale_at = self._clock() + RETRY_S
        finally:
            self._quiet_until = self._clock() + APART_S


class IssuerKeys(Published[Sequence[VerificationKey]]):
    """Keys of one issuer.

    `jwt.PyJWKClient` would drop its keys during an outage, and bound neither size nor redirects.
    """

    def __init__(self, read: ReadKeys, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("keys", read, clock)

    async def find(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        """Return the key *kid*, after another read if it is unknown.

        Without a *kid* there must be exactly one key for *algorithm*.

        Raises: see `get`.
        """
        if self._value is None:
            await self.refresh()  # `get` would wait for a minute after a failure
        found = _choose(await self.get(), kid, algorithm)
        if found is None:  # the issuer may have a new key
            await self.refresh()
            found = _choose(await self.get(), kid, algorithm)
        return found


def _choose(
    keys: Sequence[VerificationKey], kid: str | None, algorithm: str
) -> VerificationKey | None:
    fitting = [key for key in keys if kid in (None, key.kid) and algorithm in key.algorithms]
    return fitting[0] if len(fitting) == 1 else None


def open_client(timeout_s: float) -> httpx.AsyncClient:
    """Open a client that neither follows redirects nor keeps cookies, which may be of a person.

    Raises: `ConfigurationError`, see `checked_environment`.
    """
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    jar = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    with checked_environment():
        return httpx.AsyncClient(
            headers=headers, cookies=jar, follow_redirects=False, timeout=timeout_s
        )


@contextmanager
def checked_environment() -> Iterator[None]:
    """Raise `ConfigurationError` if httpx cannot use the environment's certificates or proxy."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        reason = "SSL_CERT_FILE, SSL_CERT_DIR or a proxy of the environment cannot be used"
        files = {name: os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
        named = "".join(f"; {name} is {value}" for name, value in files.items() if value)
        raise ConfigurationError(f"{reason}: {error}{named}") from error


async def read_keys(
    client: httpx.AsyncClient, issuer: IssuerSettings, timeout_s: float
) -> tuple[VerificationKey, ...]:
    """Read the keys of *issuer* in *timeout_s* altogether.

    Raises: `IssuerUnavailableError`, see `discover`.
    """
    async with asking(issuer.url, timeout_s):
        url = issuer.jwks_url or (await discover(client, issuer)).endpoint("jwks_uri")
        return decode_jwks(await _get(client, url))


@asynccontextmanager
async def asking(issuer: str, timeout_s: float) -> AsyncGenerator[None]:
    """Bound the time of requests to *issuer*. Raises: `IssuerUnavailableError` for any failure."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise IssuerUnavailableError(f"{issuer}: does not answer in time") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # also of malformed documents
        raise IssuerUnavailableError(f"{issuer}: {error or type(error).__name__}") from error


class IssuerConfiguration(NamedTuple):
    """Configuration that an issuer publishes, and the URL that it was read from."""

    url: str
    document: Mapping[str, Any]

    def endpoint(self, name: str) -> str:
        """Return the URL called *name*, encrypted as the configuration is. Raises: `ValueError`."""
        url = self.document.get(name)
        if not isinstance(url, str):
            raise ValueError(f"its configuration names no {name}")  # noqa: TRY004 - a document
        if self.url.startswith(_ENCRYPTED) and not url.startswith(_ENCRYPTED):
            raise ValueError(f"its {name} is not https://")
        return inner_url(url)


async def discover(client: httpx.AsyncClient, issuer: IssuerSettings) -> IssuerConfiguration:
    """Read the configuration of *issuer* (OpenID Connect Discovery §4).

    Raises: `httpx.HTTPError`, `ValueError` if it is malformed or of another issuer,
    `ConfigurationError` if that one differs by a slash only.
    """
    url = issuer.discovery_url or issuer.url
    if issuer.discovery_url is None or "/.well-known/" not in url:
        url = f"{url.rstrip('/')}/.well-known/openid-configuration"
    document: Any = orjson.loads(await _get(client, url))
    named = document.get("issuer") if isinstance(document, dict) else None
    if named != issuer.url:
        if fault := slash_fault(named, issuer.url):
            raise ConfigurationError(f"{issuer.url}: {fault}")
        raise ValueError(f"its configuration is of another issuer, {str(named)[:255]!r}")
    return IssuerConfiguration(url, document)


def slash_fault(named: object, url: str) -> str:
    """Return how the name of an issuer differs from the *url* of the settings; empty if they are
    equal, or differ by more than the slash at the end.
    """
    if not isinstance(named, str) or named == url or named.rstrip("/") != url.rstrip("/"):
        return ""
    name = repr(named[:255])
    if len(named) > len(url):
        return f"its name {name} has a slash at the end, which its url in issuers lacks"
    return f"its name {name} has no slash at the end, which its url in issuers has"


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    status, body = await exchange(client, "GET", url)
    if status != HTTPStatus.OK:
        raise ValueError(f"{url} answers {status}")
    return body


async def exchange(
    client: httpx.AsyncClient, method: str, url: str, **options: Any
) -> tuple[int, bytes]:
    """Send a request to an issuer; return the status and the body, whose size is bounded.

    Raises: `httpx.HTTPError`, `ValueError`.
    """
    async with client.stream(method, url, **options) as response:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError(f"{url} has a Content-Encoding that was not accepted")
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > _MOST_NBYTES:
                raise ValueError(f"{url} has more than {_MOST_NBYTES} bytes")
        return response.status_code, bytes(body)


def decode_jwks(data: bytes) -> tuple[VerificationKey, ...]:
    """Decode the signing keys of a JWK Set (RFC 7517). Raises: `ValueError` if it is none."""
    match orjson.loads(data):
        case {"keys": list(keys)}:
            decoded = [_decode_jwk(jwk) for jwk in keys if isinstance(jwk, dict)]
            return tuple(key for key in decoded if key is not None)
        case _:
            raise ValueError("its jwks_uri is no JWK Set")


def _decode_jwk(jwk: Mapping[str, Any]) -> VerificationKey | None:
    texts = {name: value for name, value in jwk.items() if isinstance(value, str)}
    able = _RSA if texts.get("kty") == "RSA" else _CURVES.get(texts.get("crv", ""), frozenset())
    algorithms = able & {texts["alg"]} if "alg" in texts else able
    # A published private key, which "d" marks, can be anyone's.
    if not algorithms or texts.get("use", "sig") != "sig" or "d" in jwk:
        return None
    with suppress(jwt.PyJWTError, UnsupportedAlgorithm):
        return VerificationKey(texts.get("kid"), algorithms, jwt.PyJWK(texts, min(algorithms)).key)
    return None
