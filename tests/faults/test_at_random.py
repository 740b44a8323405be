"""Gateways are killed, asked to end, or stopped for a while at any moment, while many write."""

from collections.abc import Generator
from contextlib import closing
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.crowds import Plans, plans
from tests.faults.pairs import Mischief, Pair
from tests.gateways import Start
from tests.labs import Lab

SITES: Final = ("folder", pytest.param("seaweedfs", marks=pytest.mark.soak))
"""What becomes of each request to the other, `test_killed_at_each_step.py` has."""
WRITERS: Final = 16
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


@pytest.mark.soak
@settings(QUIET, max_examples=40)
@given(plans=plans(WRITERS), mischief=MISCHIEF)
def test_it_always_is(pair: Pair, plans: Plans, mischief: list[Mischief]) -> None:
    """The same, many times."""
    assert pair.play(pair.lab.new_array(), plans, mischief) == []
