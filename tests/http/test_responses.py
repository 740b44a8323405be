"""`app.http.responses` and `problems`: headers and errors."""

import json
from http import HTTPStatus

from hypothesis import given
from hypothesis import strategies as st

from app import errors
from app.http.problems import STATUS, Headers, problem
from app.http.responses import Cors, combine_headers

MANY = 10_000


class Name(bytes):
    """A name that counts how often it is compared."""

    compared = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        """Compare."""
        Name.compared += 1
        return super().__eq__(other)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.binary())))
def test_a_header_that_is_repeated_is_a_list(headers: Headers) -> None:
    """Its values keep their order (RFC 9110 §5.3)."""
    assert combine_headers(headers) == {
        name: b", ".join(value for each, value in headers if each == name) for name, _ in headers
    }


def test_many_headers_are_combined_in_one_go() -> None:
    """As many as fit into a head that is refused, one of which is repeated."""
    headers: Headers = [(Name(b"%x" % number), b"") for number in range(MANY)]
    combine_headers([*headers, (Name(b"0"), b"")])

    assert Name.compared < 10 * MANY


ORIGIN = b"access-control-allow-origin"


def test_origins_are_allowed_by_name_or_all() -> None:
    """With a star the answer is the same for every page; else caches hear that answers differ."""
    star, named = Cors(["*"]), Cors(["https://a.example"])
    allowed = {ORIGIN: b"https://a.example", b"vary": b"Origin"}

    assert star.headers(b"https://a.example") == star.headers(None)
    assert dict(star.headers(None))[ORIGIN] == b"*"
    assert dict(named.headers(b"https://a.example")).items() >= allowed.items()
    assert dict(named.headers(b"https://b.example")) == {b"vary": b"Origin"}


def test_what_scripts_need_is_exposed_and_allowed() -> None:
    """Scripts may read the headers they work with, and send those for which browsers ask first."""
    exposed = dict(Cors(["*"]).headers(None))[b"access-control-expose-headers"].split(b", ")
    allowed = dict(Cors(["*"]).preflight(b"GET"))[b"access-control-allow-headers"].split(b", ")

    assert {b"ETag", b"Content-Range", b"Content-Length", b"Content-Encoding"} <= set(exposed)
    assert {b"Range", b"If-Match", b"If-None-Match", b"Authorization", b"Cache-Control"} <= set(
        allowed
    )


def test_every_leaf_of_the_error_tree_has_a_status() -> None:
    """A new error cannot be forgotten at the edge, nor in the drawing of the tree."""
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    leaves = {c for c in classes if issubclass(c, Exception) and not c.__subclasses__()}
    names = [c.__name__ for c in classes if c.__name__.endswith("Error")]

    assert leaves == set(STATUS)
    assert [name for name in names if name not in (errors.__doc__ or "")] == []


def test_no_failure_of_a_store_is_absence() -> None:
    """404 is said of a proven absence and of what a request means only."""
    absent = {error for error, status in STATUS.items() if status is HTTPStatus.NOT_FOUND}

    assert absent == {
        errors.UnknownDatasetError,
        errors.UnknownRepositoryError,
        errors.UnknownRefError,
        errors.UnknownSessionError,
        errors.UnknownUploadError,
    }


def test_problem_document() -> None:
    """A problem says what and why (RFC 9457); 429, 503 and 504 when to come back."""
    headers, body = problem(HTTPStatus.BAD_GATEWAY, "s3://b/k: damaged")

    assert json.loads(body) == {
        "type": "about:blank",
        "title": "Bad Gateway",
        "status": 502,
        "detail": "s3://b/k: damaged",
    }
    assert dict(headers)[b"content-type"] == b"application/problem+json"
    assert [
        status.value for status in HTTPStatus if b"retry-after" in dict(problem(status, "x")[0])
    ] == [429, 503, 504]
