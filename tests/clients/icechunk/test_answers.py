"""Response headers of a repository, and the reads of the store that each request takes."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import pytest
import zarr

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.support.clients.icechunk.repositories import commit, create, migrate, write_kinds
from tests.support.clients.services import ask, connect
from tests.support.files import read_files
from tests.support.serving import serving
from tests.support.storage.faulty import FaultyServer, etag

LASTING: Final = "public, max-age=31536000, immutable"
BRIEF: Final = "public, max-age=7"
CHUNKS: Final = ("native/c/0", "inline/c/0", "sharded/c/0", "small/c/0")
LAST: Final = ("native/c/1", "inline/c/1", "sharded/c/3", "small/c/3")
CHUNK, NEIGHBOUR = "native/c/0", "native/c/1"
TTL_S: Final = 60.0
AT_ONCE_S: Final = 1e-6


@dataclass
class Counted:
    """The service without a chunk cache, before a server that records its requests."""

    client: httpx.Client
    store: FaultyServer
    folder: Path
    repo: icechunk.Repository

    def publish(self) -> None:
        """Copy new and changed files of the repository to the server."""
        for name, data in read_files(self.folder).items():
            if self.store.objects.get(f"/bucket/em/{name}") != data:
                self.store.put("bucket", f"em/{name}", data)

    def change(self, name: str = "native") -> None:
        """Commit a change of the last chunk of an array only."""

        def write(store: Any) -> None:
            zarr.open_array(store, path=name)[-1:] = 251

        commit(self.repo, "change", write)
        self.publish()

    def ask(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        """Send a request for a key."""
        return ask(self.client, f"/em/{path}", method, **headers)

    def reads(self, path: str, status: int = 200, method: str = "GET", **headers: str) -> list[str]:
        """Send a request for a key; return the folders of the files that it read."""
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
    """Serve a new repository over HTTP with empty caches."""
    dataset = DatasetSettings(url=f"{faulty.url}/bucket/em", format=named, cache_control=BRIEF)
    cache = CacheSettings(chunk_bytes=0, ttl_s=ttl_s)
    repo = create(folder, version)
    commit(repo, "begin", write_kinds)
    repo.create_tag("v 1", repo.lookup_branch("main"))
    repo = migrate(repo, version)
    unstored = dataset.model_copy(update={"cache_control": "public, No-Store"})
    datasets = {"em": dataset, "unstored": unstored}
    with serving(Settings(cache=cache, datasets=datasets)) as url, connect(url) as client:
        counted = Counted(client, faulty, folder, repo)
        counted.publish()
        yield counted


differing = pytest.mark.parametrize(
    "version", ["v1", "v2", pytest.param("migrated", marks=pytest.mark.soak)]
)


@pytest.fixture
def version() -> str:
    """Return the version of a repository; tests of what differs take others too."""
    return "v2"


@pytest.fixture
def counted(faulty: FaultyServer, tmp_path: Path, version: str) -> Generator[Counted]:
    """Serve a repository with a branch TTL of 60 s."""
    with serving_copy(faulty, tmp_path / "repo", version, TTL_S) as made:
        yield made


@pytest.fixture
def hasty(faulty: FaultyServer, tmp_path: Path, version: str) -> Generator[Counted]:
    """Serve a repository with hardly any branch TTL."""
    with serving_copy(faulty, tmp_path / "repo", version, AT_ONCE_S) as made:
        yield made


def refs_read(version: str) -> list[str]:
    """Return the folders that a ref is read from: in version 1 it is a file of its own."""
    return ["repo", "refs"] if version == "v1" else ["repo"]


def test_snapshots_and_tags_are_immutable_and_branches_are_not(counted: Counted) -> None:
    """Cache-Control is immutable for snapshots and tags, brief for branches and absent keys."""
    snapshot_id = counted.repo.lookup_branch("main")
    controls = {f"@{snapshot_id}/": LASTING, "@tag.v%201/": LASTING}
    controls |= {"@branch.main/": BRIEF, "": BRIEF}
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
        assert answer.status_code == 404
        assert answer.headers["cache-control"] == f"{BRIEF}, must-revalidate"


def test_snapshot_that_no_cache_may_store_is_not_immutable(counted: Counted) -> None:
    """Where `cache_control` says no-store, it holds for snapshots too."""
    answer = ask(counted.client, "/unstored/@tag.v%201/native/c/0")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "public, No-Store")


def test_etag_outlives_a_commit(hasty: Counted) -> None:
    """A chunk keeps its ETag below every ref and across commits that do not change it."""
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


@differing
def test_warm_chunk_takes_one_read(counted: Counted, version: str) -> None:
    """A cold chunk takes reads of ref, snapshot, manifest and chunk; a warm one a single read."""
    cold = [*refs_read(version), "snapshots", "manifests", "chunks"]
    assert counted.reads(CHUNK) == cold
    counted.reads(f"@tag.v%201/{NEIGHBOUR}")
    snapshot_id = counted.repo.lookup_branch("main")
    counted.change()

    for path in (CHUNK, NEIGHBOUR, f"@{snapshot_id}/{CHUNK}", f"@tag.v%201/{NEIGHBOUR}"):
        assert counted.reads(path) == ["chunks"]
    assert counted.ask(NEIGHBOUR).content == counted.ask(f"@tag.v%201/{NEIGHBOUR}").content


def test_documents_and_inline_chunks_take_no_read_of_their_own(counted: Counted) -> None:
    """Documents and absence take no read; inline chunks and shard indexes are read once."""
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


@differing
def test_branch_is_revalidated_after_its_ttl(hasty: Counted, version: str) -> None:
    """An expired branch is revalidated and shows a new commit; tags and snapshots are not.

    In version 1 a snapshot takes one read that finds a migration.
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
def test_format_detection_reads_markers_once(
    faulty: FaultyServer, tmp_path: Path, ref: str
) -> None:
    """The format `auto` reads each other marker once, and none for a key below a snapshot."""
    with serving_copy(faulty, tmp_path / "repo", "v2", TTL_S, "auto") as counted:
        ref = ref and f"@{counted.repo.lookup_branch('main')}/"
        others = set() if ref else {"info", "refs", "zarr.json"}
        reads = [*counted.reads(f"{ref}{CHUNK}"), *counted.reads(f"{ref}{NEIGHBOUR}")]

        needed = ["repo", "snapshots", "manifests", "chunks", "chunks"]
        assert [each for each in reads if each not in others] == needed
        more = [each for each in reads if each in others]  # some may be on the way still
        assert len(more) == len(set(more))
