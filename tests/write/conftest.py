"""The store that tests of writers begin with."""

import pytest

from shardgate.storage.memory import MemoryStore
from tests.support.write.writers import filled


@pytest.fixture
def memory() -> MemoryStore:
    """Return a store with a sharded array without chunks, and an object beside it."""
    return filled()
