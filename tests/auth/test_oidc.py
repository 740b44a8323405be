"""`shardgate.auth.oidc`: tokens, keys and claims of issuers."""

import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from shardgate.auth.oidc import IDENTITY_S, LEEWAY_S, Issuers, grants
from shardgate.errors import UnauthenticatedError
from shardgate.settings import IssuerSettings
from tests.support.auth.issuing import Issuer, issuing, make_key, spell, spell_bytes

KINDS = dict.fromkeys(("first", "second"), "RSA") | {"p256": "P-256", "p384": "P-384"}
KINDS |= {"p521": "P-521", "ed": "Ed25519"}
"""Kinds of the issuer's keys by their ids."""


@pytest.fixture(scope="module")
def issuer() -> Generator[Issuer]:
    """Run an issuer with keys of several kinds."""
    with issuing() as issuer:
        issuer.publish(*(make_key(kid, kind) for kid, kind in KINDS.items()))
        yield issuer


@pytest.fixture
async def issuers(issuer: Issuer) -> AsyncGenerator[Issuers]:
    """Open the checker of this issuer's tokens."""
    async with aclosing(Issuers({"sso": issuer.settings}, timeout_s=5)) as issuers:
        yield issuers


async def refusal(issuers: Issuers, token: str) -> str:
    """Return the error with which *token* is refused."""
    with pytest.raises(UnauthenticatedError) as caught:
        await issuers.identify(token)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kid", "alg"),
    [
        *(("first", alg) for alg in ("RS256", "RS512", "PS256", "PS384", "PS512")),
        *(("second", "RS384"), ("p256", "ES256"), ("p384", "ES384"), ("p521", "ES512")),
        ("ed", "EdDSA"),
    ],
)
async def test_signed_token_is_accepted(
    issuer: Issuer, issuers: Issuers, kid: str, alg: str
) -> None:
    """A token that the issuer signed, with any public-key algorithm, identifies its subject."""
    known = await issuers.identify(issuer.sign(key=make_key(kid, KINDS[kid]), alg=alg))

    assert known is not None
    assert known.caller.name == "sso:ada"


async def test_claims_are_granted(issuer: Issuer, issuers: Issuers) -> None:
    """A token grants the values of the configured claims, and `public`, until it expires."""
    expires = int(time.time()) + 30
    said = {"scope": "openid em", "groups": ["lab"], "roles": ["admin"], "exp": expires}
    known = await issuers.identify(issuer.sign(said))

    assert known is not None
    assert known.caller.grants == {*("public", "sso:openid", "sso:em", "sso:lab", "sso:group=lab")}
    assert known.until_s == expires + LEEWAY_S


@pytest.mark.parametrize(
    ("claims", "kind"),
    [
        ({"aud": ["other", "shardgate"]}, "JWT"),
        ({"aud": "shardgate"}, "jwt"),
        ({}, "at+jwt"),
        ({}, "application/at+jwt"),
        ({"exp": -LEEWAY_S // 2}, None),
        ({"nbf": LEEWAY_S // 2}, None),
        ({"iat": LEEWAY_S // 2}, None),
        ({"exp": 10**6}, None),
        ({"exp": str(int(time.time()) + 10**6)}, None),
    ],
)
async def test_valid_token_is_accepted(
    issuer: Issuer, issuers: Issuers, claims: dict[str, Any], kind: str | None
) -> None:
    """A token (RFC 7519, 9068) is accepted with valid times, within the leeway, and audience."""
    now = int(time.time())
    at = {k: now + v if isinstance(v, int) else v for k, v in claims.items()}
    known = await issuers.identify(issuer.sign(at, header={"typ": kind}))

    assert known is not None
    assert known.until_s <= time.time() + IDENTITY_S


JSON: st.SearchStrategy[object] = st.sampled_from(
    [None, True, 0, -1.5, 1e400, 10**400, "", "RS256", "none", "é", [], ["b64"], {}, {"a": {}}]
)


@settings_of_hypothesis(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    header=st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64", "jwk"]), JSON),
    claims=st.dictionaries(st.sampled_from(["exp", "aud", "sub", "nbf", "groups"]), JSON),
    signature=st.binary(max_size=8),
)
async def test_malformed_token_raises_only_unauthenticated(
    issuer: Issuer,
    issuers: Issuers,
    header: dict[str, object],
    claims: dict[str, object],
    signature: bytes,
) -> None:
    """A token with arbitrary headers and claims is refused or unknown, and raises nothing else."""
    said = {**issuer.claims(), **claims}
    named = {"alg": "RS256", "kid": "first", **header}
    token = f"{spell(named)}.{spell(said)}.{spell_bytes(signature)}"

    with suppress(UnauthenticatedError):
        assert await issuers.identify(token) is None


@pytest.mark.parametrize(
    "token",
    [
        *("", "opaque", "a.b", "a.b.c", "..", "a.b.c.d.e", "é.é.é", "[" * 5000),
        *(
            f"{spell({'alg': 'RS256'})}.{spell(claims)}.AAAA"
            for claims in ([], {}, *({"iss": iss} for iss in (["sso"], "sso", "https://x.example")))
        ),
    ],
)
async def test_token_of_another_issuer_is_unknown(issuers: Issuers, token: str) -> None:
    """A token that names no configured issuer is unknown, and not refused."""
    assert await issuers.identify(token) is None


async def test_issuers_do_not_speak_for_each_other(issuer: Issuer) -> None:
    """A token of one issuer that another has signed is refused; with a slash more it is another."""
    async with aclosing(Issuers({"sso": issuer.settings})) as issuers:
        assert "has a slash at the end" in await refusal(
            issuers, issuer.sign({"iss": f"{issuer.url}/"})
        )
    with issuing() as other:
        other.publish(make_key("theirs"))
        settings = {"sso": issuer.settings, "other": other.settings}
        async with aclosing(Issuers(settings)) as issuers:
            known = await issuers.identify(other.sign({"groups": ["em"]}, key=make_key("theirs")))
            forged = other.sign({"iss": issuer.url}, key=make_key("theirs"))

            assert known is not None
            assert known.caller.grants == {"public", "other:em", "other:group=em"}
            assert "does not have" in await refusal(issuers, forged)


CLAIMS: dict[str, Any] = {
    "scope": "openid em write:em",
    "groups": ["lab", "data team"],
    "group": "data team",
    "realm_access": {"roles": ["admin"]},
    "resource_access": {"my.client": {"roles": ["reader"]}, "roles": 7},
    "https://lab.example/roles": ["writer"],
    "https://lab": {"example/roles": ["wrong"]},
    "mixed": ["a", 5, None, ["b"], {"c": "d"}, ""],
    "number": 5,
    "object": {"em": True, "old": False, "gone": None, "": {}},
    "nothing": None,
}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scope", {"openid", "em", "write:em"}),
        ("groups", {"lab", "data team"}),
        ("group", {"data team"}),
        ("realm_access.roles", {"admin"}),
        ("resource_access.my.client.roles", {"reader"}),
        ("https://lab.example/roles", {"writer"}),
        ("mixed", {"a", ""}),
        ("number", set()),
        ("object", {"em"}),
        ("nothing", set()),
        ("missing", set()),
        ("realm_access.groups", set()),
        ("groups.lab", set()),
        ("resource_access.roles.deep", set()),
        ("", set()),
        (".", set()),
    ],
)
def test_claim_values_are_granted(name: str, values: set[str]) -> None:
    """Strings and keys of a claim are granted, scopes by words; a dotted name is a path."""
    groups = {"group=lab", "group=data team"}
    assert grants("sso", CLAIMS, [name]) == {
        *("public", *(f"sso:{value}" for value in values | groups))
    }


@pytest.mark.parametrize(
    ("claims", "granted"),
    [
        ({"groups": ["lab", 5, "a=b"]}, {"sso:group=lab", "sso:group=a=b"}),
        ({"groups": "lab"}, {"sso:group=lab"}),
        ({"email": 5, "email_verified": True}, set()),
        ({"email": ["ada@a.example"], "email_verified": True}, set()),
        ({"nickname": ["email=ada@a.example", "group=lab", "Ada"]}, {"sso:Ada"}),
        ({"nickname": "group=lab", "groups": []}, set()),
    ],
)
def test_groups_and_addresses_are_told_from_other_claims(
    claims: dict[str, object], granted: set[str]
) -> None:
    """Groups and verified addresses fulfil rules of their own, which no other claim fulfils."""
    assert grants("sso", claims, ["nickname"]) == {"public"} | granted


@pytest.mark.parametrize(
    ("verified", "is_granted", "is_granted_if_assumed"),
    [
        (True, True, True),
        ("true", True, True),
        (None, False, True),
        (False, False, False),
        ("false", False, False),
        ("", False, False),
        (1, False, False),
    ],
)
async def test_verified_address_is_granted(
    verified: object, *, is_granted: bool, is_granted_if_assumed: bool
) -> None:
    """An address is granted if it is verified, or if the settings assume that."""
    claims = {"sub": "ada", "email": "ada@a.example", "email_verified": verified}
    settings = {
        "claim": IssuerSettings(url="https://claim.example", audience="a"),
        "assumed": IssuerSettings(
            url="https://assumed.example", audience="a", email_verified="assumed"
        ),
    }
    async with aclosing(Issuers(settings)) as issuers:
        granted = {name: issuers.by_name[name].caller_of(claims).grants for name in settings}

    assert ("claim:email=ada@a.example" in granted["claim"]) is is_granted
    assert ("assumed:email=ada@a.example" in granted["assumed"]) is is_granted_if_assumed
