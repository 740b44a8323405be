"""``/api``, health, metrics and the list of datasets, with OpenAPI at ``/docs``."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import version
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from shardgate.api.openapi import DEFAULT, AsciiJson
from shardgate.auth.access import Datasets, ServedDataset, may_write
from shardgate.concurrency import bounded_gather
from shardgate.errors import BusyError, ShardgateError, StorageError, TooManyRequestsError
from shardgate.formats.surveying import Description
from shardgate.observability.logging import log_failure
from shardgate.observability.metrics import MEDIA_TYPE, Metrics
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.problems import Failure, extension_members, status_of
from shardgate.server.request import Headers
from shardgate.server.responses import ALLOW, Explain, csp_digest
from shardgate.survey.inspect import DamageReport, inspect_page

_ABOUT: Final = """Control plane: datasets, Icechunk repositories, sessions and tokens. Data are at:

- `GET /{dataset}/{key}` reads a chunk or an object; `PUT` and `DELETE` write it where the dataset \
is `writable`.
- `DELETE /{dataset}?prefix=a/` deletes all keys below a prefix.
- `GET /{dataset}?list-type=2` lists keys; for clients of S3 a dataset is a bucket.
- `PUT /{dataset}/@session.{session_id}/{key}` writes into a session of an Icechunk repository, \
which is begun and committed below.
"""


class DatasetSummary(BaseModel, use_attribute_docstrings=True):
    """A dataset that is served."""

    name: str
    path: str
    """Path that its keys begin with."""
    format: str
    """Container format, or `auto`."""
    writable: bool = False
    """Whether the caller may write below that path."""


class DatasetList(BaseModel):
    """All datasets."""

    datasets: list[DatasetSummary]


class DatasetDescription(DatasetSummary):
    """A dataset, its arrays, and other sharded collections."""

    arrays: list[Description]
    damaged: list[DamageReport]
    is_all: bool
    """Whether no others follow; if not, and without `next`, a look at the dataset takes too long to
    find them.
    """
    next: str | None = None
    """`after` of the next page, where there are more arrays."""
    reason: str = ""
    """Why the look ended before `limit`, which names were looked for where nothing is found, and
    which ones are left out, as they are no keys.
    """


class Readiness(BaseModel):
    """State of each dataset's root: `ok`, or why it cannot be reached."""

    datasets: dict[str, str]


def build_api(  # noqa: PLR0913 - its parts, each made by the composition root
    datasets: Datasets,
    resolver: Resolver,
    metrics: Metrics,
    routers: Sequence[APIRouter] = (),
    *,
    start_page: Callable[[Request], Awaitable[Response]],
    explain: Explain,
) -> FastAPI:
    """Build the FastAPI application, with the routes of *routers*.

    *start_page* answers browsers at the root; *explain* returns the response to a failure.
    """
    app = FastAPI(
        title="Shardgate",
        version=version("shardgate"),
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would lead to http:// behind TLS, and lose a token in the path
        default_response_class=AsciiJson,
        responses=dict(DEFAULT),
    )
    for error in (ShardgateError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, _error_handler(explain))
    _add_datasets(app, datasets, resolver, start_page)
    _add_health(app, datasets, resolver, metrics)
    _add_docs(app)
    for router in routers:
        app.router.routes.extend(router.routes)
    return app


def _add_datasets(
    app: FastAPI,
    datasets: Datasets,
    resolver: Resolver,
    start_page: Callable[[Request], Awaitable[Response]],
) -> None:
    @app.get("/", include_in_schema=False)
    async def start(request: Request) -> Response:
        if request.scope["responder"].request.accepts_html:
            return await start_page(request)
        found = await _summaries(datasets, resolver, request)
        body = DatasetList(datasets=found).model_dump_json()
        return Response(body, media_type="application/json")

    @app.get("/api/datasets", tags=["Datasets"])
    async def list_datasets(request: Request) -> DatasetList:
        """List the datasets that the caller may read."""
        return DatasetList(datasets=await _summaries(datasets, resolver, request))

    @app.get("/api/datasets/{dataset}", tags=["Datasets"])
    async def describe_dataset(
        request: Request,
        dataset: str,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> DatasetDescription:
        """Describe the arrays and other collections of a dataset, as stored and as served."""
        named = datasets.find(dataset, request.scope["caller"])
        page = await inspect_page(resolver.root(named), after=after, limit=limit)
        summary = _summary(named, request, is_read_only=await resolver.is_read_only(named))
        return DatasetDescription(
            **summary.model_dump(),
            arrays=[report for report in page.reports if isinstance(report, Description)],
            damaged=[report for report in page.reports if isinstance(report, DamageReport)],
            is_all=page.is_all,
            next=page.next,
            reason=page.reason,
        )


def _add_health(app: FastAPI, datasets: Datasets, resolver: Resolver, metrics: Metrics) -> None:
    @app.get("/healthz", tags=["Service"])
    async def is_alive() -> dict[str, str]:
        """Answer while the process runs; 503 from a second before it takes no more connections."""
        if metrics.requests.is_stopping:
            raise BusyError("the process is stopping")
        return {"status": "ok"}

    @app.get("/readyz", tags=["Service"], responses={503: {"model": Readiness}})
    async def is_ready(request: Request, response: Response) -> Readiness:
        """Check that the root of every dataset can be reached; 503 if not.

        States are listed of the datasets that the caller may read.
        """
        states: dict[str, str] = {}

        async def check(dataset: Dataset) -> None:
            states[dataset.name] = "ok"
            try:
                await resolver.check_reachable(dataset)
            except StorageError as error:
                log_failure(HTTPStatus.SERVICE_UNAVAILABLE, error, dataset.name)
                states[dataset.name] = str(error)
                response.status_code = HTTPStatus.SERVICE_UNAVAILABLE

        await bounded_gather(check, list(datasets), limit=64)
        visible = [each.name for each in datasets.readable_by(request.scope["caller"])]
        return Readiness(datasets={name: states[name] for name in visible})

    @app.get("/metrics", tags=["Service"])
    async def expose_metrics(request: Request) -> Response:
        """Return the metrics of this process for Prometheus."""
        datasets.demand_watching(request.scope["caller"])
        return Response(metrics.exposition(), media_type=MEDIA_TYPE)


def _add_docs(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def show_docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url="./openapi.json",
            title=app.title,
            swagger_js_url="./docs/swagger-ui-bundle.js",
            swagger_css_url="./docs/swagger-ui.css",
            swagger_favicon_url="data:,",
        )
        # The page has one script in line, whose digest permits it.
        script = bytes(page.body).decode().partition("<script>")[2].partition("</script>")[0]
        page.headers["content-security-policy"] = (
            f"default-src 'none'; script-src 'self' '{csp_digest(script)}'; connect-src 'self'; "
            "style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'"
        )
        return page

    # With its own files the page works where no other server can be reached.
    app.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))


async def _summaries(
    datasets: Datasets, resolver: Resolver, request: Request
) -> list[DatasetSummary]:
    caller = request.scope["caller"]
    readable = datasets.readable_by(caller)
    read_only: set[str] = set()

    async def look(dataset: ServedDataset) -> None:
        if await resolver.is_read_only(dataset):
            read_only.add(dataset.name)

    with suppress(TimeoutError):  # the others count as writable
        async with asyncio.timeout(1.0):  # a list is to come at once, whatever the stores do
            allowed = [each for each in readable if may_write(caller, each)]
            await bounded_gather(look, allowed, limit=64)
    return [_summary(each, request, is_read_only=each.name in read_only) for each in readable]


def _summary(dataset: ServedDataset, request: Request, *, is_read_only: bool) -> DatasetSummary:
    """Describe *dataset* for the caller, whose path keeps the token of the request."""
    base_path = request.scope["responder"].request.base_path
    return DatasetSummary(
        name=dataset.name,
        path=f"{base_path}/{quote(dataset.name)}/",
        format=dataset.format,
        writable=may_write(request.scope["caller"], dataset) and not is_read_only,
    )


def _methods_of(request: Request) -> str:
    """Return the methods of all routes of the path, for ``Allow``."""
    methods = {"OPTIONS"}
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods.update(getattr(route, "methods", ()))
    if methods == {"OPTIONS"}:  # the path is below that of mounted files
        methods.add("GET")
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


def _error_handler(explain: Explain) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def respond(
        request: Request, failure: Failure, extra: Mapping[str, str] | None = None
    ) -> Response:
        explained = await explain(request.scope["responder"].request, failure)
        headers = {k.decode(): v.decode() for k, v in cast("Headers", explained.headers)}
        return Response(explained.body, explained.status, headers | dict(extra or {}))

    async def handle(request: Request, error: Exception) -> Response:
        match error:
            case ShardgateError():
                status = status_of(error)
                log_failure(status, error)
                extra: dict[str, str] = {}
                if status is HTTPStatus.METHOD_NOT_ALLOWED:
                    extra["Allow"] = ALLOW.decode()
                if isinstance(error, TooManyRequestsError):
                    extra["retry-after"] = str(error.wait_s)
                members = extension_members(error)
                return await respond(request, Failure(status, str(error), error, members), extra)
            case HTTPException(status_code=HTTPStatus.METHOD_NOT_ALLOWED):
                failure = Failure(HTTPStatus.METHOD_NOT_ALLOWED, error.detail)
                return await respond(request, failure, {"Allow": _methods_of(request)})
            case HTTPException():
                failure = Failure(HTTPStatus(error.status_code), error.detail)
                return await respond(request, failure, error.headers)
            case RequestValidationError():
                first: dict[str, Any] = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                detail = f"{where}: {first['msg']}"
                return await respond(request, Failure(HTTPStatus.BAD_REQUEST, detail))
            case _:
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                return await respond(request, Failure(status, "a fault of this service"))

    return handle
