"""A provider, a service where people sign in there, and their browsers; workers of pictures."""

from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.support.auth.fixtures import browser, other, provider, running, url
from tests.support.auth.people import TOKENS, caller
from tests.support.serving import client_of
from tests.support.web.drawing import drawing, drawing_worker
from tests.support.web.pictures import write_all

__all__ = ["browser", "drawing", "drawing_worker", "other", "provider", "running", "url"]


@pytest.fixture(scope="session")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write arrays of several formats."""
    root = tmp_path_factory.mktemp("pictures")
    write_all(root)
    return root


@pytest.fixture(scope="module")
def client(pictured: Path) -> Generator[httpx.Client]:
    """Serve them, one to one caller only, and a dataset that is down."""
    datasets = {each.name: DatasetSettings(url=str(each)) for each in pictured.iterdir()}
    datasets["cells"] = DatasetSettings(url=str(pictured / "volumes/cells"))
    datasets["private"] = DatasetSettings(url=str(pictured / "data"), read=("ana",))
    datasets["down"] = DatasetSettings(url="http://127.0.0.1:9/nothing")
    with client_of(Settings(datasets=datasets, callers={"ana": caller(TOKENS["ana"])})) as opened:
        yield opened
