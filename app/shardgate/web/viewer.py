"""Neuroglancer: links that open data in it, and its client served under ``/viewer/``."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from shardgate.errors import BadParameterError, DamagedError, install_command
from shardgate.auth.access import ServedDataset
from shardgate.web.nodes import NodeView, find_images, read_node
from shardgate.web.previews import Previews
from shardgate.web.viewer_state import (
    Contrast,
    is_viewable,
    link_to,
    needs_contrast,
    state_of,
)
from shardgate.server.request import Request as GatewayRequest
from shardgate.server.request import quote_key
from shardgate.server.responses import csp_digest
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver

PUBLIC_VIEWER: Final = "https://neuroglancer-demo.appspot.com/"
VIEWER: Final = "viewer/v/page/"
"""Path below the root of the service: the client looks for ``/v/`` and a name in its address."""

_HOST: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_THIS_MACHINE: Final = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?")
_PACKAGE: Final = "neuroglancer"
_WAIT_S: Final = 20.0
"""Longest wait of a link for the contrast."""
_HASHED: Final = re.compile(r"(?:.+\.)?[0-9a-f]{16}\.[a-z]+")
_LASTING: Final = "public, max-age=31536000, immutable"
_SCRIPT: Final = """
// The client waits for events of a Python server, which does not exist here.
window.EventSource = class { constructor() { setTimeout(() => this.onopen()); } close() {} };
// Without a state in its address it would send each change of it to that server.
if (!location.hash) location.hash = "#!{}";
"""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the service, as a client reached it.

    Forged headers deceive only their sender: pages are not cached.
    """

    origin: str
    """Scheme and host."""
    root_path: str
    """Percent-encoded path that the service is mounted below."""
    token: str | None = None
    """Token in the path, percent-encoded."""

    @staticmethod
    def of(host: str, scheme: str, root_path: str, token: str | None) -> "Address":
        """Return the address for the header Host, and the *scheme* that a proxy reports in
        X-Forwarded-Proto.
        """
        nearest = scheme.partition(",")[0].strip()
        known_scheme = nearest if nearest == "https" else "http"
        known_host = host if _HOST.fullmatch(host) else "localhost"
        return Address(f"{known_scheme}://{known_host}", root_path, token)

    @property
    def root(self) -> str:
        """URL that the pages of the service are below."""
        return f"{self.origin}{self.root_path}"

    @property
    def base(self) -> str:
        """URL that the datasets are below, with the token if one is in the path."""
        return self.root if self.token is None else f"{self.root}/~{self.token}"

    def signing_viewer(self, dataset: Dataset, viewers: Sequence[str]) -> str | None:
        """Return the page, of *viewers* that sign people in, to open a private *dataset*; `None`
        if they cannot from here, or need not.
        """
        if not viewers or not self.is_secure or self.token is not None:
            return None
        is_private = isinstance(dataset, ServedDataset) and not dataset.is_public
        return f"{viewers[0]}/" if is_private else None

    def viewer(self, *, is_installed: bool) -> str | None:
        """Return the page of the viewer; `None` if none can read from here."""
        if is_installed:
            return f"{self.root}/{VIEWER}"
        return PUBLIC_VIEWER if self.is_trustworthy else None

    @property
    def is_secure(self) -> bool:
        """Return whether it is encrypted."""
        return self.origin.startswith("https://")

    @property
    def is_trustworthy(self) -> bool:
        """Return whether nobody can listen on the way: it is encrypted, or on this machine."""
        host = self.origin.partition("://")[2]
        return self.is_secure or _THIS_MACHINE.fullmatch(host) is not None


def address_of(request: Request) -> Address:
    """Return the address that *request* of a route came to."""
    headers, token = request.headers, request.scope["token"]
    return Address.of(
        headers.get("host", ""),
        headers.get("x-forwarded-proto", request.scope["scheme"]),
        quote(request.scope["root_path"]),
        None if token is None else quote(token, safe="%"),
    )


def address_reached_by(request: GatewayRequest) -> Address:
    """Return the address that *request* came to."""
    headers, token = request.headers, request.token
    scheme = "http" if request.asgi is None else request.asgi.scope["scheme"]
    return Address.of(
        headers.get(b"host", b"").decode("latin-1"),
        headers.get(b"x-forwarded-proto", scheme.encode()).decode("latin-1"),
        quote(request.root_path),
        None if token is None else quote(token, safe="%"),
    )


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
        signing_viewer = address.signing_viewer(dataset, self._signing_viewers)
        viewer = signing_viewer or address.viewer(is_installed=viewer_folder() is not None)
        base = address.base if signing_viewer is None else f"middleauth+{address.base}"
        if viewer is None:
            hint = install_command("viewer")
            raise BadParameterError(f"there is no viewer; {hint} in the checkout adds one")
        async for each in find_images(self._resolver, dataset, path):
            node = await self._read(dataset, each, is_named=bool(path) and each == path)
            if node is not None and is_viewable(node):
                contrast = await self._contrast(dataset, node)
                key = f"{dataset.name}/{each}".rstrip("/")
                state = state_of(node, f"{base}/{quote_key(key)}", key, contrast)
                return link_to(viewer, state)
        raise BadParameterError(f"{dataset.name}/{path} has nothing that Neuroglancer draws")

    async def _read(self, dataset: Dataset, path: str, *, is_named: bool) -> NodeView | None:
        """Read a node; damage of one that is not named is none: others may be sound."""
        try:
            return await read_node(self._resolver, dataset, path)
        except DamagedError:
            if is_named:
                raise
            return None

    async def _contrast(self, dataset: Dataset, node: NodeView) -> Contrast | None:
        """Return the contrast of the preview of *node*, if it is needed and made in time."""
        if not needs_contrast(node):
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                return (await self._previews.get(dataset, node.path, None)).contrast
        return None


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
        "connect-src * blob: data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'self'"
    )
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(content, headers=headers)
