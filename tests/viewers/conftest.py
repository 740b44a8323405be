"""The browser, the page of Neuroglancer in it, and the folder for pictures."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser

from tests.support.viewers.browser import launched
from tests.support.viewers.viewing import Neuroglancer, paging_client

_ROOT: Final = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    """Run Chromium for the tests of a file."""
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for pictures: where `CI` is set, one that outlives the run."""
    if not os.environ.get("CI"):
        return tmp_path_factory.mktemp("pictures")
    folder = _ROOT / "build/pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def neuroglancer(browser: Browser, pictures: Path) -> Generator[Neuroglancer]:
    """Serve the page of Neuroglancer to the browser."""
    with paging_client() as url:
        yield Neuroglancer(browser, url, pictures)
