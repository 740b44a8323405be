"""Listening: one uvicorn process, or several that share a socket."""

import asyncio
import ctypes
import errno
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

from shardgate.datasets import exposures
from shardgate.errors import ConfigurationError
from shardgate.main import create_app
from shardgate.observability.logging import logging_config
from shardgate.observability.tracing import open_tracing
from shardgate.server.asgi import AsgiApp
from shardgate.server.protocol import GatewayProtocol
from shardgate.settings import ServerSettings, Settings

STOP_S: Final = 20  # longest wait for responses in progress after SIGTERM
_LEAVING_S: Final = 1.0
"""Time in which balancers that ask before they send a request learn that the process stops."""
_NOT_STARTED: Final = "the service did not start; the log says why"
_MOST_FILES: Final = 65_536
_log: Final = logging.getLogger(__name__)

type Announce = Callable[[str], None]
"""Called once, with the base URL, when the service accepts requests."""


def run(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises: `ConfigurationError` if it cannot listen or the application does not start.
    """
    _allow_many_files()
    listener = _bind(settings.server.host, settings.server.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has stopped: the exit code is 0.
        signal.signal(number, lambda *_: sys.exit(0))
    announce_url = functools.partial(announce, _url(settings.server.host, listener))
    is_private = not all(dataset.is_public for dataset in settings.datasets.values())
    config = configure(
        functools.partial(make_app, settings), settings.server, factory=True, is_private=is_private
    )
    for warning in exposures(settings):
        _log.warning(warning)
    if settings.login.issuer and settings.server.workers > 1 and settings.tokens.url is None:
        _log.warning("tokens.url is not set: tokens are revoked in one process only")
    if config.workers == 1:
        try:
            _Server(config, announce_url).run([listener])
        except SystemExit as stopped:
            if stopped.code == STARTUP_FAILURE:
                raise ConfigurationError(_NOT_STARTED) from None
            raise
    else:
        create_app(settings)  # reports a wrong setting once, not from each process
        supervisor = _Supervisor(config, [listener], announce_url)
        supervisor.run()
        if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
            raise ConfigurationError(_NOT_STARTED)


def make_app(settings: Settings) -> AsgiApp:
    """Build the application, and tune the memory of its process."""
    return tune_memory(create_app(settings, tracing=open_tracing(os.environ)))


def tune_memory[T](app: T) -> T:
    """Tune the garbage collector and the allocator, once *app* is built; return *app*."""
    # Under load, walking the objects of the start-up stopped responses for 90 ms twice a second.
    gc.collect()
    gc.freeze()
    # With Python's threshold, collections of the young generation took 4 % of the time.
    gc.set_threshold(5_000)
    with suppress(OSError, AttributeError):  # a C library other than GNU's
        libc = ctypes.CDLL(None)
        # Freed blocks as large as an index go back to the system: fragmentation cost half as much
        # memory as the cache. Smaller ones are kept, which saves 12 µs per body.
        libc.mallopt(-3, 256 * 1024)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 4 * 1024**2)  # M_TRIM_THRESHOLD
    return app


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce
        self._is_ended_by_system = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal ends the process at once."""
        if self.should_exit:
            os._exit(1)
        self._is_ended_by_system = sig == signal.SIGTERM
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop. After SIGTERM, while clients are connected, first answer 503 to ``/healthz``."""
        if self._is_ended_by_system and self.server_state.connections:
            self.config.loaded_app.metrics.is_stopping = True
            await asyncio.sleep(_LEAVING_S)
        await super().shutdown(sockets)


class _Supervisor(Multiprocess):
    def __init__(
        self, config: uvicorn.Config, sockets: list[socket.socket], announce: Callable[[], None]
    ) -> None:
        super().__init__(config, sockets)
        self._announce = announce
        self._is_announced = False

    def init_processes(self) -> None:
        super().init_processes()
        self._announce_once(60.0)  # signals are not handled before

    def keep_subprocess_alive(self) -> None:
        """Replace processes that have ended; on a busy machine others may be ready only now."""
        super().keep_subprocess_alive()
        if not self._is_announced:
            self._announce_once(1.0)

    def _announce_once(self, within_s: float) -> None:
        if all(process.wait_until_ready(within_s, self.should_exit) for process in self.processes):
            self._is_announced = True
            self._announce()

    def terminate_all(self) -> None:
        """Stop all processes; a second signal ends them at once."""
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
    """Return the configuration of uvicorn; see `logging_config` for *is_private*."""
    return uvicorn.Config(
        app,
        factory=factory,
        interface="asgi3",
        lifespan="on",
        loop="uvloop",
        http=GatewayProtocol,
        ws="none",
        workers=settings.workers,
        backlog=2048,  # one page of a viewer opens more than a hundred connections
        log_config=logging_config(settings, is_private=is_private),
        access_log=False,
        headers=[("X-Content-Type-Options", "nosniff")],
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type] # a float will do
        timeout_graceful_shutdown=STOP_S,
        # With uvicorn's 5 s, a process that replaced another one on a busy machine was ended before
        # it had imported all, again and again. Signals wait as long.
        timeout_worker_healthcheck=20,
    )


def _allow_many_files() -> None:
    # Each connection is an open file.
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
        # A restart need not wait for the last connections of the process before.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        hint = "; --port takes another one" if error.errno == errno.EADDRINUSE else ""
        reason = f"{error.strerror}{hint}"
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}") from error
    except UnicodeError as error:  # a label of the name is empty, or too long
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from error
    listener.set_inheritable(True)  # several processes accept its connections
    return listener


def _url(host: str, listener: socket.socket) -> str:
    """Return the URL of *listener* on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - shown, not bound
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"
