"""Answers that are no success, as OpenAPI describes them."""

from functools import cache
from http import HTTPStatus
from typing import Any, Final

from pydantic import BaseModel

type Responses = dict[int | str, dict[str, Any]]

_MEDIA_TYPE: Final = "application/problem+json"
_WHEN: Final = {
    HTTPStatus.BAD_REQUEST: "A parameter, a header or the body cannot be what it should be.",
    HTTPStatus.UNAUTHORIZED: "No credentials, or none that are good here.",
    HTTPStatus.FORBIDDEN: "The store, or what the operator allows, does not let it be.",
    HTTPStatus.NOT_FOUND: "There is no such dataset, repository, ref, snapshot or session.",
    HTTPStatus.METHOD_NOT_ALLOWED: "The dataset is not `writable`, or the repository is of a "
    "version of the format that is only read.",
    HTTPStatus.CONFLICT: "What is there already does not go together with it.",
    HTTPStatus.LENGTH_REQUIRED: "The body comes without its length.",
    HTTPStatus.PRECONDITION_FAILED: "The branch is not where `If-Match` says.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is larger than is taken.",
    HTTPStatus.LOCKED: "The repository is read-only or offline.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The same can be done later; see `Retry-After`.",
}


class Problem(BaseModel, use_attribute_docstrings=True):
    """Why there is no other answer (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    """What is wrong, in one sentence."""


class CommitProblem(Problem):
    """Why there is no commit; the further members only where others have changed the same."""

    expected_parent: str | None = None
    """The snapshot that the changes were made against."""
    actual_parent: str | None = None
    """Where the branch is by now."""
    conflicts: list[dict[str, Any]] = []
    """What others changed that does not go together with the commit: `kind`, `path`, and in
    `chunks` the coordinates of the first of `count` chunks."""


OTHERWISE: Final[Responses] = {
    "default": {
        "description": "A problem document (RFC 9457): the parameters are wrong, there is no such "
        "thing, the store cannot be reached, or another reason that `detail` tells.",
        "content": {_MEDIA_TYPE: {"schema": Problem.model_json_schema()}},
    }
}
"""What every route may answer."""


def problems(*statuses: int, conflict: type[Problem] = Problem) -> Responses:
    """Describe the answers of a route that have these *statuses*; 409 has members of its own."""
    return {int(status): _described(HTTPStatus(status), conflict) for status in sorted(statuses)}


def _described(status: HTTPStatus, conflict: type[Problem]) -> dict[str, Any]:
    model = conflict if status is HTTPStatus.CONFLICT else Problem
    content = {_MEDIA_TYPE: {"schema": _schema(model)}}
    return {"description": _WHEN[status], "content": content}


@cache
def _schema(model: type[Problem]) -> dict[str, Any]:
    return model.model_json_schema()
