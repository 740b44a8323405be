"""Neuroglancer in a browser with an empty profile: its requests, pictures and values."""

import io
import json
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image
from playwright.sync_api import Browser, Error, Page, Request, ViewportSize

_AT: Final = "/v/test/"
"""The client looks for ``/v/TOKEN`` in its own address."""


@contextmanager
def paging_client() -> Generator[str]:
    """Serve the client, and yield the URL of its page."""
    with as_file(files("neuroglancer") / "static/client") as folder, paging(folder) as origin:
        yield f"{origin}{_AT}"


@contextmanager
def paging(folder: Path) -> Generator[str]:
    """Serve the files of *folder*, and yield the origin."""
    with _Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.closing = threading.Event()


class _Handler(SimpleHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with a file, or with the empty stream of events that the client looks for."""
        if self.path.startswith("/events/"):
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.server.closing.wait()
        else:
            self.path = self.path.removeprefix(_AT.rstrip("/"))
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called
        """Log nothing."""


type Json = dict[str, Any]
type Voxels = npt.NDArray[np.int64]
"""Rows of coordinates in the dimensions of the state."""
type Pixels = npt.NDArray[np.int16]
"""Rows of columns of red, green and blue."""

_LOAD_S: Final = 120.0
_POLL_MS: Final = 100
_SIZE: Final = ViewportSize(width=800, height=600)

RESTORE: Final = "state => { viewer.state.reset(); viewer.state.restoreState(state); }"
"""A state in the page's address is written back, in the midst of reading it if that takes 0.4 s."""
_PASSING: Final = """
.neuroglancer-display-dimensions-widget,
.neuroglancer-layer-item-visible-progress,
.neuroglancer-layer-item-prefetch-progress { display: none }
[title="Previous selection"], [title="Next selection"] { visibility: hidden !important }
"""
"""Elements that disappear some time after the zoom was set, or everything was loaded, or that
depend on earlier states.
"""
LOADED: Final = """layers => (
    viewer.layerManager.managedLayers.length === layers
    && viewer.isReady()
    && !document.querySelector("#neuroglancer-status-container li:not([style*='none'])")
    || viewer.layerManager.managedLayers.some(
        ({layer}) => layer?.dataSources.some(source => source.loadState?.error))
)"""
_FAULTS: Final = """() => viewer.layerManager.managedLayers.flatMap(({layer}) =>
    layer.dataSources.map(source => source.loadState?.error).filter(Boolean).map(String))"""
_VALUES: Final = """([name, points]) => {
    const {layer} = viewer.layerManager.getLayerByName(name);
    return JSON.stringify(JSON.parse(points).map(point => {
        for (const part of layer.renderLayers) {
            const value = part.getValueAt?.(Float32Array.from(point));
            if (value !== undefined && value !== null) return String(value);
        }
        return null;
    }));
}"""
"""Points and values are JSON, since Playwright takes long for each number."""


def sections(shape: Sequence[int], center: Sequence[int]) -> Voxels:
    """Return the voxels in the planes through *center*, all of which its view shows."""
    voxels = np.indices(shape).reshape(len(shape), -1).T
    return np.compress((voxels == center).any(axis=1), voxels, axis=0)


def count(colour: str, pixels: Pixels) -> int:
    """Count the *pixels* of a *colour* such as ``#ff00ff``, in the light or in the shade."""
    wanted = np.array([colour[at : at + 2] == "ff" for at in (1, 3, 5)])
    return int(((pixels > 60) == wanted).all(axis=2).sum())


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the page to another origin, and its status."""

    url: str
    range: str | None
    status: int | None
    """`None` for a response that the page may not read."""


@dataclass(frozen=True, slots=True)
class View:
    """A state of Neuroglancer after everything is loaded."""

    asked: Sequence[Asked]
    faults: Sequence[str]
    """Errors of sources, and messages about CORS."""
    values: Mapping[str, Sequence[int | None]]
    """By layer, the value of each voxel; `None` where no chunk is loaded."""
    pixels: Pixels


class Neuroglancer:
    """The client's page, which shows one state after the other."""

    def __init__(self, browser: Browser, page_url: str, pictures: Path) -> None:
        self._page_url = page_url
        self._pictures = pictures
        self._page = browser.new_page(viewport=_SIZE)
        self._asked, self._faults = listen(self._page, page_url)
        self._load()

    def look(self, state: Json, name: str, voxels: Mapping[str, Voxels] | None = None) -> View:
        """Open *state*, save a picture called *name*, and return the *voxels* of its layers."""
        file = self._pictures / f"{name}.png"
        page = self.opened(state)
        try:
            picture = picture_when_still(page, len(state["layers"]))
        except Error as error:
            page.screenshot(path=file)
            refused = [each for each in self._asked if each.status not in {200, 206}]
            raise AssertionError(f"not all is loaded: {self._faults} {refused}") from error
        faults = [*self._faults, *page.evaluate(_FAULTS)]
        values = {layer: read_values(page, layer, rows) for layer, rows in (voxels or {}).items()}
        asked = [*self._asked]
        file.write_bytes(picture)
        if faults:  # their messages would stay
            self._load()
        return View(asked, faults, values, decode(picture))

    def opened(self, state: Json) -> Page:
        """Open *state*, and return the page."""
        self._asked.clear()
        self._faults.clear()
        self._page.evaluate(RESTORE, state)
        return self._page

    def close(self) -> None:
        """Close the page and its profile."""
        self._page.close()

    def _load(self) -> None:
        self._page.goto(self._page_url)
        self._page.wait_for_function("window.viewer")


def listen(page: Page, page_url: str) -> tuple[list[Asked], list[str]]:
    """Return growing lists of the requests of *page* to others, and of what CORS forbids."""
    asked: list[Asked] = []
    faults: list[str] = []
    own = page_url.partition("/v/")[0]

    def note(request: Request, status: int | None) -> None:
        if not request.url.startswith(f"{own}/"):
            asked.append(Asked(request.url, request.headers.get("range"), status))

    def note_failed(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page itself no longer wanted it
            note(request, None)

    page.on("response", lambda response: note(response.request, response.status))
    page.on("requestfailed", note_failed)
    page.on("console", lambda said: faults.append(said.text) if "CORS" in said.text else None)
    return asked, faults


def picture_when_still(page: Page, layers: int) -> bytes:
    """Wait until everything is loaded and two successive pictures are equal.

    The page may forbid scripts of others, such as those that would wait in it.
    """
    deadline = time.monotonic() + _LOAD_S
    before = b""
    while time.monotonic() < deadline:
        if not page.evaluate(LOADED, layers):
            page.wait_for_timeout(_POLL_MS)
            continue
        page.evaluate("viewer.display.draw()")
        picture = page.screenshot(style=_PASSING)
        if picture == before:
            return picture
        before = picture
    raise Error("the picture does not come to rest")


def read_values(page: Page, layer: str, voxels: Voxels) -> list[int | None]:
    """Return the values that *layer* shows at *voxels*; `None` where no chunk is loaded."""
    found: str = page.evaluate(_VALUES, [layer, json.dumps((voxels + 0.5).tolist())])
    return [None if value is None else int(value) for value in json.loads(found)]


def decode(picture: bytes) -> Pixels:
    """Return the pixels of a *picture*."""
    with Image.open(io.BytesIO(picture)) as image:
        return np.asarray(image.convert("RGB"), np.int16)
