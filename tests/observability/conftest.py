"""Logging as a process begins with, whatever other tests have configured."""

import logging
from collections.abc import Generator

import pytest


@pytest.fixture(autouse=True)
def unconfigured() -> Generator[None]:
    """Remove levels and filters for the test."""
    ours, failures = logging.getLogger("shardgate"), logging.getLogger("shardgate.failures")
    level, filters = ours.level, failures.filters[:]
    ours.setLevel(logging.NOTSET)
    failures.filters.clear()
    yield
    ours.setLevel(level)
    failures.filters[:] = filters
