"""The control plane of Icechunk repositories that may be written: refs, status, creation."""

from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Header, Path, Request, Response
from pydantic import BaseModel

from app.errors import (
    BadHeaderError,
    BadParameterError,
)
from app.formats.icechunk.repo_info import Availability
from app.http.auth.access import Datasets
from app.http.body import RequestBodyReader, RequestDocument, describe_document
from app.http.conditions import parse_demand
from app.http.icechunk.writable import opens_writable
from app.http.openapi import new_router, problems
from app.http.repositories import NamedRef
from app.resolve.icechunk.creation import create_repository
from app.resolve.icechunk.refs import Named, RefChanges
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.resolver import Resolver

_DATASETS: Final = "/api/datasets"
_TAG: Final = "Icechunk repositories"
_SEGMENTS_BEFORE_NAME: Final = 6
"""Of ``/api/datasets/DATASET/branches/NAME``, with the empty one at the start."""


class NewRepository(RequestDocument):
    """The repository that is to be made."""

    name: str
    """Of a dataset, whose root is empty."""


class CreatedRepository(BaseModel, use_attribute_docstrings=True):
    """A repository that was made."""

    name: str
    branch: str
    snapshot_id: str
    """The empty snapshot that the branch is at."""


class NewRef(RequestDocument):
    """The branch or tag that is to be made."""

    name: str
    snapshot_id: str
    """The snapshot it is to be at."""


class NewTip(RequestDocument):
    """Where a branch is to be put."""

    snapshot_id: str


class NewStatus(RequestDocument):
    """What may be done with the repository from now on."""

    availability: Literal["online", "read_only"]
    reason: str | None = None
    """Is told to those who want more."""


def _ref_name(
    request: Request,
    name: Annotated[str, Path(description="Percent-encoded.")],  # noqa: ARG001 - a line's end is lost in it
) -> str:
    """Decode the last part of the path by itself, for names may have slashes and more in them."""
    spelled = request.scope["raw_path"].split(b"/", _SEGMENTS_BEFORE_NAME - 1)[-1]
    try:
        return unquote(spelled.decode("ascii"), errors="strict")
    except UnicodeDecodeError:
        raise BadParameterError("the name is not percent-encoded UTF-8") from None


type _RefName = Annotated[str, Depends(_ref_name)]
type _IfMatch = Annotated[
    str | None, Header(description="The id of the snapshot that the branch is at, in quotes.")
]


def build_repository_changes(
    datasets: Datasets, resolver: Resolver, swaps: RepoSwaps, documents: RequestBodyReader
) -> APIRouter:
    """Build the routes that change repositories as a whole."""
    router = new_router(f"{_DATASETS}/{{dataset}}", _TAG)

    type Opened = Annotated[OpenedRepository, Depends(opens_writable(datasets, resolver))]

    async def change(opened: Opened) -> RefChanges:
        await swaps.store.verify_conditional_writes(opened.directory)
        return RefChanges(swaps, opened)

    type Changes = Annotated[RefChanges, Depends(change)]

    @router.post(
        "/branches",
        status_code=201,
        openapi_extra=_body(NewRef),
        responses=problems(400, 404, 405, 409, 423),
    )
    async def create_branch(request: Request, response: Response, changes: Changes) -> NamedRef:
        """Make a branch at a snapshot."""
        given = await documents.read_document(request, NewRef)
        return _tell(response, await changes.create_branch(given.name, given.snapshot_id))

    @router.put(
        "/branches/{name:path}",
        openapi_extra=_body(NewTip),
        responses=problems(400, 404, 405, 412, 423),
    )
    async def reset_branch(
        request: Request,
        response: Response,
        name: _RefName,
        changes: Changes,
        if_match: _IfMatch = None,
    ) -> NamedRef:
        """Put a branch at another snapshot, if it still is where `If-Match` says."""
        given = await documents.read_document(request, NewTip)
        if (demand := parse_demand(if_match, None)) is None:
            raise BadHeaderError("If-Match has to name the snapshot that the branch is at")
        return _tell(response, await changes.reset_branch(name, given.snapshot_id, demand))

    @router.delete(
        "/branches/{name:path}",
        status_code=204,
        responses=problems(400, 404, 405, 409, 412, 423),
    )
    async def delete_branch(name: _RefName, changes: Changes, if_match: _IfMatch = None) -> None:
        """Take a branch away, but never `main`; with `If-Match` only if it is there still."""
        await changes.delete_branch(name, parse_demand(if_match, None))

    @router.post(
        "/tags",
        status_code=201,
        openapi_extra=_body(NewRef),
        responses=problems(400, 404, 405, 409, 423),
    )
    async def create_tag(request: Request, response: Response, changes: Changes) -> NamedRef:
        """Make a tag at a snapshot, where it stays."""
        given = await documents.read_document(request, NewRef)
        return _tell(response, await changes.create_tag(given.name, given.snapshot_id))

    @router.delete(
        "/tags/{name:path}", status_code=204, responses=problems(400, 404, 405, 409, 423)
    )
    async def delete_tag(name: _RefName, changes: Changes) -> None:
        """Take a tag away. Its name cannot be used again."""
        await changes.delete_tag(name)

    @router.put(
        "/status",
        status_code=204,
        openapi_extra=_body(NewStatus),
        responses=problems(400, 404, 405),
    )
    async def set_status(request: Request, changes: Changes) -> None:
        """Say what may be done with the repository: all, or only reading."""
        given = await documents.read_document(request, NewStatus)
        availability = Availability[given.availability.upper()]
        await changes.set_status(availability, given.reason)

    return router


def build_creation(datasets: Datasets, swaps: RepoSwaps, documents: RequestBodyReader) -> APIRouter:
    """Build the route that makes repositories."""
    router = new_router(_DATASETS, _TAG)

    @router.post(
        "",
        status_code=201,
        summary="Create Repository",
        openapi_extra=_body(NewRepository),
        responses=problems(400, 403, 404, 405, 409),
    )
    async def create(request: Request) -> CreatedRepository:
        """Make an Icechunk repository where there is nothing: at the empty root of a dataset."""
        given = await documents.read_document(request, NewRepository)
        dataset = datasets.find_writable(given.name, request.scope["caller"])
        snapshot_id = await create_repository(swaps, dataset)
        return CreatedRepository(name=dataset.name, branch="main", snapshot_id=snapshot_id)

    return router


def _body(model: type[RequestDocument]) -> dict[str, Any]:
    return dict(describe_document(model))


def _tell(response: Response, ref: Named) -> NamedRef:
    response.headers["etag"] = f'"{ref.snapshot_id}"'
    return NamedRef(name=ref.name, snapshot_id=ref.snapshot_id)
