"""Gateways that tests kill, and stores with a proxy before them that goes wrong."""

import pytest

from tests.support.gateways import Start, starting


@pytest.fixture(scope="session")
def start() -> Start:
    """Start services faster than their command does."""
    return starting()
