"""The control plane: ``/api``, health, and the list of datasets, with OpenAPI at ``/docs``."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from app.errors import ShardgateError, StorageError
from app.formats.surveying import Description
from app.http.answer import ALLOW
from app.http.credentials.access import Datasets, may_write
from app.http.described import OTHERWISE
from app.http.problems import members_of, problem, status_of
from app.http.repositories import RepositoryPath, build_repositories
from app.http.routers import Json
from app.http.start.page import StartPage
from app.http.target import check_key
from app.http.viewer import add_viewer
from app.observability.logging import log_failure
from app.observability.metrics import MEDIA_TYPE, Metrics
from app.resolve.icechunk.refs import ContainerReport, list_containers
from app.resolve.inspect import DamageReport, inspect_root
from app.resolve.resolver import Dataset, Resolver

type Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_ABOUT: Final = """What is served. The bytes are elsewhere:

- `GET /{dataset}/{key}` reads a chunk or an object; `PUT` and `DELETE` write it where the dataset \
is `writable`.
- `DELETE /{dataset}?prefix=a/` deletes all keys below a prefix.
- `GET /{dataset}?list-type=2` lists keys; clients of S3 take a dataset for a bucket.
- `PUT /{dataset}/@session.{session_id}/{key}` writes into a session of an Icechunk repository, \
which is begun and committed below.
"""


class DatasetSummary(BaseModel, use_attribute_docstrings=True):
    """A dataset that is served."""

    name: str
    path: str
    """Where its keys begin."""
    format: str
    """Container format, or `auto`."""
    writable: bool = False
    """Whether the caller may write below that path."""


class DatasetList(BaseModel):
    """All datasets."""

    datasets: list[DatasetSummary]


class DatasetDescription(DatasetSummary):
    """A dataset and the arrays in it, and whatever else is sharded."""

    arrays: list[Description]
    damaged: list[DamageReport]
    containers: list[ContainerReport]
    """Where virtual references of an Icechunk repository may lead, and whether they do here."""
    next: str | None = None
    """Path to go on after, where there are more arrays."""


class Readiness(BaseModel):
    """Whether the root of each dataset can be reached; a reason if not."""

    datasets: dict[str, str]


def build_control(  # noqa: PLR0913 - its parts, each made by the composition root
    datasets: Datasets,
    resolver: Resolver,
    metrics: Metrics,
    lifespan: Lifespan,
    writing: Sequence[APIRouter] = (),
    *,
    start_page: StartPage,
) -> FastAPI:
    """Build the FastAPI application, with the routes that write."""
    app = FastAPI(
        title="Shardgate",
        description=_ABOUT,
        lifespan=lifespan,
        redoc_url=None,
        default_response_class=Json,
        responses=dict(OTHERWISE),
    )
    for error in (ShardgateError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, _on_error)

    @app.get("/", include_in_schema=False)
    async def start(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return await start_page(request)
        summaries = _summaries(datasets, request)
        return Response(
            DatasetList(datasets=summaries).model_dump_json(), media_type="application/json"
        )

    @app.get("/api/datasets")
    async def list_datasets(request: Request) -> DatasetList:
        """List what is served."""
        return DatasetList(datasets=_summaries(datasets, request))

    @app.get("/api/datasets/{dataset}")
    async def describe_dataset(
        request: Request,
        dataset: str,
        path: RepositoryPath = "",
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> DatasetDescription:
        """Describe the arrays and the like of a dataset as they are stored and served."""
        named = datasets.find(dataset, request.scope["caller"])
        root = resolver.root(named)
        reports = await inspect_root(root, after=after, limit=limit)
        containers = await list_containers(root, check_key(path.rstrip("/")))
        damaged = [each for each in (*reports, *containers) if isinstance(each, DamageReport)]
        return DatasetDescription(
            **_summary(named, request).model_dump(),
            arrays=[report for report in reports if isinstance(report, Description)],
            damaged=list(dict.fromkeys(damaged)),
            containers=[each for each in containers if isinstance(each, ContainerReport)],
            next=reports[-1].path if len(reports) == limit else None,
        )

    @app.get("/healthz")
    async def is_alive() -> dict[str, str]:
        """Tell that the process answers."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": Readiness}})
    async def is_ready(request: Request, response: Response) -> Readiness:
        """Tell whether the root of every dataset can be reached; of those that one may see, why."""
        states = {each.name: await _reach(resolver, each) for each in datasets}
        if any(state != "ok" for state in states.values()):
            response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        seen = [each.name for each in datasets.seen_by(request.scope["caller"])]
        return Readiness(datasets={name: states[name] for name in seen})

    @app.get("/metrics")
    async def count(request: Request) -> Response:
        """Tell what this process has done, for Prometheus."""
        datasets.demand_watching(request.scope["caller"])
        return Response(metrics.exposition(), media_type=MEDIA_TYPE)

    add_viewer(app)
    _take(app, build_repositories(datasets, resolver), *writing)
    return app


def _take(app: FastAPI, *routers: APIRouter) -> None:
    """Add the routes of *routers*, as `new_router` makes them."""
    for router in routers:
        app.router.routes.extend(router.routes)


def _summaries(datasets: Datasets, request: Request) -> list[DatasetSummary]:
    return [_summary(each, request) for each in datasets.seen_by(request.scope["caller"])]


def _summary(dataset: Dataset, request: Request) -> DatasetSummary:
    """Say what is there for who asks, with the token that the path began with."""
    token = request.scope.get("token")
    return DatasetSummary(
        name=dataset.name,
        path=f"{f'/~{token}' if token else ''}/{quote(dataset.name)}/",
        format=dataset.format,
        writable=may_write(request.scope["caller"], dataset),
    )


async def _reach(resolver: Resolver, dataset: Dataset) -> str:
    try:
        await resolver.check_reachable(dataset)
    except StorageError as error:
        log_failure(HTTPStatus.SERVICE_UNAVAILABLE, error, dataset.name)
        return str(error)
    return "ok"


def _problem_response(
    status: HTTPStatus,
    detail: str,
    more: Mapping[str, str] | None = None,
    members: Mapping[str, object] | None = None,
) -> Response:
    headers, body = problem(status, detail, members or {})
    return Response(body, status, {k.decode(): v.decode() for k, v in headers} | dict(more or {}))


async def _on_error(_: Request, error: Exception) -> Response:
    match error:
        case ShardgateError():
            status = status_of(error)
            log_failure(status, error)
            more = {"Allow": ALLOW.decode()} if status is HTTPStatus.METHOD_NOT_ALLOWED else None
            return _problem_response(status, str(error), more, members_of(error))
        case HTTPException():
            return _problem_response(HTTPStatus(error.status_code), error.detail, error.headers)
        case RequestValidationError():
            first: dict[str, Any] = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return _problem_response(HTTPStatus.BAD_REQUEST, f"{where}: {first['msg']}")
        case _:
            return _problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of this service")
