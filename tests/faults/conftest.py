"""Gateways that tests kill, and stores with a proxy before them that goes wrong."""

from collections.abc import Generator

import pytest

from tests.gateways import Start, forking


@pytest.fixture(scope="session")
def start() -> Generator[Start]:
    """Start services faster than their command does."""
    with forking() as ready:
        yield ready
