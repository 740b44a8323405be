"""The service, configured as the command does it, in a thread of the tests."""

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import uvicorn

from app.main import create_app
from app.server import configure
from app.settings import Settings
from app.storage.contract import ObjectStore

_START_S: Final = 20.0
_STOP_S: Final = 10


@contextmanager
def serving(
    settings: Settings, *, wrap: Callable[[ObjectStore], ObjectStore] | None = None
) -> Generator[str]:
    """Run the service with *settings* and give its URL, which ends without a slash."""
    app = create_app(settings) if wrap is None else create_app(settings, wrap=wrap)
    quiet = settings.server.model_copy(update={"log_level": "critical"})
    server = uvicorn.Server(configure(app, quiet))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            _wait_until_started(server, thread)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(2 * _STOP_S)
    if thread.is_alive():
        raise RuntimeError("the server does not stop")


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + _START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the server does not start; its reason is in the log")
        time.sleep(0.005)
