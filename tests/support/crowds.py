"""Many clients that write and read the chunks of one array, and records of their writes."""

import asyncio
import random
import ssl
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import httpx
from hypothesis import strategies as st

from tests.support.histories import Write, ever, possible
from tests.support.labs import SMALL, value

READERS: Final = 4
DEADLINE_S: Final = 120.0
"""Time limit of a run."""
_PAUSE_S: Final = 0.05
_READ_S: Final = 0.01
"""Time between two requests of a reader."""
_GATEWAYS: Final = 2

type Mischief = Callable[[], Coroutine[Any, Any, None]]


class Step(NamedTuple):
    """One write of one client."""

    chunk: int
    is_delete: bool
    gateway: int


type Plans = list[list[Step]]


def plans(writers: int, *, deletes: bool = True) -> st.SearchStrategy[Plans]:
    """Draw the steps of each of *writers* clients."""
    steps = st.builds(
        Step,
        st.integers(0, SMALL.chunks - 1),
        st.sampled_from([False] * 4 + [deletes]),
        st.integers(0, _GATEWAYS - 1),
    )
    each = st.lists(steps, min_size=1, max_size=4)
    return st.lists(each, min_size=writers, max_size=writers)


async def nothing() -> None:
    """Cause no fault."""


async def play(
    urls: list[str],
    name: str,
    plans: Plans,
    mischief: Mischief = nothing,
    *,
    trusted: ssl.SSLContext | None = None,
) -> list[Write]:
    """Run all plans and some readers through gateways at *urls*, which may be replaced.

    A write that is not acknowledged is repeated until it is.
    """
    crowd = _Crowd(urls, name, len(plans), trusted)
    async with asyncio.timeout(DEADLINE_S), crowd.client, asyncio.TaskGroup() as group:
        for each in range(READERS):
            group.create_task(crowd.look_on(each))
        async with asyncio.TaskGroup() as writers:
            writers.create_task(mischief())
            for number, plan in enumerate(plans, 1):
                writers.create_task(crowd.write(number, plan))
        crowd.is_over = True
    return crowd.writes


class _Crowd:
    def __init__(
        self, urls: list[str], name: str, writers: int, trusted: ssl.SSLContext | None
    ) -> None:
        limits = httpx.Limits(max_connections=writers + READERS)
        self.client = httpx.AsyncClient(timeout=60, limits=limits, verify=trusted or True)
        self.writes: list[Write] = []
        self.is_over = False
        """True once readers end; a cancelled one may leave a socket open, as anyio connects."""
        self._urls = urls
        self._name = name

    async def write(self, writer: int, plan: list[Step]) -> None:
        """Do one write after the other, each with a value of its own."""
        for number, step in enumerate(plan):
            data = None if step.is_delete else value(SMALL, writer, number)
            write = Write(self._key(step.chunk), data, time.monotonic())
            self.writes.append(write)
            while not await self._is_done(step.gateway, write):  # noqa: ASYNC110  it is asked for
                await asyncio.sleep(_PAUSE_S)
            write.end = time.monotonic()

    async def _is_done(self, gateway: int, write: Write) -> bool:
        url = f"{self._urls[gateway]}/data/{write.key}"
        try:
            method = "DELETE" if write.value is None else "PUT"
            answer = await self.client.request(method, url, content=write.value)
        except httpx.TransportError:
            return False
        assert answer.is_success or answer.is_server_error, answer.text
        return answer.is_success

    async def look_on(self, reader: int) -> None:
        """Read random chunks until the end, and assert that each is one that was written."""
        choice = random.Random(reader)
        while not self.is_over:
            await asyncio.sleep(_READ_S)
            key = self._key(choice.randrange(SMALL.chunks))
            try:
                answer = await self.client.get(f"{choice.choice(self._urls)}/data/{key}")
            except httpx.TransportError:  # the gateway is gone
                await asyncio.sleep(_PAUSE_S)
                continue
            assert answer.status_code in {HTTPStatus.OK, HTTPStatus.NOT_FOUND}, answer.text
            assert (answer.content if answer.is_success else None) in ever(self.writes, key)

    def _key(self, chunk: int) -> str:
        return f"{self._name}/c/{chunk}"


def impossible(writes: list[Write], found: dict[str, bytes | None]) -> list[str]:
    """Return the keys whose values contradict the writes."""
    return [key for key, data in found.items() if data not in possible(writes, key)]
