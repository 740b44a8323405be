"""Debian's nginx with the configuration from `deploy/`, and replicas that record requests."""

import getpass
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import trustme

from tests.support.clients.filling import open_boto3
from tests.support.lacking import need
from tests.support.processes import free_ports, listening, listens, wait_until
from tests.support.storage.listening import Handler, Listener

_CONFIGURATION: Final = Path(__file__).parents[3] / "deploy/nginx"
TOKEN: Final = "c2VjcmV0LXRva2Vu"
"""Bearer token of the caller that may read the private dataset."""
BRIEF: Final = "public, max-age=1"
EXPIRED_S: Final = 2.1
"""Time after which nginx, which counts whole seconds, takes `BRIEF` for over."""
_LONGEST_S: Final = 20.0


class Balancer:
    """A running nginx."""

    def __init__(self, folder: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.port = port
        self.host = f"localhost:{port}"
        self.url = f"https://{self.host}"
        self._process = process

    @property
    def ca_file(self) -> Path:
        """Path of the certificate that clients trust."""
        return self.folder / "ca.pem"

    def tls(self) -> ssl.SSLContext:
        """Return a TLS context that trusts nginx's certificate."""
        return ssl.create_default_context(cafile=str(self.ca_file))

    def client(self, **options: Any) -> httpx.Client:
        """Open a client of nginx."""
        return httpx.Client(base_url=self.url, verify=self.tls(), timeout=20, **options)

    @contextmanager
    def connection(self) -> Generator[ssl.SSLSocket]:
        """Open a TLS connection for raw bytes."""
        with (
            socket.create_connection(("127.0.0.1", self.port), 10) as plain,
            self.tls().wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            yield connection

    def send(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Send a request for *target* verbatim, and return the response that was read."""
        with closing(http.client.HTTPSConnection(self.host, context=self.tls())) as connection:
            connection.request(method, target, body, dict(headers))
            answer = connection.getresponse()
            answer.read()
            return answer

    def s3_client(self) -> Any:
        """Return a boto3 client of nginx."""
        by_path = {"addressing_style": "path"}
        return open_boto3(self.url, verify=str(self.ca_file), s3=by_path)

    @property
    def output(self) -> str:
        """Everything that nginx has logged."""
        return (self.folder / "output").read_text()

    def logged(self, since: int = 0, at_least: int = 0) -> list[dict[str, Any]]:
        """Return the lines of the access log from *since* on, once there are *at_least* as many."""
        deadline = time.monotonic() + _LONGEST_S
        while True:
            lines = [line for line in self.output.splitlines() if line.startswith("{")][since:]
            if len(lines) >= at_least:
                return [json.loads(line) for line in lines]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def logged_so_far(self) -> int:
        """Return the number of lines in the access log once it stops growing."""
        count = -1
        while count != (count := len(self.logged())):
            time.sleep(0.2)
        return count

    def send_to(self, urls: Sequence[str]) -> None:
        """Replace the list of replicas, and wait until no worker has the old one."""
        before = self._workers()
        write_replicas(self.folder, urls)
        self._process.send_signal(signal.SIGHUP)
        wait_until(lambda: self._workers() and not self._workers() & before)
        self.wait()

    def wait(self) -> None:
        """Wait until nginx listens and has workers; before that, a signal would end it."""
        has_ended = self._process.poll
        wait_until(lambda: has_ended() is not None or (self._workers() and listens(self.port)))
        assert has_ended() is None

    def _workers(self) -> set[str]:
        pid = self._process.pid
        return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@contextmanager
def balancing(
    folder: Path, urls: Sequence[str], *, cached: bool = False, prefix: str = ""
) -> Generator[Balancer]:
    """Run nginx before the replicas at *urls*, *cached* with its cache of public answers."""
    with started(folder, configured(folder, urls, cached=cached, prefix=prefix)) as balancer:
        yield balancer


def configured(folder: Path, urls: Sequence[str], *, cached: bool = False, prefix: str = "") -> int:
    """Write the configuration of nginx before the replicas at *urls*; return its port.

    With a *prefix* the comment that sets it is made a line.
    """
    port, inner_port = free_ports(2)
    shutil.copy(_CONFIGURATION / "nginx.conf", folder)
    site = (_CONFIGURATION / "site.conf").read_text()
    if prefix:
        assert "# set $prefix /arrays;" in site
        site = site.replace("# set $prefix /arrays;", f"set $prefix {prefix};")
    ipv6 = f"listen [::1]:{port}" if has_ipv6() else "#"
    site = site.replace("listen [::]:443", ipv6).replace("listen 443", f"listen 127.0.0.1:{port}")
    (folder / ("clients.conf" if cached else "site.conf")).write_text(site)
    if cached:
        for source, name in ("cache.conf", "cache.conf"), ("behind-cache.conf", "site.conf"):
            text = (_CONFIGURATION / source).read_text()
            (folder / name).write_text(text.replace("127.0.0.1:8001", f"127.0.0.1:{inner_port}"))
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate.private_key_pem.write_to_path(folder / "tls.key")
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(folder / "tls.crt", append=True)
    write_replicas(folder, urls)
    return port


@contextmanager
def started(folder: Path, port: int, program: str | None = None) -> Generator[Balancer]:
    """Run nginx, or *program*, with the configuration in *folder*, which listens on *port*."""
    run = command(program or need("nginx"), folder)
    with listening(run, port, folder / "output") as process:
        balancer = Balancer(folder, port, process)
        balancer.wait()
        yield balancer


def command(nginx: str, folder: Path) -> list[str]:
    """Return the command that runs *nginx* with the configuration in *folder* as this user."""
    user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
    options = ["-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    return [nginx, *options, "-g", f"daemon off; {user}"]


def cached(answer: httpx.Response) -> str | None:
    """Return the word of nginx's cache in *answer*: hit, miss, revalidated."""
    status: str | None = answer.headers.get("x-cache")
    return status


def files_with(folder: Path, text: bytes) -> int:
    """Return the number of files in the cache below *folder* that contain *text*."""
    files = [each for each in (folder / "cache").rglob("*") if each.is_file()]
    return sum(text in each.read_bytes() for each in files)


def has_ipv6() -> bool:
    """Return whether this machine has IPv6 on its loopback interface."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def write_replicas(folder: Path, urls: Sequence[str]) -> None:
    """Write the list of replicas in the form of the examples."""
    for name in "replicas.conf", "writers.conf":
        (*_, example) = (_CONFIGURATION / name).read_text().splitlines()
        _, _, rest = example.split(" ", 2)
        lines = [f"server {url.removeprefix('http://')} {rest}\n" for url in urls]
        (folder / name).write_text("".join(lines))


_NAME: Final = b"HTTP/1.1 204 No Content\r\nX-Shard: %s\r\n\r\n"
HELLO: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@dataclass(frozen=True)
class Received:
    """A request that arrived at a replica."""

    method: str
    target: str
    headers: dict[str, str]
    body_nbytes: int


@dataclass
class Recorder:
    """A replica that records requests, and its responses."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    asked: list[Received] = field(default_factory=list)
    """Requests for names of shards."""
    name: bytes | None = b"name"
    """Name of the shard of every key; `None` closes the connection instead."""
    answers: bool = True
    """Whether requests are answered; otherwise the connection is closed."""
    response: bytes = HELLO

    def answer(self, request: Received) -> bytes | None:
        """Record *request* and return the response, or None to close the connection."""
        if request.target.startswith("/_shard/"):
            self.asked.append(request)
            return None if self.name is None else _NAME % self.name
        if request.target == "/healthz":
            return HELLO
        self.received.append(request)
        return self.response if self.answers else None


class _Recording(Handler[Recorder]):
    methods = ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS")

    def answer(self) -> None:
        _, target, _ = self.requestline.split(" ")
        headers = {name.lower(): value for name, value in self.headers.items()}
        received = Received(self.command, target, headers, len(self.body()))
        if (answer := self.server.owner.answer(received)) is None:
            self.close_connection = True
        else:
            self.wfile.write(answer)
            self.close_connection = b"\r\nConnection: close\r\n" in answer


@contextmanager
def recording[R: Recorder](recorder: R) -> Generator[R]:
    """Run *recorder*."""
    listener = Listener[Recorder](_Recording, recorder)
    recorder.url = listener.url
    with listener.running():
        yield recorder
