"""`/api` routes of Icechunk repositories: refs, history, operations and creation."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from shardgate.api.openapi import new_router, reads
from shardgate.auditing import note
from shardgate.auth.access import Caller, Datasets, ServedDataset
from shardgate.errors import BadHeaderError, BadParameterError
from shardgate.formats.icechunk.keys import Branch, Tag
from shardgate.icechunk.diff import Change, read_diff
from shardgate.icechunk.repo_swap import RefUpdates, RepoSwaps, create_repository
from shardgate.icechunk.repository import (
    Ancestor,
    NamedRef,
    OpenedRepository,
    Operation,
    open_repository,
    read_history,
    read_operations,
    read_refs,
)
from shardgate.read.budget import ByteBudget
from shardgate.read.resolver import Resolver
from shardgate.server.body import RequestBodyReader, RequestDocument
from shardgate.server.conditions import parse_demand
from shardgate.server.request import check_key

_DATASETS: Final = "/api/datasets"
_TAG: Final = "Icechunk repositories"


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


class HistoryPage(BaseModel, use_attribute_docstrings=True):
    """Page of snapshots, newest first, each the parent of the one before."""

    history: list[Ancestor]
    next: str | None
    """`after` of the next page, if there is one."""


class BranchPage(BaseModel, use_attribute_docstrings=True):
    """Page of branches, by name."""

    branches: list[NamedRef]
    next: str | None
    """`after` of the next page, if there is one."""


class TagPage(BaseModel, use_attribute_docstrings=True):
    """Page of tags, by name."""

    tags: list[NamedRef]
    next: str | None
    """`after` of the next page, if there is one."""


class DifferencesPage(BaseModel, use_attribute_docstrings=True, from_attributes=True):
    """Page of the changes between two versions, by path."""

    from_snapshot_id: str
    to_snapshot_id: str
    changes: list[Change]
    next: str | None
    """`after` of the next page, if there is one; it is of the same two snapshots."""


class OperationsPage(BaseModel, use_attribute_docstrings=True):
    """Page of operations, newest first."""

    operations: list[Operation]
    next: str | None
    """`after` of the next page, if there is one. It stays valid while operations are added."""
    ends_early: str | None
    """Reason for which older operations cannot be read, if there are some."""


_SPELLED: Final = (
    "Spelled as in keys: `@branch.NAME`, `@tag.NAME`, `@SNAPSHOTID`. A name without `@` is that of "
    "a branch or, if there is none, the id of a snapshot."
)

type RepositoryPath = Annotated[
    str, Query(description="Path of the repository in the dataset, if that holds several.")
]
type FindDataset = Callable[[str, Caller], ServedDataset]
type OpenRepository = Callable[..., Awaitable[OpenedRepository]]
type _After = Annotated[str | None, Query(description="`next` of the previous page.")]
type _Limit = Annotated[int, Query(ge=1, le=1000)]
type _IfMatch = Annotated[
    str | None, Header(description="The id of the snapshot that the branch is at, in quotes.")
]


def opens(find: FindDataset, resolver: Resolver) -> OpenRepository:
    """Return a dependency that opens the repository of a request; *find* finds its dataset."""

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
    # The path is /api/datasets/DATASET/branches/NAME, and names may have escaped slashes.
    spelled = request.scope["raw_path"].split(b"/", 5)[-1]
    try:
        ref = unquote(spelled.decode("ascii"), errors="strict")
    except UnicodeDecodeError:
        raise BadParameterError("the name is not percent-encoded UTF-8") from None
    note(ref=ref)
    return ref


type _RefName = Annotated[str, Depends(_ref_name)]


def build_repositories(datasets: Datasets, resolver: Resolver, logs: ByteBudget) -> APIRouter:
    """Build the routes that read repositories; *logs* bounds the memory of transaction logs."""
    router = new_router(f"{_DATASETS}/{{dataset}}", _TAG)

    type Opened = Annotated[OpenedRepository, Depends(opens(datasets.find, resolver))]

    @router.get("/branches", response_model=BranchPage)
    async def list_branches(opened: Opened, after: _After = None, limit: _Limit = 1000) -> Response:
        """List the branches and their tips."""
        page = await read_refs(opened, Branch, after, limit)
        return await _answer(BranchPage(branches=page.items, next=page.next))

    @router.get("/tags", response_model=TagPage)
    async def list_tags(opened: Opened, after: _After = None, limit: _Limit = 1000) -> Response:
        """List the tags and their snapshots."""
        page = await read_refs(opened, Tag, after, limit)
        return await _answer(TagPage(tags=page.items, next=page.next))

    @router.get("/history", response_model=HistoryPage)
    async def list_history(
        opened: Opened,
        ref: Annotated[str, Query(description=_SPELLED)] = "@branch.main",
        after: _After = None,
        limit: _Limit = 100,
    ) -> Response:
        """List the snapshots that led to a ref, newest first."""
        page = await read_history(opened, ref, after, limit)
        return await _answer(HistoryPage(history=page.items, next=page.next))

    @router.get("/operations", response_model=OperationsPage)
    async def list_operations(
        opened: Opened, after: _After = None, limit: _Limit = 100
    ) -> Response:
        """List the operations on the repository, newest first: commits, tags, resets, expiration.

        Repositories of format version 1 keep no such log. `after` may also be a time.
        """
        operations, next_, ends_early = await read_operations(opened, after, limit)
        page = OperationsPage(operations=operations, next=next_, ends_early=ends_early)
        return await _answer(page)

    @router.get("/diff", response_model=DifferencesPage)
    async def list_differences(
        opened: Opened,
        from_: Annotated[str, Query(alias="from", description=f"An ancestor of `to`. {_SPELLED}")],
        to: Annotated[str, Query(description=_SPELLED)] = "@branch.main",
        after: _After = None,
        limit: _Limit = 1000,
    ) -> Response:
        """List what the commits after one version, up to another one, have changed.

        `limit` counts chunks, and changes of nodes.
        """
        page = await read_diff(opened, logs, (from_, to), after, limit)
        return await _answer(DifferencesPage.model_validate(page))

    return router


def build_repository_changes(
    datasets: Datasets, resolver: Resolver, swaps: RepoSwaps, bodies: RequestBodyReader
) -> APIRouter:
    """Build the routes that create repositories, and change branches and tags."""
    router = new_router(_DATASETS, _TAG)
    opening = Depends(opens(datasets.find_writable, resolver))

    async def open_changes(opened: Annotated[OpenedRepository, opening]) -> RefUpdates:
        await swaps.store.verify_conditional_writes(opened.directory)
        return RefUpdates(swaps, opened)

    @router.post(
        "", summary="Create Repository", status_code=201, openapi_extra=reads(NewRepository)
    )
    async def create(request: Request) -> CreatedRepository:
        """Create an Icechunk repository at the empty root of a dataset."""
        document = await bodies.read_document(request, NewRepository)
        note(dataset=document.name)
        dataset = datasets.find_writable(document.name, request.scope["caller"])
        snapshot_id = await create_repository(swaps, dataset)
        note(after=snapshot_id)
        return CreatedRepository(name=dataset.name, branch="main", snapshot_id=snapshot_id)

    refs = new_router(f"{_DATASETS}/{{dataset}}", _TAG)
    _add_ref_changes(refs, Depends(open_changes), bodies)
    router.routes.extend(refs.routes)
    return router


def _add_ref_changes(router: APIRouter, changing: Any, bodies: RequestBodyReader) -> None:
    type Changes = Annotated[RefUpdates, changing]

    @router.post("/branches", status_code=201, openapi_extra=reads(NewRef))
    async def create_branch(request: Request, response: Response, changes: Changes) -> NamedRef:
        """Create a branch at a snapshot."""
        new = await bodies.read_document(request, NewRef)
        note(ref=new.name)
        return _with_etag(response, await changes.create("branch", new.name, new.snapshot_id))

    @router.put("/branches/{name:path}", openapi_extra=reads(NewTip))
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

    @router.delete("/branches/{name:path}", status_code=204)
    async def delete_branch(name: _RefName, changes: Changes, if_match: _IfMatch = None) -> None:
        """Delete a branch other than `main`; with `If-Match`, only if that is its tip."""
        await changes.delete_branch(name, parse_demand(if_match, None))

    @router.post("/tags", status_code=201, openapi_extra=reads(NewRef))
    async def create_tag(request: Request, response: Response, changes: Changes) -> NamedRef:
        """Create a tag at a snapshot; it cannot be moved."""
        new = await bodies.read_document(request, NewRef)
        note(ref=new.name)
        return _with_etag(response, await changes.create("tag", new.name, new.snapshot_id))

    @router.delete("/tags/{name:path}", status_code=204)
    async def delete_tag(name: _RefName, changes: Changes) -> None:
        """Delete a tag. Its name cannot be used again."""
        await changes.delete_tag(name)


async def _answer(page: BaseModel) -> Response:
    # In a thread: a page has up to 1,000 items.
    return Response(await asyncio.to_thread(to_json, page), media_type="application/json")


def _with_etag(response: Response, ref: NamedRef) -> NamedRef:
    response.headers["etag"] = f'"{ref.snapshot_id}"'
    note(after=ref.snapshot_id)
    return ref
