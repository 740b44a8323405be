"""`app.http.credentials.signatures`: which requests are signed rightly, and why others are not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from app.errors import SignatureError
from app.http.credentials.caller import Caller
from app.http.credentials.signatures import Signatures
from tests.http.credentials.checking import CALLERS, check, code_of, who
from tests.http.credentials.sigv4 import (
    HOST,
    NOW,
    PLAIN,
    SECRET,
    UNSIGNED,
    Request,
    Scope,
    Signer,
    authorization,
    with_header,
)

ANN: Final = Caller("ann", frozenset({"public", "ann"}))
SIGNER: Final = Signer()


@pytest.mark.parametrize(
    ("request_", "signature"),
    [
        (
            Request(path="/test.txt", headers=(HOST, ("range", "bytes=0-9"))),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            Request(
                "PUT",
                "/test%24file.text",
                headers=(
                    HOST,
                    ("date", "Fri, 24 May 2013 00:00:00 GMT"),
                    ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
                ),
                payload="44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
            ),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            Request(path="/", query="lifecycle"),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            Request(path="/", query="max-keys=2&prefix=J"),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_examples_of_the_specification(request_: Request, signature: str) -> None:
    """The signatures that Amazon publishes as examples are right, and are what tests sign."""
    scope = SIGNER.signed(request_)

    assert authorization(scope).endswith(signature)
    assert who(scope) == "ann"


def test_the_presigned_example_of_the_specification() -> None:
    """So is that of a URL which is good for a day, and no longer."""
    scope = SIGNER.presigned(Request(path="/test.txt"), 86400)

    signature = b"aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    assert scope["query_string"].endswith(signature)
    assert who(scope) == who(scope, at=NOW + 86400) == "ann"
    assert code_of(scope, at=NOW + 86401) == "AccessDenied"


def test_callers_keep_the_rules_that_name_them() -> None:
    """What a signature shows is who has signed."""
    signed = check(SIGNER.signed(PLAIN))

    assert signed is not None
    assert signed.caller == ANN
    assert who(Signer("B0B", "another").signed(PLAIN)) == "bob"


@pytest.mark.parametrize(
    "scope",
    [
        PLAIN.scope(),
        PLAIN.scope(("authorization", "Bearer AWS4")),
        PLAIN.scope(("authorization", "")),
        replace(PLAIN, query="prefix=X-Amz-Signature=1&list-type=2").scope(),
    ],
)
def test_what_is_not_signed_is_somebody_elses_matter(scope: Scope) -> None:
    """There is nothing to check where no signature of S3 is."""
    assert check(scope) is None


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/lab/a%20b", ""),
        ("/lab/%C3%BC/%2B/%3D/%40branch.a%252Fb/c/0", ""),
        ("/lab/a%2Fb", ""),
        ("/lab/@branch.a%2Fb/(c)", ""),
        ("/lab//a/../b/./", ""),
        ("//lab", ""),
        ("/lab", "list-type=2&prefix=a+b%2F*~&delimiter=/"),
        ("/lab", "list-type=2&prefix=&delimiter=%2F&encoding-type=url"),
        ("/lab/k", "uploads"),
        ("/lab/k", "uploadId=a%3Db&partNumber=1"),
        ("/lab", "b=2&a=1&b=1&a=%C3%BC&A=3&"),
    ],
)
@pytest.mark.parametrize("sign", [SIGNER.signed, SIGNER.presigned])
def test_paths_are_signed_as_they_are_sent(
    path: str, query: str, sign: Callable[[Request], Scope]
) -> None:
    """And parameters by what they mean, however they are spelled."""
    assert who(sign(Request(path=path, query=query))) == "ann"


@pytest.mark.parametrize(
    ("sent", "other"),
    [("/lab/a%20b", "/lab/a+b"), ("/lab/a%2Fb", "/lab/a/b"), ("/lab/b", "/lab/a/../b")],
)
def test_another_spelling_of_the_path_is_another_path(sent: str, other: str) -> None:
    """Nothing is decoded or resolved before it is compared."""
    scope = SIGNER.signed(Request(path=sent))

    assert code_of({**scope, "raw_path": other.encode()}) == "SignatureDoesNotMatch"


def test_spaces_in_headers_count_once() -> None:
    """As the specification has it."""
    scope = SIGNER.signed(replace(PLAIN, headers=(HOST, ("x-amz-meta-a", "a  b"))))

    assert who(with_header(scope, "x-amz-meta-a", " a b ")) == "ann"


def test_repeated_headers_are_signed_in_their_order() -> None:
    """All values of one count."""
    headers = (HOST, ("x-amz-meta-a", "1"), ("x-amz-meta-a", "2"))
    scope = SIGNER.signed(replace(PLAIN, headers=headers))

    assert who(scope) == "ann"
    swapped = with_header(with_header(scope, "x-amz-meta-a", "2"), "x-amz-meta-b", None)
    swapped["headers"].append((b"x-amz-meta-a", b"1"))
    assert code_of(swapped) == "SignatureDoesNotMatch"


@pytest.mark.parametrize("late_s", [-900, 0, 900])
def test_clocks_may_differ_by_fifteen_minutes(late_s: int) -> None:
    """Either way."""
    assert who(SIGNER.signed(PLAIN), at=NOW + late_s) == "ann"


@pytest.mark.parametrize("late_s", [-86400, -901, 901, 86400])
def test_clocks_may_not_differ_by_more(late_s: int) -> None:
    """So long can a request be replayed, and no longer."""
    assert code_of(SIGNER.signed(PLAIN), at=NOW + late_s) == "RequestTimeTooSkewed"


@pytest.mark.parametrize(
    ("expires", "late_s", "is_good"),
    [(1, 1, True), (1, 2, False), (1, -900, True), (1, -901, False), (604800, 604800, True)],
)
def test_presigned_urls_are_good_for_as_long_as_they_say(
    expires: int, late_s: int, *, is_good: bool
) -> None:
    """From the time that they were signed at, whoever's clock is late."""
    scope = SIGNER.presigned(PLAIN, expires)

    if is_good:
        assert who(scope, at=NOW + late_s) == "ann"
    else:
        assert code_of(scope, at=NOW + late_s) == "AccessDenied"


@pytest.mark.parametrize("expires", ["0", "604801", "-1", "", "1.5", "9" * 50, "\u0663"])
def test_presigned_urls_are_good_for_a_week_at_most(expires: str) -> None:
    """And for some time at least."""
    assert code_of(SIGNER.presigned(PLAIN, expires)) == "AuthorizationQueryParametersError"


def test_nobody_signs_with_the_key_of_another() -> None:
    """Nor with one that nobody has."""
    assert code_of(Signer(secret="another").signed(PLAIN)) == "SignatureDoesNotMatch"
    assert code_of(Signer("AKID").signed(PLAIN)) == "InvalidAccessKeyId"
    assert code_of(Signer("", "").signed(PLAIN)) == "AuthorizationHeaderMalformed"


def test_an_unknown_key_costs_what_a_known_one_costs() -> None:
    """Its signature is computed too: only then is it refused."""
    signatures = Signatures(CALLERS, clock=lambda: NOW)
    with pytest.raises(SignatureError, match="nobody"):
        signatures.check(Signer("AKID").signed(PLAIN))

    assert signatures._derive_key.cache_info().misses == 1


def test_keys_of_a_day_are_made_once() -> None:
    """That is a fifth of the cost of a check."""
    signatures = Signatures(CALLERS, clock=lambda: NOW)
    for path in ("/lab/a", "/lab/b"):
        signatures.check(SIGNER.signed(Request(path=path)))

    assert signatures._derive_key.cache_info().misses == 1


@pytest.mark.parametrize("region", ["eu-central-1", "auto", "US", "x" * 64])
def test_any_region_may_be_signed_for(region: str) -> None:
    """There is but one here, whatever clients call it."""
    assert who(Signer(region=region).signed(PLAIN)) == "ann"
    assert who(Signer(region=region).presigned(PLAIN)) == "ann"


@pytest.mark.parametrize("sign", [SIGNER.signed, SIGNER.presigned])
@pytest.mark.parametrize("name", ["x-amz-copy-source", "x-amz-meta-a", "x-amz-trailer"])
def test_headers_of_amazon_are_signed(name: str, sign: Callable[[Request], Scope]) -> None:
    """They mean too much for others to add them."""
    scope = sign(PLAIN)
    scope["headers"].append((name.encode(), b"1"))

    assert code_of(scope) == "AccessDenied"


@pytest.mark.parametrize("sign", [SIGNER.signed, SIGNER.presigned])
def test_the_host_is_signed(sign: Callable[[Request], Scope]) -> None:
    """What was signed for another service is not good here."""
    other = sign(replace(PLAIN, headers=(("content-type", "a/b"),)))
    other["headers"].append((b"host", b"examplebucket.s3.amazonaws.com"))

    assert code_of(other) == "AccessDenied"


def test_signed_headers_are_there() -> None:
    """One that was taken away on the way is told of by its name."""
    scope = SIGNER.signed(replace(PLAIN, headers=(HOST, ("content-type", "a/b"))))

    with pytest.raises(SignatureError, match="content-type"):
        check(with_header(scope, "content-type", None))


@pytest.mark.parametrize(
    "payload",
    ["", "A" * 64, "a" * 63, "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD", "STREAMING-", "unsigned"],
)
def test_other_payloads_are_refused(payload: str) -> None:
    """What could not be checked would not be."""
    assert code_of(SIGNER.signed(replace(PLAIN, payload=payload))) == "InvalidArgument"


def test_a_signed_header_says_what_the_body_is() -> None:
    """One without it, as old versions of curl send, is refused with S3's name for that."""
    scope = SIGNER.signed(PLAIN)
    value = authorization(scope).replace("x-amz-content-sha256;", "")
    without = with_header(scope, "x-amz-content-sha256", None)

    assert code_of(with_header(without, "authorization", value)) == "MissingSecurityHeader"


def test_a_presigned_url_says_only_that_its_body_is_not_signed() -> None:
    """As Amazon's library for JavaScript lets it say; a digest there would not be compared."""
    query = "X-Amz-Content-Sha256="

    assert who(SIGNER.presigned(replace(PLAIN, query=query + UNSIGNED))) == "ann"
    assert code_of(SIGNER.presigned(replace(PLAIN, query=query + "0" * 64))) == "InvalidArgument"


@pytest.mark.parametrize("path", ["/lab/a#b", "/lab/a\tb", "/lab/\u00fc"])
def test_paths_that_no_client_sends_are_refused(path: str) -> None:
    """They would be signed as other paths."""
    for signed in (path, path.partition("#")[0], path.replace("\t", "")):
        scope = {**SIGNER.signed(Request(path=signed)), "raw_path": path.encode()}

        assert code_of(scope) == "SignatureDoesNotMatch"


def test_no_secret_is_shown() -> None:
    """Neither of what was signed, nor of what it was signed with."""
    request = replace(PLAIN, method="PUT", payload="STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
    signed = check(SIGNER.signed(request))

    shown = repr(signed)
    assert "ann" in shown
    assert SECRET not in shown
    assert repr(SIGNER.key())[2:12] not in shown
    assert "key" not in shown
