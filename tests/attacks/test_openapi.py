"""`/api` keeps to what its OpenAPI document says, whatever is asked (schemathesis)."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import icechunk
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import CHECKS, load_all_checks

from shardgate.settings import DatasetSettings, Settings
from tests.support.serving import serving

STRICTER: Final = "positive_data_acceptance"
"""Names of refs and paths can be spelled that nothing has: 400 tells so."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a repository that may be written, and an empty place."""
    folder: Path = tmp_path_factory.mktemp("any") / "repo"
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    datasets = {
        "data": DatasetSettings(url=folder.as_uri(), writable=True),
        "empty": DatasetSettings(url="memory://empty", writable=True),
    }
    with serving(Settings(datasets=datasets)) as served:
        yield served


def operations(url: str) -> list[Any]:
    """Read what is served below `/api`."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json").include(path_regex="^/api")
    return [each.ok() for each in schema.get_all_operations()]  # type: ignore[union-attr]


def play(url: str, operation: Any, examples: int, dataset: str) -> None:
    """Ask for all kinds of things; answers are no 500, and of the documented form."""
    load_all_checks()
    left_out = [CHECKS.get_one(STRICTER)]

    @seed(7)
    @settings(
        max_examples=examples,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        if "{dataset}" in operation.path:
            case.path_parameters["dataset"] = dataset
        case.call_and_validate(base_url=url, excluded_checks=left_out)

    ask()


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.soak)], ids=str)
def test_every_answer_is_a_documented_one(url: str, examples: int) -> None:
    """Of every route, for what its document allows."""
    found = operations(url)

    assert len(found) > 15
    for operation in found:
        play(url, operation, examples, "data")


def test_an_empty_place_is_no_fault(url: str) -> None:
    """Every route tells that there is no repository."""
    for operation in operations(url):
        play(url, operation, 2, "empty")
