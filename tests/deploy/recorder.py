"""A replica that notes what reaches it, byte for byte, and does not answer when it is told so."""

import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Final

_NAME: Final = b"HTTP/1.1 204 No Content\r\nX-Shard: %s\r\n\r\n"
_BODY: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@dataclass(frozen=True)
class Received:
    """One request."""

    method: str
    target: str
    headers: dict[str, str]
    body_nbytes: int


@dataclass
class Recorder:
    """What arrived, and what is done about it."""

    url: str
    received: list[Received] = field(default_factory=list)
    asked: list[Received] = field(default_factory=list)
    """For names of shards."""
    name: bytes | None = b"name"
    """Of the shard that all is in; `None` breaks the connection off."""
    answers: bool = True
    """Whether requests are answered; else the connection breaks off."""

    def answer(self, request: Received) -> bytes | None:
        """Note *request*."""
        if request.target.startswith("/_shard/"):
            self.asked.append(request)
            return None if self.name is None else _NAME % self.name
        self.received.append(request)
        return _BODY if self.answers else None


@contextmanager
def recording() -> Generator[Recorder]:
    """Listen."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            while (request := self._read()) is not None:
                if (answer := recorder.answer(request)) is None:
                    break
                self.wfile.write(answer)

        def _read(self) -> Received | None:
            if not (line := self.rfile.readline()):
                return None
            method, target, _ = line.decode("latin-1").split(" ")
            headers = {}
            while name := self.rfile.readline().strip():
                key, _, value = name.decode("latin-1").partition(":")
                headers[key.lower()] = value.strip()
            length = int(headers.get("content-length", "0"))
            return Received(method, target, headers, len(self.rfile.read(length)))

    class Server(ThreadingTCPServer):
        daemon_threads = True
        address_family = socket.AF_INET

        def handle_error(self, *_: object) -> None:
            """Let clients go."""

    with Server(("127.0.0.1", 0), Handler) as server:
        recorder = Recorder(f"http://127.0.0.1:{server.server_address[1]}")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join()
