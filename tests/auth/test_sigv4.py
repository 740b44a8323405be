"""`shardgate.auth.sigv4`: signatures of requests."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.auth import sigv4
from shardgate.auth.access import Caller
from shardgate.auth.sigv4 import Signatures
from shardgate.errors import SignatureError
from tests.support.auth.sigv4 import (
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
    check_by,
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
def test_signatures_equal_the_published_examples(request_: Request, signature: str) -> None:
    """Amazon's example requests get the published signatures, and are accepted."""
    scope = SIGNER.signed(request_)

    assert authorization(scope).endswith(signature)
    assert who(scope) == "ann"


def test_presigned_example_is_accepted_for_a_day() -> None:
    """The published presigned URL is accepted for a day; each key identifies its own caller."""
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
def test_unsigned_request_has_no_caller(scope: Scope) -> None:
    """A request without a signature has no caller."""
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
def test_path_is_signed_as_sent(path: str, query: str, sign: Callable[[Request], Scope]) -> None:
    """A path is signed as it is sent, and a query by its decoded parameters, in any order."""
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
def test_other_spelling_of_a_signed_path_is_refused(sent: str, other: str) -> None:
    """Another spelling of a signed path fails with SignatureDoesNotMatch."""
    scope = SIGNER.signed(Request(path=sent))

    assert code_of({**scope, "raw_path": other.encode()}) == "SignatureDoesNotMatch"


def test_repeated_headers_are_signed_in_their_order() -> None:
    """Values of a repeated header are signed in their order, with runs of spaces as one."""
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
def test_signature_expires(expires: int | str | None, late_s: int, code: str | None) -> None:
    """A signature counts for fifteen minutes around its time, a URL for a week at most."""
    scope = SIGNER.signed(PLAIN) if expires is None else SIGNER.presigned(PLAIN, expires)

    if code is None:
        assert who(scope, at=NOW + late_s) == "ann"
    else:
        assert code_of(scope, at=NOW + late_s) == code


def test_wrong_or_unknown_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong secret and an unknown key id have S3's codes; a key is derived for the latter too."""
    assert code_of(Signer(secret="another").signed(PLAIN)) == "SignatureDoesNotMatch"
    assert code_of(Signer("AKID").signed(PLAIN)) == "InvalidAccessKeyId"
    assert code_of(Signer("", "").signed(PLAIN)) == "AuthorizationHeaderMalformed"
    derive = Mock(wraps=sigv4.derive_key)
    monkeypatch.setattr(sigv4, "derive_key", derive)
    signatures = Signatures(CALLERS, clock=lambda: NOW)
    with pytest.raises(SignatureError, match="access key id"):
        check_by(signatures, Signer("AKID").signed(PLAIN))
    derive.assert_called_once()


@pytest.mark.parametrize("sign", [SIGNER.signed, SIGNER.presigned])
def test_unsigned_host_is_refused(sign: Callable[[Request], Scope]) -> None:
    """A signature that does not include the Host fails with AccessDenied."""
    other = sign(replace(PLAIN, headers=(("content-type", "a/b"),)))
    other["headers"].append((b"host", b"examplebucket.s3.amazonaws.com"))

    assert code_of(other) == "AccessDenied"


@pytest.mark.parametrize(
    "payload",
    ["", "A" * 64, "a" * 63, "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD", "STREAMING-", "unsigned"],
)
def test_unknown_payload_hash_is_refused(payload: str) -> None:
    """A payload hash that is neither a digest nor a known keyword fails with InvalidArgument."""
    assert code_of(SIGNER.signed(replace(PLAIN, payload=payload))) == "InvalidArgument"


def test_signed_request_needs_a_payload_hash() -> None:
    """A payload hash is needed (MissingSecurityHeader); a URL may declare UNSIGNED-PAYLOAD only."""
    scope = SIGNER.signed(PLAIN)
    value = authorization(scope).replace("x-amz-content-sha256;", "")
    without = with_header(scope, "x-amz-content-sha256", None)
    query = "X-Amz-Content-Sha256="

    assert code_of(with_header(without, "authorization", value)) == "MissingSecurityHeader"
    assert who(SIGNER.presigned(replace(PLAIN, query=query + UNSIGNED))) == "ann"
    assert code_of(SIGNER.presigned(replace(PLAIN, query=query + "0" * 64))) == "InvalidArgument"


def test_repr_has_no_secret() -> None:
    """The repr of a signed request contains neither the secret nor the signing key."""
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
def test_invalid_credential_scope_is_refused(signer: Signer) -> None:
    """A scope with another service, terminal or date is malformed; any region is accepted."""
    assert code_of(signer.signed(PLAIN)) == "AuthorizationHeaderMalformed"
    for region in ("eu-central-1", "auto", "US", "x" * 64):
        assert who(Signer(region=region).signed(PLAIN)) == "ann"
        assert who(Signer(region=region).presigned(PLAIN)) == "ann"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (", Signature=", ", Signature=0"),
        ("Signature=", "Signature=A"),
        ("SignedHeaders=", "SignedHeader="),
        ("SignedHeaders=host;", "SignedHeaders=host;host;"),
        ("SignedHeaders=host;", "SignedHeaders=Host;"),
        ("SignedHeaders=host;x-amz-content-sha256", "SignedHeaders=x-amz-content-sha256;host"),
        ("Credential=", f"Credential={KEY_ID}, Credential="),
        ("/aws4_request", ""),
        ("/us-east-1", "/us\teast-1"),
        (", ", " "),
    ],
)
def test_malformed_authorization_is_refused(old: str, new: str) -> None:
    """An Authorization header with a missing, repeated or misspelled part is malformed."""
    scope = SIGNER.signed(PLAIN)
    value = authorization(scope)
    assert old in value

    broken = with_header(scope, "authorization", value.replace(old, new, 1))
    assert code_of(broken) == "AuthorizationHeaderMalformed"


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)])
def test_parts_of_authorization_come_in_any_order(order: tuple[int, ...]) -> None:
    """Parts of Authorization have any order; a repeated header of the signature is malformed."""
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
def test_other_algorithm_is_refused(scope: Scope, what: str) -> None:
    """Signatures of version 2 and of ECDSA fail with InvalidRequest, which names them."""
    with pytest.raises(SignatureError, match=what) as refused:
        check(scope)

    assert refused.value.code == "InvalidRequest"
    assert "AWS4-HMAC-SHA256" in str(refused.value)


@pytest.mark.parametrize("value", ["Bearer token", None])
def test_two_credentials_are_refused(value: str | None) -> None:
    """A presigned request with an Authorization header fails with InvalidArgument."""
    scope = SIGNER.presigned(PLAIN)
    value = value or authorization(SIGNER.signed(PLAIN))

    assert code_of(with_header(scope, "authorization", value)) == "InvalidArgument"


@pytest.mark.parametrize(
    "name", ["Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature"]
)
def test_missing_or_repeated_query_parameter_is_refused(name: str) -> None:
    """A presigned URL with a missing or repeated signature parameter, in any case, is malformed."""
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


@settings(max_examples=50)
@given(REQUESTS, st.sampled_from([SIGNER.signed, SIGNER.presigned]), st.data())
def test_changed_letter_of_a_signed_request_is_refused(
    request_: Request, sign: Callable[[Request], Scope], data: st.DataObject
) -> None:
    """A signed request with a changed letter in method, path, query or signed header is refused."""
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


def test_added_or_removed_part_of_a_signed_request_is_refused() -> None:
    """A signed request is refused if a part of its path, query or headers is added or removed."""
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


@settings(max_examples=25)
@given(REQUESTS, TEXT, TEXT)
def test_unsigned_header_may_change(request_: Request, old: str, new: str) -> None:
    """A signed request is accepted with other values of the headers that are not signed."""
    unsigned: Headers = [("range", old), ("user-agent", "any")]
    scope = SIGNER.signed(request_, unsigned=unsigned)

    assert who(scope) == "ann"
    assert who(with_header(scope, "range", new)) == "ann"
    assert who(with_header(scope, "user-agent", "\u00fc")) == "ann"
