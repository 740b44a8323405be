"""Logging as a process begins with, whatever services in it have configured."""

import logging
from collections.abc import Generator

import pytest

from app.seeing import failures


@pytest.fixture(autouse=True)
def unconfigured() -> Generator[None]:
    """Let nothing be withheld by level or filter."""
    ours, seldom = logging.getLogger("app"), logging.getLogger(failures.__name__)
    level, filters = ours.level, seldom.filters[:]
    ours.setLevel(logging.NOTSET)
    seldom.filters.clear()
    yield
    ours.setLevel(level)
    seldom.filters[:] = filters
