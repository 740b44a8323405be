"""`app.http.credentials.claimed_signatures`: what is no signature that could be right."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from app.errors import SignatureError
from tests.http.credentials.checking import check, code_of, who
from tests.http.credentials.sigv4 import (
    KEY_ID,
    PLAIN,
    Scope,
    Signer,
    authorization,
    with_header,
)

SIGNER: Final = Signer()


@pytest.mark.parametrize(
    "signer",
    [
        Signer(service="s3-object-lambda"),
        Signer(terminal="aws5_request"),
        Signer(region=""),
        Signer(region="x" * 65),
        Signer(timestamp="2013-05-24T00:00:00Z"),
        Signer(timestamp="20131324T000000Z"),
        Signer(timestamp="20130524T0000\u0663\u0663Z"),
    ],
)
def test_other_scopes_are_refused(signer: Signer) -> None:
    """What is signed for something else is not good here."""
    assert code_of(signer.signed(PLAIN)) == "AuthorizationHeaderMalformed"


def test_the_day_of_the_key_is_that_of_the_request() -> None:
    """Else the key of a day could be used on others."""
    scope = SIGNER.signed(PLAIN)
    value = authorization(scope).replace("20130524", "20130523")

    assert code_of(with_header(scope, "authorization", value)) == "AuthorizationHeaderMalformed"


MALFORMED: Final[list[tuple[str, str]]] = [
    (", Signature=", ", Signature=0"),
    ("Signature=", "Signature=A"),
    (", SignedHeaders=", ", SignedHeader="),
    (", SignedHeaders=host;", ", SignedHeaders=host;host;"),
    (", SignedHeaders=host;", ", SignedHeaders=Host;"),
    (", SignedHeaders=host;x-amz-content-sha256", ", SignedHeaders=x-amz-content-sha256;host"),
    ("Credential=", f"Credential={KEY_ID}, Credential="),
    ("/aws4_request", ""),
    ("/us-east-1", "/us\teast-1"),
    (", ", " "),
]


@pytest.mark.parametrize(("old", "new"), MALFORMED)
def test_malformed_headers_are_refused(old: str, new: str) -> None:
    """Each has one spelling, in which each part is once."""
    scope = SIGNER.signed(PLAIN)
    value = authorization(scope)
    assert old in value

    broken = with_header(scope, "authorization", value.replace(old, new, 1))
    assert code_of(broken) == "AuthorizationHeaderMalformed"


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)])
def test_the_parts_of_the_header_come_in_any_order(order: tuple[int, ...]) -> None:
    """With or without spaces between them, as clients differ."""
    scope = SIGNER.signed(PLAIN)
    algorithm, _, rest = authorization(scope).partition(" ")
    parts = rest.split(", ")
    value = f"{algorithm} {','.join(parts[at] for at in order)}"

    assert who(with_header(scope, "authorization", value)) == "ann"


@pytest.mark.parametrize(
    ("scope", "what"),
    [
        (PLAIN.scope(("authorization", "AWS AKID:c2lnbmF0dXJl")), "AWS"),
        (replace(PLAIN, query="AWSAccessKeyId=A&Signature=b&Expires=1").scope(), "Version 2"),
        (PLAIN.scope(("authorization", "AWS4-ECDSA-P256-SHA256 Credential=A")), "ECDSA"),
        (
            replace(
                PLAIN,
                query="X-Amz-Algorithm=AWS4-ECDSA-P256-SHA256&X-Amz-Credential=A&X-Amz-Date=1"
                "&X-Amz-Expires=1&X-Amz-SignedHeaders=host&X-Amz-Signature=a",
            ).scope(),
            "ECDSA",
        ),
        (PLAIN.scope(("authorization", "aws4-hmac-sha256 Credential=A")), "aws4"),
    ],
)
def test_other_ways_to_sign_are_refused_by_their_name(scope: Scope, what: str) -> None:
    """Older ones are weak, and newer ones not served."""
    with pytest.raises(SignatureError, match=what) as refused:
        check(scope)

    assert refused.value.code == "InvalidRequest"


@pytest.mark.parametrize("value", ["Bearer token", None])
def test_a_request_is_signed_in_one_way(value: str | None) -> None:
    """By its header or its query; nor does it show other credentials besides a signed query."""
    scope = SIGNER.presigned(PLAIN)
    value = value or authorization(SIGNER.signed(PLAIN))

    assert code_of(with_header(scope, "authorization", value)) == "InvalidArgument"


@pytest.mark.parametrize("name", ["authorization", "x-amz-date", "x-amz-content-sha256", "host"])
def test_what_signatures_build_on_is_not_repeated(name: str) -> None:
    """Whoever reads the first would do something else than who reads the last."""
    scope = SIGNER.signed(PLAIN)
    value = dict(scope["headers"])[name.encode()]

    repeated = {**scope, "headers": [*scope["headers"], (name.encode(), value)]}
    assert code_of(repeated) == "AuthorizationHeaderMalformed"


PARAMETERS: Final = ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature")


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("spell", [str, str.lower])
def test_nor_are_parameters(name: str, spell: Callable[[str], str]) -> None:
    """In whatever case."""
    scope = SIGNER.presigned(PLAIN)
    query = scope["query_string"]

    repeated = query + f"&{spell('X-Amz-' + name)}=1".encode()
    assert code_of({**scope, "query_string": repeated}) == "AuthorizationQueryParametersError"


@pytest.mark.parametrize("name", PARAMETERS)
def test_nor_is_any_missing(name: str) -> None:
    """All of them make a presigned URL."""
    scope = SIGNER.presigned(PLAIN)
    query = re.sub(rf"&?X-Amz-{name}=[^&]*".encode(), b"", scope["query_string"])

    assert code_of({**scope, "query_string": query}) == "AuthorizationQueryParametersError"
