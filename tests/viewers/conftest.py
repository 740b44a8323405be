"""The browser, the page of Neuroglancer in it, and the folder for pictures."""

import os
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser

from tests.support.documents import ROOT
from tests.support.viewers.browser import launched
from tests.support.viewers.viewing import Neuroglancer, paging_client
from tests.support.web.drawing import drawing, drawing_worker

__all__ = ["drawing", "drawing_worker"]


class _Shared:
    """One browser, with one page of Neuroglancer, for all tests of this folder in a row."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._browser: Browser | None = None
        self._neuroglancer: Neuroglancer | None = None

    def browser(self) -> Browser:
        """Return the browser, which is launched if it does not run."""
        if self._browser is None:
            self._browser = self._stack.enter_context(launched())
        return self._browser

    def neuroglancer(self, pictures: Path) -> Neuroglancer:
        """Return the page of Neuroglancer, which is opened if it is not there."""
        if self._neuroglancer is None:
            browser = self.browser()
            url = self._stack.enter_context(paging_client())
            page = closing(Neuroglancer(browser, url, pictures))
            self._neuroglancer = self._stack.enter_context(page)
        return self._neuroglancer

    def close(self) -> None:
        """End the browser."""
        self._browser = None
        self._neuroglancer = None
        self._stack.close()


_shared: Final = _Shared()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None]:
    """End the browser before tests of other folders: its event loop runs in their thread."""
    try:
        yield
    finally:
        if nextitem is None or nextitem.path.parent != Path(__file__).parent:
            _shared.close()


@pytest.fixture(scope="module")
def browser() -> Browser:
    """Run Chromium."""
    return _shared.browser()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for pictures: where `CI` is set, one that outlives the run."""
    if not os.environ.get("CI"):
        return tmp_path_factory.mktemp("pictures")
    folder = ROOT / "build/pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def neuroglancer(pictures: Path) -> Neuroglancer:
    """Serve the page of Neuroglancer to the browser."""
    return _shared.neuroglancer(pictures)
