"""A full disk refuses writes and damages nothing; writes succeed again when there is room."""

import json
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.support.files import read_files
from tests.support.formats.zarr.building import LITTLE, array_metadata, sharding
from tests.support.serving import client_of

CHUNK: Final = 256
OLD, NEW = b"1" * CHUNK, b"2" * CHUNK
GROUP: Final = {"zarr_format": 3, "node_type": "group", "attributes": {}}
SHARDED: Final = array_metadata([1024], [512], [sharding([CHUNK], [LITTLE])])
PLAIN: Final = array_metadata([1024], [CHUNK], [LITTLE])


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """Mount a file system of 256 KiB."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def client(disk: Path) -> Generator[httpx.Client]:
    """Serve an array with a chunk, and an empty repository, on the small disk."""
    datasets = {}
    for name in ("array", "repo"):
        (disk / name).mkdir()
        datasets[name] = DatasetSettings(url=(disk / name).as_uri(), writable=True)
    (disk / "array" / "zarr.json").write_text(json.dumps(SHARDED))
    with client_of(Settings(datasets=datasets)) as opened:
        assert opened.put("/array/c/0", content=OLD).is_success
        assert opened.post("/api/datasets", json={"name": "repo"}).is_success
        yield opened


@contextmanager
def full(disk: Path) -> Generator[None]:
    """Fill the disk for the duration of the block."""
    left = os.statvfs(disk)
    fill = disk / "fill"
    fill.write_bytes(bytes(left.f_bavail * left.f_frsize))
    try:
        yield
    finally:
        fill.unlink()


def files(disk: Path) -> dict[str, bytes]:
    """Return the bytes of all files on the disk."""
    return {name: data for name, data in read_files(disk).items() if name != "fill"}


def begin(client: httpx.Client) -> str:
    """Begin a session with an array, one of whose chunks is written."""
    session_id: str = client.post("/api/datasets/repo/sessions").json()["session_id"]
    base = f"/repo/@session.{session_id}"
    assert client.put(f"{base}/zarr.json", json=GROUP).is_success
    assert client.put(f"{base}/t/zarr.json", json=PLAIN).is_success
    assert client.put(f"{base}/t/c/0", content=OLD).is_success
    return session_id


def demand_refused(answer: httpx.Response) -> None:
    """Assert a 503 with Retry-After whose detail names the full disk."""
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "No space left on device" in answer.json()["detail"]


@pytest.mark.parametrize("key", ["c/0", "c/1", "object", "new/folder/object", "big"])
def test_write_to_a_full_disk_is_refused_with_503(
    disk: Path, client: httpx.Client, key: str
) -> None:
    """A write to a full disk fails with 503 and changes no file; it succeeds with room."""
    data = bytes(100_000) if key == "big" else NEW
    before = files(disk)
    with full(disk):
        demand_refused(client.put(f"/array/{key}", content=data))
        assert client.get("/array/c/0").content in (OLD, NEW)
    assert files(disk) == before

    assert client.put(f"/array/{key}", content=data).is_success
    assert client.get(f"/array/{key}").content == data
    assert client.delete(f"/array/{key}").is_success
    assert client.put("/array/c/0", content=OLD).is_success


def test_full_disk_serves_reads_and_deletions(disk: Path, client: httpx.Client) -> None:
    """Reads and deletions of objects on a full disk succeed."""
    client.put("/array/object", content=NEW)
    with full(disk):
        assert client.get("/array/object").content == NEW
        assert client.delete("/array/object").status_code == 204
        assert client.get("/array/object").status_code == 404


def test_commit_to_a_full_disk_is_refused_with_503(disk: Path, client: httpx.Client) -> None:
    """A commit to a full disk fails with 503; with room, its session is committed."""
    session_id = begin(client)
    commit = f"/api/datasets/repo/sessions/{session_id}/commit"
    with full(disk):
        demand_refused(client.put(f"/repo/@session.{session_id}/t/c/1", content=NEW))
        demand_refused(client.post(commit, json={"message": "no room"}))
        assert client.get("/repo/t/c/0").status_code == 404

    assert client.put(f"/repo/@session.{session_id}/t/c/1", content=NEW).is_success
    assert client.post(commit, json={"message": "room"}).status_code == 201
    assert client.get("/repo/t/c/0").content == OLD
    assert client.get("/repo/t/c/1").content == NEW
    history = client.get("/api/datasets/repo/history").json()["history"]
    assert "no room" not in [each["message"] for each in history]
