"""The service, configured as by the command, in a thread of the tests."""

import asyncio
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn

from shardgate.main import create_app
from shardgate.processes import configure
from shardgate.server.asgi import AsgiApp
from shardgate.settings import Settings
from shardgate.storage.contract import ObjectStore
from tests.support.processes import wait_until

_STOP_S: Final = 10
_TICK_S: Final = 0.1
_LEAVING_S: Final = 0.002
"""Time in which the server learns of connections that clients have closed."""


class _Server(uvicorn.Server):
    """A uvicorn server that stops at once, if no client is connected.

    Uvicorn itself waits for a tenth of a second, twice.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.sleep(_LEAVING_S)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        await self.lifespan.shutdown()

    def stop(self) -> None:
        """Stop, from another thread."""
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has stopped by itself
                self._loop.call_soon_threadsafe(self._told.set)


@contextmanager
def serving(
    settings: Settings,
    *,
    wrap: Callable[[ObjectStore], ObjectStore] | None = None,
    around: Callable[[AsgiApp], Any] = lambda app: app,
    certificate: Path | None = None,
) -> Generator[str]:
    """Run the service with *settings*, and yield its URL without a final slash.

    Its stores are wrapped by *wrap*, and the application by *around*. With a *certificate*, a file
    that holds its key as well, the service speaks TLS.
    """
    app = around(create_app(settings) if wrap is None else create_app(settings, wrap=wrap))
    quiet = settings.server.model_copy(update={"log_level": "critical"})
    config = configure(app, quiet)
    config.ssl_certfile = certificate
    server = _Server(config)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started, "the server does not start; its reason is in the log"
            yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{port}"
        finally:
            server.stop()
            thread.join(2 * _STOP_S)
    if thread.is_alive():
        raise RuntimeError("the server does not stop")


@contextmanager
def client_of(settings: Settings, **options: Any) -> Generator[httpx.Client]:
    """Run the service with *settings*, and open a client of it."""
    with serving(settings, **options) as url, httpx.Client(base_url=url, timeout=60) as opened:
        yield opened
