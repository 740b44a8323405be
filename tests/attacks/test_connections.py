"""Idle, slow and endless connections do not hold up other clients."""

import itertools
import re
import resource
import socket
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx
import icechunk
import pytest

from shardgate.server.protocol import HEAD_NBYTES, MAX_HEADERS, MAX_PIPELINED
from shardgate.settings import DatasetSettings, LimitSettings, ServerSettings, Settings
from tests.support.attacks.raw import LONGEST_S, connect, exchange, flood, heard, statuses
from tests.support.gateways import Gateway, forked, of_dataset
from tests.support.processes import wait_until
from tests.support.serving import client_of, serving

MANY: Final = 600
MOST_BYTES_EACH: Final = 16 * 1024
FEW_FILES: Final = 200
IN_FLIGHT: Final = 8 * 2**20
BODY: Final = bytes(6 * 2**20)
KEPT: Final = b"GET /data/there HTTP/1.1\r\nHost: x\r\n\r\n"
LAST: Final = b"GET /data/there HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture
def gateway(tmp_path: Path) -> Generator[Gateway]:
    """Serve a file from a separate process."""
    (tmp_path / "there").write_bytes(b"bytes\n")
    with forked(of_dataset(str(tmp_path))) as running:
        yield running


@contextmanager
def idle(url: str, count: int, sent: bytes = b"") -> Generator[list[socket.socket]]:
    """Open *count* connections and send *sent* on each."""
    with ExitStack() as stack:
        opened = [stack.enter_context(connect(url)) for _ in range(count)]
        for each in opened:
            each.sendall(sent)
        yield opened


def test_hundreds_of_idle_connections_take_little_memory(gateway: Gateway) -> None:
    """Hundreds of idle connections take less than 16 KiB each and delay no new request."""
    url = gateway.url
    assert httpx.get(f"{url}/data/there").is_success
    before = gateway.resident_nbytes
    with idle(url, MANY // 2), idle(url, MANY // 2, LAST[:-2]):
        assert statuses(exchange(url, LAST)) == [200]
        taken = gateway.resident_nbytes - before

    assert taken / MANY < MOST_BYTES_EACH


def test_longest_idle_connection_gives_way_to_a_new_one(gateway: Gateway) -> None:
    """When file descriptors run out, a new connection closes the longest idle one."""
    url = gateway.url
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
    with idle(url, FEW_FILES * 3 // 4) as opened:
        opened[0].sendall(KEPT)
        assert statuses(opened[0].recv(65536)) == [200]

        assert statuses(exchange(url, LAST)) == [200]
        assert heard(opened[1]) == b""
        for each in (opened[0], opened[2]):
            each.sendall(LAST)
            assert statuses(heard(each)) == [200]


def test_connection_is_refused_with_503_when_none_is_idle(gateway: Gateway) -> None:
    """When file descriptors run out and no connection is idle, a new one gets 503."""
    url = gateway.url
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
    with idle(url, FEW_FILES * 3 // 4, LAST[:-2]) as first:
        received = exchange(url)
        first[0].sendall(b"\r\n")
        answer = heard(first[0])

        assert statuses(received) == [503]
        assert b"retry-after: 1" in received
        assert statuses(answer) == [200]


def test_concurrent_bodies_take_bounded_memory(tmp_path: Path) -> None:
    """Concurrent PUTs beyond the limit of bytes in flight get 503 and take bounded memory."""
    allowed = {"SHARDGATE_LIMITS__IN_FLIGHT_BYTES": str(IN_FLIGHT)}
    with forked(of_dataset(str(tmp_path)) | allowed) as running:
        before = running.resident_nbytes

        def put(number: int) -> int:
            return httpx.put(f"{running.url}/data/{number}", content=BODY, timeout=60).status_code

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(put, range(16)))
        status = Path(f"/proc/{running.pid}/status").read_text()

    (peak,) = map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))
    assert 200 in answers
    assert set(answers) <= {200, 503}
    assert peak * 1024 - before < IN_FLIGHT + 3 * len(BODY)


PUT_OF_DATA: Final = b"PUT /data/k"
FRAMED: Final = b"Content-Encoding: aws-chunked\r\nX-Amz-Decoded-Content-Length: 1048576\r\n"
LENGTH: Final = b"Content-Length: 1048576\r\n"
IDLE: Final = {
    "no bytes": (PUT_OF_DATA, LENGTH + b"\r\n"),
    "a first byte": (PUT_OF_DATA, LENGTH + b"\r\nX"),
    "all but the last byte": (PUT_OF_DATA, LENGTH + b"\r\n" + bytes(2**20 - 1)),
    "gzip": (PUT_OF_DATA, LENGTH + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b"),
    "frames": (PUT_OF_DATA, FRAMED + LENGTH + b"\r\n100000\r\nX"),
    "no length": (PUT_OF_DATA, FRAMED + b"Transfer-Encoding: chunked\r\n\r\n1\r\nX\r\n"),
    "chunks": (b"POST /api/datasets/repo/chunks", LENGTH + b"\r\nX"),
    "commits": (b"POST /api/datasets/repo/commits", LENGTH + b"\r\n{"),
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve a folder and a repository with few bytes in flight and a long timeout."""
    folder: Path = tmp_path_factory.mktemp("narrow")
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder / "repo")))
    (folder / "there").write_bytes(b"bytes\n")
    urls = {"data": str(folder), "repo": str(folder / "repo")}
    settings = Settings(
        limits=LimitSettings(in_flight_bytes=4 * 2**20, timeout_s=LONGEST_S),
        datasets={name: DatasetSettings(url=url, writable=True) for name, url in urls.items()},
    )
    with client_of(settings) as client:
        yield client


@pytest.mark.parametrize(("line", "rest"), IDLE.values(), ids=IDLE)
def test_stalled_bodies_leave_room_for_reads(
    narrow: httpx.Client, line: bytes, rest: bytes
) -> None:
    """Eight requests with stalled bodies do not use up the bytes in flight that reads need."""

    def count_requests(expected: int) -> bool:
        return f"requests_in_flight {expected + 1}.0" in narrow.get("/metrics").text

    head = line + b" HTTP/1.1\r\nHost: localhost\r\n"
    with idle(str(narrow.base_url), 8, head + rest):
        wait_until(lambda: count_requests(8))
        assert narrow.get("/data/there", timeout=LONGEST_S / 2).content == b"bytes\n"
    wait_until(lambda: count_requests(0))


GET = b"GET /any/there HTTP/1.1\r\nHost: x\r\n"
LISTING = b"GET /any/ HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
MOST_BYTES = 8 * 1024**2
"""More than the socket buffers of the system hold."""
SOON_S = 0.3


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a writable dataset with short timeouts."""
    folder: Path = tmp_path_factory.mktemp("any")
    (folder / "there").write_bytes(b"bytes\n")
    settings = Settings(
        server=ServerSettings(keep_alive_s=SOON_S),
        limits=LimitSettings(timeout_s=SOON_S),
        datasets={"any": DatasetSettings(url=folder.as_uri(), writable=True)},
    )
    with pytest.MonkeyPatch.context() as patch, serving(settings) as served:
        patch.setattr("shardgate.server.protocol.HEAD_S", SOON_S)
        yield served


@pytest.fixture(autouse=True)
def _goes_on(url: str) -> Generator[None]:
    """Assert after each test that the service still answers reads."""
    yield
    assert httpx.get(f"{url}/any/there").content == b"bytes\n"


ENDLESS = {
    "a target": (b"GET /", b"a" * 65536),
    "a value": (GET + b"X: ", b"a" * 65536),
    "a name": (GET + b"X", b"a" * 65536),
    "headers": (GET, b"X: y\r\n" * 10_000),
    "headers behind a request": (LISTING + GET, b"X: y\r\n" * 10_000),
    "empty lines": (b"", b"\r\n" * 10_000),
    "trailers": (GET + CHUNKED + b"0\r\n", b"X: y\r\n" * 10_000),
    "an extension of a chunk": (GET + CHUNKED + b"5;", b"a" * 65536),
    "requests behind one": (b"", LISTING * 1000),
    "what follows an upgrade": (
        GET + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"\r\n" * 10_000,
    ),
}


@pytest.mark.parametrize(("first", "piece"), ENDLESS.values(), ids=ENDLESS)
def test_endless_request_is_cut_off(url: str, first: bytes, piece: bytes) -> None:
    """An endless request is cut off before 8 MiB, with 431 as its only error status."""
    pieces = itertools.repeat(piece, MOST_BYTES // len(piece))
    taken, received = flood(url, itertools.chain([first], pieces))

    assert taken < MOST_BYTES
    assert set(statuses(received)) <= {200, 431}


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        (b"X: %s\r\n" % (b"a" * (HEAD_NBYTES - 1000)), b"X: %s\r\n" % (b"a" * HEAD_NBYTES)),
        (b"X: y\r\n" * (MAX_HEADERS - 2), b"X: y\r\n" * MAX_HEADERS),
    ],
    ids=["bytes", "headers"],
)
def test_head_above_the_limits_is_refused_with_431(
    url: str, allowed: bytes, refused: bytes
) -> None:
    """A head with too many bytes or headers gets 431; one within the limits gets 200."""
    for headers, status in ((allowed, 200), (refused, 431)):
        request = GET + b"Connection: close\r\n" + headers + b"\r\n"
        assert statuses(exchange(url, request)) == [status]


def test_pipelined_requests_are_all_answered(url: str) -> None:
    """All pipelined requests up to the limit are answered with 200."""
    last = GET + b"Connection: close\r\n\r\n"

    assert statuses(exchange(url, LISTING * (MAX_PIPELINED - 1) + last)) == [200] * MAX_PIPELINED


def test_silent_connection_is_closed_without_a_response(url: str) -> None:
    """A connection without a request is closed after the timeout, without any response."""
    with connect(url) as connection:
        assert heard(connection) == b""


PUT = b"PUT /any/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    "before", [GET, GET + b"\r\n" + GET, LISTING + GET, PUT], ids=["first", "next", "slow", "body"]
)
def test_head_or_body_sent_byte_by_byte_times_out_with_408(url: str, before: bytes) -> None:
    """A head or a body sent byte by byte gets 408 after the timeout; nothing is stored."""
    deadline, received = time.monotonic() + LONGEST_S, b""
    with connect(url) as connection:
        connection.sendall(before)
        connection.settimeout(0.05)
        while 408 not in statuses(received):
            assert time.monotonic() < deadline
            with suppress(TimeoutError):
                connection.sendall(b"X")
                received += connection.recv(65536)

    assert statuses(received)[-1] == 408
    assert httpx.get(f"{url}/any/k").status_code == 404


def test_head_on_a_kept_connection_has_its_own_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete head gets 408 after its own timeout, not after the one of idle connections."""
    monkeypatch.setattr("shardgate.server.protocol.HEAD_S", SOON_S / 3)
    settings = Settings(
        server=ServerSettings(keep_alive_s=60), datasets={"any": DatasetSettings(url=str(tmp_path))}
    )
    with serving(settings) as url, connect(url) as connection:
        for _ in range(2):
            connection.sendall(GET + b"\r\n")
            assert statuses(connection.recv(65536)) == [404]
            time.sleep(SOON_S)
        connection.sendall(GET)

        assert statuses(heard(connection)) == [408]


@pytest.mark.parametrize("path", ["/api/nothing", "/healthz", "/any/there"])
def test_connection_is_closed_while_an_unread_body_keeps_arriving(url: str, path: str) -> None:
    """A connection is closed after its response although the unread body keeps arriving."""
    method = "GET" if path == "/any/there" else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
    with connect(url) as connection:
        connection.sendall(head.encode())
        assert connection.recv(65536)
        deadline = time.monotonic() + LONGEST_S
        with suppress(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(bytes(10))
                time.sleep(0.05)
            pytest.fail("it is not closed")
