"""Cancellation of the work for a client that has closed its connection."""

import asyncio
from typing import Any, Final, Self

_GRACE_S: Final = 0.05
"""Work that ends sooner is not watched: a watcher costs 10 µs."""


class ClientGoneError(Exception):
    """The client closed its connection before its response was ready."""


class UntilDisconnect:
    """Cancels the block on ``http.disconnect``. Raises: `ClientGoneError`, out of the block."""

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._has_gone = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._owner = asyncio.current_task()
        self._start = loop.call_later(_GRACE_S, self._watch)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._start.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._has_gone and self._owner is not None:
            self._owner.uncancel()
            raise ClientGoneError

    def _watch(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._owner is not None:
            self._has_gone = True
            self._owner.cancel()
