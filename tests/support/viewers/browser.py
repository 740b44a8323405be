"""Chromium, which reaches this machine only."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from playwright.sync_api import Browser, sync_playwright

from tests.support.lacking import lack

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
