"""Repositories that the Icechunk library writes, and the service in front of them."""

from collections.abc import Generator, Mapping
from pathlib import Path

import icechunk
import obstore.store
import pytest
import zarr

from shardgate.settings import Settings, VirtualPrefix
from tests.support.clients.arrays import BY_NAME
from tests.support.clients.icechunk.repositories import (
    DATA,
    HISTORIES,
    SHARDED,
    VERSIONS,
    VOLUME,
    ZARR,
    Elsewhere,
    bare,
    in_bucket,
    in_folder,
    in_web,
    write_dataset,
    write_eventful,
    write_placed,
    write_sources,
    write_split,
    write_virtual,
)
from tests.support.clients.precomputed.cases import BY_NAME as VOLUMES
from tests.support.clients.precomputed.volumes import write as write_volume
from tests.support.clients.services import served_fixtures
from tests.support.clients.writing import quiet, write
from tests.support.files import read_files
from tests.support.seaweedfs import SeaweedFS, stored_in
from tests.support.serving import serving
from tests.support.storage.faulty import FaultyServer, etag


@pytest.fixture(scope="session", autouse=True)
def _silent() -> None:
    """Suppress the library's warning about concurrent commits in folders."""
    icechunk.set_logs_filter("error")


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write repositories in each version, such as ``eventful/v2``.

    Beside them are containers of other formats, and files that look like parts of a repository.
    """
    root, cases, twin = (tmp_path_factory.mktemp(name) for name in ("bucket", "cases", "twin"))
    for version in VERSIONS:
        write_eventful(root / "eventful" / version, version, cases)
        write_split(root / "split" / version, version)
        HISTORIES[version](root / "history" / version)
    write_placed(root / "placed/v2", "v2", cases, SHARDED)
    write_dataset(root / "dataset")
    write(BY_NAME[ZARR], root / "lab1/array")
    with quiet():
        zarr.create_group(root / "lab1")
    write_volume(VOLUMES[VOLUME], root / "lab1x/volume", twin)
    (root / "git/refs").mkdir(parents=True)
    (root / "git/repo").write_text("not a repository\n")
    (root / "git/refs/note").write_text("nor is this\n")
    return root


local, remote, service = served_fixtures("icechunk")


@pytest.fixture(scope="session")
def places(
    tmp_path_factory: pytest.TempPathFactory, seaweedfs: SeaweedFS
) -> Generator[Mapping[str, Elsewhere]]:
    """Put the same objects into a folder, SeaweedFS and a plain HTTP server."""
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder)
    seaweedfs.upload_folder(folder, "sources")
    told = seaweedfs.client.head_object(Bucket=seaweedfs.bucket, Key="sources/data.bin")
    local = obstore.store.LocalStore(folder).head("data.bin")["e_tag"]
    with FaultyServer().running() as web:
        for name, data in read_files(folder).items():
            web.put("sources", name, data)
        url = f"{web.url}/sources"
        yield {
            "file": in_folder(folder, bare(local)),
            "s3": in_bucket(seaweedfs, "sources", bare(told["ETag"])),
            "http": in_web(url, bare(etag(DATA))),
        }


@pytest.fixture(scope="session")
def virtual(
    tmp_path_factory: pytest.TempPathFactory, places: Mapping[str, Elsewhere]
) -> dict[str, Path]:
    """Write a repository of virtual references in each version."""
    root, cases = (tmp_path_factory.mktemp(name) for name in ("virtual", "cases"))
    for version in VERSIONS:
        write_virtual(root / version, version, places, cases)
    return {version: root / version for version in VERSIONS}


@pytest.fixture(scope="session", params=["local", pytest.param("remote", marks=pytest.mark.soak)])
def following(
    request: pytest.FixtureRequest,
    places: Mapping[str, Elsewhere],
    virtual: dict[str, Path],
    seaweedfs: SeaweedFS,
) -> Generator[str]:
    """Serve the repositories of references, with all references allowed."""
    prefixes = tuple(
        VirtualPrefix(url=place.prefix, store="lab" if scheme == "s3" else None)
        for scheme, place in places.items()
    )
    datasets = {}
    for version, folder in virtual.items():
        prefix = f"virtual/{version}"
        if request.param == "remote":
            seaweedfs.upload_folder(folder, prefix)
        place = seaweedfs if request.param == "remote" else None
        told = {"format": "icechunk", "virtual_chunk_prefixes": prefixes}
        _, datasets[version] = stored_in(folder, place, prefix, **told)
    with serving(Settings(stores={"lab": seaweedfs.settings}, datasets=datasets)) as url:
        yield url
