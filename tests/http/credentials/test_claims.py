"""`app.http.credentials.claims`: the rules that claims keep."""

from typing import Any

import pytest

from app.http.credentials.claims import grants

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
    "object": {"em": True},
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
        ("object", set()),
        ("nothing", set()),
        ("missing", set()),
        ("realm_access.groups", set()),
        ("groups.lab", set()),
        ("resource_access.roles.deep", set()),
        ("", set()),
        (".", set()),
    ],
)
def test_the_values_of_a_claim_are_granted(name: str, values: set[str]) -> None:
    """Only scopes are split at spaces; a path leads within, and a whole name comes first."""
    assert grants("sso", CLAIMS, [name]) == {"public", *(f"sso:{value}" for value in values)}


def test_the_values_of_several_claims_are_granted_together() -> None:
    """A rule is kept by any of them."""
    assert {"sso:em", "sso:lab"} <= grants("sso", CLAIMS, ["scope", "groups"])


@pytest.mark.parametrize("value", ["~em", "other:admin", "bob", "public", ":", "", "other:~em"])
def test_an_issuer_grants_in_its_own_name_only(value: str) -> None:
    """Whatever it says, no rule of another issuer, of a caller, or of ours is kept by it."""
    granted = grants("sso", {"groups": [value]}, ["groups"]) - {"public"}

    assert granted == {f"sso:{value}"}
