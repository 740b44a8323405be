"""The services of docker-compose.yml, run with their own commands, files and health checks."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from tests.support.deploy.naming import Names, naming
from tests.support.deploy.programs import NGINX_VERSION, ROOT, Stage, image, new_nginx, stages
from tests.support.lacking import need
from tests.support.processes import environ, free_ports, listens
from tests.support.seaweedfs import own_ports, remove_sockets

FILE: Final = ROOT / "docker-compose.yml"
_LONGEST_S: Final = 180.0
_FOLDERS: Final = ("data", "certificates", "tmp", "etc/shardgate")


def services() -> dict[str, dict[str, Any]]:
    """Return the description of each service."""
    read: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text("utf-8"))["services"]
    return read


class Composed(NamedTuple):
    """The running services: root folder, ports, nginx, and their DNS server."""

    root: Path
    ports: Mapping[str, int]
    nginx: str
    names: Names
    resolver: str

    @property
    def ca_file(self) -> Path:
        """Path of the certificate that clients trust."""
        return self.root / "certificates/client.pem"

    def here(self, text: str, service: str) -> str:
        """Replace hosts, ports and paths of *service* in *text* by those of this machine."""
        ports = self.ports
        gateways = {f"{name}:8000": f"{name}:{port}" for name, port in ports.items()}
        known = {
            **gateways,
            "8000": str(ports[service]),
            "8333": str(ports["store"]),
            "8443": str(ports["balancer"]),
            "8001": str(ports["behind cache"]),
            "0.0.0.0": "127.0.0.1",
            "127.0.0.11": self.resolver,
            "store": "127.0.0.1",
            "daemon off;": "daemon off; user root;" if os.geteuid() == 0 else "daemon off;",
            **{f"/{name}": str(self.root / name) for name in _FOLDERS},
        }
        pattern = "|".join(map(re.escape, known))
        return re.sub(rf"(?<!\w)(?:{pattern})(?![\w.])", lambda found: known[found[0]], text)


@contextmanager
def composing(root: Path, nginx: str) -> Generator[Composed]:
    """Run all services below *root*, each after those that it depends on."""
    described = services()
    store_port, listening = own_ports(root)
    named = [*described, "behind cache"]
    ports = dict(zip(named, free_ports(len(named)), strict=True)) | {"store": store_port}
    names = Names("", ports)
    for name in _FOLDERS:
        (root / name).mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(remove_sockets, listening)
        composed = Composed(root, ports, nginx, names, stack.enter_context(naming(names)))
        needed = {name: each.get("depends_on", ()) for name, each in described.items()}
        for name in TopologicalSorter(needed).static_order():
            more = listening if name == "store" else []
            process = stack.enter_context(_started(composed, name, described[name], more))
            if "restart" in described[name]:
                _wait_until_healthy(composed, name, described[name], process)
            else:
                assert process.wait(_LONGEST_S) == 0, name
        yield composed


@contextmanager
def _started(
    composed: Composed, name: str, told: Mapping[str, Any], more: Sequence[str]
) -> Generator[subprocess.Popen[bytes]]:
    _lay_files(composed, name, told)
    env = environ(PATH=_path(), SHARDGATE_SERVER__PORT=str(composed.ports[name]))
    env |= {k: composed.here(v, name) for k, v in told.get("environment", {}).items()}
    command = [composed.here(word, name) for word in _command(told)]
    program = _program(composed, [*command, *more])
    with (composed.root / f"{name}.txt").open("wb") as output:
        process = subprocess.Popen(
            program, env=env, cwd=ROOT / "deploy", stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill() if name == "store" else process.terminate()
        process.wait(_LONGEST_S)


def _lay_files(composed: Composed, name: str, told: Mapping[str, Any]) -> None:
    for volume in told.get("volumes", []):
        source, target, *_ = volume.split(":")
        if source.startswith("./"):
            text = (ROOT / source).read_text("utf-8")
            Path(composed.here(target, name)).write_text(composed.here(text, name))


def _command(told: Mapping[str, Any]) -> list[str]:
    """Return entry point and command: the service's own, or else its image's."""
    stage = _stage(told)
    entrypoint = told.get("entrypoint") or stage.command("ENTRYPOINT")
    return [*entrypoint, *(told.get("command") or stage.command("CMD"))]


def _stage(told: Mapping[str, Any]) -> Stage:
    """Return the stage that the image is built from, or the last one if it is not built here."""
    made = [each for each in services().values() if "build" in each]
    match next((each["build"] for each in made if each["image"] == told["image"]), None):
        case {"target": target}:
            return next(stage for stage in stages() if stage.name == target)
        case _:
            return image()


def _program(composed: Composed, command: Sequence[str]) -> list[str]:
    """Return the command with this project's or this environment's program, or the system's."""
    first, *rest = command
    if first == "nginx":
        return [composed.nginx, *rest]
    if first == "shardgate":
        return [sys.executable, "-m", "shardgate", *rest]
    return [shutil.which(first, path=_path()) or first, *rest]


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _wait_until_healthy(
    composed: Composed, name: str, told: Mapping[str, Any], process: subprocess.Popen[bytes]
) -> None:
    own = told.get("healthcheck", {}).get("test")
    check = own[1:] if own else _stage(told).command("HEALTHCHECK")
    command = _program(composed, [composed.here(word, name) for word in check])
    deadline = time.monotonic() + _LONGEST_S
    while (
        not listens(composed.ports[name])
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        if process.poll() is not None or time.monotonic() > deadline:
            said = (composed.root / f"{name}.txt").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{name} does not start: {said}")
        time.sleep(0.1)


OURS = ("shardgate", "shardgate-store", "shardgate-examples")
ONE_SHOT = {"examples", "certificate"}
LONGEST_S = 20.0


@pytest.fixture(scope="module")
def composed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Composed]:
    """Run all services."""
    with composing(tmp_path_factory.mktemp("composed"), new_nginx(request)) as running:
        yield running


def curl(composed: Composed, path: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    """Request *path* as a user does who has copied the certificate."""
    url = f"https://localhost:{composed.ports['balancer']}{path}"
    command = [need("curl"), "-sS", "--cacert", str(composed.ca_file), *options, url]
    return subprocess.run(command, check=True, capture_output=True, timeout=120)


def test_chunk_is_served_over_tls_and_http_2(composed: Composed) -> None:
    """A chunk is served through nginx over TLS and HTTP/2, with CORS headers."""
    answer = curl(composed, "/image/s0/c/2/3/4", "-D", "/dev/stderr")
    head = answer.stderr.decode().lower()

    assert head.startswith("http/2 200")
    assert "access-control-allow-origin: *" in head
    assert f"content-length: {len(answer.stdout)}" in head
    assert len(answer.stdout) > 10_000


@pytest.mark.parametrize(
    "path", ["/image/s0/zarr.json", "/cells/info", "/history/@tag.landfall/zarr.json"]
)
def test_examples_are_served(composed: Composed, path: str) -> None:
    """The example image, segmentation and repository are served."""
    assert curl(composed, path, "-f").stdout.startswith(b"{")


def test_second_answer_comes_from_the_cache_on_the_volume(composed: Composed) -> None:
    """The second GET of a chunk is a hit of nginx's cache, which lies on the volume."""
    first, second = (curl(composed, "/image/s0/c/1/2/3", "-D", "/dev/stderr") for _ in range(2))

    assert b"x-cache: miss" in first.stderr
    assert b"x-cache: hit" in second.stderr
    assert second.stdout == first.stdout
    kept = [each for each in (composed.root / "tmp/cache").rglob("*") if each.is_file()]
    assert sum(first.stdout in each.read_bytes() for each in kept) == 1


def test_nginx_follows_changed_addresses_of_gateways(composed: Composed) -> None:
    """Changed addresses of gateways are resolved by nginx without a reload."""
    for address, status in (("127.0.0.2", b"503"), ("127.0.0.1", b"200")):
        composed.names.address = address
        options = ("-H", "cache-control: no-cache", "-o", "/dev/null", "-w", "%{http_code}")
        deadline = time.monotonic() + LONGEST_S
        while (told := curl(composed, "/cells/info", *options).stdout) != status:
            assert time.monotonic() < deadline, told


def test_compose_file_is_valid() -> None:
    """docker-compose accepts the file."""
    command = [need("docker-compose"), "-f", str(FILE), "config", "--quiet"]

    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize("name", services())
def test_every_service_is_confined(name: str) -> None:
    """Every service has a read-only root, no capabilities and bounded logs.

    Long-running services restart unless they were stopped.
    """
    service = services()[name]

    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    options = {"max-size": "10m", "max-file": "3"}
    assert service["logging"] == {"driver": "json-file", "options": options}
    assert service.get("restart") == (None if name in ONE_SHOT else "unless-stopped")


def test_images_have_the_versions_of_the_project_and_of_tests() -> None:
    """Own images have the project's version and are built once each; nginx has the tested one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {tuple(each["image"].split(":")) for each in services().values()}
    made = [each["image"] for each in services().values() if "build" in each]

    ours = {(name, project["version"]) for name in OURS}
    assert versions == ours | {("nginx", NGINX_VERSION)}
    assert sorted(made) == sorted(":".join(each) for each in ours)


def test_only_the_balancer_publishes_a_port() -> None:
    """The balancer publishes a port on the loopback interface, and no other service any."""
    ports = {name: service["ports"] for name, service in services().items() if "ports" in service}

    assert ports == {"balancer": ["127.0.0.1:8443:8443"]}
