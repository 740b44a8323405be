"""Whatever the service and the library do by turns, both tell what a model of dictionaries does."""

import itertools
from collections.abc import Generator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from app.settings import CacheSettings, DatasetSettings, Settings
from tests.clients.icechunk.model.machine import Lab, Repository
from tests.serving import serving


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Run two services in front of a folder: one believes nothing it knows, the other all."""
    folder = tmp_path_factory.mktemp("repositories")
    datasets = {"data": DatasetSettings(url=folder.as_uri(), writable=True)}
    doubting, trusting = (
        Settings(datasets=datasets, cache=CacheSettings(ttl_s=ttl_s)) for ttl_s in (1e-6, 600)
    )
    with (
        serving(doubting) as one,
        serving(trusting) as other,
        httpx.Client(base_url=one, timeout=60) as first,
        httpx.Client(base_url=other, timeout=60) as second,
    ):
        yield Lab(folder, (first, second), itertools.count())


@pytest.mark.parametrize(
    ("examples", "steps"), [(5, 12), pytest.param(100, 40, marks=pytest.mark.soak)]
)
def test_service_and_library_agree(lab: Lab, examples: int, steps: int) -> None:
    """Each run of the model has repositories of its own."""
    config = settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )
    factory: Any = lambda: Repository(lab)  # noqa: E731 - it is typed as a class
    run_state_machine_as_test(factory, settings=config)
