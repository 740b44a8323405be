"""Connections on which nothing happens cost little, and cannot use up what others need."""

import re
import resource
import socket
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.attacks.raw import connect, exchange, heard, statuses
from tests.gateways import Gateway, forked, of_dataset

MANY: Final = 10_000
OURS: Final = 200
"""Files that the tests have open besides."""
MOST_BYTES_EACH: Final = 16 * 1024
FEW_FILES: Final = 200
IN_FLIGHT: Final = 16 * 2**20
BODY: Final = bytes(12 * 2**20)
LAST: Final = b"GET /data/there HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture
def gateway(tmp_path: Path) -> Generator[Gateway]:
    """Serve a file by a process of its own."""
    (tmp_path / "there").write_bytes(b"bytes\n")
    with forked(of_dataset(str(tmp_path))) as running:
        yield running


@contextmanager
def idle(url: str, count: int) -> Generator[list[socket.socket]]:
    """Open connections, and send nothing, or half a head."""
    with ExitStack() as stack:
        opened = [stack.enter_context(connect(url)) for _ in range(count)]
        for each in opened[::2]:
            each.sendall(LAST[:-2])
        yield opened


@contextmanager
def many_files() -> Generator[int]:
    """Allow this process as many files as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard if hard != resource.RLIM_INFINITY else 2 * MANY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_of_idle_connections_are_nothing(gateway: Gateway) -> None:
    """The service answers as before, and holds a few KiB for each."""
    url = gateway.url
    assert httpx.get(f"{url}/data/there").is_success
    before = gateway.resident_nbytes
    with many_files() as files:
        count = min(MANY, files * 3 // 4 - OURS)
        with idle(url, count):
            began_at = time.monotonic()
            assert statuses(exchange(url, LAST)) == [200]
            assert time.monotonic() - began_at < 2
            time.sleep(0.2)
            each = (gateway.resident_nbytes - before) / count

    assert each < MOST_BYTES_EACH


def test_more_connections_than_files_are_refused(gateway: Gateway) -> None:
    """At once, so that files of stores can be opened, and others go on."""
    url = gateway.url
    resource.prlimit(gateway._pid, resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
    with idle(url, FEW_FILES * 3 // 4) as first:
        received = exchange(url)
        first[0].sendall(b"\r\n")
        answer = heard(first[0])

        assert statuses(received) == [503]
        assert b"retry-after: 1" in received
        assert statuses(answer) == [200]


def test_bodies_that_arrive_together_are_bounded(tmp_path: Path) -> None:
    """They take the memory that is allowed for all of them, and that of one body more."""
    allowed = {"SHARDGATE_LIMITS__IN_FLIGHT_BYTES": str(IN_FLIGHT)}
    with forked(of_dataset(str(tmp_path)) | allowed) as running:
        before = running.resident_nbytes

        def put(number: int) -> int:
            return httpx.put(f"{running.url}/data/{number}", content=BODY, timeout=60).status_code

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(put, range(16)))
        status = Path(f"/proc/{running._pid}/status").read_text()

    (peak,) = map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))
    assert 200 in answers
    assert set(answers) <= {200, 503}
    assert peak * 1024 - before < IN_FLIGHT + 3 * len(BODY)
