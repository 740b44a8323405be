"""Requests over kept connections to many servers."""

import asyncio
import ssl
from collections import defaultdict
from typing import Final

from app.storage.http1.connection import Connection
from app.storage.http1.errors import NoAnswerError
from app.storage.http1.response import Response
from app.storage.http1.target import Origin, Target

_KEPT_S: Final = 15.0
"""Firewalls forget idle connections without a word, and servers close them."""


class Client:
    """Keeps up to *connections* exchanges under way, first come first served.

    A server may be silent for *silence_s*, also while it connects. *ca_file* replaces the
    system's certificates.
    """

    def __init__(self, *, connections: int, silence_s: float, ca_file: str | None = None) -> None:
        self._slots = asyncio.Semaphore(connections)
        self._silence_s = silence_s
        self._ca_file = ca_file
        self._context: ssl.SSLContext | None = None
        self._open: set[Connection] = set()
        self._idle: defaultdict[Origin, list[Connection]] = defaultdict(list)

    async def send(
        self, method: str, target: Target, headers: bytes = b"", *, is_eager: bool = False
    ) -> Response:
        """Send a request without a body, and wait for the head of the answer.

        *method* is safe to repeat, for a kept connection may turn out to be closed. *headers*
        are lines, each with its end. With *is_eager* the body, or its first 512 KiB, is waited
        for too, which saves a turn of the event loop. The answer must be read to its end, or
        released.

        Raises: `ExchangeError`, `TimeoutError`, `OSError`.
        """
        message = b"".join((method.encode(), b" ", target.head, headers, b"\r\n"))
        while True:
            await self._slots.acquire()
            connection = self._kept(target.origin)
            is_kept = connection is not None
            if connection is None:
                connection = await self._connect(target.origin)
            response = Response(connection, is_bodiless=method == "HEAD", is_eager=is_eager)
            connection.send(message, response)
            try:
                await response.begin()
            except (NoAnswerError, ConnectionError):
                if not is_kept or response.has_begun:
                    raise
            except BaseException:
                response.release()
                raise
            else:
                return response

    async def aclose(self) -> None:
        """Close all connections; what is under way fails."""
        closing = list(self._open)
        for connection in closing:
            connection.close()
        await asyncio.gather(*(connection.closed for connection in closing))

    def _kept(self, origin: Origin) -> Connection | None:
        """Take the connection that was idle for the shortest time, and close old ones."""
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_s < _KEPT_S:
                return connection
            connection.close()
        return None

    async def _connect(self, origin: Origin) -> Connection:
        def make() -> Connection:
            return Connection(self._silence_s, on_end)

        def on_end(connection: Connection) -> None:
            self._slots.release()
            if connection.is_open:
                self._idle[origin].append(connection)

        try:
            async with asyncio.timeout(self._silence_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    make, origin.host, origin.port, ssl=self._tls(origin)
                )
        except BaseException:
            self._slots.release()
            raise
        self._open.add(connection)
        connection.closed.add_done_callback(lambda _: self._open.discard(connection))
        return connection

    def _tls(self, origin: Origin) -> ssl.SSLContext | None:
        if origin.scheme == "http":
            return None
        if self._context is None:
            self._context = ssl.create_default_context(cafile=self._ca_file)
        return self._context
