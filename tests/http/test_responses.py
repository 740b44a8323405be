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


def test_star_allows_all() -> None:
    """With a star the answer is the same for every page, so caches may share it."""
    cors = Cors(["*"])

    assert cors.headers(b"https://a.example") == cors.headers(None)
    assert dict(cors.headers(None))[ORIGIN] == b"*"


def test_listed_origin_is_echoed() -> None:
    """A listed origin is allowed by name, and caches are told that answers differ."""
    headers = dict(Cors(["https://a.example"]).headers(b"https://a.example"))

    assert headers[ORIGIN] == b"https://a.example"
    assert headers[b"vary"] == b"Origin"


def test_other_origins_are_not_allowed() -> None:
    """A page of another origin gets no leave to read."""
    headers = dict(Cors(["https://a.example"]).headers(b"https://b.example"))

    assert headers == {b"vary": b"Origin"}


def test_what_scripts_need_is_exposed() -> None:
    """Scripts may read the headers they work with."""
    exposed = dict(Cors(["*"]).headers(None))[b"access-control-expose-headers"].decode()

    assert {"ETag", "Content-Range", "Content-Length", "Content-Encoding"} <= set(
        exposed.split(", ")
    )


def test_preflight_allows_what_clients_send() -> None:
    """Each header for which browsers ask first is allowed."""
    allowed = dict(Cors(["*"]).preflight(b"GET"))[b"access-control-allow-headers"].decode()

    assert {"Range", "If-Match", "If-None-Match", "Authorization", "Cache-Control"} <= set(
        allowed.split(", ")
    )


def test_every_leaf_of_the_error_tree_has_a_status() -> None:
    """A new error cannot be forgotten at the edge."""
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    leaves = {c for c in classes if issubclass(c, Exception) and not c.__subclasses__()}

    assert leaves == set(STATUS)


def test_no_failure_of_a_store_is_absence() -> None:
    """404 is said of a proven absence and of what a request means only."""
    absent = {error for error, status in STATUS.items() if status is HTTPStatus.NOT_FOUND}

    assert absent == {
        errors.UnknownDatasetError,
        errors.UnknownRepositoryError,
        errors.UnknownRefError,
        errors.UnknownSessionError,
        errors.UnknownUploadError,
        errors.UnknownSessionError,
    }


def test_the_tree_is_drawn() -> None:
    """The docstring of the module names every error."""
    names = [c.__name__ for c in vars(errors).values() if isinstance(c, type)]
    drawn = errors.__doc__ or ""

    assert [name for name in names if name.endswith("Error") and name not in drawn] == []


def test_problem_document() -> None:
    """A problem says what and why (RFC 9457)."""
    headers, body = problem(HTTPStatus.BAD_GATEWAY, "s3://b/k: damaged")

    assert json.loads(body) == {
        "type": "about:blank",
        "title": "Bad Gateway",
        "status": 502,
        "detail": "s3://b/k: damaged",
    }
    assert dict(headers)[b"content-type"] == b"application/problem+json"


def test_temporary_problems_say_when_to_come_back() -> None:
    """429, 503 and 504 carry Retry-After, others do not."""
    with_retry = {
        status for status in HTTPStatus if b"retry-after" in dict(problem(status, "x")[0])
    }

    assert with_retry == {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
