"""Every ref of every repository is, document by document and chunk by chunk, the library's own."""

from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

import httpx
import icechunk
import pytest

from app.settings import DatasetSettings, Settings
from tests.clients.asking import connect
from tests.clients.icechunk.conftest import KINDS, lab
from tests.clients.icechunk.library import (
    Node,
    compare_documents,
    compare_nodes,
    in_seaweedfs,
    nodes_of,
    refs_of,
)
from tests.clients.icechunk.repositories import (
    ODD_TAGS,
    STORABLE,
    VERSIONS,
    commit,
    set_root,
    spec,
    storage,
    write_placed,
)
from tests.clients.stores import from_folder
from tests.seaweedfs import SeaweedFS
from tests.serving import serving

REPOSITORIES: Final = tuple(f"{kind}/{version}" for kind in KINDS for version in VERSIONS)


def _where(place: str) -> list[Any]:
    """Read each repository from one place; from the other one it is the same, which takes long."""
    return [
        pytest.param(
            name,
            marks=() if name.endswith("/migrated") == (place == "seaweedfs") else pytest.mark.soak,
        )
        for name in REPOSITORIES
    ]


@pytest.mark.parametrize("name", _where("folder"))
def test_is_what_the_library_reads_in_a_folder(local: str, written: Path, name: str) -> None:
    """All repositories of either version."""
    compare(local, storage(written / name), written / name, name)


@pytest.mark.parametrize("name", _where("seaweedfs"))
def test_is_what_the_library_reads_in_seaweedfs(
    remote: str, seaweedfs: SeaweedFS, written: Path, name: str
) -> None:
    """Migrated repositories have files of both versions."""
    compare(remote, in_seaweedfs(seaweedfs, f"icechunk/{name}"), written / name, name)


def compare(url: str, where: icechunk.Storage, folder: Path, name: str) -> None:
    """Compare documents, chunks as they are stored, and the values of sharded arrays.

    Where several refs are at one snapshot, only the documents are compared again.
    """
    repo, known = icechunk.Repository.open(where), dict[str, list[Node]]()
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
                compare_nodes(client, base, nodes, session.store)
    assert sum(len(node.chunks) for nodes in known.values() for node in nodes) > 100


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_odd_tags(request: pytest.FixtureRequest, tmp_path: Path, version: str, where: str) -> None:
    """Whatever a tag is called, it is found until it is deleted.

    The library spells names of files in one way in S3, and in another in folders.
    """
    place, url, stores = storage(tmp_path), str(tmp_path), {}
    if where == "remote":
        seaweedfs: SeaweedFS = request.getfixturevalue("seaweedfs")
        place, stores = in_seaweedfs(seaweedfs, f"odd/{version}"), {"lab": lab(seaweedfs)}
        url = f"s3://{seaweedfs.bucket}/odd/{version}"
    repo = icechunk.Repository.create(place, spec_version=spec(version))
    commit(repo, "root", set_root)
    tags = [tag for tag in (*ODD_TAGS, "~x[1]*?#") if version == "v2" or "/" not in tag]
    for tag in tags:
        repo.create_tag(tag, repo.lookup_branch("main"))
    for tag in tags[::2]:
        repo.delete_tag(tag)
    dataset = DatasetSettings(url=url, store="lab" if stores else None)
    with serving(Settings(stores=stores, datasets={"em": dataset})) as base:
        found = {
            tag: httpx.get(f"{base}/em/@tag.{quote(tag, safe='')}/zarr.json").status_code
            for tag in tags
        }

    gone = [tag for tag in tags[::2] if unquote(tag) not in tags[1::2]]
    assert found == {tag: 404 if tag in gone else 200 for tag in tags}


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("branch", ["main", "native"])
def test_every_array_that_can_be_stored(tmp_path: Path, version: str, branch: str) -> None:
    """All chains of codecs, shapes, types and fill values, inline and native."""
    folder = tmp_path / "placed/all"
    write_placed(folder, version, tmp_path / "cases", STORABLE)
    repo = icechunk.Repository.open(storage(folder))
    session = repo.readonly_session(branch)
    nodes = nodes_of(session)
    with from_folder(tmp_path) as url, connect(url) as client:
        compare_documents(client, f"/bucket/placed/all/@branch.{branch}", nodes)
        compare_nodes(client, f"/bucket/placed/all/@branch.{branch}", nodes, session.store)

    assert len(nodes) > len(STORABLE) > 100
