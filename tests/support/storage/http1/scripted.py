"""A small real server that follows a script for each connection."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Final, Protocol

from shardgate.storage.http1_client import HttpClient, RequestTarget

_AT_ONCE: Final = struct.pack("ii", 1, 0)
"""Linger time of zero, with which closing is a reset."""

_BLOCK_BYTES: Final = 256 * 1024
HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
"""The head of a response of five bytes."""


class Do(StrEnum):
    """Steps of a script besides sending and waiting."""

    READ = "wait for a request"
    ECHO = "answer with the path that was asked for last"
    CLOSE = "close"
    RESET = "reset"


type Step = bytes | float | asyncio.Event | Do
"""Bytes are sent, seconds and events waited for; after its script a connection stays open."""


class ScriptedServer:
    """A server that records requests in their order of arrival, and connections."""

    def __init__(self, scripts: Sequence[list[Step]]) -> None:
        self._scripts = scripts
        self._following: set[asyncio.Task[None]] = set()
        self.port = 0
        self._scheme = "http"
        self.requests: list[bytes] = []
        self.asked_on: list[int] = []
        """Number of the connection, from 0, of each request."""
        self.connections = 0
        self.sent_bytes = 0
        """Bytes of the current step that were sent."""

    def target(
        self, path: str = "/", *, scheme: str = "", host: str = "127.0.0.1"
    ) -> RequestTarget:
        """Return the URL of *path*, by default with the scheme that is served."""
        return RequestTarget(f"{scheme or self._scheme}://{host}:{self.port}{path}")

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._following)

    @property
    def paths(self) -> list[bytes]:
        """The requested paths."""
        return [request.split(b" ")[1] for request in self.requests]

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None) -> AsyncGenerator["ScriptedServer"]:
        """Serve until the context ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        listener = server.sockets[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BLOCK_BYTES)
        self.port = listener.getsockname()[1]
        self._scheme = "http" if tls is None else "https"
        try:
            yield self
        finally:
            server.close()
            for task in self._following:
                task.cancel()
            await asyncio.gather(*self._following, return_exceptions=True)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, task = self.connections, asyncio.current_task()
        assert task is not None
        self.connections += 1
        self._following.add(task)
        try:
            with suppress(ConnectionError, EOFError, asyncio.CancelledError):
                await self._follow(number, reader, writer)
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
            self._following.discard(task)

    async def _follow(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for step in self._scripts[min(number, len(self._scripts) - 1)]:
            match step:
                case Do.READ:
                    self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                    self.asked_on.append(number)
                case Do.ECHO:
                    writer.write(answer(self.paths[-1]))
                case Do.CLOSE:
                    writer.close()
                    await writer.wait_closed()
                    return
                case Do.RESET:
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                    return
                case bytes():
                    for start in range(0, len(step), _BLOCK_BYTES):
                        writer.write(step[start : start + _BLOCK_BYTES])
                        await writer.drain()
                        self.sent_bytes = start
                case asyncio.Event():
                    await step.wait()
                case float():
                    await asyncio.sleep(step)
        await reader.read()


async def until(condition: Callable[[], object]) -> None:
    """Return when *condition* holds, which must be soon."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nobody tells when it does
            await asyncio.sleep(0.001)


def answer(body: bytes = b"hello", headers: bytes = b"") -> bytes:
    """Return a response of *body* with its length and *headers*, each with its line end."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), headers, body)


async def fetch(client: HttpClient, target: RequestTarget, *, is_eager: bool = False) -> bytes:
    """Read a whole response, and release it."""
    response = await client.send("GET", target, is_eager=is_eager)
    try:
        return await response.read()
    finally:
        response.release()


class Serve(Protocol):
    """Starts servers that stop with the test."""

    async def __call__(
        self, *scripts: list[Step], tls: ssl.SSLContext | None = None
    ) -> ScriptedServer:
        """Let the n-th connection follow the n-th script, and all later ones the last."""
        ...
