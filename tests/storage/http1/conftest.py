"""Event loops, clients and servers for the tests of the HTTP client."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing

import pytest
import uvloop

from shardgate.storage.http1_client import HttpClient
from tests.support.storage.http1.scripted import ScriptedServer, Serve, Step

_LONGEST_S = 20.0
"""A test that hangs fails after this time."""


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each test on uvloop, as the service does, and on asyncio's own loop."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave asyncio's own loop to soak runs: all tests of stores use the client on it."""
    if isinstance(item, pytest.Function) and "[asyncio" in item.name:
        item.add_marker(pytest.mark.soak)


@pytest.fixture
async def serve() -> AsyncGenerator[Serve]:
    """Start servers."""
    alarm = asyncio.get_running_loop().call_later(_LONGEST_S, _cancel_all)
    async with AsyncExitStack() as stack:

        async def start(*scripts: list[Step], tls: ssl.SSLContext | None = None) -> ScriptedServer:
            return await stack.enter_async_context(ScriptedServer(scripts).running(tls))

        yield start
    alarm.cancel()


@pytest.fixture(params=["plain", "tls"])
def transport(request: pytest.FixtureRequest, tls: ssl.SSLContext) -> ssl.SSLContext | None:
    """Return the context of a server without TLS, and with it."""
    return tls if request.param == "tls" else None


@pytest.fixture
async def client(ca_file: str) -> AsyncGenerator[HttpClient]:
    """Open a client of two connections with a long timeout."""
    async with aclosing(HttpClient(connections=2, silence_s=60, ca_file=ca_file)) as opened:
        yield opened


@pytest.fixture
async def narrow(ca_file: str) -> AsyncGenerator[HttpClient]:
    """Open a client of one connection with a long timeout."""
    async with aclosing(HttpClient(connections=1, silence_s=60, ca_file=ca_file)) as opened:
        yield opened


@pytest.fixture
async def hasty() -> AsyncGenerator[HttpClient]:
    """Open a client of one connection with a short timeout."""
    async with aclosing(HttpClient(connections=1, silence_s=1)) as opened:
        yield opened


def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
