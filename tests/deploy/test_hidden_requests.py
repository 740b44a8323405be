"""What nginx passes on is understood by a gateway as nginx does: no request is hidden in one."""

import socket
import ssl
from collections.abc import Generator
from pathlib import Path

import pytest

from app.model import ByteRequest, Condition, ETag, ObjectRef
from app.settings import DatasetSettings, Settings
from app.storage.contract import Found, NotModified
from app.storage.memory import MemoryStore
from tests.attacks.raw import heard, statuses
from tests.attacks.test_smuggling import LAST, UNCLEAR
from tests.deploy.balancer import Balancer, balancing
from tests.deploy.programs import need
from tests.serving import serving

SHAPES = list(UNCLEAR.values())
HIDDEN = b"GET /any/hidden-%d HTTP/1.1\r\nHost: x\r\n\r\n"


class Asked(MemoryStore):
    """Notes which objects are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Note, and read."""
        self.keys.add(ref.key)
        return await super().get(ref, request, if_match=if_match, if_none_match=if_none_match)


@pytest.fixture(scope="module")
def store() -> Asked:
    """Make the store."""
    return Asked()


@pytest.fixture(scope="module")
def balancer(store: Asked, tmp_path_factory: pytest.TempPathFactory) -> Generator[Balancer]:
    """Run nginx before a gateway."""
    need("nginx")
    folder: Path = tmp_path_factory.mktemp("nginx")
    settings = Settings(datasets={"any": DatasetSettings(url="memory://any", writable=True)})
    with serving(settings, wrap=lambda _: store) as url, balancing(folder, [url]) as running:
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
def test_no_request_is_hidden_in_another(balancer: Balancer, store: Asked, number: int) -> None:
    """A gateway answers what nginx has passed on, and nothing else."""
    received = exchange(balancer, SHAPES[number] + HIDDEN % number + LAST)

    assert len(statuses(received)) <= 3
    if f"hidden-{number}" in store.keys:
        logged = (balancer.folder / "output").read_bytes()
        assert b"/any/hidden-%d" % number in logged
