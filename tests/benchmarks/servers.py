"""The servers: nginx in four roles, uvicorn, and Shardgate itself."""

import getpass
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import trustme

from tests.support.processes import environ as clean
from tests.support.processes import free_ports, listening

from .client import Client

BUCKET: Final = "bucket"
DATASET: Final = "em"
_DEPLOYED: Final = Path(__file__).parents[2] / "deploy/nginx"

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
        listen 127.0.0.1:{port} backlog=1024{listen};
        {tls}
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

_PROXY_TLS: Final = """
            proxy_pass https://store;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_ssl_name localhost;
            proxy_ssl_verify on;
            proxy_ssl_trusted_certificate {authority};
"""

_TLS: Final = """
        ssl_certificate {certificate};
        ssl_certificate_key {certificate};
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
endpoint_url = "{store}"
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
    authority: Path | None = None
    """Certificate of the authority of a server that speaks TLS."""

    @property
    def url(self) -> str:
        """Scheme, address and port."""
        return f"{'https' if self.authority else 'http'}://127.0.0.1:{self.port}"


@contextmanager
def nginx_files(
    home: Path, root: Path, *, cors: bool = False, tls: bool = False
) -> Generator[Server]:
    """Serve the files below *root*, with ranges: the static server, or the store.

    Missing files get S3's error document, without which the service takes nothing for absent. With
    *cors* pages of other origins may read, as by a bucket's rules. With *tls* there is HTTPS only.
    """
    location = f"root {root}; error_page 404 @absent;"
    with _nginx(home, location=_CORS + location if cors else location, tls=tls) as server:
        yield server


@contextmanager
def nginx_proxy(home: Path, store: Server, *, roomy: bool = False) -> Generator[Server]:
    """Pass every request, with its Range, to *store* on kept connections.

    A body of 64 KiB exceeds nginx's default buffers; *roomy* ones hold it.
    """
    location = _PROXY if store.authority is None else _PROXY_TLS.format(authority=store.authority)
    if roomy:
        location += _ROOMY
    with _nginx(home, location=location, upstream=_UPSTREAM.format(port=store.port)) as server:
        yield server


@contextmanager
def uvicorn(home: Path, app: str, **environ: str) -> Generator[Server]:
    """Run the ASGI application *app* with the service's options of uvicorn."""
    home.mkdir()
    (port,) = free_ports(1)
    options = ["--loop", "uvloop", "--http", "httptools", "--no-access-log"]
    command = ["-m", "uvicorn", *options, "--log-level", "warning", "--port", str(port), app]
    with listening([sys.executable, *command], port, home / "log", clean(**environ)) as process:
        yield Server(process.pid, port)


@contextmanager
def nginx_deployed(home: Path, gateway: Server, *, cached: bool = False) -> Generator[Server]:
    """Run nginx before *gateway* as `deploy/nginx` has it, *cached* with its cache of answers.

    As its yardsticks it has one worker, no log, and speaks plain HTTP.
    """
    home.mkdir()
    port, inner_port = free_ports(2)
    changes = {
        "worker_processes 2": "worker_processes 1",
        "access_log [^;]*": "access_log off",
        "127.0.0.1:8001": f"127.0.0.1:{inner_port}",
    }
    copied = {"nginx.conf": "nginx.conf"}
    if cached:
        copied |= {"cache.conf": "cache.conf", "behind-cache.conf": "site.conf"}
    for source, name in copied.items():
        text = (_DEPLOYED / source).read_text()
        for pattern, changed in changes.items():
            text = re.sub(pattern, changed, text)
        (home / name).write_text(text)
    site = f"listen 127.0.0.1:{port} backlog=2048;\n"
    (home / ("clients.conf" if cached else "site.conf")).write_text(site)
    for name in "replicas.conf", "writers.conf":
        (home / name).write_text(f"server 127.0.0.1:{gateway.port} max_fails=0;\n")
    user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
    command = ["nginx", "-p", str(home), "-e", "stderr", "-c", str(home / "nginx.conf")]
    with listening([*command, "-g", f"daemon off; {user}"], port, home / "log") as process:
        yield Server(process.pid, port)


@contextmanager
def shardgate(
    home: Path,
    store: Server,
    *,
    index_bytes: int = 256 << 20,
    chunk_bytes: int = 0,
    more: str = "",
    command: str = "from shardgate.cli import main; main()",
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Generator[Server]:
    """Run the service over the bucket of *store*, through its S3 path, with *more* datasets.

    Another *command* gets the same configuration, and *environ* too.
    """
    home.mkdir()
    (port,) = free_ports(1)
    config = home / "config.toml"
    text = _CONFIG.format(
        port=port,
        store=store.url,
        index_bytes=index_bytes,
        chunk_bytes=chunk_bytes,
        dataset=DATASET,
        bucket=BUCKET,
    )
    config.write_text(text + more)
    arguments = [sys.executable, "-c", command, "serve", str(config)]
    trusted = {"AWS_CA_BUNDLE": str(store.authority)} if store.authority else {}
    with listening(arguments, port, home / "log", clean(**trusted, **environ)) as process:
        yield Server(process.pid, port)


@contextmanager
def _nginx(
    home: Path, *, location: str, upstream: str = "", tls: bool = False
) -> Generator[Server]:
    home.mkdir()
    (port,) = free_ports(1)
    user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
    authority = _issue(home) if tls else None
    text = _NGINX.format(
        home=home,
        port=port,
        location=location,
        upstream=upstream,
        user=user,
        listen=" ssl" if tls else "",
        tls=_TLS.format(certificate=home / "server.pem") if tls else "",
    )
    config = home / "nginx.conf"
    config.write_text(text)
    command = ["nginx", "-c", str(config), "-e", str(home / "error.log")]
    with listening(command, port, home / "log") as process:
        yield Server(process.pid, port, authority)


def _issue(home: Path) -> Path:
    """Write a certificate for this machine, and return that of its authority."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(home / "server.pem"))
    authority.cert_pem.write_to_path(str(home / "authority.pem"))
    return home / "authority.pem"


def requests_served(counter: Client) -> int:
    """Return nginx's count of requests, which includes this one."""
    return int(counter.ask("/stub_status").body.splitlines()[2].split()[2])
