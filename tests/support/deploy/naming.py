"""A DNS server like that of Kubernetes, with SRV records of a headless Service's pods."""

import socket
import socketserver
import struct
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

_QUESTION: Final = b"\xc0\x0c"
"""Pointer to the name in the question."""


class Kind(IntEnum):
    """Types of DNS records."""

    A = 1
    SRV = 33


class Names:
    """DNS records of pods by name; the pods can be replaced, and all have one address."""

    def __init__(self, service: str, pods: Mapping[str, int]) -> None:
        self.pods = pods
        self.address = "127.0.0.1"
        self._service = service

    def answer(self, query: bytes) -> bytes:
        """Return the response to a query with one question."""
        end = query.index(0, 12) + 5
        name = _decode(query[12 : end - 4]).removesuffix(f".{self._service}")
        (kind,) = struct.unpack(">H", query[end - 4 : end - 2])
        match kind, name:
            case Kind.SRV, "_http._tcp":
                found = [
                    struct.pack(">HHH", 0, 100, port) + _encode(f"{pod}.{self._service}")
                    for pod, port in self.pods.items()
                ]
            case Kind.A, pod if pod in self.pods:
                found = [socket.inet_aton(self.address)]
            case _:
                found = []
        head = struct.pack(">2sHHHHH", query[:2], 0x8580, 1, len(found), 0, 0)
        records = [_QUESTION + struct.pack(">HHIH", kind, 1, 1, len(data)) + data for data in found]
        return head + query[12:end] + b"".join(records)


@contextmanager
def naming(names: Names) -> Generator[str]:
    """Serve *names* by UDP; yield the address of the server."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            query, channel = self.request
            channel.sendto(names.answer(query), self.client_address)

    with socketserver.ThreadingUDPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _decode(labels: bytes) -> str:
    words = []
    while labels and labels[0]:
        words.append(labels[1 : 1 + labels[0]].decode())
        labels = labels[1 + labels[0] :]
    return ".".join(words)


def _encode(name: str) -> bytes:
    return b"".join(bytes([len(word)]) + word.encode() for word in name.split(".")) + b"\0"
