"""The public keys that an issuer signs with (JWK Set, RFC 7517)."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson
from cryptography.exceptions import UnsupportedAlgorithm
from jwt import PyJWK
from jwt.algorithms import AllowedPublicKeys
from jwt.exceptions import PyJWTError

_OF_RSA: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_OF_CURVES: Final[Mapping[str, frozenset[str]]] = {
    "P-256": frozenset({"ES256"}),
    "P-384": frozenset({"ES384"}),
    "P-521": frozenset({"ES512"}),
    "Ed25519": frozenset({"EdDSA"}),
    "Ed448": frozenset({"EdDSA"}),
}

_OF_NONE: Final = frozenset[str]()

ALGORITHMS: Final = _OF_RSA.union(*_OF_CURVES.values())
"""With these only the issuer can sign: whoever can check a signature by a secret can forge it."""


class VerificationKey(NamedTuple):
    """A public key, and the algorithms that may be used with it, whatever a token says."""

    kid: str | None
    algorithms: frozenset[str]
    key: AllowedPublicKeys


def decode_jwks(data: bytes) -> tuple[VerificationKey, ...]:
    """Decode the keys of a set that signatures can be checked with; others are for others.

    Raises: `ValueError` for what is no set of keys.
    """
    match orjson.loads(data):
        case {"keys": list(keys)}:
            decoded = [_decode(jwk) for jwk in keys if isinstance(jwk, dict)]
            return tuple(key for key in decoded if key is not None)
        case _:
            raise ValueError("what is at its jwks_uri is no set of keys")


def choose(
    keys: Iterable[VerificationKey], kid: str | None, algorithm: str
) -> VerificationKey | None:
    """Choose the key *kid* for *algorithm*; without a *kid* there has to be one that fits."""
    fitting = [key for key in keys if kid in (None, key.kid) and algorithm in key.algorithms]
    return fitting[0] if len(fitting) == 1 else None


def _decode(jwk: Mapping[str, Any]) -> VerificationKey | None:
    texts = {name: value for name, value in jwk.items() if isinstance(value, str)}
    algorithms = _algorithms(texts)
    if not algorithms or texts.get("use", "sig") != "sig" or "d" in jwk:
        return None
    try:
        key = PyJWK(texts, min(algorithms)).key
    except (PyJWTError, UnsupportedAlgorithm):
        return None
    return VerificationKey(texts.get("kid"), algorithms, key)


def _algorithms(jwk: Mapping[str, str]) -> frozenset[str]:
    """Tell what a key is for: all that its kind can, unless it says which."""
    able = _OF_RSA if jwk.get("kty") == "RSA" else _OF_CURVES.get(jwk.get("crv", ""), _OF_NONE)
    return able & {jwk["alg"]} if "alg" in jwk else able
