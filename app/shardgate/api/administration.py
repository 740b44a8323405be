"""`/api` routes of the settings of repositories, which the rule `admin` lets change."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Depends, Header, Request, Response
from pydantic import BaseModel

from shardgate.api.openapi import new_router, reads
from shardgate.api.repositories import opens
from shardgate.auth.access import Datasets
from shardgate.errors import BadHeaderError
from shardgate.icechunk.repo_swap import RepoSwaps
from shardgate.icechunk.repository import OpenedRepository
from shardgate.icechunk.repository_settings import (
    CONFIG,
    FLAGS,
    METADATA,
    STATUS,
    Administration,
    Setting,
    TaggedDocument,
)
from shardgate.read.resolver import Resolver
from shardgate.server.body import RequestBodyReader, RequestDocument
from shardgate.server.conditions import parse_demand

_TAG: Final = "Icechunk repositories"
_MAX_NBYTES: Final = 1024**2  # as large as a configuration that is read

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


class RepositoryConfig(RequestDocument):
    """Configuration of a repository, with the names of the library; all members are optional.

    `inline_chunk_threshold_bytes`, `num_updates_per_repo_info_file`, `compression`,
    `manifest.splitting` and `virtual_chunk_containers` can be changed. Others stay as they are.
    """

    config: dict[str, Any]


class _SettingRoute(NamedTuple):
    """Routes that read and replace a setting."""

    name: str
    setting: Setting
    reads: type[RequestDocument]
    returns: type[BaseModel]
    description: str
    member: str | None = None
    """Member of the document that has the setting; `None` if that is the whole document."""


_ROUTES: Final = (
    _SettingRoute(
        "status", STATUS, NewStatus, RepositoryStatus, "whether the repository is online"
    ),
    _SettingRoute(
        "flags", FLAGS, FeatureFlags, FeatureFlags, "the feature flags of the repository"
    ),
    _SettingRoute(
        "metadata",
        METADATA,
        RepositoryMetadata,
        RepositoryMetadata,
        "the metadata of the repository",
        member="metadata",
    ),
    _SettingRoute(
        "config",
        CONFIG,
        RepositoryConfig,
        RepositoryConfig,
        "the configuration that the library reads when it opens the repository, for admins only",
        member="config",
    ),
)


def build_administration(
    datasets: Datasets, resolver: Resolver, swaps: RepoSwaps, bodies: RequestBodyReader
) -> APIRouter:
    """Build the routes of status, metadata, feature flags and configuration."""
    router = new_router("/api/datasets/{dataset}", _TAG)
    changing = Depends(opens(datasets.find_administered, resolver))
    for route in _ROUTES:
        # A configuration names servers and folders.
        reading = changing if route.setting is CONFIG else Depends(opens(datasets.find, resolver))
        _add_routes(router, route, (reading, changing), swaps, bodies)
    return router


def _add_routes(
    router: APIRouter,
    route: _SettingRoute,
    openings: tuple[Any, Any],
    swaps: RepoSwaps,
    bodies: RequestBodyReader,
) -> None:
    reading, changing = openings

    def answer(response: Response, entity: TaggedDocument) -> Any:
        response.headers["etag"] = entity.etag
        document = entity.document
        return document if route.member is None else {route.member: document}

    @router.get(
        f"/{route.name}",
        summary=f"Read {route.name.title()}",
        description=f"Return {route.description}.",
        response_model=route.returns,
    )
    async def read(opened: Annotated[OpenedRepository, reading], response: Response) -> Any:
        return answer(response, await Administration(swaps, opened).read(route.setting))

    @router.put(
        f"/{route.name}",
        summary=f"Replace {route.name.title()}",
        description=f"Replace {route.description}, if it is as `If-Match` says.",
        response_model=route.returns,
        openapi_extra=reads(route.reads),
    )
    async def replace(
        opened: Annotated[OpenedRepository, changing],
        request: Request,
        response: Response,
        if_match: _IfMatch = None,
    ) -> Any:
        read = await bodies.read_document(request, route.reads, _MAX_NBYTES)
        wanted = read.model_dump()
        if (demand := parse_demand(if_match, None)) is None:
            raise BadHeaderError("If-Match must have the ETag of the setting, or *")
        if route.member is not None:
            wanted = wanted[route.member]
        administration = Administration(swaps, opened)
        return answer(response, await administration.replace(route.setting, wanted, demand))
