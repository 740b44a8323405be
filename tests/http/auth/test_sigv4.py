"""`shardgate.http.auth.sigv4`: signatures of requests."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import SignatureError
from shardgate.http.auth.access import Caller
from shardgate.http.auth.sigv4 import Signatures
from tests.http.auth.sigv4 import (
    CALLERS,
    HOST,
    KEY_ID,
    NOW,
    PLAIN,
    SECRET,
    UNSIGNED,
    Headers,
    Request,
    Scope,
    Signer,
    authorization,
    check,
    code_of,
    who,
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
    """It is good for a day, and no longer; signatures show who has signed."""
    scope = SIGNER.presigned(Request(path="/test.txt"), 86400)
    signature = b"aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"

    assert scope["query_string"].endswith(signature)
    assert who(scope) == who(scope, at=NOW + 86400) == "ann"
    assert code_of(scope, at=NOW + 86401) == "AccessDenied"
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
    [
        *(("/lab/a%20b", "/lab/a+b"), ("/lab/a%2Fb", "/lab/a/b"), ("/lab/b", "/lab/a/../b")),
        *(
            (sent, other)
            for other in ("/lab/a#b", "/lab/a\tb", "/lab/\u00fc")
            for sent in (other, other.partition("#")[0], other.replace("\t", ""))
        ),
    ],
)
def test_another_spelling_of_the_path_is_another_path(sent: str, other: str) -> None:
    """Nothing is decoded or resolved before it is compared, and what no client sends is refused."""
    scope = SIGNER.signed(Request(path=sent))

    assert code_of({**scope, "raw_path": other.encode()}) == "SignatureDoesNotMatch"


def test_repeated_headers_are_signed_in_their_order() -> None:
    """All values of one count; spaces in them count once, as the specification has it."""
    headers = (HOST, ("x-amz-meta-a", "1"), ("x-amz-meta-a", "2"))
    scope = SIGNER.signed(replace(PLAIN, headers=headers))
    assert who(scope) == "ann"
    swapped = with_header(with_header(scope, "x-amz-meta-a", "2"), "x-amz-meta-b", None)
    swapped["headers"].append((b"x-amz-meta-a", b"1"))
    assert code_of(swapped) == "SignatureDoesNotMatch"

    spaced = SIGNER.signed(replace(PLAIN, headers=(HOST, ("x-amz-meta-a", "a  b"))))
    assert who(with_header(spaced, "x-amz-meta-a", " a b ")) == "ann"


SKEWED: Final = "RequestTimeTooSkewed"
EXPIRED: Final = "AccessDenied"
NO_TIME: Final = "AuthorizationQueryParametersError"


@pytest.mark.parametrize(
    ("expires", "late_s", "code"),
    [
        *((None, late_s, None) for late_s in (-900, 0, 900)),
        *((None, late_s, SKEWED) for late_s in (-86400, -901, 901, 86400)),
        *((expires, late_s, None) for expires, late_s in ((1, 1), (1, -900), (604800, 604800))),
        *((expires, late_s, EXPIRED) for expires, late_s in ((1, 2), (1, -901))),
        *(
            (expires, 0, NO_TIME)
            for expires in ("0", "604801", "-1", "", "1.5", "9" * 50, "\u0663")
        ),
    ],
)
def test_signatures_are_good_for_a_time(
    expires: int | str | None, late_s: int, code: str | None
) -> None:
    """Clocks may differ by fifteen minutes; a URL tells how long it is good, a week at most."""
    scope = SIGNER.signed(PLAIN) if expires is None else SIGNER.presigned(PLAIN, expires)

    if code is None:
        assert who(scope, at=NOW + late_s) == "ann"
    else:
        assert code_of(scope, at=NOW + late_s) == code


def test_nobody_signs_with_the_key_of_another() -> None:
    """An unknown key costs what a known one does: only then it is refused."""
    assert code_of(Signer(secret="another").signed(PLAIN)) == "SignatureDoesNotMatch"
    assert code_of(Signer("AKID").signed(PLAIN)) == "InvalidAccessKeyId"
    assert code_of(Signer("", "").signed(PLAIN)) == "AuthorizationHeaderMalformed"
    signatures = Signatures(CALLERS, clock=lambda: NOW)
    with pytest.raises(SignatureError, match="access key id"):
        signatures.check(Signer("AKID").signed(PLAIN))
    assert signatures._derive_key.cache_info().misses == 1


@pytest.mark.parametrize("sign", [SIGNER.signed, SIGNER.presigned])
def test_the_host_is_signed(sign: Callable[[Request], Scope]) -> None:
    """What was signed for another service is not good here."""
    other = sign(replace(PLAIN, headers=(("content-type", "a/b"),)))
    other["headers"].append((b"host", b"examplebucket.s3.amazonaws.com"))

    assert code_of(other) == "AccessDenied"


@pytest.mark.parametrize(
    "payload",
    ["", "A" * 64, "a" * 63, "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD", "STREAMING-", "unsigned"],
)
def test_other_payloads_are_refused(payload: str) -> None:
    """What could not be checked would not be."""
    assert code_of(SIGNER.signed(replace(PLAIN, payload=payload))) == "InvalidArgument"


def test_what_is_signed_says_what_the_body_is() -> None:
    """A header that old versions of curl do not send; a URL says only that it is unsigned."""
    scope = SIGNER.signed(PLAIN)
    value = authorization(scope).replace("x-amz-content-sha256;", "")
    without = with_header(scope, "x-amz-content-sha256", None)
    query = "X-Amz-Content-Sha256="

    assert code_of(with_header(without, "authorization", value)) == "MissingSecurityHeader"
    assert who(SIGNER.presigned(replace(PLAIN, query=query + UNSIGNED))) == "ann"
    assert code_of(SIGNER.presigned(replace(PLAIN, query=query + "0" * 64))) == "InvalidArgument"


def test_no_secret_is_shown() -> None:
    """Neither of what was signed, nor of what it was signed with."""
    request = replace(PLAIN, method="PUT", payload="STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
    signed = check(SIGNER.signed(request))

    shown = repr(signed)
    assert "ann" in shown
    assert SECRET not in shown
    assert repr(SIGNER.key())[2:12] not in shown
    assert "key" not in shown


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
    """Signed for something else it is not good; regions are all one, whatever they are called."""
    assert code_of(signer.signed(PLAIN)) == "AuthorizationHeaderMalformed"
    for region in ("eu-central-1", "auto", "US", "x" * 64):
        assert who(Signer(region=region).signed(PLAIN)) == "ann"
        assert who(Signer(region=region).presigned(PLAIN)) == "ann"


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
    """With or without spaces between them, but no header that signatures build on comes twice."""
    scope = SIGNER.signed(PLAIN)
    algorithm, _, rest = authorization(scope).partition(" ")
    parts = rest.split(", ")
    value = f"{algorithm} {','.join(parts[at] for at in order)}"

    assert who(with_header(scope, "authorization", value)) == "ann"
    for name in (b"authorization", b"x-amz-date", b"x-amz-content-sha256", b"host"):
        repeated = (name, dict(scope["headers"])[name])
        code = code_of({**scope, "headers": [*scope["headers"], repeated]})
        assert code == "AuthorizationHeaderMalformed"


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
    assert "AWS4-HMAC-SHA256" in str(refused.value)


@pytest.mark.parametrize("value", ["Bearer token", None])
def test_a_request_is_signed_in_one_way(value: str | None) -> None:
    """By its header or its query; nor does it show other credentials besides a signed query."""
    scope = SIGNER.presigned(PLAIN)
    value = value or authorization(SIGNER.signed(PLAIN))

    assert code_of(with_header(scope, "authorization", value)) == "InvalidArgument"


PARAMETERS: Final = ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature")


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_urls_are_there_once(name: str) -> None:
    """All of them make a presigned URL, and none comes again in whatever case."""
    scope = SIGNER.presigned(PLAIN)
    query = scope["query_string"]

    for wrong in (
        query + f"&X-Amz-{name}=1".encode(),
        query + f"&x-amz-{name.lower()}=1".encode(),
        re.sub(rf"&?X-Amz-{name}=[^&]*".encode(), b"", query),
    ):
        code = code_of({**scope, "query_string": wrong})
        assert code == "AuthorizationQueryParametersError"


TEXT: Final = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="%#?"))
SPELLED: Final = st.text(st.sampled_from("abc/-_.~@+=:!*'()")).map(lambda text: "/" + text)
PAIRS: Final = st.lists(
    st.tuples(st.sampled_from("abcde"), st.text("xyz19-_.~", max_size=5)), max_size=3
)
REQUESTS: Final = st.builds(
    Request,
    st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    SPELLED,
    PAIRS.map(lambda pairs: "&".join(f"{k}={v}" for k, v in pairs)),
    st.builds(lambda v: (HOST, ("content-type", "a/b"), ("x-amz-meta-a", v)), TEXT),
)


@given(REQUESTS, st.sampled_from([SIGNER.signed, SIGNER.presigned]), st.data())
def test_no_letter_of_a_request_can_be_changed(
    request_: Request, sign: Callable[[Request], Scope], data: st.DataObject
) -> None:
    """Of the method, the path, the query and signed headers; the signature is included."""
    scope = sign(request_)
    headers = dict(scope["headers"])
    part = data.draw(
        st.sampled_from(["method", "raw_path", "query_string", *headers]).filter(
            lambda part: headers.get(part, scope.get(part))
        )
    )
    old = headers[part].decode() if part in headers else scope[part]
    text = old if isinstance(old, str) else old.decode()
    start = len("AWS4") if part == b"authorization" else 0
    at = data.draw(st.integers(start, len(text) - 1))
    new = text[:at] + data.draw(st.sampled_from("q5").filter(text[at].__ne__)) + text[at + 1 :]
    if part in headers:
        changed = with_header(scope, part.decode(), new)
    else:
        changed = {**scope, part: new if part == "method" else new.encode()}

    assert who(scope) == "ann"
    code_of(changed)


def test_nothing_is_added_or_left_out() -> None:
    """Neither of the path and the query nor of the headers, signed or not."""
    named = (HOST, ("content-type", "a/b"), ("x-amz-meta-a", "1"))
    scope = SIGNER.signed(replace(PLAIN, query="a=1", headers=named))
    headers, value = scope["headers"], authorization(scope)
    assert who(scope) == "ann"

    for changed in (
        *(
            {**scope, "raw_path": path}
            for path in (b"/lab/c/0/0x", b"/lab/c/0/0%20", b"//lab/c/0/0")
        ),
        *({**scope, "query_string": query} for query in (b"a=1&z=1", b"a=1&acl", b"a=10", b"")),
        *(
            {**scope, "headers": [*headers, more]}
            for more in ((b"x-amz-meta-b", b"1"), (b"content-type", b"a/b"))
        ),
        *({**scope, "headers": headers[:at] + headers[at + 1 :]} for at in range(len(headers) - 1)),
        with_header(scope, "authorization", value.replace("content-type;", "")),
        with_header(scope, "authorization", value.replace(KEY_ID, "B0B")),
        with_header(scope, "x-amz-content-sha256", UNSIGNED),
    ):
        code_of(changed)


@given(REQUESTS, TEXT, TEXT)
def test_headers_that_are_not_signed_may_change(request_: Request, old: str, new: str) -> None:
    """Proxies add and change some."""
    unsigned: Headers = [("range", old), ("user-agent", "any")]
    scope = SIGNER.signed(request_, unsigned=unsigned)

    assert who(scope) == "ann"
    assert who(with_header(scope, "range", new)) == "ann"
    assert who(with_header(scope, "user-agent", "\u00fc")) == "ann"
