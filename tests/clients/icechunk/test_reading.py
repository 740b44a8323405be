"""Every ref reads as by the Icechunk library, by clients without Icechunk."""

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

import httpx
import icechunk
import numpy as np
import pytest
import zarr
import zarr.storage

from shardgate.settings import Settings
from tests.support.clients.arrays import BY_NAME
from tests.support.clients.icechunk.library import (
    Node,
    compare_chunks,
    compare_documents,
    compare_nodes,
    nodes_of,
    refs_of,
)
from tests.support.clients.icechunk.repositories import (
    ODD_TAGS,
    STORABLE,
    VERSIONS,
    VOLUME,
    ZARR,
    commit,
    put,
    spec,
    storage,
    write_placed,
)
from tests.support.clients.precomputed.cases import BY_NAME as VOLUMES
from tests.support.clients.precomputed.volumes import read_tensorstore
from tests.support.clients.reading import OPENERS, open_tensorstore, over_fsspec
from tests.support.clients.services import connect, from_folder
from tests.support.clients.writing import counted, quiet, same
from tests.support.deferred import Deferred
from tests.support.files import read_files
from tests.support.seaweedfs import stored_in
from tests.support.serving import serving
from tests.support.writable_repositories import in_seaweedfs

xarray: Any = Deferred("xarray")

REPOSITORIES: Final = (
    "placed/v2",
    *(f"{kind}/{version}" for kind in ("eventful", "split", "history") for version in VERSIONS),
)
USUAL: Final = {
    "local": ("placed/v2", "eventful/v1", "eventful/v2", "split/migrated", "history/v1"),
    "remote": (),
}
"""Repositories in each place; soak runs have all in both."""


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(place, name, marks=() if name in usual else pytest.mark.soak)
        for place, usual in USUAL.items()
        for name in REPOSITORIES
    ],
)
def test_every_ref_reads_as_by_the_library(
    request: pytest.FixtureRequest, bucket: Path, place: str, name: str
) -> None:
    """Every ref of every repository, of either version or migrated, reads as by the library."""
    where = storage(bucket / name)
    if place == "remote":
        where = in_seaweedfs(request.getfixturevalue("seaweedfs"), f"icechunk/{name}")
    compare(request.getfixturevalue(place), where, bucket / name, name)


def compare(url: str, where: icechunk.Storage, folder: Path, name: str) -> None:
    """Compare documents, chunks as they are stored, and the values of sharded arrays.

    Where several refs are at one snapshot, only the documents are compared again; of arrays that
    are the same in several snapshots, one chunk.
    """
    repo, known = icechunk.Repository.open(where), dict[str, list[Node]]()
    compared = list[Node]()
    with connect(url) as client:
        for ref, session in refs_of(repo, folder):
            base = f"/bucket/{name}/{ref}"
            is_new = session.snapshot_id not in known
            nodes = known.setdefault(session.snapshot_id, nodes_of(session) if is_new else [])
            if nodes:
                compare_documents(client, base, nodes)
            else:
                assert client.get(f"{base}/zarr.json").status_code == 404
            if is_new:
                same_as_before = [node for node in nodes if node in compared]
                changed = [node for node in nodes if node not in compared]
                for node in same_as_before:
                    if not node.is_sharded:
                        compare_chunks(client, base, node.with_one_chunk())
                compare_nodes(client, base, changed, session.store)
                compared += changed
    assert sum(len(node.chunks) for nodes in known.values() for node in nodes) > 100


@pytest.mark.parametrize(("version", "where"), [("v1", "local"), ("v1", "remote"), ("v2", "local")])
def test_tags_with_unusual_names_are_found(
    request: pytest.FixtureRequest, tmp_path: Path, version: str, where: str
) -> None:
    """A tag of any name gets 200, and 404 once it is deleted.

    The library spells file names differently in S3 and in folders.
    """
    place, seaweedfs = storage(tmp_path), None
    if where == "remote":
        seaweedfs = request.getfixturevalue("seaweedfs")
        place = in_seaweedfs(seaweedfs, f"odd/{version}")
    stores, dataset = stored_in(tmp_path, seaweedfs, f"odd/{version}")
    repo = icechunk.Repository.create(place, spec_version=spec(version))
    commit(repo, "root", zarr.create_group)
    tags = [tag for tag in (*ODD_TAGS, "~x[1]*?#") if version == "v2" or "/" not in tag]
    for tag in tags:
        repo.create_tag(tag, repo.lookup_branch("main"))
    for tag in tags[::2]:
        repo.delete_tag(tag)
    with serving(Settings(stores=stores, datasets={"em": dataset})) as base:
        found = {
            tag: httpx.get(f"{base}/em/@tag.{quote(tag, safe='')}/zarr.json").status_code
            for tag in tags
        }

    gone = [tag for tag in tags[::2] if unquote(tag) not in tags[1::2]]
    assert found == {tag: 404 if tag in gone else 200 for tag in tags}


def test_node_at_the_key_of_a_chunk_or_document_hides_neither(tmp_path: Path) -> None:
    """Nodes that the library commits in an array, or as ``zarr.json``, leave all keys readable."""
    repo = icechunk.Repository.create(storage(tmp_path / "odd"))
    group = b'{"zarr_format": 3, "node_type": "group"}'

    def write(store: icechunk.IcechunkStore) -> None:
        values = np.arange(4, dtype="u1")
        zarr.create_array(store, name="a", data=values, chunks=(2,), compressors=None)
        put(store, {"zarr.json/zarr.json": group, "a/c/0/zarr.json": group})

    commit(repo, "nodes", write)
    with from_folder(tmp_path) as url, connect(url) as client:
        found = {
            key: client.get(f"/bucket/odd/{key}")
            for key in ("zarr.json", "a/zarr.json", "a/c/0", "a/c/1", "a/c/0/zarr.json")
        }

    assert {response.status_code for response in found.values()} == {200}
    assert [found[key].content for key in ("a/c/0", "a/c/1")] == [b"\0\1", b"\2\3"]
    assert found["zarr.json"].json()["node_type"] == "group"
    assert found["a/zarr.json"].json()["node_type"] == "array"


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("branch", ["main", "native"])
def test_every_storable_array_reads_as_by_the_library(
    tmp_path: Path, version: str, branch: str
) -> None:
    """Every array that the library can store reads as by the library, inline and native."""
    folder = tmp_path / "placed/all"
    in_version_2 = () if version == "v2" else ("rectilinear/",)
    names = tuple(name for name in STORABLE if not name.startswith(in_version_2))
    write_placed(folder, version, tmp_path / "cases", names)
    repo = icechunk.Repository.open(storage(folder))
    session = repo.readonly_session(branch)
    nodes = nodes_of(session)
    with from_folder(tmp_path) as url, connect(url) as client:
        compare_documents(client, f"/bucket/placed/all/@branch.{branch}", nodes)
        compare_nodes(client, f"/bucket/placed/all/@branch.{branch}", nodes, session.store)

    assert len(nodes) > len(names) > 50


@pytest.mark.parametrize(
    ("version", "opener", "ref"),
    [
        ("v1", "fsspec", "@tag.first"),
        ("v1", "fsspec", ""),
        ("v2", "obstore", "@branch.main"),
        ("v2", "obstore", "@tag.first"),
        ("migrated", "fsspec", "@branch.reset"),
    ],
)
def test_zarr_python_opens_a_ref(service: str, version: str, opener: str, ref: str) -> None:
    """zarr-python opens a ref as a group with consolidated metadata, and reads its arrays."""
    with quiet():
        group = OPENERS[opener](f"{service}/bucket/eventful/{version}/{ref}".rstrip("/"))
        members = dict(group.members(max_depth=None))
    is_first = ref == "@tag.first"

    assert group.attrs["title"] == "µ"
    assert group.metadata.consolidated_metadata is not None
    assert ("deleted" in members) == is_first
    expected = counted((7, 5), "i8")
    if not is_first:
        expected[0, 0] = -1
    same(group["native"][...], expected)
    same(members["inline"][...], counted((7, 5), "u1"))


def test_zarr_python_lists_nested_groups_of_a_ref(service: str) -> None:
    """zarr-python lists nested groups of a ref over fsspec, and the nodes of `main`."""
    root = f"{service}/bucket/eventful/v2"
    with quiet():
        group = over_fsspec(f"{root}/@tag.first/group")
        names = {unquote(name) for name, _ in group.members(max_depth=None)}
        main = {name for name, _ in zarr.open_group(root, use_consolidated=False).members()}

    assert group.metadata.consolidated_metadata is None
    assert names == {"x", "below", "below/é 日本", "below/é 日本/y"}
    same(group["below/é 日本/y"][...], np.full((5, 5), 9, "u1"))
    assert {"native", "group", "transpose"} <= main
    assert "deleted" not in main


@pytest.mark.parametrize("branch", ["main", "native"])
@pytest.mark.parametrize("name", ["index/zarr_start_big_crc", "nested/three", "plain/transposed"])
def test_tensorstore_reads_arrays_of_a_repository(local: str, branch: str, name: str) -> None:
    """TensorStore's `zarr3` driver reads arrays of a repository, with chunks inline and not."""
    url = f"{local}/bucket/placed/v2/@branch.{branch}/{name}"

    same(open_tensorstore(url).read().result(), BY_NAME[name].values)


def test_xarray_opens_a_tag(service: str) -> None:
    """Xarray reads a tag and `main` with and without consolidated metadata."""
    for consolidated in (True, False):
        url = f"{service}/bucket/dataset"
        with xarray.open_zarr(f"{url}/@tag.v1", consolidated=consolidated, chunks=None) as opened:
            assert set(opened.variables) == {"t", "x", "rain"}
            assert opened.attrs == {"title": "weather"}
            np.testing.assert_array_equal(opened["rain"].values, counted((4, 6), "f4"))
        with xarray.open_zarr(url, consolidated=consolidated, chunks=None) as now:
            assert now.sizes == {"t": 6, "x": 6}


@pytest.fixture
def client(service: str) -> Generator[httpx.Client]:
    """Open a client of the service."""
    with connect(service) as opened:
        yield opened


def test_containers_beside_a_repository_are_served(service: str) -> None:
    """An array and a volume beside a repository are served in their own formats."""
    same(zarr.open_array(f"{service}/bucket/lab1/array", mode="r")[...], BY_NAME[ZARR].values)
    for scale, stored in enumerate(VOLUMES[VOLUME].scales):
        same(read_tensorstore(f"{service}/bucket/lab1x/volume/", scale), stored.values)


def test_file_named_repo_makes_no_repository(client: httpx.Client) -> None:
    """Files that only look like a repository's are served as stored, and their refs get 404."""
    assert client.get("/bucket/git/repo").text == "not a repository\n"
    assert client.get("/bucket/git/refs/note").text == "nor is this\n"
    assert client.get("/bucket/@tag.v1/zarr.json").status_code == 404
    assert client.get("/bucket/eventful/@tag.first/zarr.json").status_code == 404


@pytest.mark.parametrize("repo", ["dataset", "eventful/v1"])
def test_files_of_a_repository_are_hidden(client: httpx.Client, bucket: Path, repo: str) -> None:
    """Files of a repository get 404, except in the raw view."""
    files = read_files(bucket / repo)
    for name, data in files.items():
        path = quote(f"{repo}/{name}")
        assert client.get(f"/bucket/{path}").status_code == 404, path
        assert client.get(f"/raw/{path}").content == data, path
    assert len(files) > 9


@pytest.mark.parametrize("repo", ["dataset", "eventful/v1", "eventful/v2"])
def test_page_of_a_repository_links_to_refs_and_nodes(client: httpx.Client, repo: str) -> None:
    """The page of a repository links to refs and nodes, not to files; every link works."""
    base = f"/bucket/{repo}/"
    page = client.get(base).text
    links = re.findall(r'href="\./([^"]+)"', page)

    assert "snapshots" not in page
    assert "@branch.main/" in links
    assert ("rain/" if repo == "dataset" else "native/") in links
    assert {client.get(base + link).status_code for link in links} == {200}
    folder, _, name = base.rstrip("/").rpartition("/")
    assert f"{name}/" in client.get(f"{folder}/").text


@pytest.mark.parametrize(
    ("kind", "version"), [("history", "v1"), ("split", "v2"), ("history", "migrated")]
)
def test_library_reads_a_repository_over_http(
    service: str, bucket: Path, kind: str, version: str
) -> None:
    """The library reads all snapshots and refs of a repository from the raw view over HTTP.

    In version 1, the library lists no refs over HTTP.
    """
    folder = bucket / kind / version
    there = icechunk.Repository.open(icechunk.http_storage(f"{service}/raw/{kind}/{version}"))
    here = icechunk.Repository.open(storage(folder))
    by_snapshot = {session.snapshot_id: session for _, session in refs_of(here, folder)}

    for snapshot_id, session in by_snapshot.items():
        assert nodes_of(there.readonly_session(snapshot_id=snapshot_id)) == nodes_of(session)
    assert len(by_snapshot) >= 2
    if version != "v1":
        assert there.list_branches() == here.list_branches()
        assert there.list_tags() == here.list_tags()
    for branch in here.list_branches():
        assert there.lookup_branch(branch) == here.lookup_branch(branch)
    for tag in here.list_tags():
        assert there.lookup_tag(tag) == here.lookup_tag(tag)
