"""Headers of answers from a repository, and the reads of the store that they take."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import pytest
import zarr
from pydantic import ByteSize

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.clients.icechunk.repositories import commit, create, migrate, write_kinds
from tests.clients.services import ask, connect
from tests.storage.faulty import FaultyServer, etag
from tests.support.serving import serving

LASTING: Final = "public, max-age=31536000, immutable"
BRIEF: Final = "public, max-age=7"
CHUNKS: Final = ("native/c/0", "inline/c/0", "sharded/c/0", "small/c/0")
LAST: Final = ("native/c/1", "inline/c/1", "sharded/c/3", "small/c/3")
CHUNK, NEIGHBOUR = "native/c/0", "native/c/1"
TTL_S: Final = 60.0
AT_ONCE_S: Final = 1e-6


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

    def change(self, name: str = "native") -> None:
        """Commit a change of the last chunk of an array, and nothing else of it."""

        def write(store: Any) -> None:
            zarr.open_array(store, path=name)[-1:] = 251

        commit(self.repo, "change", write)
        self.publish()

    def ask(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        """Ask for a key."""
        return ask(self.client, f"/em/{path}", method, **headers)

    def reads(self, path: str, status: int = 200, method: str = "GET", **headers: str) -> list[str]:
        """Ask for a key, and return the folders of the files that were read."""
        before = len(self.store.seen)
        answer = self.ask(path, method, **headers)
        assert answer.status_code == status, answer.text
        seen = self.store.seen[before:]
        assert all(each.method == "GET" and not each.query for each in seen)
        return [each.path.removeprefix("/bucket/em/").partition("/")[0] for each in seen]


@contextmanager
def serving_copy(
    faulty: FaultyServer, folder: Path, version: str, ttl_s: float, named: Any = "icechunk"
) -> Generator[Counted]:
    """Serve a repository over HTTP, from which nothing was read yet."""
    dataset = DatasetSettings(url=f"{faulty.url}/bucket/em", format=named, cache_control=BRIEF)
    cache = CacheSettings(chunk_bytes=ByteSize(0), ttl_s=ttl_s)
    repo = create(folder, version)
    commit(repo, "begin", write_kinds)
    repo.create_tag("v 1", repo.lookup_branch("main"))
    repo = migrate(repo, version)
    with serving(Settings(cache=cache, datasets={"em": dataset})) as url, connect(url) as client:
        counted = Counted(client, faulty, folder, repo)
        counted.publish()
        yield counted


@pytest.fixture
def counted(faulty: FaultyServer, tmp_path: Path, version: str) -> Generator[Counted]:
    """Serve a repository in each version, whose branches are believed for a time."""
    with serving_copy(faulty, tmp_path / "repo", version, TTL_S) as made:
        yield made


@pytest.fixture
def hasty(faulty: FaultyServer, tmp_path: Path, version: str) -> Generator[Counted]:
    """Serve it with hardly any time for which branches are believed."""
    with serving_copy(faulty, tmp_path / "repo", version, AT_ONCE_S) as made:
        yield made


def refs_read(version: str) -> list[str]:
    """Name the folders that refs are read from: in version 1 a ref is a file, too."""
    return ["repo", "refs"] if version == "v1" else ["repo"]


def test_headers(counted: Counted) -> None:
    """Snapshots and tags last, branches and absence do not; HEAD and 304 read no chunk."""
    snapshot_id = counted.repo.lookup_branch("main")
    controls = {
        f"@{snapshot_id}/": LASTING,
        "@tag.v%201/": LASTING,
        "@branch.main/": BRIEF,
        "": BRIEF,
    }
    for path in (*CHUNKS, "native/zarr.json", "zarr.json"):
        for ref, control in controls.items():
            assert counted.ask(f"{ref}{path}").headers["cache-control"] == control
        full = counted.ask(path)
        head = counted.ask(path, "HEAD")
        told = {name for name in full.headers if name not in {"date", "x-request-id"}}
        assert {name: head.headers[name] for name in told} == {n: full.headers[n] for n in told}
        assert counted.reads(path, method="HEAD") == []
        assert counted.reads(path, 304, if_none_match=full.headers["etag"]) == []
    for absent in ("@tag.none/zarr.json", "@tag.v%201/native/c/2", f"@{'0' * 20}/zarr.json"):
        answer = counted.ask(absent)
        assert (answer.status_code, answer.headers["cache-control"]) == (404, BRIEF)


def test_etag_outlives_a_commit(hasty: Counted) -> None:
    """It is the same below every ref, and after a commit that left the chunk's file alone.

    What was overwritten has another ETag, and the old one remains below the tag.
    """
    old = {path: hasty.ask(path) for path in (*CHUNKS, *LAST)}
    for name in ("native", "inline", "sharded", "small"):
        hasty.change(name)
    new = {path: hasty.ask(path) for path in old}

    for path, before in old.items():
        tagged = hasty.ask(f"@tag.v%201/{path}")
        assert tagged.content == before.content
        assert tagged.headers["etag"] == before.headers["etag"]
    for path in CHUNKS:
        assert new[path].content == old[path].content
    for path in ("native/c/0", "sharded/c/0"):
        assert new[path].headers["etag"] == old[path].headers["etag"]
    for path in LAST:
        assert new[path].content[-1] == 251
        assert new[path].headers["etag"] != old[path].headers["etag"]


def test_reads_of_chunks(counted: Counted, version: str) -> None:
    """Cold they take refs, snapshot, manifest and chunk; warm one read each, below any ref."""
    cold = [*refs_read(version), "snapshots", "manifests", "chunks"]
    assert counted.reads(CHUNK) == cold
    counted.reads(f"@tag.v%201/{NEIGHBOUR}")
    snapshot_id = counted.repo.lookup_branch("main")
    counted.change()

    for path in (CHUNK, NEIGHBOUR, f"@{snapshot_id}/{CHUNK}", f"@tag.v%201/{NEIGHBOUR}"):
        assert counted.reads(path) == ["chunks"]
    assert counted.ask(NEIGHBOUR).content == counted.ask(f"@tag.v%201/{NEIGHBOUR}").content


def test_reads_of_what_is_with_snapshot_and_manifest(counted: Counted) -> None:
    """Documents and absence take none, inline chunks their manifest, shards their index, once."""
    counted.reads("zarr.json")

    for name in ("native", "inline", "sharded"):
        assert counted.reads(f"{name}/zarr.json") == []
    for absent in ("native/c/2", "none/zarr.json", "native/c/00", "zarr.jso"):
        assert counted.reads(absent, status=404) == []
    assert counted.reads("sharded/c/0") == ["manifests", "chunks", "chunks"]
    assert counted.reads("sharded/c/1") == ["chunks"]
    assert counted.reads("sharded/c/2") == ["chunks", "chunks"]
    for path in ("inline/c/0", "small/c/0"):
        assert counted.reads(path) == ["manifests"]
        assert counted.reads(path) == []


def test_branch_is_asked_for_anew(hasty: Counted, version: str) -> None:
    """After its TTL a branch is revalidated, and a new commit is seen; a snapshot never is.

    Of version 1, whether the repository was migrated is.
    """
    snapshot = f"@{hasty.repo.lookup_branch('main')}"
    before = hasty.ask(NEIGHBOUR).content
    hasty.reads(NEIGHBOUR)
    seen = len(hasty.store.seen)
    assert hasty.reads(NEIGHBOUR) == [*refs_read(version), "chunks"]
    told = hasty.store.seen[seen:][-2]
    assert told.headers["If-None-Match"] == etag(hasty.store.objects[told.path])
    hasty.reads(f"{snapshot}/{NEIGHBOUR}")
    again = ["repo"] if version == "v1" else []
    assert hasty.reads(f"{snapshot}/{NEIGHBOUR}") == [*again, "chunks"]
    assert hasty.reads(f"{snapshot}/zarr.json") == again

    hasty.change()

    assert hasty.ask(NEIGHBOUR).content != before
    for ref in ("@tag.v%201", snapshot):
        assert hasty.ask(f"{ref}/{NEIGHBOUR}").content == before
    assert hasty.reads(NEIGHBOUR) == [*refs_read(version), "chunks"]


@pytest.mark.parametrize("ref", ["", "@"])
def test_markers_are_looked_for_once(faulty: FaultyServer, tmp_path: Path, ref: str) -> None:
    """With the format `auto` three more are read, but for a key that begins with a ref."""
    with serving_copy(faulty, tmp_path / "repo", "v2", TTL_S, "auto") as counted:
        ref = ref and f"@{counted.repo.lookup_branch('main')}/"
        others = set() if ref else {"info", "refs", "zarr.json"}
        reads = [*counted.reads(f"{ref}{CHUNK}"), *counted.reads(f"{ref}{NEIGHBOUR}")]

        needed = ["repo", "snapshots", "manifests", "chunks", "chunks"]
        assert [each for each in reads if each not in others] == needed
        more = [each for each in reads if each in others]  # some may be on the way still
        assert len(more) == len(set(more))
