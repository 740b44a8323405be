"""Below `@sharded` arrays of repositories and sessions have the chunks that the library stores."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import icechunk
import numpy as np
import pytest
import zarr

from tests.support.clients.icechunk.library import (
    compare_chunks,
    nodes_of,
    refs_of,
    without_members,
)
from tests.support.clients.icechunk.repositories import storage
from tests.support.clients.reading import OPENERS, open_tensorstore
from tests.support.clients.services import connect, sizes_of
from tests.support.clients.writing import same
from tests.support.deferred import Deferred
from tests.support.sessions import Replicas, replicas
from tests.support.writable_repositories import new_place

xarray: Any = Deferred("xarray")

ARRAY: Final = "index/tensorstore_end_little_plain"


@pytest.mark.parametrize("name", ["placed/v2", pytest.param("eventful/v1", marks=pytest.mark.soak)])
def test_shards_of_every_snapshot_equal_those_of_the_library(
    local: str, bucket: Path, name: str
) -> None:
    """Documents, shards and listed sizes of each snapshot below `@sharded` are the library's."""
    repo = icechunk.Repository.open(storage(bucket / name))
    by_snapshot = {each[1].snapshot_id: each for each in refs_of(repo, bucket / name)}
    with connect(local) as client:
        for ref, session in by_snapshot.values():
            base = f"/bucket/{name}/{ref}/@sharded"
            sizes = dict[str, int]()
            for node in nodes_of(session):
                document = client.get(f"{base}/{node.key('zarr.json')}")
                if node.path:
                    assert document.content == node.stored
                else:
                    assert without_members(document.json()) == without_members(node.document)
                compare_chunks(client, base, node)
                sizes[node.key("zarr.json")] = len(document.content)
                sizes |= {node.key(key): len(data) for key, data in node.chunks.items() if data}
            assert sizes_of(client, "bucket", f"{name}/{ref}/@sharded/") == sizes


def test_sharded_before_a_repository_means_its_refs(local: str) -> None:
    """`@sharded` before the path of a repository, or before a ref, names the same shards."""
    with connect(local) as client:
        keys = [
            f"placed/v2/@branch.main/@sharded/{ARRAY}",
            f"@sharded/placed/v2/@branch.main/{ARRAY}",
            f"@sharded/placed/v2/{ARRAY}",
            f"placed/v2/@sharded/{ARRAY}",
        ]
        chunks = [client.get(f"/bucket/{key}/c/0/0/0") for key in keys]
        pages = [client.get(f"/bucket/{key}/") for key in keys]

        assert {answer.status_code for answer in chunks} == {200}
        assert len({(each.content, each.headers["etag"]) for each in chunks}) == 1
        assert {"zarr.json" in page.text for page in pages} == {True}


@pytest.fixture
def pair(tmp_path: Path) -> Generator[Replicas]:
    """Serve an empty repository."""
    with replicas(new_place(tmp_path)) as pair:
        yield pair


def commit_array(pair: Replicas, values: Any, shards: tuple[int, ...], **options: Any) -> None:
    """Commit a sharded array by the library."""
    session = pair.repo.writable_session("main")
    group = zarr.open_group(session.store, mode="a")
    group.create_array("a", data=values, shards=shards, compressors=None, **options)
    session.commit("an array")


def test_clients_read_shards_of_a_ref(pair: Replicas) -> None:
    """Each client reads an array of a branch by inner chunks and by shards."""
    values = np.arange(96, dtype="u2").reshape(8, 12)
    commit_array(pair, values, (4, 6), chunks=(2, 3), dimension_names=("y", "x"))
    for face in ("", "@sharded/"):
        url = f"{pair.urls[0]}/data/@branch.main/{face}a"
        same(xarray.open_zarr(url.removesuffix("/a"), consolidated=True)["a"].values, values)
        same(open_tensorstore(url).read().result(), values)
        for opener in OPENERS.values():
            opened = opener(url)
            assert opened.shards == ((4, 6) if face else None)
            same(opened[...], values)


def test_session_has_both_faces_of_a_shard(pair: Replicas) -> None:
    """Writes of a session by inner chunks and by shards are seen in each other and committed."""
    commit_array(pair, np.zeros(4, "u1"), (4,), chunks=(2,))
    session_id = pair.begin()
    shard = f"/data/@session.{session_id}/@sharded/a/c/0"
    client = pair.clients[0]
    assert pair.put(session_id, "a/c/0", b"\x01\x02").status_code == 200
    assert pair.put(session_id, "a/c/1", b"\x03\x04").status_code == 200
    read = client.get(shard)
    changed = b"\x09" + read.content[1:]
    known = {"if-match": read.headers["etag"]}
    answers = [client.put(shard, content=changed, headers=each) for each in ({}, known, known)]

    assert read.content[:4] == b"\x01\x02\x03\x04"
    assert [each.status_code for each in answers] == [428, 200, 412]
    assert pair.get(session_id, "a/c/0").content == b"\x09\x02"
    pair.committed(session_id)
    store = pair.repo.readonly_session("main").store
    same(zarr.open_array(store, path="a", mode="r")[...], np.array([9, 2, 3, 4], "u1"))


def test_session_behind_sharded_has_the_same_shards(pair: Replicas) -> None:
    """`@sharded` before a session names the shards that it names behind it, and needs a version."""
    commit_array(pair, np.full(4, 7, "u1"), (4,), chunks=(2,))
    session_id = pair.begin()
    client = pair.clients[0]
    prefix = f"@sharded/@session.{session_id}/a/"
    folder = f"/data/{prefix}"
    inner = client.get(f"/data/@session.{session_id}/@sharded/a/c/0")
    outer = client.get(f"{folder}c/0")
    condition = {"if-match": outer.headers["etag"]}
    blind = [
        client.put(f"{folder}c/0", content=b"new"),
        client.delete(f"{folder}c/0", headers={"if-match": "*"}),
        client.delete("/data", params={"prefix": prefix}),
    ]
    body = f"<Delete><Object><Key>{prefix}c/0</Key></Object></Delete>"
    deleted = client.post("/data?delete", content=body)

    assert (outer.content, outer.headers["etag"]) == (inner.content, inner.headers["etag"])
    assert sizes_of(client, "data", prefix)["c/0"] == len(outer.content)
    assert "zarr.json" in client.get(folder).text
    assert [each.status_code for each in blind] == [428] * 3
    assert "If-Match" in deleted.text
    assert client.put(f"{folder}c/0", content=outer.content, headers=condition).is_success
    assert pair.get(session_id, "a/c/1").content == b"\7\7"
