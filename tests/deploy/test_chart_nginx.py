"""nginx as the chart configures and starts it: names of gateways, proxies, certificates."""

import http.client
import subprocess
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import pytest
import trustme
import zarr

from tests.support.deploy.balancer import (
    Balancer,
    Recorder,
    command,
    recording,
    started,
    write_replicas,
)
from tests.support.deploy.naming import Names, naming
from tests.support.deploy.programs import BALANCER, Chart, Rendered, helm, new_nginx
from tests.support.gateways import forked, of_dataset
from tests.support.processes import free_ports, wait_until

CLIENTS: Final = 4
BEHIND: Final = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}
HERE: Final = {"balancer.networks": ["127.0.0.0/8"]}
ELSEWHERE: Final = {"balancer.networks": ["10.20.0.0/16"]}
CACHED: Final = {"balancer.cache.enabled": True}
TLS: Final = {"balancer.tls.secretName": "certificate"}


@pytest.fixture(scope="module")
def chart(request: pytest.FixtureRequest) -> Chart:
    """Return the chart with its Helm."""
    return Chart(helm(request))


@pytest.fixture(scope="module")
def nginx(request: pytest.FixtureRequest) -> str:
    """Return the path of an nginx of the chart's version."""
    return new_nginx(request)


def _lay(rendered: Rendered, folder: Path, replacements: Mapping[str, str]) -> None:
    """Write the configuration of nginx to *folder*, with the paths and ports of this test."""
    for name, text in rendered.files().items():
        here = text.replace("/tmp/", f"{folder}/")
        for old, new in replacements.items():
            here = here.replace(old, new)
        (folder / name).write_text(here)


@contextmanager
def _running(nginx: str, rendered: Rendered, folder: Path) -> Generator[tuple[Balancer, Recorder]]:
    """Run nginx of the chart before one replica."""
    port, inner_port = free_ports(2)
    replacements = {
        "listen 8080": f"listen 127.0.0.1:{port}",
        "listen 8443": f"listen 127.0.0.1:{port}",
        "127.0.0.1:8001": f"127.0.0.1:{inner_port}",
        "127.0.0.1:8002": f"127.0.0.1:{inner_port}",
        "/certificates;": f"{folder}/certificates;",
        " /certificates/": f" {folder}/certificates/",
    }
    _lay(rendered, folder, replacements)
    with recording(Recorder()) as replica:
        write_replicas(folder, [replica.url])
        with started(folder, port, nginx) as balancer:
            yield balancer, replica


def _start(chart: Chart, nginx: str, folder: Path, listed: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the container, which ends with nginx's own check."""
    rendered = chart.render()
    _lay(rendered, folder, {})
    (folder / "resolv.conf").write_text(listed)
    container = rendered.container(BALANCER[1])
    (script,) = container["args"]
    for old, new in (
        ("/tmp/", f"{folder}/"),
        ("/etc/resolv.conf", f"{folder}/resolv.conf"),
        ("-p /tmp", f"-p {folder}"),
        ("/etc/shardgate", str(folder)),
        ("exec nginx", f"exec {nginx} -t"),
    ):
        assert old in script
        script = script.replace(old, new)
    return subprocess.run(
        [*container["command"], script], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    ("listed", "resolver"),
    [
        ("search lab.svc\nnameserver 10.96.0.10\nnameserver 192.0.2.1\n", "10.96.0.10"),
        ("nameserver fd00::a\n", "[fd00::a]"),
    ],
)
def test_nginx_asks_the_first_name_server_of_its_pod(
    chart: Chart, nginx: str, tmp_path: Path, listed: str, resolver: str
) -> None:
    """The default of `balancer.resolver` is the first name server in `/etc/resolv.conf`."""
    done = _start(chart, nginx, tmp_path, listed)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "resolver.conf").read_text() == f"resolver {resolver} valid=1s;\n"


def test_pod_without_name_server_is_an_error(chart: Chart, nginx: str, tmp_path: Path) -> None:
    """A start that finds no name server fails, and names the value that helps."""
    done = _start(chart, nginx, tmp_path, "search lab.svc\n")

    assert done.returncode == 1
    assert "set balancer.resolver" in done.stderr


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (BEHIND | HERE, ("203.0.113.9", "https")),
        (BEHIND | HERE | CACHED, ("203.0.113.9", "https")),
        (BEHIND | ELSEWHERE, ("127.0.0.1", "http")),
        (HERE, ("127.0.0.1", "http")),
    ],
    ids=["named", "cached", "unnamed", "nothing before it"],
)
def test_client_is_told_by_named_networks_only(
    chart: Chart,
    nginx: str,
    tmp_path: Path,
    values: Mapping[str, object],
    expected: tuple[str, str],
) -> None:
    """Address and scheme of the client are those that a proxy in the named networks reports."""
    rendered = chart.render(**values)
    sent = {"X-Forwarded-For": "198.51.100.1, 203.0.113.9, 127.0.0.2", "X-Forwarded-Proto": "https"}
    with (
        _running(nginx, rendered, tmp_path) as (balancer, replica),
        closing(http.client.HTTPConnection("127.0.0.1", balancer.port)) as connection,
    ):
        connection.request("GET", "/data/key", headers=sent)
        connection.getresponse().read()

    (received,) = replica.received
    assert (received.headers["x-forwarded-for"], received.headers["x-forwarded-proto"]) == expected


class _Secret:
    """A mounted Secret, whose files the kubelet replaces all at once by one link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "certificates"
        self._folder.mkdir()
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / "ca.pem")
        self._versions = 0
        self.renew()
        for name in "tls.crt", "tls.key":
            (self._folder / name).symlink_to(f"..data/{name}")

    def renew(self) -> None:
        """Put a new certificate of the same authority in the place of the old one."""
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        certificate = self._authority.issue_cert("localhost")
        certificate.private_key_pem.write_to_path(version / "tls.key")
        certificate.cert_chain_pems[0].write_to_path(version / "tls.crt")
        (self._folder / "..link").symlink_to(version.name)
        (self._folder / "..link").rename(self._folder / "..data")


def test_renewed_certificate_counts_at_once_and_ends_no_connection(
    chart: Chart, nginx: str, tmp_path: Path
) -> None:
    """New connections get a renewed certificate; requests go on over the open ones."""
    secret = _Secret(tmp_path)
    is_over = Event()

    def read_on(connection: http.client.HTTPSConnection) -> set[int]:
        first = connection.sock
        statuses = set()
        while not is_over.is_set():
            connection.request("GET", "/data/key")
            with closing(answer := connection.getresponse()):
                answer.read()
            statuses.add(answer.status)
        assert connection.sock is first
        return statuses

    with ExitStack() as stack:
        balancer, _ = stack.enter_context(_running(nginx, chart.render(**TLS), tmp_path))
        before = _serial_number(balancer)
        reads = []
        pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        stack.callback(is_over.set)
        for _ in range(CLIENTS):
            kept = http.client.HTTPSConnection(balancer.host, context=balancer.tls())
            stack.enter_context(closing(kept)).connect()
            reads.append(pool.submit(read_on, kept))
        secret.renew()
        after = _serial_number(balancer)
        sent = len(balancer.logged())
        balancer.logged(at_least=sent + CLIENTS)
        is_over.set()
        assert [read.result() for read in reads] == [{200}] * CLIENTS

    assert after != before


def _serial_number(balancer: Balancer) -> object:
    """Return the serial number of the certificate that a new connection gets."""
    with balancer.connection() as connection:
        certificate = connection.getpeercert()
        assert certificate is not None
        return certificate["serialNumber"]


def test_unusable_certificate_ends_the_start(chart: Chart, nginx: str, tmp_path: Path) -> None:
    """A start of nginx fails with a certificate that cannot be read, and names its file."""
    _lay(chart.render(**TLS), tmp_path, {"/certificates": str(tmp_path)})
    (tmp_path / "resolver.conf").write_text("resolver 127.0.0.1;")
    (tmp_path / "tls.crt").write_text("no certificate")

    done = subprocess.run(
        [*command(nginx, tmp_path), "-t"], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode != 0
    assert f'cannot load certificate "{tmp_path}/tls.crt"' in done.stderr


SERVICE: Final = "demo-shardgate-replicas.lab.svc.cluster.local"
REPLICAS: Final = 3
SHARDS: Final = 24
CHUNKS: Final = 4
"""Number of chunks in each shard."""
LONGEST_S: Final = 20.0


class Balanced(NamedTuple):
    """nginx, the DNS server that it resolves gateways by, and a client."""

    names: Names
    nginx: Balancer
    client: httpx.Client

    def read(self) -> dict[int, set[str]]:
        """Read every chunk; return the replicas that answered for each shard."""
        before = self.nginx.logged_so_far()
        for chunk in range(SHARDS * CHUNKS):
            assert self.client.get(f"/data/c/{chunk}").content == bytes([chunk])
        replicas = defaultdict(set)
        for line in self.nginx.logged(before, at_least=SHARDS * CHUNKS):
            replicas[int(line["path"].rpartition("/")[2]) // CHUNKS].add(line["replica"])
        return dict(replicas)


@pytest.fixture
def balanced(chart: Chart, nginx: str, tmp_path: Path) -> Generator[Balanced]:
    """Run three gateways, a DNS server that lists them, and nginx as the chart configures it."""
    options: Any = {"shards": (CHUNKS,), "chunks": (1,), "compressors": None, "fill_value": 255}
    values = np.arange(SHARDS * CHUNKS, dtype="u1")
    zarr.create_array(tmp_path / "data", data=values, **options)
    with ExitStack() as stack:
        environ = of_dataset(str(tmp_path / "data"))
        gateways = [stack.enter_context(forked(environ)) for _ in range(REPLICAS)]
        ports = [int(gateway.url.rpartition(":")[2]) for gateway in gateways]
        names = Names(SERVICE, {f"10-0-0-{n}": port for n, port in enumerate(ports)})
        resolver = stack.enter_context(naming(names))
        (port,) = free_ports(1)
        rendered = chart.render(**{"balancer.resolver": resolver})
        _lay(rendered, tmp_path, {"listen 8080": f"listen 127.0.0.1:{port}"})
        balancer = stack.enter_context(started(tmp_path, port, nginx))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        wait_until(lambda: client.get("/data/zarr.json").is_success)  # it finds the gateways late
        yield Balanced(names, balancer, client)


def test_removed_replica_moves_own_shards_only(balanced: Balanced) -> None:
    """After a replica leaves DNS, its shards move to others, and all other shards stay."""
    before = balanced.read()
    assert {len(replicas) for replicas in before.values()} == {1}
    assert len(set.union(*before.values())) == REPLICAS

    gone, port = next(iter(balanced.names.pods.items()))
    balanced.names.pods = {k: v for k, v in balanced.names.pods.items() if k != gone}
    deadline = time.monotonic() + LONGEST_S
    while f"127.0.0.1:{port}" in set.union(*(after := balanced.read()).values()):
        assert time.monotonic() < deadline

    assert {shard for shard in before if before[shard] != after[shard]} == {
        shard for shard in before if before[shard] == {f"127.0.0.1:{port}"}
    }
