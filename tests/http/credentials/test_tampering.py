"""Whatever of a signed request is changed on its way, it is refused."""

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http.credentials.checking import code_of, who
from tests.http.credentials.sigv4 import (
    HOST,
    KEY_ID,
    UNSIGNED,
    Headers,
    Request,
    Scope,
    Signer,
    authorization,
    with_header,
)

SIGNER: Final = Signer()


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


def _in_header(old: str, new: str) -> Callable[[Scope], Scope]:
    def mutate(scope: Scope) -> Scope:
        value = authorization(scope)
        assert old in value
        return with_header(scope, "authorization", value.replace(old, new, 1))

    return mutate


def _header(name: str, value: str | None) -> Callable[[Scope], Scope]:
    return lambda scope: with_header(scope, name, value)


def _flip(scope: Scope) -> Scope:
    value = authorization(scope)
    last = "0" if value[-1] != "0" else "1"
    return with_header(scope, "authorization", value[:-1] + last)


def _new(part: str, change: Callable[[Any], Any]) -> Callable[[Scope], Scope]:
    return lambda scope: {**scope, part: change(scope[part])}


MUTATIONS: Final[dict[str, Callable[[Scope], Scope]]] = {
    "method": _new("method", lambda method: "PATCH" if method == "GET" else "GET"),
    "longer path": _new("raw_path", lambda path: path + b"x"),
    "shorter path": _new("raw_path", lambda path: path[:-1]),
    "doubled slash": _new("raw_path", lambda path: b"/" + path),
    "escaped": _new("raw_path", lambda path: path + b"%20"),
    "more query": _new("query_string", lambda query: query + b"&z=1"),
    "only a name": _new("query_string", lambda query: query + b"&acl"),
    "longer value": _new("query_string", lambda query: query + b"0" if query else b"a=0"),
    "host": _header("host", "evil.example"),
    "signed header": _header("content-type", "a/c"),
    "signed header gone": _header("content-type", None),
    "header of amazon": _header("x-amz-meta-a", "\x7f"),
    "header of amazon gone": _header("x-amz-meta-a", None),
    "new header of amazon": _header("x-amz-meta-b", "1"),
    "digest": _header("x-amz-content-sha256", "0" * 64),
    "no digest": _header("x-amz-content-sha256", UNSIGNED),
    "time": _header("x-amz-date", "20130524T000001Z"),
    "day": _header("x-amz-date", "20130523T235959Z"),
    "region": _in_header("us-east-1", "us-east-2"),
    "key id": _in_header(KEY_ID, "B0B"),
    "day of the key": _in_header("20130524", "20130525"),
    "service": _in_header("/s3/", "/s4/"),
    "one header less": _in_header("content-type;", ""),
    "signature": _flip,
    "second value": lambda scope: {
        **scope,
        "headers": [*scope["headers"], (b"content-type", b"a/b")],
    },
}


@pytest.mark.parametrize("name", MUTATIONS)
@settings(max_examples=20)
@given(REQUESTS)
def test_no_part_of_a_request_can_be_changed(name: str, request_: Request) -> None:
    """Whatever was signed, it is refused once any one part is another."""
    scope = SIGNER.signed(request_)
    changed = MUTATIONS[name](scope)

    assert who(scope) == "ann"
    assert changed != scope
    code_of(changed)


@given(REQUESTS, st.data())
def test_no_letter_of_a_presigned_request_can_be_changed(
    request_: Request, data: st.DataObject
) -> None:
    """Of the path and the query, its signature included."""
    scope = SIGNER.presigned(request_)
    part = data.draw(st.sampled_from(["raw_path", "query_string"]))
    at = data.draw(st.integers(0, len(scope[part]) - 1))
    old = scope[part][at : at + 1]
    new = data.draw(st.sampled_from(b"q5").map(lambda code: bytes([code])).filter(old.__ne__))
    changed = {**scope, part: scope[part][:at] + new + scope[part][at + 1 :]}

    assert who(scope) == "ann"
    code_of(changed)


@given(REQUESTS, TEXT, TEXT)
def test_headers_that_are_not_signed_may_change(request_: Request, old: str, new: str) -> None:
    """Proxies add and change some."""
    unsigned: Headers = [("range", old), ("user-agent", "any")]
    scope = SIGNER.signed(request_, unsigned=unsigned)

    assert who(scope) == "ann"
    assert who(with_header(scope, "range", new)) == "ann"
    assert who(with_header(scope, "user-agent", "\u00fc")) == "ann"
