"""Changes that wait until their shard is rewritten."""

import asyncio
from contextlib import suppress

from app.resolve.changes import Request


class Waiting:
    """Requests that wait for one shard, and how many are likely to come together."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._expected = 1
        self._is_full = asyncio.Event()

    def add(self, request: Request) -> None:
        """Let *request* wait."""
        self.requests.append(request)
        if len(self.requests) >= self._expected:
            self._is_full.set()

    def take(self) -> list[Request]:
        """Give all that wait; as many may come again once they are answered."""
        taken, self.requests = self.requests, []
        self._expected = len(taken)
        return taken

    async def gather(self, longest_s: float) -> None:
        """Wait until all who were answered may have come with their next change, but not longer.

        Clients who fill a shard send one change after the other. Without a pause only those would
        go into the next rewrite who came during the last one: half of them, twice as often.
        """
        self._is_full.clear()
        self._expected += len(self.requests)
        if len(self.requests) < self._expected:
            with suppress(TimeoutError):
                async with asyncio.timeout(longest_s):
                    await self._is_full.wait()
