"""`app.http.problems`: every error has its status."""

import json
from http import HTTPStatus

from app import errors
from app.http.problems import STATUS, problem


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
