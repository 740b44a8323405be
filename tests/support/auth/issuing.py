"""An issuer of tokens, made with another library than the one that checks them."""

import base64
import functools
import json
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from joserfc import jwt
from joserfc.errors import SecurityWarning
from joserfc.jwk import ECKey, OKPKey, RSAKey

from shardgate.settings import IssuerSettings
from tests.support.storage.faulty import FaultyServer

type Key = RSAKey | ECKey | OKPKey

AUDIENCE: Final = "shardgate"
DISCOVERY: Final = "/.well-known/openid-configuration"
JWKS: Final = "/keys/jwks"


def make_key(kid: str, kind: str = "RSA") -> Key:
    """Make a key of a *kind*, `RSA`, `short RSA` or a curve, and cache it, as that takes long."""
    return _made(kid, kind)


@functools.cache
def _made(kid: str, kind: str) -> Key:
    parameters: Any = {"kid": kid}
    match kind:
        case "RSA":
            return RSAKey.generate_key(2048, parameters)
        case "short RSA":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SecurityWarning)
                return RSAKey.generate_key(1024, parameters)
        case "Ed25519" | "Ed448":
            return OKPKey.generate_key(kind, parameters)
        case curve:
            return ECKey.generate_key(curve, parameters)


class Issuer:
    """Signs tokens, and publishes its keys on a real server."""

    def __init__(self, server: FaultyServer) -> None:
        self.server = server
        self.url = server.url
        self.settings = IssuerSettings(url=server.url, audience=AUDIENCE)
        self.configure(issuer=server.url, jwks_uri=f"{server.url}{JWKS}")
        self.publish(make_key("first"))

    def configure(self, **configuration: object) -> None:
        """Set the discovery document."""
        self.server.objects[DISCOVERY] = json.dumps(configuration).encode()

    def publish(self, *keys: Key) -> None:
        """Set the published keys."""
        jwks = {"keys": [key.as_dict(private=False) for key in keys]}
        self.server.objects[JWKS] = json.dumps(jwks).encode()

    def reads(self, path: str = JWKS) -> int:
        """Count how often a document was read."""
        return sum(seen.path == path for seen in self.server.seen)

    def claims(self, changes: Mapping[str, object] | None = None) -> dict[str, object]:
        """Return the claims of a valid token with *changes*; `None` removes a claim."""
        good = {"iss": self.url, "aud": AUDIENCE, "sub": "ada", "exp": int(time.time()) + 60}
        said = {**good, **(changes or {})}
        return {name: value for name, value in said.items() if value is not None}

    def sign(
        self,
        changes: Mapping[str, object] | None = None,
        *,
        key: Key | None = None,
        alg: str = "RS256",
        header: Mapping[str, object] | None = None,
    ) -> str:
        """Sign claims with *key*, by default the key that is published from the start."""
        key = key or make_key("first")
        named = {"alg": alg, "kid": key.kid, **(header or {})}
        shown = {name: value for name, value in named.items() if value is not None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecurityWarning)
            return jwt.encode(shown, self.claims(changes), key, [alg])


@contextmanager
def issuing() -> Generator[Issuer]:
    """Run an issuer on a local server."""
    with FaultyServer().running() as server:
        yield Issuer(server)


def spell(document: object) -> str:
    """Encode a document as a part of a token."""
    return spell_bytes(json.dumps(document, separators=(",", ":")).encode())


def spell_bytes(data: bytes) -> str:
    """Encode bytes as a part of a token."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
