"""Raw bytes sent and received on connections to the service."""

import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

_STATUS = re.compile(rb"^HTTP/1\.1 (\d{3})", re.MULTILINE)
LONGEST_S = 60
"""Far more than an answer takes on a busy machine."""


def connect(url: str) -> socket.socket:
    """Open a connection to the service at *url*."""
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port or 0), LONGEST_S)


def heard(connection: socket.socket) -> bytes:
    """Read until the peer closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


def exchange(url: str, *pieces: bytes) -> bytes:
    """Send *pieces* and read until the peer closes the connection."""
    return flood(url, pieces)[1]


def statuses(received: bytes) -> list[int]:
    """Return the statuses of all responses in *received*."""
    return [int(status) for status in _STATUS.findall(received)]


def flood(url: str, pieces: Iterable[bytes]) -> tuple[int, bytes]:
    """Send *pieces* until the peer closes; return the bytes' count and the response."""
    taken, received = 0, b""
    with connect(url) as connection:
        with suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
                taken += len(piece)
        with suppress(ConnectionError):
            received = heard(connection)
    return taken, received
