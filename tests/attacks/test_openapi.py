"""Responses of `/api` conform to its OpenAPI document for generated requests (schemathesis)."""

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
"""Left out: the schema allows names of refs and paths that are invalid, which get 400."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a writable repository and an empty dataset."""
    folder: Path = tmp_path_factory.mktemp("any") / "repo"
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    datasets = {
        "data": DatasetSettings(url=folder.as_uri(), writable=True),
        "empty": DatasetSettings(url="memory://empty", writable=True),
    }
    with serving(Settings(datasets=datasets)) as served:
        yield served


def operations(url: str) -> list[Any]:
    """Return the operations below `/api` of the OpenAPI document."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json").include(path_regex="^/api")
    return [each.ok() for each in schema.get_all_operations()]  # type: ignore[union-attr]


def play(url: str, operation: Any, examples: int, dataset: str) -> None:
    """Send generated requests; assert that no response is a 500 and all conform to the document."""
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


@pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.soak)], ids=str)
def test_responses_conform_to_the_openapi_document(url: str, examples: int) -> None:
    """Every route's responses for a repository, and an empty dataset, conform to the document."""
    found = operations(url)

    assert len(found) > 15
    for operation in found:
        play(url, operation, examples, "data")
        play(url, operation, 2, "empty")
