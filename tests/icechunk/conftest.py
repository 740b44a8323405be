"""The repository that tests of sessions start from."""

from collections.abc import Mapping

import pytest

from tests.support.icechunk.sessions.replicas import files_of_repository


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Write a repository once."""
    return files_of_repository(tmp_path_factory.mktemp("sessions") / "repo")
