"""A proxy that delays bytes to a server, like a long network path."""

import asyncio
import gc
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import pairwise
from threading import Event, Thread


class Proxy:
    """Passes on what clients send after *delay_s*, responses at once, and records requests.

    A TCP connection is accepted at once; TLS and requests are delayed.
    """

    def __init__(self, upstream_port: int, delay_s: float) -> None:
        self._upstream_port = upstream_port
        self._delay_s = delay_s
        self.port = 0
        self.arrivals: list[float] = []
        """Times of the HTTP/1.1 requests, in seconds of the loop."""

    @property
    def waits(self) -> int:
        """Number of times the client waited; concurrent requests count once."""
        gaps = (after - before for before, after in pairwise(self.arrivals))
        return 1 + sum(gap > self._delay_s / 2 for gap in gaps)

    async def run(self, is_ready: Event, is_over: asyncio.Event) -> None:
        """Serve on a free port."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            self.loop = asyncio.get_running_loop()
            is_ready.set()
            await is_over.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection."""
        upstream, to_server = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        answers = asyncio.create_task(_copy(upstream, writer))
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.arrivals += [loop.time()] * data.count(b" HTTP/1.1\r\n")
                loop.call_later(self._delay_s, to_server.write, data)
        answers.cancel()
        to_server.close()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 20):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def proxying(upstream_port: int, delay_s: float) -> Generator[Proxy]:
    """Run a proxy in a thread of its own, as clients of browsers run a loop in this one.

    Garbage is collected first, as that would delay the proxy by a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    proxy, is_ready, is_over = Proxy(upstream_port, delay_s), Event(), asyncio.Event()
    thread = Thread(target=lambda: asyncio.run(proxy.run(is_ready, is_over)))
    thread.start()
    is_ready.wait()
    try:
        yield proxy
    finally:
        proxy.loop.call_soon_threadsafe(is_over.set)
        thread.join()
