"""Clients go away amid a body, or before the answer: all of it is written, or nothing."""

import socket
import struct
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from typing import Final, Literal
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateways import Gateway, Start, of_dataset
from tests.labs import LARGE, SMALL, Lab, value

SITES: Final = (pytest.param("folder", marks=pytest.mark.soak), "seaweedfs")
OLD: Final = {at: value(SMALL, 1, at) for at in range(8)}
NEW: Final = {at: value(SMALL, 2, at) for at in range(8)}
"""All chunks of one shard."""
WITNESS: Final = value(SMALL, 3, 0)
DEADLINE_S: Final = 30
SETTLED_S: Final = 0.2
"""What has arrived is looked at by then."""
RESET: Final = struct.pack("ii", 1, 0)

type Going = Literal["closes", "resets"]

goings = pytest.mark.parametrize("going", ["closes", "resets"])


class Site:
    """A store with arrays in it, and a gateway before it."""

    def __init__(self, lab: Lab, gateway: Gateway) -> None:
        self.lab = lab
        self._base = f"{gateway.url}/data"

    def leave(self, request: bytes, after_s: float, going: Going) -> None:
        """Send *request*, and go."""
        where = urlsplit(self._base)
        with socket.create_connection((where.hostname, where.port or 0), DEADLINE_S) as client:
            client.sendall(request)
            time.sleep(after_s)
            if going == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        time.sleep(SETTLED_S)

    def read(self, name: str) -> dict[int, bytes | None]:
        """Read all chunks of the shard, after another was put that is answered after all before."""
        url = f"{self._base}/{name}/c/7"
        assert httpx.put(url, content=WITNESS, timeout=DEADLINE_S).is_success
        found = list(self.lab.read(name).values())
        assert found[7] == WITNESS
        return dict(enumerate(found[:7]))


@pytest.fixture(scope="module", params=SITES)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start the gateway."""
    is_remote = request.param == "seaweedfs"
    seaweedfs = request.getfixturevalue("seaweedfs") if is_remote else None
    lab = Lab(tmp_path_factory.mktemp("left"), seaweedfs)
    with ExitStack() as stack:
        gateway = stack.enter_context(closing(start(of_dataset(lab.url, seaweedfs))))
        yield Site(lab, gateway)


def put(path: str, body: bytes) -> bytes:
    """Write a request."""
    return (
        f"PUT /data{path} HTTP/1.1\r\nhost: [::1]\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


@goings
def test_half_a_body_is_not_written(site: Site, going: Going) -> None:
    """A chunk that did not arrive as a whole is none, long or short."""
    for shape in (SMALL, LARGE):
        name = site.lab.new_array(shape, {0: value(shape, 1, 0)})
        before = site.lab.read(name)
        request = put(f"/{name}/c/0", value(shape, 2, 0))

        site.leave(request[: -shape.chunk_nbytes // 2], 0.05, going)

        assert site.lab.read(name) == before


@pytest.mark.parametrize("after_s", [0, 0.005, 0.02])
@goings
def test_who_does_not_wait_has_written_all_or_nothing(
    site: Site,
    going: Going,
    after_s: float,
) -> None:
    """A chunk that arrived is in the shard or not, whenever its client left."""
    name = site.lab.new_array(SMALL, OLD)

    site.leave(put(f"/{name}/c/0", NEW[0]), after_s, going)

    before = {at: OLD[at] for at in range(7)}
    assert site.read(name) in (before, before | {0: NEW[0]})
