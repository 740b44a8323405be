"""The control plane of Icechunk repositories: refs, history, operations."""

import asyncio
from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from app.http.auth.access import Datasets
from app.http.openapi import new_router
from app.http.paths import check_key
from app.resolve.icechunk.history import read_history
from app.resolve.icechunk.operations import SetStatus, read_operations
from app.resolve.icechunk.refs import read_branches, read_tags
from app.resolve.icechunk.repositories import OpenedRepository, open_repository
from app.resolve.resolver import Resolver


class _Model(BaseModel, use_attribute_docstrings=True, from_attributes=True):
    pass


class NamedRef(_Model):
    """A branch or a tag."""

    name: str
    snapshot_id: str
    """The snapshot it is at."""


class DamagedRef(_Model):
    """A branch or a tag that cannot be understood."""

    name: str
    reason: str


class BranchList(_Model):
    """Branches, by name."""

    branches: list[NamedRef]
    damaged: list[DamagedRef]
    next: str | None
    """The name to go on after, where there are more."""


class TagList(_Model):
    """Tags, by name."""

    tags: list[NamedRef]
    deleted: list[str]
    """Names of deleted tags, which cannot be used again; every page tells all."""
    damaged: list[DamagedRef]
    next: str | None
    """The name to go on after, where there are more."""


class RepositoryStatus(_Model):
    """What may be done with a repository."""

    availability: str
    """`online`, or `read_only`; one that is `offline` answers 503."""
    reason: str | None = None
    """Why there is not more."""
    set_at: datetime | None = None


class SnapshotEntry(_Model):
    """A snapshot: one commit."""

    snapshot_id: str
    parent_id: str | None
    """The commit before it that is still kept; none before the first."""
    message: str
    flushed_at: datetime
    metadata: dict[str, Any]


class History(_Model):
    """Snapshots, newest first."""

    history: list[SnapshotEntry]
    next: str | None
    """The snapshot to go on after, where there are more."""


class OperationEntry(_Model):
    """An operation on the repository."""

    kind: str
    """The specification's name of it: `new_commit`, `tag_created`, `branch_reset`."""
    updated_at: datetime
    backup: str | None
    """The file in `overwritten/` that keeps the state after it; none for the last operation, and
    for those before a migration."""
    fields: dict[str, str | int | bool | SetStatus | None]
    """What is told of this kind, by the specification's names."""


class OperationList(_Model):
    """Operations, newest first."""

    operations: list[OperationEntry]
    next: str | None
    """What to go on after, where there are more. It stays good while others are done."""
    ends_early: str | None
    """Why older operations cannot be told: the file that has them was deleted."""


_SPELLED: Final = (
    "Spelled as in keys: `@branch.NAME`, `@tag.NAME`, `@SNAPSHOTID`. A name without `@` is that of "
    "a branch or, if there is none, the id of a snapshot."
)
_WHERE: Final = "Where the repository is in the dataset, if that holds several."

type RepositoryPath = Annotated[str, Query(description=_WHERE)]
type _After = Annotated[str | None, Query(description="What the page before gave as `next`.")]
type _Limit = Annotated[int, Query(ge=1, le=1000)]


def build_repositories(datasets: Datasets, resolver: Resolver) -> APIRouter:
    """Build the routes of repositories."""
    router = new_router("/api/datasets/{dataset}", "Icechunk repositories")

    async def open_named(
        request: Request, dataset: str, path: RepositoryPath = ""
    ) -> OpenedRepository:
        root = resolver.root(datasets.find(dataset, request.scope["caller"]))
        return await open_repository(root, check_key(path.rstrip("/")))

    type Opened = Annotated[OpenedRepository, Depends(open_named)]

    @router.get("/branches", response_model=BranchList)
    async def list_branches(opened: Opened, after: _After = None, limit: _Limit = 1000) -> Response:
        """List the branches, and the snapshot each is at."""
        return await _answer(BranchList, await read_branches(opened, after, limit))

    @router.get("/tags", response_model=TagList)
    async def list_tags(opened: Opened, after: _After = None, limit: _Limit = 1000) -> Response:
        """List the tags and the snapshot each is at, and name the deleted ones."""
        return await _answer(TagList, await read_tags(opened, after, limit))

    @router.get("/status")
    async def tell_status(opened: Opened) -> RepositoryStatus:
        """Tell what may be done with a repository; those of version 1 of the format are online."""
        if (info := await opened.info()) is None:
            return RepositoryStatus(availability="online")
        availability = info.status.availability.name.lower()
        reason, set_at = info.status.reason, info.status.set_at
        return RepositoryStatus(availability=availability, reason=reason, set_at=set_at)

    @router.get("/history", response_model=History)
    async def tell_history(
        opened: Opened,
        ref: Annotated[str, Query(description=_SPELLED)] = "@branch.main",
        after: _After = None,
        limit: _Limit = 100,
    ) -> Response:
        """Tell the snapshots that led to a ref, newest first."""
        return await _answer(History, await read_history(opened, ref, after, limit))

    @router.get("/operations", response_model=OperationList)
    async def tell_operations(
        opened: Opened, after: _After = None, limit: _Limit = 100
    ) -> Response:
        """Tell what was done to the repository, newest first: commits, tags, resets, expiration.

        Repositories in version 1 of the format keep no log of that. `after` may also be a time.
        """
        return await _answer(OperationList, await read_operations(opened, after, limit))

    return router


async def _answer(model: type[BaseModel], found: object) -> Response:
    """Spell what was *found*, beside the event loop: it may be much."""
    body = await asyncio.to_thread(
        lambda: model.model_validate(found).model_dump_json(by_alias=True)
    )
    return Response(body, media_type="application/json")
