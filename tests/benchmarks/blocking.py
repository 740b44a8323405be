"""Longest blocking times of the event loop: the service and a clock in one loop."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

import uvicorn
import uvloop

from shardgate.configuration import load
from shardgate.processes import configure, make_app

from .client import connected

_TICK_S: Final = 0.001
_IDLE_S: Final = 0.2


class Ask(NamedTuple):
    """A request; its path may have members of the responses to earlier POSTs."""

    method: str
    path: str
    body: str | None = None


class _Clock:
    """Wakes up every millisecond, and records the longest delay."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    async def run(self) -> None:
        last = perf_counter()
        while True:
            await asyncio.sleep(_TICK_S)
            now = perf_counter()
            self._longest_s, last = max(self._longest_s, now - last), now

    def take(self) -> float:
        """Return the longest delay since the last call."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


async def measure(config: Path, asks: Sequence[Ask]) -> list[float]:
    """Send requests in turn; return the longest delay during each, and during none."""
    clock = _Clock()
    known: dict[str, str] = {}
    async with _serving(config) as port:
        ticking = asyncio.create_task(clock.run())
        await asyncio.sleep(_IDLE_S)
        longest_s = [clock.take()]
        with connected(port) as client:
            for ask in asks:
                path = ask.path.format_map(known)
                answer = await asyncio.to_thread(client.ask, path, ask.method, ask.body)
                if not 200 <= answer.status < 300:
                    raise RuntimeError(f"{path}: {answer.status}: {answer.body[:300]!r}")
                if ask.method == "POST":
                    known |= json.loads(answer.body)
                await asyncio.sleep(5 * _TICK_S)
                longest_s.append(clock.take())
        ticking.cancel()
    return [*longest_s[1:], longest_s[0]]


@asynccontextmanager
async def _serving(config: Path) -> AsyncGenerator[int]:
    """Run the service in this loop, and yield its port."""
    settings = load(config, {})
    server = _Server(configure(partial(make_app, settings), settings.server, factory=True))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        await server.is_up.wait()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


def main(config: Path, rounds: int, asks: Sequence[Ask]) -> None:
    """Print the delays of each round, each with a new service."""
    measured = []
    for _ in range(rounds):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured.append(runner.run(measure(config, asks)))
    print(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Ask(*each) for each in json.loads(sys.argv[3])])
