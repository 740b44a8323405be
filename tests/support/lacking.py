"""Programs that are not installed."""

import os
from typing import NoReturn

import pytest


def lack(reason: str) -> NoReturn:
    """Skip the test, or fail it where `CI` is set."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
