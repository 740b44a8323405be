"""`/api` routes of Icechunk repositories: refs, history, operations, status and creation."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel

from app.errors import BadHeaderError, BadParameterError
from app.formats.icechunk.repo_info import Availability
from app.http.auth.access import Datasets
from app.http.body import RequestBodyReader
from app.http.conditions import parse_demand
from app.http.openapi import RequestDocument, new_router, route
from app.http.paths import check_key
from app.resolve.icechunk.refs import Named, RefChanges, read_branches, read_tags
from app.resolve.icechunk.repo_swap import RepoSwaps, create_repository
from app.resolve.icechunk.repository import (
    OpenedRepository,
    SetStatus,
    open_repository,
    read_history,
    read_operations,
)
from app.resolve.resolver import Resolver

_DATASETS: Final = "/api/datasets"
_TAG: Final = "Icechunk repositories"
_SLASHES_BEFORE_NAME: Final = 5
"""As in ``/api/datasets/DATASET/branches/NAME``."""


class _Model(BaseModel, use_attribute_docstrings=True, from_attributes=True):
    pass


class NamedRef(_Model):
    """A branch or a tag."""

    name: str
    snapshot_id: str


class DamagedRef(_Model):
    """A branch or a tag that cannot be decoded."""

    name: str
    reason: str


class BranchList(_Model):
    """Branches, ordered by name."""

    branches: list[NamedRef]
    damaged: list[DamagedRef]
    next: str | None
    """`after` of the next page, if there is one."""


class TagList(_Model):
    """Tags, ordered by name."""

    tags: list[NamedRef]
    deleted: list[str]
    """Names of deleted tags, which cannot be used again; every page has all of them."""
    damaged: list[DamagedRef]
    next: str | None
    """`after` of the next page, if there is one."""


class RepositoryStatus(_Model):
    """Availability of a repository."""

    availability: str
    """`online`, or `read_only`; an `offline` repository answers 503."""
    reason: str | None = None
    set_at: datetime | None = None


class SnapshotEntry(_Model):
    """A commit."""

    snapshot_id: str
    parent_id: str | None
    """The previous commit that still exists; none for the first one."""
    message: str
    flushed_at: datetime
    metadata: dict[str, Any]


class History(_Model):
    """Snapshots, newest first."""

    history: list[SnapshotEntry]
    next: str | None
    """`after` of the next page, if there is one."""


class OperationEntry(_Model):
    """An operation on the repository."""

    kind: str
    """Name in the specification: `new_commit`, `tag_created`, `branch_reset`."""
    updated_at: datetime
    backup: str | None
    """File in `overwritten/` with the state after it; none for the last operation, and for those
    before a migration."""
    fields: dict[str, str | int | bool | SetStatus | None]
    """Fields of this kind of operation, by their names in the specification."""


class OperationList(_Model):
    """Operations, newest first."""

    operations: list[OperationEntry]
    next: str | None
    """`after` of the next page, if there is one. It stays valid while operations are added."""
    ends_early: str | None
    """Reason why older operations are missing: the file that lists them was deleted."""


class NewRepository(RequestDocument):
    """The repository to create."""

    name: str
    """Name of a dataset whose root is empty."""


class CreatedRepository(BaseModel, use_attribute_docstrings=True):
    """A created repository."""

    name: str
    branch: str
    snapshot_id: str
    """The empty first snapshot."""


class NewRef(RequestDocument):
    """The branch or tag to create."""

    name: str
    snapshot_id: str


class NewTip(RequestDocument):
    """The new tip of a branch."""

    snapshot_id: str


class NewStatus(RequestDocument):
    """The new availability of the repository."""

    availability: Literal["online", "read_only"]
    reason: str | None = None
    """Shown to clients whose writes are refused."""


_SPELLED: Final = (
    "Spelled as in keys: `@branch.NAME`, `@tag.NAME`, `@SNAPSHOTID`. A name without `@` is that of "
    "a branch or, if there is none, the id of a snapshot."
)
_WHERE: Final = "Path of the repository in the dataset, if that holds several."

type RepositoryPath = Annotated[str, Query(description=_WHERE)]
type OpenRepository = Callable[..., Awaitable[OpenedRepository]]
type _After = Annotated[str | None, Query(description="`next` of the previous page.")]
type _Limit = Annotated[int, Query(ge=1, le=1000)]
type _IfMatch = Annotated[
    str | None, Header(description="The id of the snapshot that the branch is at, in quotes.")
]


def opens(datasets: Datasets, resolver: Resolver, *, writable: bool) -> OpenRepository:
    """Return a dependency that opens the repository of a request, which may have to be writable."""
    find = datasets.find_writable if writable else datasets.find

    async def open_named(
        request: Request, dataset: str, path: RepositoryPath = ""
    ) -> OpenedRepository:
        root = resolver.root(find(dataset, request.scope["caller"]))
        return await open_repository(root, check_key(path.rstrip("/")))

    return open_named


def _ref_name(
    request: Request,
    name: Annotated[str, Path(description="Percent-encoded.")],  # noqa: ARG001 - lacks a newline at its end
) -> str:
    """Decode the last part of the raw path: names may contain slashes."""
    spelled = request.scope["raw_path"].split(b"/", _SLASHES_BEFORE_NAME)[-1]
    try:
        return unquote(spelled.decode("ascii"), errors="strict")
    except UnicodeDecodeError:
        raise BadParameterError("the name is not percent-encoded UTF-8") from None


type _RefName = Annotated[str, Depends(_ref_name)]


def build_repositories(datasets: Datasets, resolver: Resolver) -> APIRouter:
    """Build the routes that read repositories."""
    router = new_router(f"{_DATASETS}/{{dataset}}", _TAG)

    type Opened = Annotated[OpenedRepository, Depends(opens(datasets, resolver, writable=False))]

    @router.get("/branches", response_model=BranchList)
    async def list_branches(opened: Opened, after: _After = None, limit: _Limit = 1000) -> Response:
        """List the branches and their tips."""
        return await _answer(BranchList, await read_branches(opened, after, limit))

    @router.get("/tags", response_model=TagList)
    async def list_tags(opened: Opened, after: _After = None, limit: _Limit = 1000) -> Response:
        """List the tags and their snapshots, and the names of deleted tags."""
        return await _answer(TagList, await read_tags(opened, after, limit))

    @router.get("/status")
    async def read_status(opened: Opened) -> RepositoryStatus:
        """Return the availability; repositories of format version 1 are always online."""
        if (info := await opened.info()) is None:
            return RepositoryStatus(availability="online")
        availability = info.status.availability.name.lower()
        reason, set_at = info.status.reason, info.status.set_at
        return RepositoryStatus(availability=availability, reason=reason, set_at=set_at)

    @router.get("/history", response_model=History)
    async def list_history(
        opened: Opened,
        ref: Annotated[str, Query(description=_SPELLED)] = "@branch.main",
        after: _After = None,
        limit: _Limit = 100,
    ) -> Response:
        """List the snapshots that led to a ref, newest first."""
        return await _answer(History, await read_history(opened, ref, after, limit))

    @router.get("/operations", response_model=OperationList)
    async def list_operations(
        opened: Opened, after: _After = None, limit: _Limit = 100
    ) -> Response:
        """List the operations on the repository, newest first: commits, tags, resets, expiration.

        Repositories of format version 1 keep no such log. `after` may also be a time.
        """
        return await _answer(OperationList, await read_operations(opened, after, limit))

    return router


def build_repository_changes(
    datasets: Datasets, resolver: Resolver, swaps: RepoSwaps, bodies: RequestBodyReader
) -> APIRouter:
    """Build the routes that change refs and status."""
    router = new_router(f"{_DATASETS}/{{dataset}}", _TAG)
    opening = Depends(opens(datasets, resolver, writable=True))

    async def open_changes(opened: Annotated[OpenedRepository, opening]) -> RefChanges:
        await swaps.store.verify_conditional_writes(opened.directory)
        return RefChanges(swaps, opened)

    _add_branch_changes(router, Depends(open_changes), bodies)
    _add_tag_and_status_changes(router, Depends(open_changes), bodies)
    return router


def _add_branch_changes(router: APIRouter, changing: Any, bodies: RequestBodyReader) -> None:
    type Changes = Annotated[RefChanges, changing]

    @router.post("/branches", **route([400, 404, 405, 409, 423], status=201, reads=NewRef))
    async def create_branch(request: Request, response: Response, changes: Changes) -> NamedRef:
        """Create a branch at a snapshot."""
        document = await bodies.read_document(request, NewRef)
        return _with_etag(
            response, await changes.create_branch(document.name, document.snapshot_id)
        )

    @router.put("/branches/{name:path}", **route([400, 404, 405, 412, 423], reads=NewTip))
    async def reset_branch(
        request: Request,
        response: Response,
        name: _RefName,
        changes: Changes,
        if_match: _IfMatch = None,
    ) -> NamedRef:
        """Move a branch to another snapshot if its tip is the one in `If-Match`."""
        document = await bodies.read_document(request, NewTip)
        if (demand := parse_demand(if_match, None)) is None:
            raise BadHeaderError("If-Match must name the snapshot that the branch is at")
        return _with_etag(response, await changes.reset_branch(name, document.snapshot_id, demand))

    @router.delete("/branches/{name:path}", **route([400, 404, 405, 409, 412, 423], status=204))
    async def delete_branch(name: _RefName, changes: Changes, if_match: _IfMatch = None) -> None:
        """Delete a branch other than `main`; with `If-Match`, only if that is its tip."""
        await changes.delete_branch(name, parse_demand(if_match, None))


def _add_tag_and_status_changes(
    router: APIRouter, changing: Any, bodies: RequestBodyReader
) -> None:
    type Changes = Annotated[RefChanges, changing]

    @router.post("/tags", **route([400, 404, 405, 409, 423], status=201, reads=NewRef))
    async def create_tag(request: Request, response: Response, changes: Changes) -> NamedRef:
        """Create a tag at a snapshot; it cannot be moved."""
        document = await bodies.read_document(request, NewRef)
        return _with_etag(response, await changes.create_tag(document.name, document.snapshot_id))

    @router.delete("/tags/{name:path}", **route([400, 404, 405, 409, 423], status=204))
    async def delete_tag(name: _RefName, changes: Changes) -> None:
        """Delete a tag. Its name cannot be used again."""
        await changes.delete_tag(name)

    @router.put("/status", **route([400, 404, 405], status=204, reads=NewStatus))
    async def set_status(request: Request, changes: Changes) -> None:
        """Set the availability of the repository."""
        document = await bodies.read_document(request, NewStatus)
        availability = Availability[document.availability.upper()]
        await changes.set_status(availability, document.reason)


def build_creation(datasets: Datasets, swaps: RepoSwaps, bodies: RequestBodyReader) -> APIRouter:
    """Build the route that creates repositories."""
    router = new_router(_DATASETS, _TAG)

    @router.post(
        "",
        summary="Create Repository",
        **route([400, 403, 404, 405, 409], status=201, reads=NewRepository),
    )
    async def create(request: Request) -> CreatedRepository:
        """Create an Icechunk repository at the empty root of a dataset."""
        document = await bodies.read_document(request, NewRepository)
        dataset = datasets.find_writable(document.name, request.scope["caller"])
        snapshot_id = await create_repository(swaps, dataset)
        return CreatedRepository(name=dataset.name, branch="main", snapshot_id=snapshot_id)

    return router


async def _answer(model: type[BaseModel], found: object) -> Response:
    def encode() -> str:
        return model.model_validate(found).model_dump_json(by_alias=True)

    return Response(await asyncio.to_thread(encode), media_type="application/json")


def _with_etag(response: Response, ref: Named) -> NamedRef:
    response.headers["etag"] = f'"{ref.snapshot_id}"'
    return NamedRef(name=ref.name, snapshot_id=ref.snapshot_id)
