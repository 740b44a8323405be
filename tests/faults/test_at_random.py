"""Gateways are killed, asked to end, or stopped for a while at any moment, while many write."""

import asyncio
from collections.abc import Generator
from contextlib import ExitStack, closing
from math import inf
from typing import Final, Literal, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.crowds import Plans, impossible, plans, play
from tests.gateways import Gateway, Start, of_dataset
from tests.labs import Lab

SITES: Final = ("folder", pytest.param("seaweedfs", marks=pytest.mark.soak))
"""What becomes of each request to the other, `test_killed_at_each_step.py` has."""
WRITERS: Final = 16
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


MISCHIEF: Final = st.lists(
    st.builds(
        Mischief,
        st.floats(0.005, 0.3),
        st.integers(0, 1),
        st.sampled_from(["kill", "terminate", "stop"]),
    ),
    min_size=1,
    max_size=4,
)
QUIET: Final = settings(suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=SITES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Pair]:
    """Start the gateways."""
    is_remote = request.param == "seaweedfs"
    seaweedfs = request.getfixturevalue("seaweedfs") if is_remote else None
    with closing(Pair(Lab(tmp_path_factory.mktemp("lab"), seaweedfs), start)) as made:
        yield made


@settings(QUIET, max_examples=4)
@given(plans=plans(WRITERS), mischief=MISCHIEF)
def test_what_is_acknowledged_is_there(pair: Pair, plans: Plans, mischief: list[Mischief]) -> None:
    """Writers who repeat what was not acknowledged find what was, for who reads directly too."""
    assert pair.play(pair.lab.new_array(), plans, mischief) == []


@pytest.mark.parametrize("pair", ["seaweedfs"], indirect=True)
@settings(QUIET, max_examples=5)
@given(plans=plans(2 * WRITERS))
def test_concurrent_writers_of_a_bucket_lose_nothing(pair: Pair, plans: Plans) -> None:
    """32 clients put and delete chunks of the same shards through both gateways."""
    assert pair.play(pair.lab.new_array(), plans, []) == []


@pytest.mark.soak
@settings(QUIET, max_examples=40)
@given(plans=plans(WRITERS), mischief=MISCHIEF)
def test_it_always_is(pair: Pair, plans: Plans, mischief: list[Mischief]) -> None:
    """The same, many times."""
    assert pair.play(pair.lab.new_array(), plans, mischief) == []
