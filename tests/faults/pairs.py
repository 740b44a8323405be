"""Two gateways before one store, with which mischief is done while many write."""

import asyncio
from contextlib import ExitStack, closing
from math import inf
from typing import Final, Literal, NamedTuple

from tests.crowds import Plans, impossible, play
from tests.gateways import Gateway, Start, of_dataset
from tests.labs import Lab

TTL_S: Final = 60
"""Of what the gateways remember: longer than any test, so that nothing is right by chance."""
GRACE_S: Final = 25
"""A gateway that is asked to ends by then."""
STOPPED_S: Final = 0.3


class Mischief(NamedTuple):
    """What is done to one of the gateways after a while."""

    delay_s: float
    gateway: int
    what: Literal["kill", "terminate", "stop"]


class Pair:
    """The store with arrays in it, and the gateways."""

    def __init__(self, lab: Lab, start: Start) -> None:
        self.lab = lab
        self._start = start
        self._environ = of_dataset(lab.url, lab.seaweedfs, ttl_s=TTL_S)
        self.gateways = [self._started() for _ in range(2)]
        self.urls = [each.url for each in self.gateways]

    def play(self, name: str, plans: Plans, mischief: list[Mischief]) -> list[str]:
        """Let all write meanwhile, and name the keys under which there is what cannot be there."""

        async def do_all() -> None:
            for each in mischief:
                await asyncio.sleep(each.delay_s)
                await self._do(each)

        writes = asyncio.run(play(self.urls, name, plans, do_all))
        assert all(write.end < inf for write in writes)
        return impossible(writes, self.lab.read(name))

    def close(self) -> None:
        """End the gateways."""
        with ExitStack() as stack:
            for each in self.gateways:
                stack.enter_context(closing(each))

    async def _do(self, mischief: Mischief) -> None:
        gateway = self.gateways[mischief.gateway]
        if mischief.what == "stop":
            gateway.stop()
            await asyncio.sleep(STOPPED_S)
            gateway.go_on()
            return
        if mischief.what == "terminate":
            gateway.terminate()
            assert await asyncio.to_thread(gateway.wait, GRACE_S)
        await asyncio.to_thread(self._restart, mischief.gateway)

    def _restart(self, number: int) -> None:
        self.gateways[number].close()
        self.gateways[number] = self._started()
        self.urls[number] = self.gateways[number].url

    def _started(self) -> Gateway:
        return self._start(self._environ)
