"""`/api` routes of pictures: previews, and links that open Neuroglancer."""

from email.utils import formatdate
from http import HTTPStatus
from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.responses import RedirectResponse

from shardgate.api.openapi import new_router
from shardgate.auth.access import Datasets, ServedDataset
from shardgate.concurrency import run_in_thread
from shardgate.errors import BusyError
from shardgate.gateway.entity_headers import cache_headers
from shardgate.model import ETag
from shardgate.server.address import address_of
from shardgate.server.conditions import Conditions
from shardgate.server.request import check_key
from shardgate.web.chunk_grids import ChunkGrids, ChunkGridView, draw_grid
from shardgate.web.histograms import draw_histogram
from shardgate.web.looks import read_indices
from shardgate.web.previews import PENDING, PLACEHOLDER, Preview, Previews
from shardgate.web.sections import Indices
from shardgate.web.viewer import ViewerLinks

_SVG_TYPE: Final = "image/svg+xml"
_PNG: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"image/png": {}}},
    304: {"description": "It is unchanged."},
}
_SVG: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {_SVG_TYPE: {}}}}
_PATH: Final = "Path of an array, image or volume, which may begin with a ref; default: the first."
_REF: Final = "Icechunk: `branch.NAME`, `tag.NAME`, or the id of a snapshot; default `branch.main`."

type _Path = Annotated[str, Query(description=_PATH)]
type _Ref = Annotated[str | None, Query(description=_REF, max_length=1024)]


class _PictureQuery(NamedTuple):
    """Dataset, path and plane that a request names."""

    dataset: ServedDataset
    path: str
    ref: str | None
    at: Indices


def build_pictures(
    datasets: Datasets, previews: Previews, grids: ChunkGrids, links: ViewerLinks
) -> APIRouter:
    """Build the routes of pictures, and of links into the viewer."""
    router = new_router("/api/datasets/{dataset}", "Pictures")

    async def parse_query(
        request: Request, dataset: str, path: _Path = "", ref: _Ref = None
    ) -> _PictureQuery:
        named = datasets.find(dataset, request.scope["caller"])
        at = read_indices(request.scope["query_string"].decode("latin-1"))
        return _PictureQuery(named, path, ref, at)

    type QueryDep = Annotated[_PictureQuery, Depends(parse_query)]

    @router.get("/preview.png", response_class=Response, responses=_PNG)
    async def show_preview(request: Request, query: QueryDep) -> Response:
        """Return a small picture of a plane of an array or multiscale, by default of the middle.

        `at.NAME=N` chooses element N along the axis NAME that the picture does not show, counted
        from 0 in the array or the finest level: `at.t=3&at.z=12`. Without `at.c` all channels of an
        OME-Zarr image are drawn, in their colours.

        `Last-Modified` is the time at which its chunks were read. If chunks were written at that
        time, it may show chunks of different moments: then `X-Shardgate-Preview` is `mixed`. In an
        Icechunk repository all are of one snapshot.

        Whatever cannot be drawn, damaged chunks for example, has a grey placeholder instead. What
        cannot be read for a reason that may pass is 503 until it was drawn once.
        """
        preview = await previews.get(*query)
        return _respond(request, query.dataset, preview, preview.png, "image/png")

    @router.get("/histogram.svg", response_class=Response, responses=_SVG)
    async def show_histogram(request: Request, query: QueryDep) -> Response:
        """Return a drawing of the values in the plane that `preview.png` shows: their range, and
        how many lie in each part of it. Parameters and headers are the same.
        """
        preview = await previews.get(*query)
        return _respond(request, query.dataset, preview, draw_histogram(preview.values), _SVG_TYPE)

    @router.get("/grid.svg", response_class=Response, responses=_SVG)
    async def show_grid(query: QueryDep) -> Response:
        """Return a drawing of the chunks in the plane that `preview.png` shows: which of them are
        stored, and in which shards. Parameters are the same.

        After a second it is sent as far as it is known: then `X-Shardgate-Grid` is `partial`.
        """
        return await _respond_grid(query.dataset, await grids.get(*query))

    @router.get(
        "/viewer", status_code=HTTPStatus.TEMPORARY_REDIRECT, response_class=RedirectResponse
    )
    async def open_viewer(request: Request, dataset: str, path: _Path = "") -> str:
        """Redirect to Neuroglancer, which shows an array, image or volume."""
        named = datasets.find(dataset, request.scope["caller"])
        return await links.link(named, check_key(path.rstrip("/")), address_of(request))

    return router


def _headers_of(dataset: ServedDataset) -> dict[str, str]:
    headers = {name.decode(): value.decode() for name, value in cache_headers(dataset)}
    headers["content-security-policy"] = "default-src 'none'; style-src 'unsafe-inline'"
    if not dataset.is_public:
        headers["vary"] = "Authorization, Cookie"
    return headers


async def _respond_grid(dataset: ServedDataset, grid: ChunkGridView) -> Response:
    headers = _headers_of(dataset)
    if not grid.is_complete:
        headers |= {"x-shardgate-grid": "partial", "cache-control": "no-store"}
    body = await run_in_thread(draw_grid, grid)
    return Response(body, media_type=_SVG_TYPE, headers=headers)


def _respond(
    request: Request, dataset: ServedDataset, preview: Preview, body: bytes, media_type: str
) -> Response:
    """Return *body*, a picture made of *preview*. Raises: `BusyError` if that is pending."""
    if preview is PENDING:
        raise BusyError("the picture is not drawn yet")
    headers = _headers_of(dataset)
    if preview is PLACEHOLDER or preview.is_mixed:
        headers["cache-control"] = "no-cache" if dataset.is_public else "private, no-cache"
    if preview.is_mixed:
        headers["x-shardgate-preview"] = "mixed"
    if preview.read_s is not None:
        headers["last-modified"] = formatdate(preview.read_s, usegmt=True)
    kind = "h" if media_type == _SVG_TYPE else ""  # other bytes of the same preview
    etag = ETag(f'{preview.etag[:-1]}{kind}"')
    headers["etag"] = etag
    conditions = Conditions(if_none_match=request.headers.get("if-none-match"))
    if (status := conditions.precondition(etag, None)) is not None:
        return Response(status_code=status, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
