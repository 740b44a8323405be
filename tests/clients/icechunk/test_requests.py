"""Number of reads that the service makes for a repository."""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import pytest
import zarr
from pydantic import ByteSize

from app.settings import CacheSettings, DatasetSettings, Settings
from tests.clients.icechunk.repositories import commit, create, migrate, write_kinds
from tests.serving import serving
from tests.storage.faulty import FaultyServer, etag

TTL_S: Final = 60.0
CHUNK, NEIGHBOUR = "native/c/0", "native/c/1"


@dataclass
class Counted:
    """The service without a chunk cache, its store, and the repository that is copied there."""

    client: httpx.Client
    store: FaultyServer
    folder: Path
    repo: icechunk.Repository

    def publish(self) -> None:
        """Copy what the library has written since."""
        for file in self.folder.rglob("*"):
            key = f"em/{file.relative_to(self.folder)}"
            if file.is_file() and self.store.objects.get(f"/bucket/{key}") != file.read_bytes():
                self.store.put("bucket", key, file.read_bytes())

    def reads(self, path: str, status: int = 200, **headers: str) -> list[str]:
        """GET *path*, and return the folders of the files that were read."""
        before = len(self.store.seen)
        answer = self.client.get(f"/em/{path}", headers=headers)
        assert answer.status_code == status, answer.text
        seen = self.store.seen[before:]
        assert all(each.method == "GET" and not each.query for each in seen)
        return [each.path.removeprefix("/bucket/em/").partition("/")[0] for each in seen]


def _change(store: Any) -> None:
    zarr.open_array(store, path="native")[150] = 77


def _serve(
    faulty: FaultyServer, folder: Path, version: str, ttl_s: float, named: Any = "icechunk"
) -> Generator[Counted]:
    settings = Settings(
        cache=CacheSettings(chunk_bytes=ByteSize(0), ttl_s=ttl_s),
        datasets={"em": DatasetSettings(url=f"{faulty.url}/bucket/em", format=named)},
    )
    repo = create(folder, version)
    commit(repo, "begin", lambda store: write_kinds(store, whole=False))
    repo.create_tag("v1", repo.lookup_branch("main"))
    repo = migrate(repo, version)
    with serving(settings) as url, httpx.Client(base_url=url, timeout=20) as client:
        counted = Counted(client, faulty, folder, repo)
        counted.publish()
        yield counted


@pytest.fixture
def counted(faulty: FaultyServer, tmp_path: Path, version: str) -> Generator[Counted]:
    """Serve a repository over HTTP, from which nothing was read yet."""
    yield from _serve(faulty, tmp_path / "repo", version, TTL_S)


@pytest.fixture
def hasty(faulty: FaultyServer, tmp_path: Path, version: str) -> Generator[Counted]:
    """Serve it with hardly any time for which branches are believed."""
    yield from _serve(faulty, tmp_path / "repo", version, 1e-6)


def expected(version: str, *more: str) -> list[str]:
    """Name the folders that a cold read takes from: in version 1 a ref is a file, too."""
    return ["repo", *(["refs"] if version == "v1" else []), *more]


def test_cold_chunk(counted: Counted, version: str) -> None:
    """It takes the refs, the snapshot, the manifest and the chunk, once each, and no listing."""
    assert counted.reads(CHUNK) == expected(version, "snapshots", "manifests", "chunks")


def test_warm_chunks(counted: Counted) -> None:
    """They take one read each, below any ref."""
    snapshot_id = counted.repo.lookup_branch("main")
    counted.reads(CHUNK)
    counted.reads(f"@tag.v1/{NEIGHBOUR}")

    for path in (CHUNK, NEIGHBOUR, f"@{snapshot_id}/{CHUNK}", f"@tag.v1/{NEIGHBOUR}"):
        assert counted.reads(path) == ["chunks"]


def test_documents_come_with_the_snapshot(counted: Counted) -> None:
    """Documents and their absence take no further reads."""
    counted.reads("zarr.json")

    for name in ("native", "inline", "sharded"):
        assert counted.reads(f"{name}/zarr.json") == []
    for absent in ("native/c/2", "none/zarr.json", "native/c/00", "zarr.jso"):
        assert counted.reads(absent, status=404) == []


def test_sharded_chunk(counted: Counted) -> None:
    """Its shard's index is read once; then it is one read of one object."""
    counted.reads("zarr.json")

    assert counted.reads("sharded/c/0") == ["manifests", "chunks", "chunks"]
    assert counted.reads("sharded/c/1") == ["chunks"]
    assert counted.reads("sharded/c/0") == ["chunks"]
    assert counted.reads("sharded/c/2") == ["chunks", "chunks"]
    assert counted.reads("sharded/c/3", status=404) == []


@pytest.mark.parametrize("path", ["inline/c/0", "small/c/0"])
def test_inline_chunk(counted: Counted, path: str) -> None:
    """It comes with its manifest, also where it is in an inline shard."""
    counted.reads("zarr.json")

    assert counted.reads(path) == ["manifests"]
    assert counted.reads(path) == []


def test_snapshots_are_known_for_ever(hasty: Counted, version: str) -> None:
    """After any time what an id leads to is not asked for again.

    Of version 1, whether the repository was migrated is.
    """
    ref = f"@{hasty.repo.lookup_branch('main')}"
    again = ["repo"] if version == "v1" else []
    hasty.reads(f"{ref}/{CHUNK}")
    hasty.reads(f"{ref}/sharded/c/0")
    hasty.reads(f"{ref}/inline/c/0")

    assert hasty.reads(f"{ref}/{CHUNK}") == [*again, "chunks"]
    assert hasty.reads(f"{ref}/{NEIGHBOUR}") == [*again, "chunks"]
    assert hasty.reads(f"{ref}/sharded/c/1") == [*again, "chunks"]
    assert hasty.reads(f"{ref}/inline/c/1") == again
    assert hasty.reads(f"{ref}/zarr.json") == again


def test_branch_is_asked_for_anew(hasty: Counted, version: str) -> None:
    """After its TTL a branch is revalidated, and a new commit is seen."""
    before = hasty.client.get(f"/em/{NEIGHBOUR}").content
    hasty.reads(NEIGHBOUR)
    seen = len(hasty.store.seen)
    assert hasty.reads(NEIGHBOUR) == expected(version, "chunks")
    told = hasty.store.seen[seen:][-2]
    assert told.headers["If-None-Match"] == etag(hasty.store.objects[told.path])

    commit(hasty.repo, "change", _change)
    hasty.publish()

    assert hasty.client.get(f"/em/{NEIGHBOUR}").content != before
    assert hasty.client.get(f"/em/@tag.v1/{NEIGHBOUR}").content == before
    assert hasty.reads(NEIGHBOUR) == expected(version, "chunks")


def test_branch_is_believed_for_a_time(counted: Counted) -> None:
    """Within the TTL a new commit is not seen."""
    before = counted.client.get(f"/em/{NEIGHBOUR}").content
    commit(counted.repo, "change", _change)
    counted.publish()

    assert counted.reads(NEIGHBOUR) == ["chunks"]
    assert counted.client.get(f"/em/{NEIGHBOUR}").content == before


def test_migration_is_seen(faulty: FaultyServer, tmp_path: Path) -> None:
    """A repository that is migrated while it is served goes on to be served."""
    for hasty in _serve(faulty, tmp_path / "repo", "v1", 1e-6):
        before = hasty.client.get(f"/em/{NEIGHBOUR}").content
        repo = migrate(hasty.repo, "migrated")
        commit(repo, "change", _change)
        faulty.objects.clear()
        hasty.publish()

        assert hasty.client.get(f"/em/@tag.v1/{NEIGHBOUR}").content == before
        assert hasty.client.get(f"/em/{NEIGHBOUR}").content[50] == 77


def test_other_formats_are_looked_for_first(faulty: FaultyServer, tmp_path: Path) -> None:
    """With the format `auto` two more markers are read, and cached."""
    for counted in _serve(faulty, tmp_path / "repo", "v2", TTL_S, "auto"):
        cold = counted.reads(CHUNK)

        assert cold == ["zarr.json", "info", "repo", "snapshots", "manifests", "chunks"]
        assert counted.reads(NEIGHBOUR) == ["chunks"]


def test_a_ref_tells_the_format(faulty: FaultyServer, tmp_path: Path) -> None:
    """With the format `auto`, a key that begins with a ref needs no other marker."""
    for hasty in _serve(faulty, tmp_path / "repo", "v2", 1e-6, "auto"):
        ref = f"@{hasty.repo.lookup_branch('main')}"

        assert hasty.reads(f"{ref}/{CHUNK}") == ["repo", "snapshots", "manifests", "chunks"]
        assert hasty.reads(f"{ref}/{NEIGHBOUR}") == ["chunks"]
