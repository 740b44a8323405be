"""Many writers fill the same shards through two gateways: nothing acknowledged is lost."""

import asyncio
from collections.abc import Generator
from contextlib import ExitStack
from math import inf
from typing import Final, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings

from tests.crowds import Plans, impossible, plans, play
from tests.gateways import forked, of_dataset
from tests.labs import Lab

SITES: Final = (pytest.param("folder", marks=pytest.mark.soak), "seaweedfs")
"""Of a folder, `tests/faults/test_at_random.py` has the same with more that goes wrong."""
WRITERS: Final = 32
TTL_S: Final = 60
"""Of what the gateways remember: longer than any test, so that nothing is right by chance."""


class Site(NamedTuple):
    """A store with arrays in it, and two gateways before it."""

    lab: Lab
    urls: list[str]


@pytest.fixture(scope="module", params=SITES)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Site]:
    """Start the gateways."""
    is_remote = request.param == "seaweedfs"
    seaweedfs = request.getfixturevalue("seaweedfs") if is_remote else None
    lab = Lab(tmp_path_factory.mktemp("lab"), seaweedfs)
    environ = of_dataset(lab.url, seaweedfs, ttl_s=TTL_S)
    with ExitStack() as stack:
        yield Site(lab, [stack.enter_context(forked(environ)).url for _ in range(2)])


@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(plans=plans(WRITERS))
def test_what_is_acknowledged_is_there(site: Site, plans: Plans) -> None:
    """After 32 writers have done, each chunk is one that was put last, for who reads directly."""
    name = site.lab.new_array()

    writes = asyncio.run(play(site.urls, name, plans))

    assert all(write.end < inf for write in writes)
    assert impossible(writes, site.lab.read(name)) == []
