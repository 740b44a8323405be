"""Shared caches before a gateway, as a CDN is: Varnish and nginx with the files of `deploy/`."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from shardgate.server.asgi import AsgiApp
from shardgate.server.request import Request, Response
from shardgate.settings import Settings
from tests.support.deploy.balancer import configured, started
from tests.support.lacking import need
from tests.support.processes import free_ports, listening
from tests.support.serving import serving

EDGES: Final = ("varnish", "nginx")
_VCL: Final = Path(__file__).parents[3] / "deploy/varnish/default.vcl"
_STORAGE: Final = "16M"


@dataclass(frozen=True, slots=True)
class Edge:
    """A running cache, and a client of it."""

    name: str
    url: str
    gateway_url: str
    passed: list[tuple[str, str]]
    """Method and path of each request that reached the gateway."""
    client: httpx.Client
    _storage: Path
    """File or folder of the answers that are kept."""

    def purge(self, path: str) -> None:
        """Drop the answer of *path*: nginx replaces it by a new one."""
        if self.name == "varnish":
            self.client.request("PURGE", path).raise_for_status()
        else:
            self.client.get(path, headers={"cache-control": "no-cache"})

    def holds(self, text: bytes) -> bool:
        """Return whether the answers that are kept contain *text*."""
        files = [self._storage, *self._storage.rglob("*")]
        return any(text in each.read_bytes() for each in files if each.is_file())


@contextmanager
def edging(name: str, folder: Path, settings: Settings) -> Generator[Edge]:
    """Run the service with *settings* behind the cache *name*, over plain HTTP."""
    passed: list[tuple[str, str]] = []
    with (
        serving(settings, around=lambda app: _recorded(app, passed)) as gateway_url,
        (varnishing if name == "varnish" else _nginx)(folder, gateway_url) as (port, storage),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield Edge(name, f"http://127.0.0.1:{port}", gateway_url, passed, client, storage)


def _recorded(app: AsgiApp, passed: list[tuple[str, str]]) -> AsgiApp:
    cached = app.cached

    def record(request: Request) -> Response | None:
        if request.name != "_shard":
            passed.append((request.method, request.path))
        return cached(request)

    app.cached = record
    return app


@contextmanager
def varnishing(folder: Path, gateway_url: str) -> Generator[tuple[int, Path]]:
    """Run Varnish before the gateway; yield its port, and the file of what it keeps."""
    (port,) = free_ports(1)
    text = _VCL.read_text("utf-8")
    assert '"8000"' in text
    gateway_port = gateway_url.rpartition(":")[2]
    (folder / "default.vcl").write_text(text.replace('"8000"', f'"{gateway_port}"'))
    storage = folder / "storage"
    options = ["-F", "-j", "none", "-n", str(folder / "varnish"), "-p", "vsl_space=1M"]
    options += ["-a", f"127.0.0.1:{port}", "-s", f"file,{storage},{_STORAGE}"]
    options += ["-f", str(folder / "default.vcl"), "-p", "http_gzip_support=off"]
    with listening([need("varnishd"), *options], port, folder / "output"):
        yield port, storage


@contextmanager
def _nginx(folder: Path, gateway_url: str) -> Generator[tuple[int, Path]]:
    port = configured(folder, [gateway_url], cached=True)
    site = folder / "clients.conf"
    site.write_text(site.read_text("utf-8").replace(" ssl http2", ""))
    with started(folder, port):
        yield port, folder / "cache"
