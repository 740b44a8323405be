"""A provider, a service where people sign in there, and their browsers; workers of pictures."""

from collections.abc import Generator

import httpx
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.support.auth.fixtures import browser, other, provider, running, url
from tests.support.auth.people import TOKENS, caller
from tests.support.serving import client_of
from tests.support.web.drawing import drawing_ahead
from tests.support.web.pictures import write_all

__all__ = ["browser", "other", "provider", "running", "url"]


@pytest.fixture(scope="session", autouse=True)
def _drawing() -> Generator[None]:
    with drawing_ahead():
        yield


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve arrays of several formats, one dataset to one caller only, and one that is down."""
    root = tmp_path_factory.mktemp("pictures")
    write_all(root)
    datasets = {each.name: DatasetSettings(url=str(each)) for each in root.iterdir()}
    datasets["cells"] = DatasetSettings(url=str(root / "volumes/cells"))
    datasets["private"] = DatasetSettings(url=str(root / "data"), read=("ana",))
    datasets["down"] = DatasetSettings(url="http://127.0.0.1:9/nothing")
    with client_of(Settings(datasets=datasets, callers={"ana": caller(TOKENS["ana"])})) as opened:
        yield opened
