"""The client of Neuroglancer, as its Python package brings it, under ``/viewer/``."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from app.http.pages import digest

PAGE: Final = "viewer/v/page/"
"""Where it is below the root of the service: it looks for ``/v/`` and a name in its address."""

_PACKAGE: Final = "neuroglancer"
_HASHED: Final = re.compile(r"(?:.+\.)?[0-9a-f]{16}\.[a-z]+")
_LASTING: Final = "public, max-age=31536000, immutable"
_SCRIPT: Final = """
// The client waits for a server in Python, which is not there and has nothing to say.
window.EventSource = class { constructor() { setTimeout(() => this.onopen()); } close() {} };
// Without a state in its address it would send each change of it to that server.
if (!location.hash) location.hash = "#!{}";
"""


@cache
def folder() -> Path | None:
    """Find the files of the client; `None` where the package is not installed."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "static/client"
    return found if (found / "index.html").is_file() else None


def is_installed() -> bool:
    """Tell whether the viewer can be served."""
    return folder() is not None


def add_viewer(app: FastAPI) -> None:
    """Let *app* serve the viewer, if it is installed."""
    if (files := folder()) is None:
        return

    @app.get("/viewer", include_in_schema=False)
    @app.get("/viewer/", include_in_schema=False)
    async def open_viewer() -> Response:
        return RedirectResponse(f"/{PAGE}")

    app.mount(f"/{PAGE}".rstrip("/"), _Client(files))


class _Client(StaticFiles):
    """The page, with a script in it, and the files that it loads."""

    def __init__(self, files: Path) -> None:
        super().__init__(directory=files)
        self._page = files / "index.html"

    async def get_response(self, path: str, scope: Any) -> Response:
        if path == ".":
            return _page(self._page)
        response = await super().get_response(path, scope)
        if _HASHED.fullmatch(path):
            response.headers["cache-control"] = _LASTING
        return response


@cache
def _page(file: Path) -> Response:
    """Put the script in front of those of the page."""
    content = file.read_text("utf-8").replace("<head>", f"<head><script>{_SCRIPT}</script>", 1)
    policy = (
        f"default-src 'self'; script-src 'self' '{digest(_SCRIPT)}' 'wasm-unsafe-eval' blob:; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' blob: data:; "
        "connect-src * blob: data:; object-src 'none'; base-uri 'none'; form-action 'none'"
    )
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(content, headers=headers)
