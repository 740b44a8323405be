"""Neuroglancer: links that open data in it, and its client served under ``/viewer/``."""

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from shardgate.formats.surveying import Description
from shardgate.http.responses import csp_digest

PUBLIC_VIEWER: Final = "https://neuroglancer-demo.appspot.com/"
VIEWER: Final = "viewer/v/page/"
"""Path below the root of the service: the client looks for ``/v/`` and a name in its address."""

_LABEL_TYPES: Final = ("uint32", "uint64")
_PACKAGE: Final = "neuroglancer"
_HASHED: Final = re.compile(r"(?:.+\.)?[0-9a-f]{16}\.[a-z]+")
_LASTING: Final = "public, max-age=31536000, immutable"
_SCRIPT: Final = """
// The client waits for events of a Python server, which does not exist here.
window.EventSource = class { constructor() { setTimeout(() => this.onopen()); } close() {} };
// Without a state in its address it would send each change of it to that server.
if (!location.hash) location.hash = "#!{}";
"""


def zarr_source(url: str) -> str:
    """Return the data source URL of the Zarr v3 array, or OME-Zarr image, at *url*."""
    return f"{url}/|zarr3:"


def precomputed_source(url: str) -> str:
    """Return the data source URL of the precomputed volume, meshes or annotations at *url*."""
    return f"precomputed://{url}"


def layer_type(collection: Description) -> str:
    """Return the type of layer for *collection*; 32 and 64-bit unsigned integers are labels."""
    match collection.kind:
        case "array":
            return "segmentation" if collection.data_type in _LABEL_TYPES else "image"
        case "annotations":
            return "annotation"
        case _:
            return "segmentation"


def link(viewer: str, kind: str, name: str, source: str) -> str:
    """Return the URL of *viewer* with *source* as a layer *name* of type *kind*."""
    state = {"layers": [{"type": kind, "name": name, "source": source}], "layout": "4panel"}
    return f"{viewer}#!{quote(json.dumps(state), safe=':/')}"


@cache
def viewer_folder() -> Path | None:
    """Return the folder of the client; `None` if the extra ``viewer`` is not installed."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "static/client"
    return found if (found / "index.html").is_file() else None


def add_viewer(app: FastAPI) -> None:
    """Serve the client from *app*, if it is installed."""
    if (folder := viewer_folder()) is None:
        return

    @app.get("/viewer", include_in_schema=False)
    @app.get("/viewer/", include_in_schema=False)
    async def open_viewer(request: Request) -> Response:
        return RedirectResponse(f"{request.scope['root_path']}/{VIEWER}")

    app.mount(f"/{VIEWER}".rstrip("/"), _ViewerFiles(folder))


class _ViewerFiles(StaticFiles):
    """The client's page, with `_SCRIPT` in it, and the files that it loads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(directory=folder)
        self._page = folder / "index.html"

    async def get_response(self, path: str, scope: Any) -> Response:
        if path == ".":
            return _viewer_page(self._page)
        response = await super().get_response(path, scope)
        if _HASHED.fullmatch(path):
            response.headers["cache-control"] = _LASTING
        return response


@cache
def _viewer_page(file: Path) -> Response:
    """Return the page with `_SCRIPT` before its own scripts."""
    content = file.read_text("utf-8").replace("<head>", f"<head><script>{_SCRIPT}</script>", 1)
    policy = (
        f"default-src 'self'; script-src 'self' '{csp_digest(_SCRIPT)}' 'wasm-unsafe-eval' blob:; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' blob: data:; "
        "connect-src * blob: data:; object-src 'none'; base-uri 'none'; form-action 'none'"
    )
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(content, headers=headers)
