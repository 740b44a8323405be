"""A repository is one container among others in a bucket."""

import re
from collections.abc import Generator
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pytest
import xarray
import zarr

from tests.clients.arrays import BY_NAME
from tests.clients.asking import connect
from tests.clients.icechunk.repositories import write_dataset, write_eventful
from tests.clients.precomputed.cases import BY_NAME as VOLUMES
from tests.clients.precomputed.volumes import read_tensorstore
from tests.clients.precomputed.volumes import write as write_volume
from tests.clients.stores import from_folder, from_seaweedfs
from tests.clients.writing import counted, quiet, same, write
from tests.seaweedfs import SeaweedFS

ZARR, VOLUME = "index/zarr_end_little_crc", "bits/identity_1_2_3"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write containers of three formats, and files that look like parts of a repository."""
    root = tmp_path_factory.mktemp("bucket")
    twin, cases = (tmp_path_factory.mktemp(name) for name in ("twin", "cases"))
    write(BY_NAME[ZARR], root / "lab1/array")
    with quiet():
        zarr.create_group(root / "lab1")
    write_volume(VOLUMES[VOLUME], root / "lab1x/volume", twin)
    write_dataset(root / "lab2/repo")
    write_eventful(root / "lab2/old", "v1", cases)
    write_eventful(root / "lab2/new", "v2", cases)
    (root / "lab2/git").mkdir()
    (root / "lab2/git/repo").write_text("not a repository\n")
    (root / "lab2/git/refs").mkdir()
    (root / "lab2/git/refs/note").write_text("nor is this\n")
    return root


@pytest.fixture(scope="module", params=["local", "remote"])
def url(request: pytest.FixtureRequest, bucket: Path) -> Generator[str]:
    """Serve it as one dataset, from each store."""
    if request.param == "local":
        with from_folder(bucket) as base:
            yield base
        return
    seaweedfs: SeaweedFS = request.getfixturevalue("seaweedfs")
    with from_seaweedfs(bucket, seaweedfs, "mixed") as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Generator[httpx.Client]:
    """Talk to the service."""
    with connect(url) as opened:
        yield opened


def test_each_container_is_served_in_its_way(url: str) -> None:
    """The neighbours of a repository are not taken for parts of it, nor it for part of them."""
    same(zarr.open_array(f"{url}/bucket/lab1/array", mode="r")[...], BY_NAME[ZARR].values)
    for scale, stored in enumerate(VOLUMES[VOLUME].scales):
        same(read_tensorstore(f"{url}/bucket/lab1x/volume/", scale), stored.values)
    with xarray.open_zarr(f"{url}/bucket/lab2/repo/@tag.v1", chunks=None) as opened:
        np.testing.assert_array_equal(opened["rain"].values, counted((4, 6), "f4"))
    found = zarr.open_array(f"{url}/bucket/lab2/old/@tag.first/native", mode="r")
    same(found[...], counted((7, 5), "i8"))


def test_what_is_in_no_container_passes_through(client: httpx.Client) -> None:
    """A file called ``repo`` does not make a repository."""
    assert client.get("/bucket/lab2/git/repo").text == "not a repository\n"
    assert client.get("/bucket/lab2/git/refs/note").text == "nor is this\n"
    assert client.get("/bucket/@tag.v1/zarr.json").status_code == 404
    assert client.get("/bucket/lab2/@tag.v1/zarr.json").status_code == 404


@pytest.mark.parametrize("repo", ["repo", "old"])
def test_files_of_a_repository_are_hidden(client: httpx.Client, bucket: Path, repo: str) -> None:
    """Only the raw view serves them."""
    files = [file for file in (bucket / "lab2" / repo).rglob("*") if file.is_file()]
    for file in files:
        path = quote(file.relative_to(bucket).as_posix())
        assert client.get(f"/bucket/{path}").status_code == 404, path
        assert client.get(f"/raw/{path}").content == file.read_bytes(), path
    assert len(files) > 9


@pytest.mark.parametrize("repo", ["repo", "old", "new"])
def test_pages(client: httpx.Client, repo: str) -> None:
    """The page of a repository links to refs and nodes, not to files; every link works."""
    base = f"/bucket/lab2/{repo}/"
    page = client.get(base).text
    links = re.findall(r'href="\./([^"]+)"', page)

    assert "snapshots" not in page
    assert "@branch.main/" in links
    assert ("rain/" if repo == "repo" else "native/") in links
    assert {client.get(base + link).status_code for link in links} == {200}
    assert f"{repo}/" in client.get("/bucket/lab2/").text
