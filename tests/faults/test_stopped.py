"""Gateways are stopped, ended or killed, and clients disconnect, during a write."""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Barrier
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.attacks.raw import connect, heard
from tests.support.commands import running
from tests.support.gateways import Gateway, forked, of_dataset
from tests.support.labs import SMALL, Lab, requested_lab, value
from tests.support.processes import listens, wait_until

OLD: Final = {0: value(SMALL, 1, 0), 1: value(SMALL, 1, 1)}
OURS: Final = value(SMALL, 2, 0)
THEIRS: Final = value(SMALL, 3, 0)
DEADLINE_S: Final = 60
GRACE_S: Final = 25
SOON_S: Final = 10
WRITERS: Final = 8
FILLED_S: Final = 0.3
"""Time after which a new temporary file is complete and its writer waits for the lock."""


class Folder:
    """A folder with an array of one shard."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self.lab = Lab(path)
        self._pool = pool
        self.name = self.lab.new_array(SMALL, OLD)

    @contextmanager
    def gateway(self, **environ: str) -> Generator[Gateway]:
        """Start a gateway before the folder."""
        with forked(of_dataset(self.lab.url) | environ) as started:
            yield started

    def put(self, gateway: Gateway, chunk: int, data: bytes) -> httpx.Response:
        """Put a chunk."""
        url = f"{gateway.url}/data/{self.name}/c/{chunk}"
        return httpx.put(url, content=data, timeout=DEADLINE_S)

    def demand(self, *chunks: bytes | None) -> None:
        """Assert that the shard has exactly these chunks."""
        found = [data for data in self.lab.read(self.name).values() if data]
        assert found == list(chunks)

    @contextmanager
    def held_up(self, gateway: Gateway) -> Generator[Future[httpx.Response]]:
        """Put a chunk whose writer waits before renaming its file until the end of the block."""
        fd = os.open(self.lab.folder / self.name / "c", os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            answer = self._pool.submit(self.put, gateway, 1, OURS)
            wait_until(lambda: self.lab.left(self.name))
            time.sleep(FILLED_S)
            yield answer
        finally:
            os.close(fd)


@pytest.fixture
def folder(tmp_path: Path) -> Generator[Folder]:
    """Create a folder with an array."""
    with ThreadPoolExecutor(1) as pool:
        yield Folder(tmp_path, pool)


def test_gateway_stopped_during_a_write_overwrites_no_later_write(folder: Folder) -> None:
    """A gateway stopped during a write, when continued, keeps chunks written since by others."""
    with folder.gateway() as stopped, folder.gateway() as other:
        with folder.held_up(stopped) as answer:
            stopped.stop()
        try:
            assert folder.put(other, 0, THEIRS).is_success
            assert folder.put(other, 2, THEIRS).is_success
        finally:
            stopped.go_on()

        assert answer.result(DEADLINE_S).is_success
        folder.demand(THEIRS, OURS, THEIRS)
        assert folder.lab.left(folder.name) == []


def test_gateway_killed_before_the_rename_leaves_the_old_shard(folder: Folder) -> None:
    """A gateway killed before the rename leaves the old shard; the next write cleans up."""
    with folder.gateway() as killed, folder.gateway() as other:
        with folder.held_up(killed) as answer:
            killed.kill()
        with pytest.raises(httpx.TransportError):
            answer.result(DEADLINE_S)
        folder.demand(*OLD.values())
        assert len(folder.lab.left(folder.name)) == 1

        assert folder.put(other, 2, THEIRS).is_success
        folder.demand(*OLD.values(), THEIRS)
        assert folder.lab.left(folder.name) == []


def test_terminated_gateway_finishes_its_write(folder: Folder) -> None:
    """A gateway that gets SIGTERM finishes its write and refuses new connections."""
    with folder.gateway() as ending:
        with folder.held_up(ending) as answer:
            ending.terminate()
            assert not ending.wait(0.5)
            wait_until(lambda: not listens(urlsplit(ending.url).port or 0))

        assert answer.result(DEADLINE_S).is_success
        assert answer.result().headers["connection"] == "close"
        assert ending.wait(GRACE_S)
        folder.demand(OLD[0], OURS)


def test_terminated_gateway_does_not_wait_for_an_incomplete_body(folder: Folder) -> None:
    """A gateway that gets SIGTERM ends despite an incomplete body, which writes nothing."""
    with folder.gateway(SHARDGATE_LIMITS__TIMEOUT_S="1") as ending:
        with connect(ending.url) as client:
            client.sendall(put(f"/{folder.name}/c/1", OURS)[:-16])
            time.sleep(0.2)
            ending.terminate()

            assert ending.wait(GRACE_S)
        folder.demand(*OLD.values())


def test_second_sigterm_ends_the_gateway_at_once(folder: Folder) -> None:
    """A gateway that gets SIGTERM twice during a write ends within 3 s and leaves the old shard."""
    with folder.gateway() as ending:
        with folder.held_up(ending) as answer:
            ending.terminate()
            assert not ending.wait(0.3)
            ending.terminate()
            assert ending.wait(SOON_S)
        with pytest.raises(httpx.TransportError):
            answer.result(DEADLINE_S)
        folder.demand(*OLD.values())


def test_terminated_gateway_does_not_wait_for_idle_connections(folder: Folder) -> None:
    """A gateway that gets SIGTERM ends within 3 s despite idle and incomplete connections."""
    with folder.gateway() as ending, ExitStack() as stack:
        connections = [stack.enter_context(connect(ending.url)) for _ in range(3)]
        connections[1].sendall(b"GET /healthz HTTP/1.1\r\nHo")
        connections[2].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connections[2].recv(65536)
        ending.terminate()

        assert ending.wait(SOON_S)
        assert [heard(each) for each in connections] == [b""] * 3


def test_acknowledged_writes_survive_sigterm_under_load(folder: Folder) -> None:
    """Acknowledged writes survive SIGTERM to a gateway under load, which exits with 0."""
    environ: dict[str, Any] = {**of_dataset(folder.lab.url)}
    with running("serve", **environ) as (gateway, (line,)), ThreadPoolExecutor(WRITERS) as pool:
        have_begun = Barrier(WRITERS + 1)
        base = f"{line.split()[0]}{folder.name}"
        writers = [pool.submit(write_on, base, n, have_begun) for n in range(WRITERS)]
        have_begun.wait(DEADLINE_S)
        time.sleep(0.2)
        code, _ = gateway.end()
        told = [each.result(DEADLINE_S) for each in writers]

        assert code == 0
    found = folder.lab.read(folder.name)
    for number, last in enumerate(told):
        assert last > 0
        allowed = [value(SMALL, 9, last), value(SMALL, 9, last + 1)]
        assert found[f"{folder.name}/c/{number}"] in allowed


def write_on(base: str, chunk: int, have_begun: Barrier) -> int:
    """Write numbered values until the gateway is gone; return the last acknowledged number.

    Waits for the other writers after the first write.
    """
    last = 0
    with httpx.Client(timeout=DEADLINE_S) as client, suppress(httpx.TransportError):
        while True:
            answer = client.put(f"{base}/c/{chunk}", content=value(SMALL, 9, last + 1))
            assert answer.is_success
            last += 1
            if last == 1:
                have_begun.wait(DEADLINE_S)
    return last


BEFORE: Final = {at: value(SMALL, 1, at) for at in range(8)}
"""All chunks of one shard."""
AFTER: Final = value(SMALL, 2, 0)
WITNESS: Final = value(SMALL, 3, 0)
SETTLED_S: Final = 0.2
"""Time after which the gateway has begun the request that arrived."""
RESET: Final = struct.pack("ii", 1, 0)


@pytest.fixture(
    scope="module", params=[pytest.param("folder", marks=pytest.mark.soak), "seaweedfs"]
)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Create the store."""
    return requested_lab(request, tmp_path_factory)


@pytest.fixture(scope="module")
def base(lab: Lab) -> Generator[str]:
    """Start a gateway before the store."""
    with forked(of_dataset(lab.url, lab.seaweedfs)) as gateway:
        yield f"{gateway.url}/data"


def put(path: str, body: bytes) -> bytes:
    """Encode a PUT request."""
    return (
        f"PUT /data{path} HTTP/1.1\r\nhost: [::1]\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


@pytest.mark.parametrize(("after_s", "resets"), [(0, True), (0.005, False), (0.02, True)])
def test_put_of_a_disconnected_client_is_done_or_not(
    lab: Lab, base: str, after_s: float, *, resets: bool
) -> None:
    """A PUT whose client disconnects early writes the whole chunk or nothing."""
    name = lab.new_array(SMALL, BEFORE)
    with connect(base) as client:
        client.sendall(put(f"/{name}/c/0", AFTER))
        time.sleep(after_s)
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    time.sleep(SETTLED_S)
    # This PUT to the same shard is answered after all earlier ones.
    answer = httpx.put(f"{base}/{name}/c/7", content=WITNESS, timeout=DEADLINE_S)

    assert answer.is_success
    first, *others = list(lab.read(name).values())[:8]
    assert first in (BEFORE[0], AFTER)
    assert others == [*(BEFORE[at] for at in range(1, 7)), WITNESS]
