"""`/api` routes of the settings of repositories, which the rule `admin` lets change."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Header, Request, Response
from pydantic import BaseModel

from shardgate.api.openapi import new_router, reads
from shardgate.api.repositories import opens
from shardgate.auth.access import Datasets
from shardgate.errors import BadHeaderError
from shardgate.icechunk.administration import (
    FLAGS,
    METADATA,
    STATUS,
    Administration,
    Described,
    Setting,
)
from shardgate.icechunk.repo_swap import RepoSwaps
from shardgate.icechunk.repository import OpenedRepository
from shardgate.read.resolver import Resolver
from shardgate.server.body import RequestBodyReader, RequestDocument
from shardgate.server.conditions import parse_demand

_TAG: Final = "Icechunk repositories"

type _IfMatch = Annotated[
    str | None, Header(description="The ETag of GET; `*` replaces whatever is there.")
]


class NewStatus(RequestDocument):
    """Operations that a repository admits."""

    availability: Literal["online", "read_only", "offline"]
    limited_availability_reason: str | None = None


class RepositoryStatus(BaseModel, use_attribute_docstrings=True):
    """Operations that a repository admits."""

    availability: str
    """`online`, `read_only`, or `offline`: then this service reads nothing of it either."""
    limited_availability_reason: str | None
    set_at: datetime


class RepositoryMetadata(RequestDocument):
    """Metadata of the repository itself, not of a commit."""

    metadata: dict[str, Any]


class FeatureFlags(RequestDocument):
    """Operations that a repository admits: `true` or `false`, or `null` for the default, `true`."""

    move_node: bool | None = None
    create_tag: bool | None = None
    delete_tag: bool | None = None


def build_administration(
    datasets: Datasets, resolver: Resolver, swaps: RepoSwaps, bodies: RequestBodyReader
) -> APIRouter:
    """Build the routes of status, metadata and feature flags."""
    router = new_router("/api/datasets/{dataset}", _TAG)
    reading = Depends(opens(datasets.find, resolver))
    changing = Depends(opens(datasets.find_administered, resolver))

    async def read(opened: OpenedRepository, setting: Setting, response: Response) -> Any:
        return _tagged(response, await Administration(swaps, opened).read(setting))

    async def replace(
        opened: OpenedRepository,
        setting: Setting,
        wanted: Mapping[str, Any],
        if_match: str | None,
        response: Response,
    ) -> Any:
        if (demand := parse_demand(if_match, None)) is None:
            raise BadHeaderError("If-Match must have the ETag of what is replaced, or *")
        administration = Administration(swaps, opened)
        return _tagged(response, await administration.replace(setting, wanted, demand))

    @router.get("/status", response_model=RepositoryStatus)
    async def read_status(opened: Annotated[OpenedRepository, reading], response: Response) -> Any:
        """Return whether the repository is online, and since when."""
        return await read(opened, STATUS, response)

    @router.put("/status", response_model=RepositoryStatus, openapi_extra=reads(NewStatus))
    async def set_status(
        opened: Annotated[OpenedRepository, changing],
        request: Request,
        response: Response,
        if_match: _IfMatch = None,
    ) -> Any:
        """Make the repository read-only, offline, or online again."""
        wanted = await bodies.read_document(request, NewStatus)
        return await replace(opened, STATUS, wanted.model_dump(), if_match, response)

    @router.get("/metadata", response_model=RepositoryMetadata)
    async def read_metadata(
        opened: Annotated[OpenedRepository, reading], response: Response
    ) -> Any:
        """Return the metadata of the repository."""
        return {"metadata": await read(opened, METADATA, response)}

    @router.put(
        "/metadata", response_model=RepositoryMetadata, openapi_extra=reads(RepositoryMetadata)
    )
    async def set_metadata(
        opened: Annotated[OpenedRepository, changing],
        request: Request,
        response: Response,
        if_match: _IfMatch = None,
    ) -> Any:
        """Replace the metadata of the repository."""
        wanted = (await bodies.read_document(request, RepositoryMetadata)).metadata
        return {"metadata": await replace(opened, METADATA, wanted, if_match, response)}

    @router.get("/flags", response_model=FeatureFlags)
    async def read_flags(opened: Annotated[OpenedRepository, reading], response: Response) -> Any:
        """Return the feature flags of the repository."""
        return await read(opened, FLAGS, response)

    @router.put("/flags", response_model=FeatureFlags, openapi_extra=reads(FeatureFlags))
    async def set_flags(
        opened: Annotated[OpenedRepository, changing],
        request: Request,
        response: Response,
        if_match: _IfMatch = None,
    ) -> Any:
        """Replace the feature flags; those that are left out get the default."""
        wanted = await bodies.read_document(request, FeatureFlags)
        return await replace(opened, FLAGS, wanted.model_dump(), if_match, response)

    return router


def _tagged(response: Response, described: Described) -> Mapping[str, Any]:
    response.headers["etag"] = described.etag
    return described.document
