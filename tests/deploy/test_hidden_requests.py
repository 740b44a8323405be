"""What nginx passes on is understood by a gateway as nginx does: no request is hidden in one."""

import socket
import ssl
from collections.abc import Generator
from pathlib import Path

import pytest

from app.settings import DatasetSettings, Settings
from app.storage.contract import ObjectStore
from tests.attacks.raw import heard, statuses
from tests.attacks.test_smuggling import LAST, UNCLEAR
from tests.clients.asking import Watched
from tests.deploy.balancer import Balancer, balancing
from tests.deploy.programs import need
from tests.serving import serving

SHAPES = list(UNCLEAR.values())
HIDDEN = b"GET /any/hidden-%d HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """Collect the keys that the store is asked for."""
    return set()


@pytest.fixture(scope="module")
def balancer(keys: set[str], tmp_path_factory: pytest.TempPathFactory) -> Generator[Balancer]:
    """Run nginx before a gateway."""
    need("nginx")
    folder: Path = tmp_path_factory.mktemp("nginx")
    settings = Settings(datasets={"any": DatasetSettings(url="memory://any", writable=True)})

    def watched(store: ObjectStore) -> ObjectStore:
        return Watched(store, lambda ref: keys.add(ref.key))

    with serving(settings, wrap=watched) as url, balancing(folder, [url]) as running:
        yield running


def exchange(balancer: Balancer, request: bytes) -> bytes:
    """Send *request* through nginx, and read until it closes."""
    host, _, port = balancer.host.partition(":")
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        balancer.tls().wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(request)
        try:
            return heard(connection)
        except (TimeoutError, ssl.SSLError):
            return b""


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=list(UNCLEAR))
def test_no_request_is_hidden_in_another(balancer: Balancer, keys: set[str], number: int) -> None:
    """A gateway answers what nginx has passed on, and nothing else."""
    received = exchange(balancer, SHAPES[number] + HIDDEN % number + LAST)

    assert len(statuses(received)) <= 3
    if f"hidden-{number}" in keys:
        logged = (balancer.folder / "output").read_bytes()
        assert b"/any/hidden-%d" % number in logged
