"""Programs that are not installed."""

import os
import shutil
from typing import NoReturn

import pytest


def lack(reason: str) -> NoReturn:
    """Skip the test, or fail it where `CI` is set."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def need(program: str) -> str:
    """Return the path of *program*, or skip the test."""
    return shutil.which(program) or lack(f"{program} is not installed")
