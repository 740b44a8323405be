"""Concurrent requests over connections that are opened beforehand."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from itertools import batched
from typing import NamedTuple


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client(NamedTuple):
    """Keep-alive connections to one server."""

    connections: Sequence[HTTPConnection]

    def ask(self, path: str, method: str = "GET", body: str | None = None) -> Answer:
        """Send one request, with JSON if it has a body."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        self.connections[0].request(method, path, body, headers)
        return _receive(self.connections[0])

    def ask_all(
        self, paths: Sequence[str], headers: Sequence[dict[str, str]] | None = None
    ) -> list[Answer]:
        """Get *paths*: one on each connection is sent before any answer is read."""
        answers = []
        asked = zip(paths, headers or [{}] * len(paths), strict=True)
        for batch in batched(asked, len(self.connections)):
            used = list(zip(self.connections, batch, strict=False))
            for connection, (path, header) in used:
                connection.request("GET", path, headers=header)
            answers += [_receive(connection) for connection, _ in used]
        return answers

    def read_all(self, bodies: Mapping[str, bytes]) -> None:
        """Get the paths of *bodies* concurrently, and compare."""
        for (path, body), answer in zip(bodies.items(), self.ask_all(list(bodies)), strict=True):
            if answer.status != 200 or answer.body != body:
                raise RuntimeError(f"{path}: {answer.status}: {answer.body[:300]!r}")


def _receive(connection: HTTPConnection) -> Answer:
    answer = connection.getresponse()
    headers = {name.lower(): value for name, value in answer.getheaders()}
    return Answer(answer.status, headers, answer.read())


@contextmanager
def connected(port: int, count: int = 1) -> Generator[Client]:
    """Open *count* connections."""
    with ExitStack() as stack:
        found = [HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(count)]
        for each in found:
            stack.enter_context(closing(each)).connect()
        yield Client(found)
