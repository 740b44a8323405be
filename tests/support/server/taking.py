"""A writable service, and raw connections to it."""

import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.support.attacks.raw import connect
from tests.support.files import write_files
from tests.support.formats.zarr.building import build, chunk_bytes
from tests.support.serving import client_of

MAX = 100_000
CHUNKS = {key: chunk_bytes(number) for number, key in enumerate(["c/0/0", "c/0/1", "c/1/1"])}
NEW = chunk_bytes(9)
LIMITS = LimitSettings(max_chunk_bytes=MAX, timeout_s=1)


@contextmanager
def taking(folder: Path) -> Generator[httpx.Client]:
    """Serve a writable sharded array, writable memory, and a read-only array."""
    write_files(build(CHUNKS), folder / "em")
    datasets = {
        "em": DatasetSettings(url=(folder / "em").as_uri(), writable=True),
        "any": DatasetSettings(url="memory://any", writable=True),
        "fixed": DatasetSettings(url=(folder / "em").as_uri()),
    }
    with client_of(Settings(limits=LIMITS, datasets=datasets)) as opened:
        yield opened


class Wire:
    """A raw connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._stream = connection.makefile("rb")

    def say(self, head: str, body: bytes = b"") -> None:
        """Send a request, or its beginning."""
        lines = [line.strip() for line in head.strip().splitlines()]
        self.connection.sendall("\r\n".join([*lines, "Host: localhost", "", ""]).encode() + body)

    def hear(self) -> tuple[int, Mapping[str, str], bytes]:
        """Read a whole response."""
        status = int(self._stream.readline().split()[1])
        headers = dict(self._headers())
        return status, headers, self._stream.read(int(headers.get("content-length", "0")))

    def hears_the_end(self) -> bool:
        """Return whether the other side has closed the connection."""
        return self._stream.read(1) == b""

    def _headers(self) -> Iterator[tuple[str, str]]:
        while (line := self._stream.readline().strip()) != b"":
            name, _, value = line.decode().partition(": ")
            yield name, value


@contextmanager
def wire(client: httpx.Client) -> Generator[Wire]:
    """Connect to the service."""
    with connect(str(client.base_url)) as connection:
        yield Wire(connection)


def get(client: httpx.Client, path: str) -> bytes | None:
    """Return the body of *path*, or `None` for 404."""
    answer = client.get(path)
    return None if answer.status_code == httpx.codes.NOT_FOUND else answer.content
