"""Store that writers begin with."""

import pytest

from shardgate.storage.memory import MemoryStore
from tests.write.writers import filled


@pytest.fixture
def memory() -> MemoryStore:
    """Put a sharded array without any chunk into a store, and an object beside it."""
    return filled()
