"""Clients who read and write through nginx for a while, and what came of it."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import httpx

from tests.deploy.balancer import Balancer
from tests.histories import Write
from tests.labs import SMALL, value

_READERS: Final = 12
_WRITERS: Final = 6
READS: Final = 500
"""So long it lasts."""


class Load:
    """Reads *keys* and writes the chunks of *arrays*, each request once."""

    def __init__(self, balancer: Balancer, keys: Sequence[str], arrays: Sequence[str]) -> None:
        connections = httpx.Limits(max_connections=_READERS + _WRITERS)
        self._client = httpx.AsyncClient(
            base_url=f"{balancer.url}/data/", verify=balancer.tls(), timeout=20, limits=connections
        )
        self._keys = keys
        self._arrays = arrays
        self.reads = 0
        self._third = asyncio.Event()
        self.failed_reads: list[str] = []
        self.writes: list[Write] = []

    async def run(self, mischief: Callable[[], None]) -> None:
        """Go on for a while; *mischief* is done after a third of it."""
        async with self._client, asyncio.TaskGroup() as group:
            for number in range(_READERS):
                group.create_task(self._read(random.Random(number)))
            for number in range(_WRITERS):
                group.create_task(self._write(number))
            await self._third.wait()
            await asyncio.to_thread(mischief)

    async def _read(self, choice: random.Random) -> None:
        while self.reads < READS:
            self.reads += 1
            if self.reads > READS / 3:
                self._third.set()
            try:
                answer = await self._client.get(choice.choice(self._keys))
            except httpx.TransportError as error:
                self.failed_reads.append(repr(error))
                continue
            if answer.status_code != httpx.codes.OK:
                self.failed_reads.append(answer.text)

    async def _write(self, writer: int) -> None:
        choice, number = random.Random(-writer), 0
        while self.reads < READS:
            number += 1
            key = f"{choice.choice(self._arrays)}/c/{choice.randrange(SMALL.chunks)}"
            data = value(SMALL, writer, number)
            write = Write(key, data, time.monotonic())
            self.writes.append(write)
            try:
                answer = await self._client.put(key, content=data)
            except httpx.TransportError:
                continue
            if answer.is_success:
                write.end = time.monotonic()
