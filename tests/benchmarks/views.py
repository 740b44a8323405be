"""Part p: the first view of a sharded array in Neuroglancer, far from everything."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from playwright.sync_api import Browser

from tests.support.deploy.balancer import balancing
from tests.support.viewers.browser import launched
from tests.support.viewers.viewing import LOADED, RESTORE, listen, paging_client

from .data import write_cube
from .delays import proxying
from .figures import Figure, Goal
from .servers import BUCKET, DATASET, Server, nginx_files, shardgate

_BROWSER_S: Final = 0.05
"""Delay between the browser and the servers."""
_STORE_S: Final = 0.01
"""Delay between the gateway and the store."""
_ARRAY: Final = "views"
_EDGE: Final = 8
_PER_SHARD: Final = 4
_CENTER: Final = (256, 128, 128)
_LOAD_MS: Final = 60_000

BUCKET_VIEW: Final = "first view, the bucket itself, HTTP/1.1"
HTTP1_VIEW: Final = "first view, the gateway, HTTP/1.1"
HTTP2_VIEW: Final = "first view, nginx with HTTP/2 and the gateway"

_TIME: Final = f"""state => new Promise(resolve => {{
    const restore = {RESTORE}, isLoaded = {LOADED}, began = performance.now();
    restore(state);
    const look = () => isLoaded(1) ? resolve(performance.now() - began) : setTimeout(look, 10);
    look();
}})"""


def measure(home: Path, root: Path, store: Server, *, rounds: int) -> list[Figure]:
    """Open the array in three ways in turn, each with a new gateway and an empty profile."""
    home.mkdir()
    write_cube(root / _ARRAY, edge=_EDGE, per_shard=_PER_SHARD)
    ways = (BUCKET_VIEW, HTTP1_VIEW, HTTP2_VIEW)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with paging_client() as page_url, launched() as browser:
        for number in range(rounds):
            for at, name in enumerate(ways):
                here = home / f"{number}-{at}"
                here.mkdir()
                with _way(name, here, root, store) as url:
                    seconds[name].append(_look(browser, page_url, url))
    bucket, http1, http2 = seconds.values()
    return [
        *(Figure.over("p", name, "s", each) for name, each in seconds.items()),
        _beside("the gateway over HTTP/1.1", http1, bucket, 1.0),
        _beside("the gateway over HTTP/2", http2, bucket, 0.45),
    ]


def _beside(what: str, ours: list[float], bucket: list[float], most: float) -> Figure:
    ratios = [o / b for o, b in zip(ours, bucket, strict=True)]
    return Figure.over("p", f"  {what}, beside the bucket", "×", ratios, Goal("at most", most))


def _look(browser: Browser, page_url: str, url: str) -> float:
    """Return the seconds until everything is loaded."""
    with browser.new_context(
        viewport={"width": 800, "height": 600}, ignore_https_errors=True
    ) as context:
        page = context.new_page()
        page.set_default_timeout(_LOAD_MS)
        asked, failed = listen(page, page_url)
        page.goto(page_url)
        page.wait_for_function("window.viewer")
        took_ms: float = page.evaluate(_TIME, _state(url))
    failed += [str(each) for each in asked if each.status not in {200, 204, 206, 404}]
    if failed:
        raise RuntimeError(f"{url}: {failed}")
    return took_ms / 1000


def _state(url: str) -> dict[str, Any]:
    return {
        "dimensions": {f"d{axis}": [1, ""] for axis in range(3)},
        "position": [middle + 0.5 for middle in _CENTER],
        "crossSectionScale": 1,
        "projectionScale": 512,
        "showDefaultAnnotations": False,
        "layers": [{"type": "image", "name": "data", "source": f"{url}|zarr3:"}],
        "layout": "4panel",
    }


@contextmanager
def _way(name: str, home: Path, root: Path, store: Server) -> Generator[str]:
    """Start the servers of one way, and yield the URL of the array."""
    with ExitStack() as running:
        start, path, scheme = running.enter_context, DATASET, "http"
        if name == BUCKET_VIEW:
            port = start(nginx_files(home / "bucket", root.parent.parent, cors=True)).port
            path = f"{BUCKET}/em.zarr"
        else:
            port = start(_service(home, store))
        if name == HTTP2_VIEW:
            port = start(balancing(home, [f"http://127.0.0.1:{port}"])).port
            scheme = "https"
        far = start(proxying(port, _BROWSER_S))
        yield f"{scheme}://127.0.0.1:{far.port}/{path}/{_ARRAY}/"


@contextmanager
def _service(home: Path, store: Server) -> Generator[int]:
    """Start a gateway, and request its readiness, as an operator does."""
    with ExitStack() as running:
        way = running.enter_context(proxying(store.port, _STORE_S))
        far_store = Server(store.pid, way.port)
        ours = running.enter_context(shardgate(home / "gateway", far_store, chunk_bytes=256 << 20))
        httpx.get(f"http://127.0.0.1:{ours.port}/readyz")
        yield ours.port
