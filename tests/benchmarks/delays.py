"""A proxy that passes bytes to a server some time after they came, as a long way does."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import pairwise
from threading import Thread


class Proxy:
    """Passes what clients send after *delay_s*, answers at once, and notes the requests.

    A TCP connection is accepted at once; TLS and requests wait.
    """

    def __init__(self, upstream_port: int, delay_s: float) -> None:
        self._upstream_port = upstream_port
        self._delay_s = delay_s
        self.port = 0
        self.arrivals: list[float] = []
        """Times of the HTTP/1.1 requests, in seconds of the loop."""

    @property
    def waits(self) -> int:
        """Times that the client waited: requests that came together count once."""
        gaps = (after - before for before, after in pairwise(self.arrivals))
        return 1 + sum(gap > self._delay_s / 2 for gap in gaps)

    async def listen(self) -> asyncio.Server:
        """Begin to serve on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
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
    """Run a proxy in a thread of its own."""
    proxy = Proxy(upstream_port, delay_s)
    with asyncio.Runner() as runner:
        server = runner.run(proxy.listen())
        loop = runner.get_loop()
        thread = Thread(target=loop.run_forever)
        thread.start()
        try:
            yield proxy
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            server.close()
