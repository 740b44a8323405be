"""The store fails by chance while many write through two gateways: nothing acknowledged is lost.

Nothing is taken away here: the request that first made an object, and arrives after that was seen
to be made by another and removed, makes it again. No condition of S3 tells absences apart.
"""

import asyncio
import random
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from math import inf
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.crowds import Plans, impossible, plans, play
from tests.gateways import Start, of_dataset
from tests.labs import Lab
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Mishap, Proxy

WRITERS: Final = 16
LIMITS: Final = {"SHARDGATE_LIMITS__TIMEOUT_S": "3", "SHARDGATE_LIMITS__DEADLINE_S": "3"}
LATE_S: Final = 3.5
"""Longer than the gateways wait for an answer."""
READS: Final = ("GET ", "HEAD ")
QUIET: Final = settings(suppress_health_check=[HealthCheck.too_slow])


class Erring(Proxy):
    """Spoils writes by chance, or passes them on too late; answers may come too late as well."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.between = lambda: time.sleep(LATE_S if self._draw() < self.late else 0)
        self.spoilt = 0.0
        """Which share of the writes is spoilt."""
        self.late = 0.0
        self._random = random.Random(0)

    def begin(self, seed: int, spoilt: float, late: float) -> None:
        """Be bad from now on."""
        self._random.seed(seed)
        self.spoilt, self.late = spoilt, late

    def note(self, request: str) -> Mishap | None:
        """Choose what is to become of a request."""
        if request.startswith(READS) or self._draw() >= self.spoilt:
            return None
        if self._draw() < self.late:
            time.sleep(LATE_S)
            return None
        return self._random.choice(list(Mishap))

    def _draw(self) -> float:
        return self._random.random()


class Site:
    """A bucket with arrays in it, and two gateways that reach it through the proxy."""

    def __init__(self, lab: Lab, erring: Erring, urls: list[str]) -> None:
        self.lab = lab
        self._erring = erring
        self._urls = urls

    def play(self, plans: Plans, seed: int) -> list[str]:
        """Let all write, and name the keys under which there is what cannot be there."""
        name = self.lab.new_array()
        self._erring.begin(seed, 0.3, 0.05)
        try:
            writes = asyncio.run(play(self._urls, name, plans))
        finally:
            self._erring.begin(seed, 0, 0)
        assert all(write.end < inf for write in writes)
        return impossible(writes, self.lab.read(name))


@pytest.fixture(scope="module")
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start the proxy and the gateways."""
    lab = Lab(tmp_path_factory.mktemp("erring"), seaweedfs)
    with ExitStack() as stack:
        erring = Erring(seaweedfs.endpoint_url)
        stack.enter_context(erring.running())
        environ = of_dataset(lab.url, seaweedfs, endpoint_url=erring.url) | LIMITS
        gateways = [stack.enter_context(closing(start(environ))) for _ in range(2)]
        yield Site(lab, erring, [each.url for each in gateways])


@settings(QUIET, max_examples=2)
@given(plans=plans(WRITERS, deletes=False), seed=st.integers(0, 2**32))
def test_what_is_acknowledged_is_there(site: Site, plans: Plans, seed: int) -> None:
    """Each chunk is one that was put last, and readers never see anything else or a failure."""
    assert site.play(plans, seed) == []


@pytest.mark.soak
@settings(QUIET, max_examples=30)
@given(plans=plans(WRITERS, deletes=False), seed=st.integers(0, 2**32))
def test_it_always_is(site: Site, plans: Plans, seed: int) -> None:
    """The same, many times."""
    assert site.play(plans, seed) == []
