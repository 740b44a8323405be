"""Shared caches before a gateway, as a CDN is: Varnish and nginx with the files of `deploy/`."""

import os
import re
import shlex
import subprocess
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
from tests.support.documents import ROOT
from tests.support.lacking import need
from tests.support.processes import free_ports, listening
from tests.support.serving import serving

EDGES: Final = ("varnish", "nginx")
_VCL: Final = ROOT / "deploy/varnish/default.vcl"
_PAGE: Final = (ROOT / "docs/cdn.md").read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Edge:
    """A running cache, and a client of it."""

    name: str
    url: str
    gateway_url: str
    passed: list[tuple[str, str]]
    """Method and path of each request that reached the gateway."""
    client: httpx.Client
    folder: Path
    """Folder of the files of the cache."""

    def purge(self, path: str) -> None:
        """Drop the answer of *path* by the documented command; nginx replaces it by a new one."""
        mark = "PURGE" if self.name == "varnish" else "no-cache"
        (command,) = [line for line in documented("curl") if mark in line]
        need("curl")
        command = re.sub(r"https?://\S+", f"{self.url}{path}", command)
        subprocess.run([*shlex.split(command), "-fsS", "-o", os.devnull], check=True)

    def holds(self, text: bytes) -> bool:
        """Return whether the answers that are kept contain *text*."""
        kept = self.folder / ("storage" if self.name == "varnish" else "cache")
        files = [kept, *kept.rglob("*")]
        return any(text in each.read_bytes() for each in files if each.is_file())


def documented(program: str) -> list[str]:
    """Return the commands of `docs/cdn.md` that run *program*."""
    return re.findall(rf"^(?:\$ )?({program} .*)$", _PAGE, re.MULTILINE)


@contextmanager
def edging(name: str, folder: Path, settings: Settings) -> Generator[Edge]:
    """Run the service with *settings* behind the cache *name*, over plain HTTP."""
    passed: list[tuple[str, str]] = []
    with (
        serving(settings, around=lambda app: _recorded(app, passed)) as gateway_url,
        (varnishing if name == "varnish" else _nginx)(folder, gateway_url) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield Edge(name, f"http://127.0.0.1:{port}", gateway_url, passed, client, folder)


def _recorded(app: AsgiApp, passed: list[tuple[str, str]]) -> AsgiApp:
    cached = app.cached

    def record(request: Request) -> Response | None:
        if request.name != "_shard":
            passed.append((request.method, request.path))
        return cached(request)

    app.cached = record
    return app


@contextmanager
def varnishing(folder: Path, gateway_url: str) -> Generator[int]:
    """Run Varnish before the gateway; yield its port."""
    (port,) = free_ports(1)
    text = _VCL.read_text("utf-8")
    assert '"8000"' in text
    gateway_port = gateway_url.rpartition(":")[2]
    (folder / "default.vcl").write_text(text.replace('"8000"', f'"{gateway_port}"'))
    (command,) = documented("varnishd")
    changes = {
        "varnishd": need("varnishd"),
        "/etc/varnish/default.vcl": str(folder / "default.vcl"),
        ":80": f"127.0.0.1:{port}",
        "malloc,4G": f"file,{folder / 'storage'},16M",
    }
    run = [changes.get(word, word) for word in shlex.split(command)]
    run += ["-F", "-j", "none", "-n", str(folder / "varnish"), "-p", "vsl_space=1M"]
    with listening(run, port, folder / "output"):
        yield port


@contextmanager
def _nginx(folder: Path, gateway_url: str) -> Generator[int]:
    port = configured(folder, [gateway_url], cached=True)
    site = folder / "clients.conf"
    site.write_text(site.read_text("utf-8").replace(" ssl http2", ""))
    with started(folder, port):
        yield port
