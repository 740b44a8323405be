"""HTTP/1.1 client with a pool of kept connections for each server."""

import asyncio
import re
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Self
from urllib.parse import quote, urljoin, urlsplit

from app.storage.http1_connection import BadUrlError, Connection, NoAnswerError, Response

_PORTS: Final = {"http": 80, "https": 443}
_PRINTABLE: Final = re.compile(r"[!-~]+")
_RESERVED: Final = "!#$%&'()*+,/:;=?@[]~"
_KEPT_S: Final = 15.0
"""Firewalls drop idle connections silently, and servers close them."""


class Origin(NamedTuple):
    """Scheme, host and port of a server (RFC 9110 §4.3.1)."""

    scheme: str
    host: str
    port: int


type Resolve = Callable[[Origin], Awaitable[Sequence[str]]]
"""Returns the addresses of a server, or raises an `ExchangeError` or `OSError`."""


class Target:
    """A URL prepared for requests; its representation hides it, since it may hold a signature."""

    __slots__ = ("_url", "head", "origin", "path")

    def __init__(self, url: str) -> None:
        if _PRINTABLE.fullmatch(url) is None:
            raise BadUrlError("malformed URL")
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname or ""
            host.encode("idna")  # as connecting will
        except ValueError:
            raise BadUrlError("malformed URL") from None
        if parts.scheme not in _PORTS or not host or port == 0 or "@" in parts.netloc:
            raise BadUrlError("malformed URL")
        self._url = url
        self.origin: Final = Origin(parts.scheme, host, port or _PORTS[parts.scheme])
        self.path: Final = parts.path or "/"
        request_target = f"{self.path}{'?' if parts.query else ''}{parts.query}"
        self.head: Final = (
            f"{request_target} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Accept-Encoding: identity\r\nUser-Agent: shardgate\r\n"
        ).encode()
        """The request after its method."""

    @property
    def without_query(self) -> str:
        """The URL without the parts that may hold secrets."""
        return re.split("[?#]", self._url, maxsplit=1)[0]

    def redirected(self, location: str) -> Self:
        """Resolve ``Location``, decoded as Latin-1; raise `BadUrlError`, also for leaving TLS."""
        try:
            url = urljoin(self._url, quote(location, _RESERVED, "latin-1"))
        except ValueError:
            raise BadUrlError("the redirect has a malformed URL") from None
        found = type(self)(url)
        if self.origin.scheme == "https" != found.origin.scheme:
            raise BadUrlError("the redirect leads away from TLS")
        return found


class _Pool:
    def __init__(self, connections: int) -> None:
        self.slots = asyncio.Semaphore(connections)
        self.slow_slots = asyncio.Semaphore(connections)
        self._idle: list[Connection] = []

    def take(self) -> Connection | None:
        """Return the most recently used connection, and close those that are too old."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_s < _KEPT_S:
                return connection
            connection.close()
        return None

    def keep(self, connection: Connection) -> None:
        if connection.is_open:
            self._idle.append(connection)


class HttpClient:
    """Runs up to *connections* exchanges with each server, first come first served.

    Streamed bodies have as many slots of their own, so that slow readers hold up only one another.
    *silence_s* limits connecting and each wait for bytes. *ca_file* replaces the system's
    certificates. With *resolve*, only the addresses that it returns are connected to.
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
        """Send a request without a body, and wait for the head of the response.

        *method* must be safe to repeat, since a kept connection may have been closed. *headers*
        are complete lines. With *is_eager*, for bodies that are read at once, the body or its first
        512 KiB is waited for too, which saves a turn of the event loop. The response must be read
        to its end, or released.

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
                if self._is_closed:  # while connecting
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
            connection = await self._connect_to_any(origin, hosts)
        self._open.add(connection)
        connection.closed.add_done_callback(lambda _: self._open.discard(connection))
        return connection

    async def _connect_to_any(self, origin: Origin, hosts: Sequence[str]) -> Connection:
        tls = self._tls() if origin.scheme == "https" else None
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

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = ssl.create_default_context(cafile=self._ca_file)
        return self._context
