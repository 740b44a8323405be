"""The least HTTP client that measures and checks: connections are opened beforehand."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """One keep-alive connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(
        self, path: str, headers: dict[str, str], method: str = "GET", body: bytes = b""
    ) -> None:
        """Hand a request to the socket; do not wait."""
        headers = {"Host": "127.0.0.1"} | headers
        if body:
            headers["Content-Length"] = str(len(body))
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""])
        self._writer.write(head.encode() + body)

    async def receive(self) -> Answer:
        """Wait for the whole answer."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.rstrip().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        length = int(headers.get("content-length", "0"))
        body = await self._reader.readexactly(length) if length else b""
        return Answer(int(status.split()[1]), headers, body)

    async def close(self) -> None:
        """Close, whatever state the connection is in."""
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def connected(port: int, count: int) -> AsyncGenerator[list[Connection]]:
    """Open *count* connections."""
    connections = [
        Connection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)
    ]
    try:
        yield connections
    finally:
        for connection in connections:
            await connection.close()


async def at_once(
    connections: Sequence[Connection],
    paths: Sequence[str],
    headers: Sequence[dict[str, str]] | None = None,
) -> list[Answer]:
    """Send all *paths*, one on each connection, before any answer is read."""
    together = list(zip(connections, paths, headers or [{}] * len(paths), strict=False))
    for connection, path, header in together:
        connection.send(path, header)
    return [await connection.receive() for connection, _, _ in together]


async def in_batches(
    connections: Sequence[Connection],
    paths: Sequence[str],
    headers: Sequence[dict[str, str]] | None = None,
) -> AsyncGenerator[list[Answer]]:
    """Get all *paths*, as many at once as there are connections."""
    step = len(connections)
    for start in range(0, len(paths), step):
        part = slice(start, start + step)
        yield await at_once(connections, paths[part], headers[part] if headers else None)
