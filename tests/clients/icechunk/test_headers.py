"""Headers, conditions and ranges of documents and chunks of a repository."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest
import zarr

from app.settings import DatasetSettings, Settings
from app.storage.contract import ObjectStore
from tests.clients.asking import Watched, ask, connect
from tests.clients.icechunk.repositories import VERSIONS, commit, create, migrate, write_kinds
from tests.serving import serving

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
