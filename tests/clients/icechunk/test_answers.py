"""Headers of answers from a repository, and the reads of the store that they take."""

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
from app.storage.contract import ObjectStore
from tests.clients.icechunk.repositories import VERSIONS, commit, create, migrate, write_kinds
from tests.clients.services import Watched, ask, connect
from tests.serving import serving
from tests.storage.faulty import FaultyServer, etag

LASTING: Final = "public, max-age=31536000, immutable"
BRIEF: Final = "public, max-age=7"
PATHS: Final = ("native/c/0", "inline/c/0", "sharded/c/0", "small/c/0", "native/zarr.json")
CHUNKS: Final = PATHS[:-1]
LAST: Final = ("native/c/1", "inline/c/1", "sharded/c/3", "small/c/3")


@dataclass
class Served:
    """The service, what of the store it reads, and the snapshot that `main` and a tag are at."""

    client: httpx.Client
    reads: list[str]
    snapshot_id: str
    commit: Any

    def chunks_read(self) -> int:
        """Count reads of files of chunks."""
        return sum("/chunks/" in key for key in self.reads)


def _change_others(store: Any) -> None:
    """Change the last chunk of every array, and nothing in its first shard."""
    for name in ("native", "inline", "sharded", "small"):
        zarr.open_array(store, path=name)[-1:] = 251


@pytest.fixture(scope="module", params=VERSIONS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    """Serve a repository without a chunk cache; branches are asked for at once."""
    folder = tmp_path_factory.mktemp("repository")
    repo = create(folder, request.param)
    first = commit(repo, "begin", write_kinds)
    repo.create_tag("v 1", first)
    repo = migrate(repo, request.param)
    reads: list[str] = []
    dataset = DatasetSettings(url=str(folder), format="icechunk", cache_control=BRIEF)
    settings = Settings.model_validate(
        {"cache": {"chunk_bytes": 0, "ttl_s": 1e-6}, "datasets": {"em": dataset}}
    )

    def watch(store: ObjectStore) -> ObjectStore:
        return Watched(store, lambda ref: reads.append(ref.key))

    with serving(settings, wrap=watch) as url, connect(url) as client:
        yield Served(client, reads, first, lambda: commit(repo, "change", _change_others))


def test_what_lasts_says_so(served: Served) -> None:
    """Below a snapshot's id and below tags answers are immutable, below branches they are not."""
    for path in (*PATHS, "zarr.json"):
        for ref, control in {
            f"@{served.snapshot_id}": LASTING,
            "@tag.v%201": LASTING,
            "@branch.main": BRIEF,
        }.items():
            assert ask(served.client, f"/em/{ref}/{path}").headers["cache-control"] == control
        assert ask(served.client, f"/em/{path}").headers["cache-control"] == BRIEF


def test_absence_does_not_last(served: Served) -> None:
    """A 404 is never immutable: the tag may be created."""
    for path in ("@tag.none/zarr.json", "@tag.v%201/native/c/2", "@0123456789ABCDEFGHJ0/zarr.json"):
        answer = ask(served.client, f"/em/{path}")
        assert (answer.status_code, answer.headers["cache-control"]) == (404, BRIEF)


@pytest.mark.parametrize("path", PATHS)
def test_head_and_not_modified_read_no_chunk(served: Served, path: str) -> None:
    """HEAD and If-None-Match need only the manifest, and the index of a shard."""
    full = ask(served.client, f"/em/{path}")
    before = served.chunks_read()
    head = ask(served.client, f"/em/{path}", "HEAD")
    told = {name for name in full.headers if name not in {"date", "x-request-id"}}
    same = ask(served.client, f"/em/{path}", if_none_match=full.headers["etag"])

    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == full.headers["etag"]
    assert head.status_code == 200
    assert {name: head.headers[name] for name in told} == {n: full.headers[n] for n in told}
    assert served.chunks_read() == before


@pytest.mark.parametrize("path", PATHS)
def test_range_of_a_chunk(served: Served, path: str) -> None:
    """A part of a chunk is that part, with the ETag of the whole."""
    full = ask(served.client, f"/em/{path}")
    for asked, part in {
        "bytes=1-2": full.content[1:3],
        "bytes=1-": full.content[1:],
        "bytes=-1": full.content[-1:],
        "bytes=0-99999": full.content,
    }.items():
        answer = ask(served.client, f"/em/{path}", range=asked)
        assert (answer.status_code, answer.content) == (206, part)
        assert answer.headers["etag"] == full.headers["etag"]
        assert answer.headers["content-range"].endswith(f"/{len(full.content)}")
    beyond = ask(served.client, f"/em/{path}", range="bytes=99999-")
    assert beyond.status_code == 416


def test_etag_outlives_a_commit(served: Served) -> None:
    """It is the same below every ref, and after a commit that left the chunk's file alone.

    What was overwritten has another ETag, and the old one remains below the tag.
    """
    old = {path: ask(served.client, f"/em/{path}") for path in (*CHUNKS, *LAST)}
    served.commit()
    new = {path: ask(served.client, f"/em/{path}") for path in old}
    tagged = {path: ask(served.client, f"/em/@tag.v%201/{path}") for path in old}

    for path, before in old.items():
        assert tagged[path].content == before.content
        assert tagged[path].headers["etag"] == before.headers["etag"]
    for path in CHUNKS:
        assert new[path].content == old[path].content
    for path in ("native/c/0", "sharded/c/0"):
        assert new[path].headers["etag"] == old[path].headers["etag"]
    for path in LAST:
        assert new[path].content[-1] == 251
        assert new[path].headers["etag"] != old[path].headers["etag"]


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
