"""Neuroglancer: links that open data in it, and its client served under ``/viewer/``."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from shardgate.auth.access import ServedDataset
from shardgate.errors import BadParameterError, DamagedError, ShardgateError, install_command
from shardgate.model import join_path
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.address import Address
from shardgate.server.request import quote_key
from shardgate.server.responses import csp_digest
from shardgate.web.nodes import NodeView, find_images, read_document, read_node
from shardgate.web.previews import Previews
from shardgate.web.viewer_state import (
    Contrast,
    State,
    is_viewable,
    link_to,
    needs_contrast,
    scene_of,
    state_of,
)

PUBLIC_VIEWER: Final = "https://neuroglancer-demo.appspot.com/"
# Path below the root of the service: the client looks for ``/v/`` and a name in its address.
VIEWER: Final = "viewer/v/page/"
_WAIT_S: Final = 20.0  # longest wait of a link for the contrast
_MOST_SEGMENTS: Final = 16  # with meshes in a link
_MOST_AROUND: Final = 4  # volumes and annotations that a link adds to a segmentation
_MOST_LOOKED_AT: Final = 64  # scales and other collections among which they are searched
_SCRIPT: Final = """
// The client waits for events of a Python server, which does not exist here.
window.EventSource = class { constructor() { setTimeout(() => this.onopen()); } close() {} };
// Without a state in its address it would send each change of it to that server.
if (!location.hash) location.hash = "#!{}";
"""


def viewer_of(address: Address, *, is_installed: bool) -> str | None:
    """Return the page of the viewer that reads from *address*; `None` if none can."""
    if is_installed:
        return f"{address.root}/{VIEWER}"
    return PUBLIC_VIEWER if address.is_trustworthy else None


def signing_viewer_of(address: Address, dataset: Dataset, viewers: Sequence[str]) -> str | None:
    """Return the page, of *viewers* that sign people in, to open a private *dataset*; `None` if
    they cannot from *address*, or need not.
    """
    if not viewers or not address.is_secure or address.token is not None:
        return None
    is_private = isinstance(dataset, ServedDataset) and not dataset.is_public
    return f"{viewers[0]}/" if is_private else None


class ViewerLinks:
    """Makes links that open nodes in Neuroglancer, with the contrast of their previews."""

    def __init__(
        self, resolver: Resolver, previews: Previews, signing_viewers: Sequence[str] = ()
    ) -> None:
        self._resolver = resolver
        self._previews = previews
        self._signing_viewers = signing_viewers

    async def link(self, dataset: Dataset, path: str, address: Address) -> str:
        """Return a link to the node at *path*, or else to the first one below it that is drawn.

        Raises: `BadParameterError` where no viewer can show it, any `ShardgateError` of reading.
        """
        signing_viewer = signing_viewer_of(address, dataset, self._signing_viewers)
        viewer = signing_viewer or viewer_of(address, is_installed=viewer_folder() is not None)
        base = address.base if signing_viewer is None else f"middleauth+{address.base}"
        if viewer is None:
            hint = install_command("viewer")
            raise BadParameterError(f"there is no viewer; {hint} in the checkout adds one")
        async for each in find_images(self._resolver, dataset, path):
            node = await self._read(dataset, each, is_named=bool(path) and each == path)
            if node is not None and is_viewable(node):
                state = await self._state(dataset, node, base)
                if node.kind == "volume" and node.array.is_labels:
                    state = await self._scene(dataset, node, base, state)
                return link_to(viewer, state)
        raise BadParameterError(f"{dataset.name}/{path} has nothing that Neuroglancer draws")

    async def _state(self, dataset: Dataset, node: NodeView, base: str) -> State:
        key = f"{dataset.name}/{node.path}".rstrip("/")
        contrast: Contrast | None = None
        if needs_contrast(node):
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    contrast = (await self._previews.get(dataset, node.path)).values.contrast
        return state_of(node, f"{base}/{quote_key(key)}", key, contrast)

    async def _scene(self, dataset: Dataset, node: NodeView, base: str, state: State) -> State:
        """Add to the *state* of a segmentation the volumes and annotations in its folder, and the
        first segments that have properties: the viewer draws no meshes of others.
        """
        around = []
        async for path in find_images(self._resolver, dataset, node.path, _MOST_LOOKED_AT):
            inner = None if path == node.path else await self._read(dataset, path, is_named=False)
            if inner is not None and inner.kind in ("volume", "annotations"):
                around.append(await self._state(dataset, inner, base))
            if len(around) == _MOST_AROUND:
                break
        return scene_of(state, await self._segments(dataset, node), around)

    async def _segments(self, dataset: Dataset, node: NodeView) -> list[str]:
        """Return the first ids in the properties of a segmentation, if it has any."""
        folder = node.document.get("segment_properties")
        if not isinstance(folder, str):
            return []
        key = join_path(node.path, f"{folder}/info")
        with suppress(ShardgateError):  # of properties: the voxels are sound
            document = await read_document(self._resolver, dataset, key)
            match document and document.members:
                case {"inline": {"ids": list() as ids}}:
                    return [each for each in ids[:_MOST_SEGMENTS] if str(each).isdecimal()]
        return []

    async def _read(self, dataset: Dataset, path: str, *, is_named: bool) -> NodeView | None:
        """Read a node; damage of one that is not named is none: others may be sound."""
        try:
            return await read_node(self._resolver, dataset, path)
        except DamagedError:
            if is_named:
                raise
            return None


@cache
def viewer_folder() -> Path | None:
    """Return the folder of the client; `None` if the extra ``viewer`` is not installed."""
    spec = find_spec("neuroglancer")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "static/client"
    return found if (found / "index.html").is_file() else None


def add_viewer(app: FastAPI) -> None:
    """Serve the client from *app*, if it is installed."""
    if (folder := viewer_folder()) is None:
        return
    page = f"/{VIEWER}".rstrip("/")

    @app.get("/viewer", include_in_schema=False)
    @app.get("/viewer/", include_in_schema=False)
    @app.get(page, include_in_schema=False)
    async def open_viewer(request: Request) -> Response:
        return RedirectResponse(f"{request.scope['root_path']}/{VIEWER}")

    app.mount(page, _ViewerFiles(folder))


class _ViewerFiles(StaticFiles):
    """The client's page, with `_SCRIPT` in it, and the files that it loads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(directory=folder)
        self._page = folder / "index.html"

    async def get_response(self, path: str, scope: Any) -> Response:
        if path == ".":
            return _viewer_page(self._page)
        response = await super().get_response(path, scope)
        if re.fullmatch(r"(?:.+\.)?[0-9a-f]{16}\.[a-z]+", path):  # named by a hash
            response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response


@cache
def _viewer_page(file: Path) -> Response:
    """Return the page with `_SCRIPT` before its own scripts."""
    content = file.read_text("utf-8").replace("<head>", f"<head><script>{_SCRIPT}</script>", 1)
    policy = (
        f"default-src 'self'; script-src 'self' '{csp_digest(_SCRIPT)}' 'wasm-unsafe-eval' blob:; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' blob: data:; "
        "connect-src * blob: data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'self'"
    )
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(content, headers=headers)
