"""The library expires snapshots and collects garbage while sessions of the service go on."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import icechunk
import pytest
import zarr

from tests.sessions import Replicas, replicas

_NBYTES = 1024


def _commit(services: Replicas, value: int) -> str:
    session = services.repo.writable_session("main")
    root = zarr.open_group(session.store)
    array = root.require_array(
        "a", shape=(4 * _NBYTES,), chunks=(_NBYTES,), dtype="u1", compressors=None
    )
    array[:_NBYTES] = value
    return session.commit(f"commit {value}")


@pytest.mark.parametrize("is_old", [False, True])
def test_what_sessions_wrote_stays_while_it_is_younger_than_the_limit(
    tmp_path: Path, *, is_old: bool
) -> None:
    """Garbage collection with a limit above the longest life of a session spares its chunks."""
    folder = tmp_path / "repo"
    with replicas(icechunk.local_filesystem_storage(str(folder)), folder.as_uri()) as services:
        for value in (1, 2, 3):
            _commit(services, value)
        abandoned = folder / "chunks" / "00000000000000000000"
        abandoned.write_bytes(b"garbage")
        if is_old:
            long_ago = (datetime.now(UTC) - timedelta(days=9)).timestamp()
            os.utime(abandoned, (long_ago, long_ago))
        session_id = services.begin()
        assert services.put(session_id, "a/c/2", bytes([5]) * _NBYTES).status_code == 200
        limit = datetime.now(UTC) - timedelta(days=8)

        services.repo.expire_snapshots(limit)
        services.repo.garbage_collect(limit)

        assert abandoned.exists() is not is_old
        services.committed(session_id, at=1)
        assert services.group()["a"][2 * _NBYTES] == 5


def test_a_session_whose_first_snapshot_has_expired_conflicts_with_later_commits(
    tmp_path: Path,
) -> None:
    """The changes since are unknown."""
    folder = tmp_path / "repo"
    with replicas(icechunk.local_filesystem_storage(str(folder)), folder.as_uri()) as services:
        _commit(services, 1)
        session_id = services.begin()
        services.put(session_id, "a/c/2", bytes([5]) * _NBYTES)
        for value in (2, 3):
            _commit(services, value)
        services.repo.expire_snapshots(datetime.now(UTC) + timedelta(seconds=1))

        answer = services.clients[0].post(
            f"/api/datasets/data/sessions/{session_id}/commit", json={"message": "late"}
        )

        assert answer.status_code == 409
        assert answer.json()["conflicts"][0]["kind"] == "parent_not_in_history"
