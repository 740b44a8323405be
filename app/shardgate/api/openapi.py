"""Routers of ``/api``, and the responses other than success that OpenAPI describes."""

import json
from typing import Any, Final

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

type Responses = dict[int | str, dict[str, Any]]

_MEDIA_TYPE: Final = "application/problem+json"


class Problem(BaseModel, use_attribute_docstrings=True):
    """Problem document (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    """The reason, in one sentence."""


class CommitProblem(Problem):
    """Reason why nothing was committed; the further members only after a conflict."""

    expected_parent: str | None = None
    """The snapshot that the changes were made against."""
    actual_parent: str | None = None
    """The snapshot that the branch is at now."""
    conflicts: list[dict[str, Any]] = []
    """Changes of others that conflict with the commit: `kind`, `path`, and in `chunks` the
    coordinates of the first of `count` chunks."""


DEFAULT: Final[Responses] = {
    "default": {
        "description": "A problem document (RFC 9457): the parameters or the body are wrong (400), "
        "there is no such thing (404), the dataset is not `writable` (405), it conflicts with the "
        "current state (409, 412), the repository is locked (423), the store cannot be reached "
        "(503), or another reason that `detail` gives.",
        "content": {_MEDIA_TYPE: {"schema": Problem.model_json_schema()}},
    }
}
"""Responses of every route."""
CONFLICTS: Final[Responses] = {
    409: {
        "description": "It conflicts with other commits.",
        "content": {_MEDIA_TYPE: {"schema": CommitProblem.model_json_schema()}},
    }
}
"""Responses of commits, beside those of all routes."""


def reads(model: type[BaseModel], **others: dict[str, Any]) -> dict[str, Any]:
    """Return the argument `openapi_extra` of a route that reads its JSON body as *model*, or in
    one of the *others*, schemas by media type.
    """
    is_required = any(field.is_required() for field in model.model_fields.values())
    schemas = {"application/json": model.model_json_schema(), **others}
    content = {media_type: {"schema": schema} for media_type, schema in schemas.items()}
    return {"requestBody": {"required": is_required, "content": content}}


class AsciiJson(JSONResponse):
    """JSON in ASCII: names in metadata may have characters that UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        """Encode *content*."""
        return json.dumps(content, separators=(",", ":")).encode()


def new_router(prefix: str, tag: str) -> APIRouter:
    """Return a router for `routes.extend`; `include_router` would parse each signature again."""
    return APIRouter(
        prefix=prefix, tags=[tag], responses=dict(DEFAULT), default_response_class=AsciiJson
    )
