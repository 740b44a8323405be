"""Fixtures: a provider, a service where people sign in there, and their browsers."""

from collections.abc import Generator

import pytest

from tests.support.auth.browsing import Browser, settings
from tests.support.auth.provider import Provider, providing
from tests.support.serving import serving


@pytest.fixture(scope="module")
def running() -> Generator[Provider]:
    """Run a provider."""
    with providing() as provider:
        yield provider


@pytest.fixture
def provider(running: Provider) -> Generator[Provider]:
    """Return the provider, which follows the specifications."""
    yield running
    running.reset()


@pytest.fixture(scope="module")
def url(running: Provider, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve the datasets."""
    with serving(settings(running, tmp_path_factory.mktemp("login"))) as url:
        yield url


@pytest.fixture
def browser(provider: Provider, url: str) -> Generator[Browser]:
    """Open a browser without cookies."""
    browser = Browser(url)
    with browser.client:
        yield browser


@pytest.fixture
def other(provider: Provider, url: str) -> Generator[Browser]:
    """Open a browser of somebody else."""
    browser = Browser(url)
    with browser.client:
        yield browser
