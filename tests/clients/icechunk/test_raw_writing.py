"""The real library writes a repository through the raw view, as into a bucket of its own."""

from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import icechunk
import numpy as np
import pytest
import zarr

from app.settings import DatasetSettings, Settings
from tests.clients.icechunk.conftest import lab
from tests.seaweedfs import SeaweedFS
from tests.serving import serving


class Place(NamedTuple):
    """Where repositories are stored, and two services before it that know nothing of each other."""

    urls: tuple[str, str]
    directly: Callable[[str], icechunk.Storage]

    def through(self, name: str, service: int = 0) -> icechunk.Storage:
        """Give the storage of *name* as one of the services has it."""
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

        def directly(name: str) -> icechunk.Storage:
            return icechunk.local_filesystem_storage(str(folder / name))
    else:
        seaweedfs: SeaweedFS = request.getfixturevalue("seaweedfs")
        settings = _settings(f"s3://{seaweedfs.bucket}/raw", seaweedfs)

        def directly(name: str) -> icechunk.Storage:
            return icechunk.s3_storage(
                bucket=seaweedfs.bucket,
                prefix=f"raw/{name}",
                endpoint_url=seaweedfs.endpoint_url,
                region=seaweedfs.region,
                access_key_id=seaweedfs.access_key_id,
                secret_access_key=seaweedfs.secret_access_key,
                allow_http=True,
                force_path_style=True,
            )

    with serving(settings) as first, serving(settings) as second:
        yield Place((first, second), directly)


def _settings(url: str, seaweedfs: SeaweedFS | None = None) -> Settings:
    stores = {} if seaweedfs is None else {"lab": lab(seaweedfs)}
    raw = DatasetSettings(url=url, store="lab" if stores else None, view="raw", writable=True)
    return Settings(stores=stores, datasets={"raw": raw})


def _values(repository: Any) -> Any:
    store = repository.readonly_session("main").store
    return np.asarray(zarr.open_array(store, path="a", mode="r")[:])


def _begin(storage: icechunk.Storage, version: str) -> icechunk.Repository:
    repository = icechunk.Repository.create(storage, spec_version=int(version[1:]))
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(16,), chunks=(2,), dtype="u4")
    array[:] = 5
    session.commit("begin")
    return repository


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_repository_is_written(place: Place, version: str) -> None:
    """Commits, tags and branches are there for who opens what is stored, and garbage goes."""
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
    """The other is told, through the same service or another one; rebased it is there, too."""
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
