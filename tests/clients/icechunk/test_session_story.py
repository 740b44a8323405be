"""xarray writes through a session with plain zarr-python, one `curl` commits, icechunk opens it."""

import json
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

import numpy as np
import obstore.store
import pytest
import xarray
import zarr
from zarr.storage import FsspecStore, ObjectStore

from tests.clients.writing import quiet
from tests.seaweedfs import SeaweedFS
from tests.writable_repositories import Api, Place, api, new_place

type Open = Callable[[Api, str], ObjectStore[Any] | FsspecStore]
type Served = tuple[Place, Api]

CHUNKS: Final = {"rain": {"chunks": (1, 16, 16)}}


def by_obstore(served: Api, session_id: str) -> ObjectStore[Any]:
    """Take the gateway for S3, as obstore does."""
    store = obstore.store.S3Store(
        "repo",
        prefix=f"@session.{session_id}",
        endpoint=str(served.client.base_url).rstrip("/"),
        access_key_id="-",
        secret_access_key="-",
        client_options={"allow_http": True},
    )
    return ObjectStore(store)


def by_s3fs(served: Api, session_id: str) -> FsspecStore:
    """Take the gateway for S3, as s3fs does."""
    options = {"endpoint_url": str(served.client.base_url).rstrip("/"), "key": "-", "secret": "-"}
    return FsspecStore.from_url(f"s3://repo/@session.{session_id}", storage_options=options)


@pytest.fixture(params=["local", "s3"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Served]:
    """Serve a place where nothing is, in a folder and in SeaweedFS."""
    server: SeaweedFS | None = None
    if request.param == "s3":
        server = request.getfixturevalue("seaweedfs")
    place = new_place(tmp_path, server)
    with api(place) as opened:
        yield place, opened


def rain(days: range) -> xarray.Dataset:
    """Make up weather, in four chunks a day."""
    values = np.random.default_rng(days.start).random((len(days), 32, 32), np.float32)
    return xarray.Dataset(
        {"rain": (("day", "y", "x"), values)}, {"day": list(days)}, {"title": "made up"}
    )


def curl(served: Api, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request as people do."""
    url = f"{served.client.base_url}/api/datasets{route}"
    command = ["curl", "-sS", "--fail-with-body", url, "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def committed(place: Place) -> xarray.Dataset:
    """Open what the library finds in ``main``."""
    store = place.open().readonly_session("main").store
    with xarray.open_zarr(store, consolidated=False, chunks=None) as opened:
        loaded: xarray.Dataset = opened.load()
    return loaded


@pytest.mark.parametrize("client", [by_obstore, by_s3fs])
def test_xarray_writes_curl_commits_and_icechunk_opens(served: Served, client: Open) -> None:
    """From nothing to a repository: made, written, read back, committed, appended to."""
    place, opened = served
    root = curl(opened, "", {"name": "repo"})["snapshot_id"]
    session = curl(opened, "/repo/sessions", {})["session_id"]
    with quiet():
        store = client(opened, session)
        rain(range(4)).to_zarr(store, zarr_format=3, consolidated=False, encoding=CHUNKS)
        with xarray.open_zarr(store, consolidated=False, chunks=None) as again:
            xarray.testing.assert_identical(again.load(), rain(range(4)))
    assert next(iter(place.open().ancestry(branch="main"))).id == root

    made = curl(opened, f"/repo/sessions/{session}/commit", {"message": "four days"})

    assert made["parent_id"] == root
    xarray.testing.assert_identical(committed(place), rain(range(4)))
    tip = next(iter(place.open().ancestry(branch="main")))
    assert (tip.id, tip.message) == (made["snapshot_id"], "four days")

    session = curl(opened, "/repo/sessions", {"branch": "main"})["session_id"]
    with quiet():
        store = client(opened, session)
        rain(range(4, 6)).to_zarr(store, append_dim="day", consolidated=False)
    made = curl(opened, f"/repo/sessions/{session}/commit", {"message": "two more"})

    both = xarray.concat([rain(range(4)), rain(range(4, 6))], "day")
    xarray.testing.assert_identical(committed(place), both)
    changed = place.open().diff(from_snapshot_id=tip.id, to_branch="main")
    assert len(changed.updated_chunks["/rain"]) == 8
    assert made["parent_id"] == tip.id


def test_the_library_goes_on_where_a_session_ended(served: Served) -> None:
    """It commits on top, and the next session sees that."""
    place, opened = served
    curl(opened, "", {"name": "repo"})
    session = curl(opened, "/repo/sessions", {})["session_id"]
    with quiet():
        rain(range(2)).to_zarr(by_obstore(opened, session), zarr_format=3, consolidated=False)
    curl(opened, f"/repo/sessions/{session}/commit", {"message": "ours"})
    theirs = place.open().writable_session("main")
    zarr.open_array(theirs.store, path="rain", mode="r+")[1] = 7
    parent = theirs.commit("theirs")

    begun = curl(opened, "/repo/sessions", {})

    assert begun["parent_id"] == parent
    array = zarr.open_array(by_obstore(opened, begun["session_id"]), path="rain", mode="r")
    assert np.all(np.asarray(array[1]) == 7)
