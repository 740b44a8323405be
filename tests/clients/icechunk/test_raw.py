"""The real library reads and writes repositories through the raw view."""

from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import icechunk
import numpy as np
import pytest
import zarr

from app.settings import DatasetSettings, Settings
from tests.clients.icechunk.library import nodes_of, refs_of
from tests.clients.icechunk.repositories import VERSIONS, storage
from tests.seaweedfs import SeaweedFS
from tests.serving import serving
from tests.writable_repositories import in_seaweedfs


class Place(NamedTuple):
    """Storage of repositories, and two independent services over it."""

    urls: tuple[str, str]
    directly: Callable[[str], icechunk.Storage]

    def through(self, name: str, service: int = 0) -> icechunk.Storage:
        """Return the storage of *name* through one of the services."""
        return icechunk.s3_storage(
            bucket="raw",
            prefix=name,
            endpoint_url=self.urls[service],
            region="us-east-1",
            access_key_id="any",
            secret_access_key="any",
            allow_http=True,
            force_path_style=True,
        )


@pytest.fixture(scope="module", params=["folder", "seaweedfs"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Place]:
    """Run the services over each store."""
    if request.param == "folder":
        folder = tmp_path_factory.mktemp("raw")
        settings = _settings(str(folder))
        directly: Callable[[str], icechunk.Storage] = lambda name: storage(folder / name)  # noqa: E731
    else:
        weed: SeaweedFS = request.getfixturevalue("seaweedfs")
        settings = _settings(f"s3://{weed.bucket}/raw", weed)
        directly = lambda name: in_seaweedfs(weed, f"raw/{name}")  # noqa: E731

    with serving(settings) as first, serving(settings) as second:
        yield Place((first, second), directly)


def _settings(url: str, seaweedfs: SeaweedFS | None = None) -> Settings:
    stores = {} if seaweedfs is None else {"lab": seaweedfs.settings}
    raw = DatasetSettings(url=url, store="lab" if stores else None, view="raw", writable=True)
    return Settings(stores=stores, datasets={"raw": raw})


def _values(repository: Any) -> Any:
    store = repository.readonly_session("main").store
    return np.asarray(zarr.open_array(store, path="a", mode="r")[:])


def _begin(where: icechunk.Storage, version: str) -> icechunk.Repository:
    repository = icechunk.Repository.create(where, spec_version=int(version[1:]))
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(16,), chunks=(2,), dtype="u4")
    array[:] = 5
    session.commit("begin")
    return repository


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_repository_is_written(place: Place, version: str) -> None:
    """Commits, tags and branches are in the store, and garbage can be collected."""
    repository = _begin(place.through(version), version)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a")[4:8] = 7
    snapshot_id = session.commit("change")
    repository.create_tag("t", snapshot_id=snapshot_id)
    repository.create_branch("b", snapshot_id)
    repository.delete_branch("b")
    stored = icechunk.Repository.open(place.directly(version))

    assert [each.message for each in stored.ancestry(branch="main")][:2] == ["change", "begin"]
    assert (stored.list_branches(), stored.list_tags()) == ({"main"}, {"t"})
    assert stored.lookup_tag("t") == snapshot_id
    np.testing.assert_array_equal(_values(stored), [5] * 4 + [7] * 4 + [5] * 8)
    repository.garbage_collect(datetime.now(UTC))
    np.testing.assert_array_equal(
        _values(icechunk.Repository.open(place.through(version))), 4 * [5] + 4 * [7] + 8 * [5]
    )


@pytest.mark.parametrize("services", [(0, 0), (0, 1)])
def test_of_two_commits_one_wins(place: Place, services: tuple[int, int]) -> None:
    """The other gets a conflict, through either service, and succeeds after a rebase."""
    name = f"race{services[1]}"
    _begin(place.through(name), "v2")
    sessions = [
        icechunk.Repository.open(place.through(name, service)).writable_session("main")
        for service in services
    ]
    for number, session in enumerate(sessions, start=1):
        zarr.open_array(session.store, path="a")[4 * number : 4 * number + 2] = number
    sessions[0].commit("first")
    with pytest.raises(icechunk.ConflictError):
        sessions[1].commit("second")
    sessions[1].commit("second", rebase_with=icechunk.ConflictDetector())
    stored = icechunk.Repository.open(place.directly(name))

    assert [each.message for each in stored.ancestry(branch="main")][:2] == ["second", "first"]
    assert _values(stored)[[4, 8]].tolist() == [1, 2]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["eventful", "split", "expired"])
def test_library_reads_everything(local: str, bucket: Path, kind: str, version: str) -> None:
    """Every snapshot has the nodes and chunks over HTTP that it has in the folder."""
    folder = bucket / kind / version
    repo = icechunk.Repository.open(icechunk.http_storage(f"{local}/raw/{kind}/{version}"))
    here = dict(refs_of(icechunk.Repository.open(storage(folder)), folder))
    by_snapshot = {session.snapshot_id: session for session in here.values()}

    for snapshot_id, session in by_snapshot.items():
        assert nodes_of(repo.readonly_session(snapshot_id=snapshot_id)) == nodes_of(session)
    assert len(by_snapshot) >= 2


@pytest.mark.parametrize("version", VERSIONS)
def test_library_finds_the_refs(service: str, bucket: Path, version: str) -> None:
    """Branches and tags are those of the folder; of version 1 it can list none over HTTP."""
    there = icechunk.Repository.open(icechunk.http_storage(f"{service}/raw/eventful/{version}"))
    here = icechunk.Repository.open(storage(bucket / "eventful" / version))

    if version != "v1":
        assert there.list_branches() == here.list_branches()
        assert there.list_tags() == here.list_tags()
    for branch in here.list_branches():
        assert there.lookup_branch(branch) == here.lookup_branch(branch)
    for tag in here.list_tags():
        assert there.lookup_tag(tag) == here.lookup_tag(tag)
