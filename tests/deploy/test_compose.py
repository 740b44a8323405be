"""What docker-compose.yml describes works, with its own commands, files and checks."""

import subprocess
import time
import tomllib
from collections.abc import Generator
from typing import Any

import pytest

from tests.deploy.composed import FILE, Composed, composing, services
from tests.deploy.dockerfile import ROOT
from tests.deploy.programs import NGINX_VERSION, need, new_nginx

OURS = ("shardgate", "shardgate-store", "shardgate-examples")
ONE_SHOT = {"examples", "certificate"}
LONGEST_S = 20.0
LASTING = sorted(services().keys() - ONE_SHOT)


@pytest.fixture(scope="module")
def composed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Composed]:
    """Run all services."""
    with composing(tmp_path_factory.mktemp("composed"), new_nginx(request)) as running:
        yield running


def curl(composed: Composed, path: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    """Ask for *path* as a user does who has copied the certificate."""
    url = f"https://localhost:{composed.ports['balancer']}{path}"
    command = [need("curl"), "-sS", "--cacert", str(composed.ca_file), *options, url]
    return subprocess.run(command, check=True, capture_output=True, timeout=30)


def test_a_chunk_comes_over_tls_and_http_2(composed: Composed) -> None:
    """It is what the gateway behind answers, CORS headers included."""
    answer = curl(composed, "/image/s0/c/2/3/4", "-D", "/dev/stderr")
    head = answer.stderr.decode().lower()

    assert head.startswith("http/2 200")
    assert "access-control-allow-origin: *" in head
    assert f"content-length: {len(answer.stdout)}" in head
    assert len(answer.stdout) > 10_000


@pytest.mark.parametrize(
    "path", ["/image/s0/zarr.json", "/cells/info", "/history/@tag.positive/zarr.json"]
)
def test_each_example_is_there(composed: Composed, path: str) -> None:
    """The store holds an image, a segmentation and a repository."""
    assert curl(composed, path, "-f").stdout.startswith(b"{")


def test_gateways_are_followed_to_other_addresses(composed: Composed) -> None:
    """Those that are made anew are found without a reload."""
    for address, status in (("127.0.0.2", b"503"), ("127.0.0.1", b"200")):
        composed.names.address = address
        deadline = time.monotonic() + LONGEST_S
        while (told := _status(composed)) != status:
            assert time.monotonic() < deadline, told


def _status(composed: Composed) -> bytes:
    return curl(composed, "/cells/info", "-o", "/dev/null", "-w", "%{http_code}").stdout


def test_it_is_valid() -> None:
    """Compose understands the file."""
    command = [need("docker-compose"), "-f", str(FILE), "config", "--quiet"]

    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize("service", services().values(), ids=services())
def test_every_service_is_confined(service: dict[str, Any]) -> None:
    """It writes to its volumes and to memory only, and gets no privileges."""
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("service", services().values(), ids=services())
def test_no_log_grows_without_bound(service: dict[str, Any]) -> None:
    """Each is begun anew, and few old ones are kept."""
    assert service["logging"] == {
        "driver": "json-file",
        "options": {"max-size": "10m", "max-file": "3"},
    }


def test_images_are_of_one_version() -> None:
    """Our own have that of the project, and nginx is the one that is tested; each is made once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {tuple(each["image"].split(":")) for each in services().values()}
    made = [each["image"] for each in services().values() if "build" in each]

    ours = {(name, project["version"]) for name in OURS}
    assert versions == ours | {("nginx", NGINX_VERSION)}
    assert sorted(made) == sorted(":".join(each) for each in ours)


@pytest.mark.parametrize("service", LASTING)
def test_what_lasts_is_started_again(service: str) -> None:
    """One that dies comes back, unless it was stopped."""
    assert services()[service]["restart"] == "unless-stopped"


def test_only_the_balancer_is_reached_from_outside() -> None:
    """Its port is open to this machine alone."""
    ports = {name: service["ports"] for name, service in services().items() if "ports" in service}

    assert ports == {"balancer": ["127.0.0.1:8443:8443"]}
