"""Requests over kept connections to many servers."""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from app.storage.http1.connection import Connection
from app.storage.http1.errors import NoAnswerError
from app.storage.http1.response import Response
from app.storage.http1.target import Origin, Target

type Resolve = Callable[[Origin], Awaitable[Sequence[str]]]
"""Gives the addresses of a server, or raises an `ExchangeError` or `OSError`."""

_KEPT_S: Final = 15.0
"""Firewalls forget idle connections without a word, and servers close them."""


class _Pool:
    """Idle connections to one server, and the right to have exchanges under way there."""

    def __init__(self, connections: int) -> None:
        self.slots = asyncio.Semaphore(connections)
        self.slow_slots = asyncio.Semaphore(connections)
        self._idle: list[Connection] = []

    def take(self) -> Connection | None:
        """Take the connection that was idle for the shortest time, and close old ones."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_s < _KEPT_S:
                return connection
            connection.close()
        return None

    def keep(self, connection: Connection) -> None:
        """Keep *connection* for the next exchange if it is good for one."""
        if connection.is_open:
            self._idle.append(connection)


class Client:
    """Has up to *connections* exchanges under way with each server, first come first served.

    Bodies that are read at the pace of who reads have as many of their own, so that slow readers
    hold up one another only. A server may be silent for *silence_s*, also while it connects.
    *ca_file* replaces the system's certificates. With *resolve* only the addresses it gives are
    connected to, as they are, so that what it found out about them holds.
    """

    def __init__(
        self,
        *,
        connections: int,
        silence_s: float,
        ca_file: str | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self._silence_s = silence_s
        self._ca_file = ca_file
        self._resolve = resolve
        self._context: ssl.SSLContext | None = None
        self._is_closed = False
        self._open: set[Connection] = set()
        self._pools = defaultdict[Origin, _Pool](lambda: _Pool(connections))

    async def send(
        self, method: str, target: Target, headers: bytes = b"", *, is_eager: bool = False
    ) -> Response:
        """Send a request without a body, and wait for the head of the answer.

        *method* is safe to repeat, for a kept connection may turn out to be closed. *headers*
        are lines, each with its end. With *is_eager*, for bodies that will be read at once, the
        body or its first 512 KiB is waited for too, which saves a turn of the event loop. The
        answer must be read to its end, or released.

        Raises: `ExchangeError`, `TimeoutError`, `OSError`.
        """
        message = b"".join((method.encode(), b" ", target.head, headers, b"\r\n"))
        is_bodiless = method == "HEAD"
        pool = self._pools[target.origin]
        slots = pool.slots if is_eager or is_bodiless else pool.slow_slots

        def end(connection: Connection) -> None:
            slots.release()
            pool.keep(connection)

        while True:
            await slots.acquire()
            connection = pool.take()
            is_kept = connection is not None
            if connection is None:
                try:
                    connection = await self._connect(target.origin)
                except BaseException:
                    slots.release()
                    raise
                if self._is_closed:  # in the meantime
                    connection.close()
            response = Response(connection, is_bodiless=is_bodiless, is_eager=is_eager)
            connection.send(message, response, end)
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
        """Close all connections; what is under way, or comes later, fails."""
        self._is_closed = True
        closing = list(self._open)
        for connection in closing:
            connection.close()
        await asyncio.gather(*(connection.closed for connection in closing))

    async def _connect(self, origin: Origin) -> Connection:
        if self._is_closed:
            raise NoAnswerError("the client is closed")
        async with asyncio.timeout(self._silence_s):
            hosts = [origin.host] if self._resolve is None else await self._resolve(origin)
            connection = await self._reach(origin, hosts)
        self._open.add(connection)
        connection.closed.add_done_callback(lambda _: self._open.discard(connection))
        return connection

    async def _reach(self, origin: Origin, hosts: Sequence[str]) -> Connection:
        """Connect to the first of *hosts* that answers."""
        tls = self._tls(origin)
        failure: Exception = NoAnswerError("the host has no address")
        for host in hosts:
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._silence_s),
                    host,
                    origin.port,
                    ssl=tls,
                    server_hostname=None if tls is None else origin.host,
                )
            except OSError as error:
                failure = error
            else:
                return connection
        raise failure

    def _tls(self, origin: Origin) -> ssl.SSLContext | None:
        if origin.scheme == "http":
            return None
        if self._context is None:
            self._context = ssl.create_default_context(cafile=self._ca_file)
        return self._context
