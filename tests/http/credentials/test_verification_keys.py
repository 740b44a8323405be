"""`app.http.credentials.verification_keys`: which keys of a set are good for what."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.credentials.verification_keys import (
    ALGORITHMS,
    VerificationKey,
    choose,
    decode_jwks,
)
from tests.http.credentials.issuing import make_key


def decode(*jwks: object) -> tuple[VerificationKey, ...]:
    """Decode a set of these keys."""
    return decode_jwks(json.dumps({"keys": jwks}).encode())


def public(kid: str = "first", kind: str = "RSA", **members: object) -> dict[str, Any]:
    """Write a public key with further *members*."""
    return {**make_key(kid, kind).as_dict(private=False), **members}


@pytest.mark.parametrize(
    ("kind", "algorithms"),
    [
        ("RSA", {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
        ("P-256", {"ES256"}),
        ("P-384", {"ES384"}),
        ("P-521", {"ES512"}),
        ("Ed25519", {"EdDSA"}),
        ("Ed448", {"EdDSA"}),
    ],
)
def test_a_key_tells_the_algorithms(kind: str, algorithms: set[str]) -> None:
    """Not the token that is to be checked with it."""
    (key,) = decode(public(kind=kind))

    assert key.kid == "first"
    assert key.algorithms == algorithms


def test_a_key_may_be_for_one_algorithm() -> None:
    """What it declares is all that it is good for."""
    (key,) = decode(public(alg="PS256"))

    assert key.algorithms == {"PS256"}


@pytest.mark.parametrize(
    "jwk",
    [
        {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "alg": "HS256"},
        {"kty": "oct", "k": "c2VjcmV0", "crv": "P-256"},
        public(use="enc"),
        public(alg="RSA-OAEP"),
        public(alg="HS256"),
        public(alg="none"),
        public(n=5),
        public(e="!"),
        {"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
        make_key("first").as_dict(private=True),
        {"kty": ["RSA"]},
        {},
        7,
        None,
    ],
)
def test_a_key_that_is_not_for_this_is_passed_over(jwk: object) -> None:
    """Secrets, keys to encrypt with, what cannot be decoded, and private keys."""
    kept = public("second")

    assert [key.kid for key in decode(jwk, kept)] == ["second"]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"keys": {}}', b"<html>", b"[" * 100_000, b"\xff"]
)
def test_what_is_no_set_of_keys_is_refused(data: bytes) -> None:
    """It is an issuer that does not work, and not one without keys."""
    with pytest.raises(ValueError, match=r"."):
        decode_jwks(data)


def test_a_key_is_chosen_by_its_name_and_algorithm() -> None:
    """A key of another kind that has the name is not the one."""
    keys = decode(public("a"), public("b"), public("b", "P-256"))

    assert choose(keys, "b", "ES256") == keys[2]
    assert choose(keys, "b", "RS512") == keys[1]
    assert choose(keys, "a", "ES256") is None
    assert choose(keys, "c", "RS256") is None


def test_a_token_without_kid_needs_a_set_with_one_key() -> None:
    """Of several it would not say which."""
    keys = decode(public("a"), public("b"), public("c", "P-256"))

    assert choose(keys, None, "ES256") == keys[2]
    assert choose(keys, None, "RS256") is None


VALUES = st.none() | st.integers() | st.text(max_size=12) | st.lists(st.text(), max_size=2)
MEMBERS = st.sampled_from(["kty", "crv", "alg", "use", "kid", "n", "e", "x", "y"])
KINDS = st.sampled_from(["RSA", "P-256", "Ed25519", "Ed448"])


@given(KINDS, st.dictionaries(MEMBERS, VALUES))
def test_no_key_is_too_odd(kind: str, members: dict[str, object]) -> None:
    """It is passed over, or is good for nothing but what only its owner can do."""
    for key in decode({**public("first", kind), **members}):
        assert key.algorithms <= ALGORITHMS
