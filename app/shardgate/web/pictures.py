"""`/api` routes of pictures: previews, and links that open Neuroglancer."""

from email.utils import formatdate
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import RedirectResponse

from shardgate.api.openapi import new_router
from shardgate.auth.access import Datasets
from shardgate.errors import BusyError
from shardgate.gateway.entity_headers import cache_headers
from shardgate.server.address import address_of
from shardgate.server.conditions import Conditions
from shardgate.server.request import check_key
from shardgate.web.previews import PENDING, Previews
from shardgate.web.viewer import ViewerLinks

_PATH: Final = "Path of an array, image or volume, which may begin with a ref; default: the first."
_REF: Final = "Icechunk: `branch.NAME`, `tag.NAME`, or the id of a snapshot; default `branch.main`."


def build_pictures(datasets: Datasets, previews: Previews, links: ViewerLinks) -> APIRouter:
    """Build the routes of previews and of links into the viewer."""
    router = new_router("/api/datasets/{dataset}", "Pictures")

    @router.get(
        "/preview.png",
        response_class=Response,
        responses={200: {"content": {"image/png": {}}}, 304: {"description": "It is unchanged."}},
    )
    async def show_preview(
        request: Request,
        dataset: str,
        path: Annotated[str, Query(description=_PATH)] = "",
        ref: Annotated[str | None, Query(description=_REF, max_length=1024)] = None,
    ) -> Response:
        """Return a small picture of the middle of an array or multiscale.

        `Last-Modified` is the time at which its chunks were read. If chunks were written at that
        time, it may show chunks of different moments: then `X-Shardgate-Preview` is `mixed`. In an
        Icechunk repository all are of one snapshot.

        Whatever cannot be drawn, damaged chunks for example, has a grey placeholder instead. What
        cannot be read for a reason that may pass is 503 until it was drawn once.
        """
        named = datasets.find(dataset, request.scope["caller"])
        preview = await previews.get(named, path, ref)
        if preview is PENDING:
            raise BusyError("the picture is not drawn yet")
        headers = {name.decode(): value.decode() for name, value in cache_headers(named)}
        if not named.is_public:
            headers["vary"] = "Authorization, Cookie"
        if preview.is_placeholder or preview.is_mixed:
            headers["cache-control"] = "no-cache"
        if preview.is_mixed:
            headers["x-shardgate-preview"] = "mixed"
        if preview.read_s is not None:
            headers["last-modified"] = formatdate(preview.read_s, usegmt=True)
        headers["etag"] = preview.etag
        conditions = Conditions(if_none_match=request.headers.get("if-none-match"))
        if (status := conditions.precondition(preview.etag, None)) is not None:
            return Response(status_code=status, headers=headers)
        return Response(preview.png, media_type="image/png", headers=headers)

    @router.get(
        "/viewer",
        status_code=HTTPStatus.TEMPORARY_REDIRECT,
        response_class=RedirectResponse,
    )
    async def open_viewer(
        request: Request,
        dataset: str,
        path: Annotated[str, Query(description=_PATH)] = "",
    ) -> str:
        """Redirect to Neuroglancer, which shows an array, image or volume."""
        named = datasets.find(dataset, request.scope["caller"])
        return await links.link(named, check_key(path.rstrip("/")), address_of(request))

    return router
