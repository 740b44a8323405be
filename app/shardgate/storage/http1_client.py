"""HTTP/1.1 client with a pool of kept connections for each server (RFC 9112).

No cookies, proxies or compression: reads and small writes of objects do not need them. A GET of
64 KiB costs 21 µs of processor time, 17 of them the event loop's and the kernel's; aiohttp's, 90.
"""

import asyncio
import os
import re
import ssl
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Self, cast
from urllib.parse import quote, urljoin, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_BUFFERED_NBYTES: Final = 512 * 1024
_HEAD_NBYTES: Final = 64 * 1024
_SWITCHING_PROTOCOLS: Final = 101
_FIRST_FINAL_STATUS: Final = 200


class ExchangeError(Exception):
    """A request without a valid response; no text repeats a URL, which may hold a signature."""


class ForbiddenAddressError(ExchangeError):
    """The request would lead to an address or a path that may not be read."""


class BadUrlError(ExchangeError):
    """The URL is malformed or not of HTTP."""


class BadAnswerError(ExchangeError):
    """The response is not HTTP/1.1, or larger than the limits."""


class NoAnswerError(ExchangeError):
    """The connection closed before the head of a response."""


class CutOffError(ExchangeError):
    """The connection closed within the body."""


class HttpResponse:
    """Status, headers and body of one response, whose parser calls the ``on_…`` methods."""

    def __init__(self, connection: "Connection", *, is_bodiless: bool) -> None:
        """Start to parse; with *is_bodiless* (HEAD) no body follows, whatever the headers say."""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """Lower-case names; of a repeated header, the last value, but all content codings."""
        self.length: int | None = None
        """``Content-Length``, also of a response to HEAD."""
        self.has_head = False
        self.is_complete = False
        self.is_reusable = False
        """True if another response may follow on the connection."""
        self._connection = connection
        self.parser = HttpResponseParser(self)
        """Refers back: `Connection.end` deletes it, so that no garbage is left to the collector."""
        self._pieces: list[bytes] = []
        self._nbytes = 0
        """Bytes of the body that have arrived and have not been read."""
        self._received_nbytes = 0
        self._is_bodiless = is_bodiless
        self._is_interim = False
        self._is_until_close = False
        self._wanted = 0
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_begun(self) -> bool:
        return self._received_nbytes > 0

    async def arrival(self, wanted: int) -> None:
        """Wait for the head and *wanted* bytes of the body, or until no more will come.

        A failure before the head is raised here, a later one where the body is read.
        """
        self._wanted = wanted
        self._waiter = waiter = self._connection.loop.create_future()
        try:
            if self.has_head or self._failure is not None:
                self._wake()
            if self._connection.is_paused and not waiter.done():
                self._connection.resume()
            await waiter
        finally:
            self._waiter = None
        if self._failure is not None and not self.has_head:
            raise self._failure

    async def read(self) -> bytes:
        """Read the rest of the body. Raises: `CutOffError`, `BadAnswerError`, `TimeoutError`."""
        if not self.is_complete:
            await self.arrival(sys.maxsize)
            if self._failure is not None:
                raise self._failure
        return self._take()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises: `CutOffError`, `BadAnswerError`, `TimeoutError`."""
        while True:
            if not self._nbytes:
                await self.arrival(1)
            # Small pieces are handed on together: a server may send a body byte by byte.
            if self._nbytes and len(self._pieces[0]) < 64 * 1024:
                yield self._take()
            elif self._nbytes:
                piece = self._pieces.pop(0)
                self._nbytes -= len(piece)
                yield piece
            elif self._failure is not None:
                raise self._failure
            else:
                return

    def release(self) -> None:
        """Drop the rest of the body: the connection closes unless the response is complete."""
        if not self.is_complete:
            self._connection.end(self)

    def feed(self, data: bytes | memoryview) -> None:
        """Parse *data*. Raises: `BadAnswerError`."""
        self._received_nbytes += len(data)
        try:
            self.parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.is_reusable = False
            if not self.is_complete:
                reason = error.__context__ or error  # raised by one of our callbacks
                raise BadAnswerError(f"malformed HTTP/1.1: {reason}") from error
        if self._received_nbytes > _HEAD_NBYTES and not self.has_head:
            raise BadAnswerError(f"the head is longer than {_HEAD_NBYTES} bytes")
        self._wake()
        if self._nbytes > self._wanted + _BUFFERED_NBYTES and not self.is_complete:
            self._connection.pause()

    def close(self, error: Exception | None) -> None:
        """End the response with the connection, which closed because of *error* or regularly."""
        if self._is_until_close and error is None:
            self.is_complete = True
            self._wake()
        elif self.has_head:
            self.fail(CutOffError("the connection closed within the body"))
        else:
            self.fail(error or NoAnswerError("the connection closed without a response"))

    def fail(self, error: Exception) -> None:
        """Raise *error* to the reader, now or when it reads."""
        if not self.is_complete and self._failure is None:
            self._failure = error
            self._wake()

    def on_message_begin(self) -> None:
        """Refuse a second response."""
        if self.is_complete:
            raise BadAnswerError("a second response follows")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else it is a trailer
            name = name.lower()
            value = value.rstrip()
            if name == b"content-encoding" and name in self.headers:
                value = self.headers[name] + b", " + value
            self.headers[name] = value

    def on_headers_complete(self) -> None:
        """Find out where the body ends (RFC 9112 §6.3)."""
        self.status = self.parser.get_status_code()
        self._is_interim = self.status < _FIRST_FINAL_STATUS
        if self._is_interim:
            if self.status == _SWITCHING_PROTOCOLS:
                raise BadAnswerError("unexpected switch of protocols")
            self.headers.clear()
            return
        coding = self.headers.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            raise BadAnswerError("unknown transfer coding")
        self.has_head = True
        self.is_reusable = self.parser.should_keep_alive()
        length = self.headers.get(b"content-length")
        if length is not None:
            self.length = int(length)  # the parser has refused what is no number
        if self._is_bodiless:
            self.is_complete = True
        else:
            self._is_until_close = coding is None and length is None

    def on_body(self, data: bytes) -> None:
        if self.is_complete or not self.has_head:
            raise BadAnswerError("unexpected body")
        self._pieces.append(data)
        self._nbytes += len(data)

    def on_message_complete(self) -> None:
        self.is_complete = not self._is_interim

    def _take(self) -> bytes:
        pieces = self._pieces
        self._pieces = []
        self._nbytes = 0
        return b"".join(pieces)

    def _wake(self) -> None:
        """Wake the reader if what it waits for has arrived, or never will."""
        has_wanted = self.has_head and self._nbytes >= self._wanted
        is_over = self.is_complete or self._failure is not None
        if (has_wanted or is_over) and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """Carries one exchange at a time, and fails it when the server is silent for *silence_s*.

    It receives into *buffer*, which all connections of a client share: the event loop fills it and
    calls `buffer_updated` before another one can. As a plain `asyncio.Protocol` it would get each
    TLS record in a new buffer of 256 KiB from uvloop.
    """

    def __init__(self, silence_s: float, buffer: memoryview) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = self.loop.create_future()
        """Done when the connection is closed."""
        self._silence_s = silence_s
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._response: HttpResponse | None = None
        self._on_end: Callable[[Connection], None] | None = None
        self.heard_at = 0.0
        """Time of the loop when bytes were sent or received last."""
        self.is_open = False
        self.is_paused = False
        self._timer: asyncio.TimerHandle | None = None

    def send(
        self, message: bytes, response: HttpResponse, on_end: Callable[["Connection"], None]
    ) -> None:
        """Send a request, feed *response*, and call *on_end* when the exchange has ended."""
        self._response = response
        self._on_end = on_end
        self.heard_at = self.loop.time()
        if self._transport is None or self._transport.is_closing():
            self._fail(NoAnswerError("the connection closed at once"))
            return
        self._transport.write(message)
        if self._timer is None:
            self._timer = self.loop.call_later(self._silence_s, self._check_silence)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        if (response := self._response) is not None:
            response.close(ConnectionAbortedError("the client closed the connection"))
            self.end(response)

    def pause(self) -> None:
        if self._transport is not None and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self.is_paused:
            self.is_paused = False
            self.heard_at = self.loop.time()
            self._transport.resume_reading()

    def end(self, response: HttpResponse) -> None:
        """Detach *response*, and close the connection unless another exchange may follow."""
        if response is not self._response:
            return
        self._response = None
        del response.parser  # they refer to one another
        if not (response.is_complete and response.is_reusable):
            self.close()
        if self._on_end is not None:
            self._on_end(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def get_buffer(self, _: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Feed the response; bytes that no request asked for close the connection."""
        self.heard_at = self.loop.time()
        if (response := self._response) is None:
            self.close()
            return
        try:
            response.feed(self._buffer[:nbytes])
        except BadAnswerError as error:
            self._fail(error)
        if response.is_complete:
            self.end(response)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
        if (response := self._response) is not None:
            response.close(error)
            self.end(response)

    def _check_silence(self) -> None:
        self._timer = None
        if self._response is None:
            return
        left = self._silence_s
        # While it is paused, our reader is slow and not the server.
        if not self.is_paused:
            left -= self.loop.time() - self.heard_at
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_silence)
        else:
            self._fail(TimeoutError(f"the server was silent for {self._silence_s:g} s"))

    def _fail(self, error: Exception) -> None:
        if (response := self._response) is not None:
            response.fail(error)
            self.end(response)


_PORTS: Final = {"http": 80, "https": 443}
_PRINTABLE: Final = re.compile(r"[!-~]+")
_KEPT_S: Final = 15.0  # firewalls drop idle connections silently, and servers close them


class Origin(NamedTuple):
    """Scheme, host and port of a server (RFC 9110 §4.3.1)."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


type Resolve = Callable[[Origin], Awaitable[Sequence[str]]]
"""Returns the addresses of a server, or raises an `ExchangeError` or `OSError`."""


class RequestTarget:
    """A URL prepared for requests; its representation hides it, since it may hold a signature."""

    __slots__ = ("_url", "head", "origin", "path")

    def __init__(self, url: str) -> None:
        if _PRINTABLE.fullmatch(url) is None:
            raise BadUrlError("malformed URL")
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
            port = parts.port
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
            # Escapes and separators stay; some servers send other bytes as they are.
            url = urljoin(self._url, quote(location, "!#$%&'()*+,/:;=?@[]~", "latin-1"))
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
            if connection.is_open and connection.loop.time() - connection.heard_at < _KEPT_S:
                return connection
            connection.close()
        return None

    def end(self, slots: asyncio.Semaphore, connection: Connection) -> None:
        """Take back *connection* after an exchange that had one of *slots*."""
        slots.release()
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
        # Less than `tune_memory` lets malloc map for each piece anew: 14 ms of the 20 of 8 MiB.
        self._buffer = memoryview(bytearray(240 * 1024))
        self._is_closed = False
        self._open: set[Connection] = set()
        self._pools = defaultdict[Origin, _Pool](lambda: _Pool(connections))

    async def send(
        self,
        method: str,
        target: RequestTarget,
        headers: bytes = b"",
        body: bytes = b"",
        *,
        is_eager: bool = False,
    ) -> HttpResponse:
        """Send a request, and wait for the head of the response.

        *method* must be safe to repeat, since a kept connection may have been closed. *headers*
        are complete lines, with the length of *body*. With *is_eager*, for responses that are read
        at once, their body or its first 512 KiB is waited for too, which saves a turn of the event
        loop. The response must be read to its end, or released.

        Raises: `ExchangeError`, `TimeoutError`, `OSError`.
        """
        message = b"".join((method.encode(), b" ", target.head, headers, b"\r\n", body))
        is_bodiless = method == "HEAD"
        pool = self._pools[target.origin]
        slots = pool.slots if is_eager or is_bodiless else pool.slow_slots
        end = partial(pool.end, slots)
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
            response = HttpResponse(connection, is_bodiless=is_bodiless)
            connection.send(message, response, end)
            try:
                await response.arrival(_BUFFERED_NBYTES if is_eager else 0)
            except (NoAnswerError, ConnectionError):
                # The server may have closed a kept connection before it got the request.
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
                    lambda: Connection(self._silence_s, self._buffer),
                    host,
                    origin.port,
                    ssl=tls,
                    server_hostname=None if tls is None else origin.host,
                )
            except OSError as error:
                reason = error.strerror or type(error).__name__
                error.strerror = f"cannot connect to {origin}: {reason}"
                failure = error
            else:
                return connection
        raise failure

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            # OpenSSL trusts what this variable names, and ignores a file that it cannot read.
            named = None if self._ca_file else os.environ.get("SSL_CERT_FILE")
            try:
                context = ssl.create_default_context(cafile=self._ca_file)
                if named:
                    context.load_verify_locations(named)
            except OSError as error:
                place = f"SSL_CERT_FILE, {named}," if named else self._ca_file
                reason = f"the certificate authorities in {place} cannot be read"
                raise ssl.SSLError(error.errno, f"{reason}: {error.strerror}") from error
            self._context = context
        return self._context
