"""Base classes of the servers and proxies with faults."""

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape


def listing(objects: Mapping[str, str], query: Mapping[str, list[str]]) -> bytes:
    """Return S3's document of a listing, in which *objects* have what is told of each key."""
    prefix, delimiter, after = (
        query.get(name, [""])[0] for name in ("prefix", "delimiter", "start-after")
    )
    contents, folders = "", dict[str, None]()
    for key in sorted(objects, key=str.encode):
        if not key.startswith(prefix) or key <= after:
            continue
        name, rolled, _ = key.removeprefix(prefix).partition(delimiter or "\0")
        if rolled:
            folders[f"{prefix}{name}{rolled}"] = None
        else:
            contents += f"<Contents><Key>{escape(key)}</Key>{objects[key]}</Contents>"
    for each in folders:
        contents += f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
    document = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
    return document.encode()


class Listener[T](ThreadingHTTPServer):
    """Listens on a free port for its *owner*, and leaves open connections to daemon threads."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, handler: type["Handler[T]"], owner: T) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def running(self) -> Generator[None]:
        """Answer requests until the context ends."""
        thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class Handler[T](BaseHTTPRequestHandler):
    """Answers requests of some methods alike, and ignores errors of connections."""

    methods: tuple[str, ...] = ("GET", "HEAD", "PUT", "POST", "DELETE")
    server: Listener[T]

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def answer(self) -> None:
        """Answer one request."""
        raise NotImplementedError

    def body(self) -> bytes:
        """Read the body of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def begin_upstream(
        self, upstream: str, hides: Callable[[str], bool] = lambda _header: False
    ) -> http.client.HTTPConnection:
        """Send the head of the request on, without hidden headers; for ``host`` its own."""
        connection = http.client.HTTPConnection(upstream, timeout=60)
        connection.putrequest(
            self.command, self.path, skip_host=not hides("host"), skip_accept_encoding=True
        )
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect") and not hides(name.lower()):
                connection.putheader(name, value)
        return connection

    def __getattr__(self, name: str) -> object:
        if name.startswith("do_") and name.removeprefix("do_") in self.methods:
            return self.answer
        raise AttributeError(name)

    def handle_expect_100(self) -> bool:
        """Ask for the body at once."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def handle_one_request(self) -> None:
        """Answer a request, or close the connection."""
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def finish(self) -> None:
        """Send what is left, if possible."""
        try:
            super().finish()
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base's name
        """Keep the output of tests clean."""

    def reset(self) -> None:
        """Close so that the other side gets ECONNRESET."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
