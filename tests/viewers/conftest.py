"""The browser, the page of Neuroglancer in it, and the folder for pictures."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.support.lacking import lack
from tests.support.viewers.viewing import Neuroglancer, paging_client

_ROOT: Final = Path(__file__).parents[2]
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
REBOUND: Final = "rebound.example"
"""A host name that the browser resolves to this machine."""
_FEATURES: Final = (
    "AimEnabled",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
    "WebUIOmniboxAimPopup",
    "WebUIOmniboxPopup",
)
"""Those that Playwright disables, and pages of the address bar, which each window would load."""
_FLAGS: Final = (
    f"--disable-features={','.join(_FEATURES)}",
    "--disable-gpu-compositing",
    "--disable-quic",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@contextmanager
def launched() -> Generator[Browser]:
    """Run Chromium, which renders in software and reaches this machine only."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        lack("chromium is not installed")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=_FLAGS) as browser,
    ):
        yield browser


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
