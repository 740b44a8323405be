"""Listening: one uvicorn process, or several that share a socket."""

import ctypes
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final, NoReturn

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from app.errors import ConfigurationError
from app.http.protocol import GatewayProtocol
from app.http.watched import Watched
from app.main import create_app
from app.seeing import failures
from app.seeing.failures import Seldom
from app.seeing.formatting import JsonFormatter, TextFormatter
from app.seeing.tracing import open_tracing
from app.settings import ServerSettings, Settings

BACKLOG: Final = 2048
"""Connections that may wait; one page of a viewer opens more than a hundred at once."""

STOP_S: Final = 20
"""Time for answers under way when the service is told to stop."""

_MOST_FILES: Final = 65_536
_YOUNG_OBJECTS: Final = 5_000
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 256 * 1024
_M_TRIM_THRESHOLD: Final = -1
_TRIM_BYTES: Final = 4 * 1024**2

_FORMATTERS: Final = {"text": TextFormatter, "json": JsonFormatter}

START_S: Final = 60.0
"""Longest wait for one of several processes to come up."""

type Announce = Callable[[str], None]
"""Is called once, with the base URL, when requests will be answered."""


def run(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises: `ConfigurationError` if it cannot listen or the application does not start.
    """
    _allow_many_files()
    listener = _bind(settings.server.host, settings.server.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has stopped: that is a success.
        signal.signal(number, lambda *_: sys.exit(0))
    announce_url = functools.partial(announce, _url(settings.server.host, listener))
    is_private = not all(dataset.is_public for dataset in settings.datasets.values())
    config = configure(
        functools.partial(make_app, settings),
        settings.server,
        factory=True,
        is_private=is_private,
    )
    if config.workers == 1:
        _run_here(config, listener, announce_url)
    else:
        create_app(settings)  # what is wrong with it is told once, not by each process
        _run_several(config, listener, announce_url)


def make_app(settings: Settings) -> Watched:
    """Make the application, and the memory of its process ready for it."""
    return make_ready(create_app(settings, tracing=open_tracing(os.environ)))


def make_ready[T](app: T) -> T:
    """Make the memory of this process ready for *app*.

    What start-up made is never garbage: collections that walked it stopped all answers for
    90 ms, twice a second under load. Requests make little of it; to look for it every few
    requests took 4 % of the time. Blocks as large as an index are given back to the system
    when they are freed, or the holes between them take half as much again as the cache may.
    Smaller ones are kept for the next body: to give each back and fetch it anew cost 12 µs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    with suppress(OSError, AttributeError):  # another C library than GNU's
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    return app


def _run_here(
    config: uvicorn.Config, listener: socket.socket, announce: Callable[[], None]
) -> None:
    try:
        _Server(config, announce).run([listener])
    except SystemExit as stopped:
        if stopped.code == STARTUP_FAILURE:
            raise ConfigurationError("the service did not start; the log says why") from None
        raise


def _run_several(
    config: uvicorn.Config, listener: socket.socket, announce: Callable[[], None]
) -> None:
    supervisor = _Supervisor(config, [listener], announce)
    supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise ConfigurationError("the service did not start; the log says why")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; who asks twice does not wait for answers under way."""
        if self.should_exit:
            os._exit(1)
        super().handle_exit(sig, frame)


class _Supervisor(Multiprocess):
    def __init__(
        self, config: uvicorn.Config, sockets: list[socket.socket], announce: Callable[[], None]
    ) -> None:
        super().__init__(config, sockets)
        self._announce = announce

    def init_processes(self) -> None:
        super().init_processes()
        if all(process.wait_until_ready(START_S) for process in self.processes):
            self._announce()

    def terminate_all(self) -> None:
        """Stop all; who asks twice does not wait for answers under way."""
        super().terminate_all()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())

    def _end(self) -> NoReturn:
        for process in self.processes:
            process.kill()
        os._exit(1)


def configure(
    app: Any, settings: ServerSettings, *, factory: bool = False, is_private: bool = False
) -> uvicorn.Config:
    """Say how uvicorn serves *app*, or what the *factory* makes.

    The log withholds more where data *is_private*.
    """
    return uvicorn.Config(
        app,
        factory=factory,
        interface="asgi3",
        lifespan="on",
        loop="uvloop",
        http=GatewayProtocol,
        ws="none",
        workers=settings.workers,
        backlog=BACKLOG,
        log_config=_logging(settings, is_private=is_private),
        access_log=False,
        headers=[("X-Content-Type-Options", "nosniff")],
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=STOP_S,
    )


def _logging(settings: ServerSettings, *, is_private: bool) -> dict[str, Any]:
    """Log our own lines, and warnings of others: botocore's debugging shows keys."""
    level = settings.log_level
    uvicorn_level = level if logging.getLevelName(level.upper()) >= logging.WARNING else "warning"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {
                "()": _FORMATTERS[settings.log_format],
                "is_private": is_private,
                "level": level,
            }
        },
        "filters": {"seldom": {"()": Seldom}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            "app": {"level": level.upper()},
            failures.__name__: {"filters": ["seldom"]},
            "uvicorn": {"level": uvicorn_level.upper()},
        },
    }


def _allow_many_files() -> None:
    """Take what the system allows: each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.set_inheritable(True)
    return listener


def _url(host: str, listener: socket.socket) -> str:
    """Give the URL under which this machine reaches *listener*."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - shown, not bound
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"
