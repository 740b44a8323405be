"""The store fails before it does what is asked, or after: each write is there, or told failed."""

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from threading import Event
from typing import Final

import httpx
import pytest

from tests.faults.sites import DEADLINE_S, Site, opened
from tests.gateways import Gateway, Start
from tests.labs import LARGE, SMALL, Shape, value
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Mishap

LIMITS: Final = {"SHARDGATE_LIMITS__TIMEOUT_S": "3", "SHARDGATE_LIMITS__DEADLINE_S": "3"}
LATE_S: Final = 3.5
"""Longer than the gateway waits for an answer."""
OURS: Final = 1
THEIRS: Final = 2
"""The chunks that are put through the two gateways at the same time."""
STEPS: Final = {SMALL: 3, LARGE: 10}
"""So many requests the rewrite of a shard takes at least."""
FOR_EVER: Final = 10**9

mishaps = pytest.mark.parametrize("mishap", Mishap, ids=[each.name for each in Mishap])


@pytest.fixture(scope="module")
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start what nothing happens to."""
    with opened(seaweedfs, tmp_path_factory.mktemp("errors"), start) as made:
        yield made


@pytest.fixture(scope="module")
def spoilt(site: Site) -> Generator[Gateway]:
    """Start a gateway before the proxy, which has not much patience."""
    with site.behind_proxy(**LIMITS) as made:
        yield made


class Race:
    """Two chunks of one shard, put at the same time, and the third, which nobody changes."""

    def __init__(self, site: Site, shape: Shape, nth: range, mishap: Mishap) -> None:
        self._site = site
        self._shape = shape
        self.old = {at: value(shape, 1, at) for at in range(shape.chunks)}
        self.new = {at: value(shape, 2, at) for at in (OURS, THEIRS)}
        self.name = site.lab.new_array(shape, self.old)
        site.proxy.spoil(nth, mishap)

    def run(self, spoilt: Gateway) -> tuple[httpx.Response, httpx.Response]:
        """Put both, and read on meanwhile through the gateway that nothing happens to."""
        done = Event()
        with ThreadPoolExecutor(3) as pool:
            reader = pool.submit(self._look_on, done)
            answers = [
                pool.submit(self._put, *each)
                for each in ((spoilt, OURS), (self._site.healthy, THEIRS))
            ]
            try:
                ours, theirs = [each.result(DEADLINE_S) for each in answers]
            finally:
                done.set()
            reader.result(DEADLINE_S)
        return ours, theirs

    def demand(self, gateway: Gateway, *, is_done: bool) -> None:
        """Be sure of what is there, and that it can be read and written through *gateway*."""
        self._site.proxy.spoil([], Mishap.ERROR)
        found = self._site.lab.read(self.name)
        ours = found[self._key(OURS)]
        assert ours == self.new[OURS] or (not is_done and ours == self.old[OURS])
        expected = {self._key(at): data for at, data in (self.old | self.new).items()}
        assert found == expected | {self._key(OURS): ours}
        assert self._put(gateway, OURS).is_success
        assert self._site.lab.read(self.name) == expected
        assert self._site.get(gateway, self._key(THEIRS)) == self.new[THEIRS]

    def _put(self, gateway: Gateway, chunk: int) -> httpx.Response:
        return self._site.put(gateway, self._key(chunk), self.new[chunk])

    def _look_on(self, done: Event) -> None:
        while not done.is_set():
            for at in (OURS, THEIRS, 0):
                seen = self._site.get(self._site.healthy, self._key(at))
                assert seen in (self.old[at], self.new.get(at, self.old[at]))

    def _key(self, chunk: int) -> str:
        return f"{self.name}/c/{chunk}"


@pytest.mark.parametrize(
    "shape",
    [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="copied", marks=pytest.mark.soak)],
)
@mishaps
def test_one_failure_is_made_good(
    site: Site, spoilt: Gateway, mishap: Mishap, shape: Shape
) -> None:
    """Whichever request of a rewrite fails, the chunk is put, and others' are kept."""
    assert spoil_each_step(site, spoilt, shape, mishap) == {HTTPStatus.OK}


@pytest.mark.soak
@pytest.mark.parametrize("mishap", [Mishap.ANSWER_LOST, Mishap.REQUEST_LOST])
def test_a_late_answer_is_not_waited_for(site: Site, spoilt: Gateway, mishap: Mishap) -> None:
    """The server has done what was asked or has not; reads are not repeated, writes are."""
    site.proxy.between = lambda: time.sleep(LATE_S)
    try:
        told = spoil_each_step(site, spoilt, SMALL, mishap)
        assert told == {HTTPStatus.OK, HTTPStatus.GATEWAY_TIMEOUT}
    finally:
        site.proxy.between = lambda: None


@pytest.mark.parametrize("nth", [0, 2])
@mishaps
def test_a_store_that_fails_on_is_told_of(
    site: Site, spoilt: Gateway, mishap: Mishap, nth: int
) -> None:
    """Nobody hangs, and what was not acknowledged is old or new; later all is well again."""
    race = Race(site, SMALL, range(nth, FOR_EVER), mishap)

    ours, theirs = race.run(spoilt)

    assert theirs.is_success, theirs.text
    assert ours.is_success or ours.is_server_error, ours.text
    race.demand(spoilt, is_done=ours.is_success)


def spoil_each_step(site: Site, spoilt: Gateway, shape: Shape, mishap: Mishap) -> set[int]:
    """Spoil each request that the rewrite of a shard takes in turn; tell how it was answered."""
    statuses, nth, is_reached = set(), 0, True
    while is_reached:
        race = Race(site, shape, range(nth, nth + 1), mishap)

        ours, theirs = race.run(spoilt)

        is_reached = len(site.proxy.seen) > nth
        assert theirs.is_success, theirs.text
        race.demand(spoilt, is_done=ours.is_success)
        statuses.add(ours.status_code)
        nth += 1
    assert nth > STEPS[shape]
    return statuses
