"""The page of Neuroglancer that comes with its Python package, from an origin of its own."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

_AT: Final = "/v/test/"
"""The client looks for ``/v/TOKEN`` in its own address."""


@contextmanager
def paging() -> Generator[str]:
    """Serve the client and give the URL of its page."""
    with as_file(files("neuroglancer") / "static/client") as folder, _Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{_AT}"
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.closing = threading.Event()


class _Handler(SimpleHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with a file of the client, or with a stream of events in which nothing happens."""
        if self.path.startswith("/events/"):
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.server.closing.wait()
        else:
            self.path = self.path.removeprefix(_AT.rstrip("/"))
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called
        """Say nothing."""
