"""Everything that listens: nginx in three roles, uvicorn, and Shardgate itself."""

import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from .client import Connection

_START_S: Final = 20.0

BUCKET: Final = "bucket"
DATASET: Final = "em"

_NGINX: Final = """
daemon off;
worker_processes 1;
{user}
pid {home}/pid;
error_log {home}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    keepalive_requests 1000000000;
    keepalive_timeout 600s;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    {upstream}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location = /stub_status {{ stub_status; }}
        location / {{ {location} }}
        location @absent {{
            default_type application/xml;
            return 404 "<Error><Code>NoSuchKey</Code></Error>";
        }}
    }}
}}
"""

_UPSTREAM: Final = """
    upstream store {{
        server 127.0.0.1:{port};
        keepalive 64;
        keepalive_requests 1000000000;
    }}
"""

_PROXY: Final = """
            proxy_pass http://store;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
"""

_CORS: Final = """
            add_header Access-Control-Allow-Origin * always;
            add_header Access-Control-Expose-Headers * always;
            if ($request_method = OPTIONS) {
                add_header Access-Control-Allow-Origin *;
                add_header Access-Control-Allow-Headers *;
                add_header Access-Control-Max-Age 3600;
                return 204;
            }
"""

_ROOMY: Final = """
            proxy_buffers 16 8k;
            proxy_buffer_size 8k;
"""

_CONFIG: Final = """
[server]
port = {port}
log_level = "warning"

[cache]
index_bytes = {index_bytes}
chunk_bytes = {chunk_bytes}
ttl_s = 3600

[stores.nginx]
endpoint_url = "http://127.0.0.1:{store}"
region = "us-east-1"
access_key_id = "benchmark"
secret_access_key = "benchmark"

[datasets.{dataset}]
url = "s3://{bucket}/em.zarr"
store = "nginx"
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A process that listens on 127.0.0.1."""

    pid: int
    port: int


@contextmanager
def nginx_files(home: Path, root: Path, *, cors: bool = False) -> Generator[Server]:
    """Serve the files below *root*, with ranges: the static server, or the store.

    What is absent is answered as S3 does, since nothing else proves absence to the service. With
    *cors* pages of other origins may read, as a bucket's rules allow it.
    """
    location = f"root {root}; error_page 404 @absent;"
    with _nginx(home, location=_CORS + location if cors else location) as server:
        yield server


@contextmanager
def nginx_proxy(home: Path, store: Server, *, roomy: bool = False) -> Generator[Server]:
    """Pass every request, its Range too, to *store* on kept connections.

    A body of 64 KiB does not fit the buffers that nginx has by default; *roomy* ones hold it.
    """
    location = _PROXY + _ROOMY if roomy else _PROXY
    with _nginx(home, location=location, upstream=_UPSTREAM.format(port=store.port)) as server:
        yield server


@contextmanager
def uvicorn(home: Path, app: str, **environ: str) -> Generator[Server]:
    """Run the ASGI application *app* as the service runs."""
    home.mkdir()
    port = free_port()
    options = ["--loop", "uvloop", "--http", "httptools", "--no-access-log"]
    command = ["-m", "uvicorn", *options, "--log-level", "warning", "--port", str(port), app]
    with _running([sys.executable, *command], home, port, clean_environ() | environ) as server:
        yield server


@contextmanager
def shardgate(
    home: Path,
    store: Server,
    *,
    index_bytes: int = 256 << 20,
    chunk_bytes: int = 0,
    more: str = "",
    command: str = "from app.__main__ import main; main()",
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Generator[Server]:
    """Run the service over the bucket of *store*, through its S3 path, with *more* datasets.

    Or another *command*, configured alike, and by *environ* too.
    """
    home.mkdir()
    port = free_port()
    config = home / "config.toml"
    text = _CONFIG.format(
        port=port,
        store=store.port,
        index_bytes=index_bytes,
        chunk_bytes=chunk_bytes,
        dataset=DATASET,
        bucket=BUCKET,
    )
    config.write_text(text + more)
    arguments = [sys.executable, "-c", command, "serve", str(config)]
    with _running(arguments, home, port, clean_environ() | dict(environ)) as server:
        yield server


@contextmanager
def _nginx(home: Path, *, location: str, upstream: str = "") -> Generator[Server]:
    home.mkdir()
    port = free_port()
    user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
    text = _NGINX.format(home=home, port=port, location=location, upstream=upstream, user=user)
    config = home / "nginx.conf"
    config.write_text(text)
    command = ["nginx", "-c", str(config), "-e", str(home / "error.log")]
    with _running(command, home, port, dict(os.environ)) as server:
        yield server


@contextmanager
def _running(
    command: Sequence[str], home: Path, port: int, environ: dict[str, str]
) -> Generator[Server]:
    """Start *command*, wait until it listens on *port*, and end it."""
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
    try:
        _wait_for(process, port, home / "log")
        yield Server(process.pid, port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not listen:\n{log.read_text()[-2000:]}")


async def requests_served(counter: Connection) -> int:
    """Read nginx's count of requests, which counts the asking too."""
    counter.send("/stub_status", {})
    lines = (await counter.receive()).body.decode().splitlines()
    return int(lines[2].split()[2])


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environ() -> dict[str, str]:
    """Drop what would change the settings under test."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SHARDGATE_", "AWS_"))}
