"""A folder as any web server gives it: files, their ranges, and leave for other origins to read."""

import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles


@contextmanager
def serving_files(folder: Path) -> Generator[str]:
    """Serve *folder*, and give the URL."""
    leave = Middleware(CORSMiddleware, allow_origins=["*"], expose_headers=["*"])
    app = Starlette(routes=[Mount("/", StaticFiles(directory=folder))], middleware=[leave])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
