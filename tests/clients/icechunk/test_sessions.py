"""zarr-python, xarray and boto3 write a session through two services; the library reads it."""

import json
import secrets
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import boto3
import icechunk
import numpy as np
import pytest
import xarray
import zarr

from tests.clients.filling import CLIENTS
from tests.clients.icechunk.library import in_seaweedfs
from tests.seaweedfs import SeaweedFS
from tests.sessions import GROUP, Replicas, array_document, replicas

SITES: Final = (pytest.param("folder", marks=pytest.mark.soak), "seaweedfs")


@pytest.fixture(params=SITES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Replicas]:
    """Run two services in front of a repository in a folder, or in a bucket."""
    if request.param == "folder":
        storage = icechunk.local_filesystem_storage(str(tmp_path / "repo"))
        with replicas(storage, (tmp_path / "repo").as_uri()) as pair:
            yield pair
        return
    weed: SeaweedFS = request.getfixturevalue("seaweedfs")
    prefix = f"sessions-{secrets.token_hex(4)}"
    with replicas(in_seaweedfs(weed, prefix), f"s3://{weed.bucket}/{prefix}", weed) as pair:
        yield pair


@pytest.mark.parametrize("client", CLIENTS)
def test_zarr_python_writes_what_the_library_reads(pair: Replicas, client: str) -> None:
    """Arrays and groups are created, changed and deleted through both services."""
    session_id = pair.begin()
    read: Any
    one, other = (pair.store(session_id, at, client) for at in (0, 1))
    group = zarr.open_group(one, mode="r+")
    array = group.create_array("g/a", shape=(9, 7), chunks=(4, 3), dtype="i4")
    array[...] = np.arange(63).reshape(9, 7)
    there: Any = zarr.open_group(other, mode="r+")
    there["g/a"][0, :2] = [-1, -2]
    there["g"].attrs["x"] = 1
    group.create_array("gone", shape=(4,), chunks=(2,), dtype="u1")[:] = 1
    assert sorted(there) == ["g", "gone"]
    del there["gone"]
    array.resize((9, 4))
    expected = np.arange(63).reshape(9, 7)[:, :4]
    expected[0, :2] = [-1, -2]

    read = zarr.open_group(one, mode="r")
    np.testing.assert_array_equal(read["g/a"][...], expected)
    keys = pair.keys(session_id, at=1)
    snapshot_id = pair.committed(session_id, at=1)
    assert pair.history[0] == snapshot_id
    read = pair.group()
    np.testing.assert_array_equal(read["g/a"][...], expected)
    assert read["g"].attrs["x"] == 1
    assert sorted(read) == ["g"]
    assert pair.keys(session_id) == keys
    branch = CLIENTS[client](pair.urls[1], "@branch.main")
    read = zarr.open_group(branch, mode="r")
    np.testing.assert_array_equal(read["g/a"][...], expected)


def test_inner_chunks_of_shards_are_written(pair: Replicas) -> None:
    """Each rewrite of a shard is a new chunk; what it had before is kept."""
    session = pair.repo.writable_session("main")
    options: Any = {"shape": (16, 16), "shards": (8, 8), "chunks": (2, 2), "dtype": "u2"}
    array = zarr.open_group(session.store).create_array("s", **options)
    values = np.arange(1, 257).reshape(16, 16)
    array[:8] = values[:8]
    session.commit("half of it")
    session_id = pair.begin()
    stores = [pair.store(session_id, at) for at in (0, 1)]
    for number, row in enumerate(range(6, 16, 2)):
        there = zarr.open_array(stores[number % 2], path="s", mode="r+")
        assert there.chunks == (2, 2)
        there[row : row + 2] = values[row : row + 2]

    for store in stores:
        np.testing.assert_array_equal(zarr.open_array(store, path="s", mode="r")[...], values)
    pair.committed(session_id)
    read = pair.group()["s"]
    assert read.shards == (8, 8)
    np.testing.assert_array_equal(read[...], values)


def test_workers_write_the_inner_chunks_of_a_shard_at_once(pair: Replicas) -> None:
    """No chunk is lost, through two services."""
    session = pair.repo.writable_session("main")
    group = zarr.open_group(session.store)
    group.create_array("s", shape=(64,), shards=(64,), chunks=(2,), dtype="u1", compressors=None)
    session.commit("empty")
    session_id = pair.begin()

    def put(number: int) -> int:
        body = bytes([number + 1] * 2)
        return pair.put(session_id, f"s/c/{number}", body, number % 2).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(put, range(32))) == {200}
    pair.committed(session_id)
    assert pair.group()["s"][:].tolist() == [n + 1 for n in range(32) for _ in range(2)]


def test_xarray_writes_regions_of_a_dataset(pair: Replicas) -> None:
    """The template, then each region through one service and the other, then more days."""
    session_id = pair.begin()
    data = xarray.Dataset(
        {"t": (("x", "y"), np.arange(48.0).reshape(8, 6))}, {"x": np.arange(8) * 10}
    )
    options: Any = {"zarr_format": 3, "consolidated": False}
    encoding = {"t": {"chunks": (4, 3)}}
    data.to_zarr(pair.store(session_id), mode="w", encoding=encoding, compute=True, **options)
    for at, region in enumerate((slice(0, 4), slice(4, 8))):
        part = (data.isel(x=region) + 100).drop_vars("x")
        part.to_zarr(pair.store(session_id, at), region={"x": region}, mode="r+", **options)
    tip = pair.committed(session_id)
    session_id = pair.begin()
    data.to_zarr(pair.store(session_id), append_dim="x", **options)
    pair.committed(session_id)

    read = xarray.open_zarr(pair.repo.readonly_session("main").store, consolidated=False)
    xarray.testing.assert_equal(
        read.load(), xarray.concat([data.assign(t=data["t"] + 100), data], "x")
    )
    changed = pair.repo.diff(from_snapshot_id=tip, to_branch="main")
    assert len(changed.updated_chunks["/t"]) == 4


def test_boto3_lists_pages_of_a_session(pair: Replicas) -> None:
    """Keys come in byte order with sizes, and with common prefixes."""
    session_id = pair.begin()
    pair.put(session_id, "a/zarr.json", json.dumps(array_document((24,), (2,))).encode())
    for number in range(12):
        pair.put(session_id, f"a/c/{number}", bytes(2))
    pair.delete(session_id, "a/c/3")
    keys: Any = {
        "aws_access_key_id": "any",
        "aws_secret_access_key": "any",
        "region_name": "us-east-1",
    }
    client: Any = boto3.client("s3", endpoint_url=pair.urls[1], **keys)
    lead = f"@session.{session_id}/"
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket="data", Prefix=lead, PaginationConfig={"PageSize": 4}
    )
    listed = [each for page in pages for each in page["Contents"]]
    folded = client.list_objects_v2(Bucket="data", Prefix=f"{lead}a/", Delimiter="/")

    expected = sorted(f"{lead}a/c/{n}" for n in range(12) if n != 3)
    assert [each["Key"] for each in listed] == [*expected, f"{lead}a/zarr.json", f"{lead}zarr.json"]
    assert {each["Size"] for each in listed[:-2]} == {2}
    assert [each["Prefix"] for each in folded["CommonPrefixes"]] == [f"{lead}a/c/"]
    assert [each["Key"] for each in folded["Contents"]] == [f"{lead}a/zarr.json"]
    client.close()


def test_large_chunks_come_in_parts(pair: Replicas) -> None:
    """Obstore uploads more than 5 MiB in parts."""
    session_id = pair.begin()
    array = zarr.create_array(
        pair.store(session_id), name="a", shape=(6 * 2**20,), dtype="u1", compressors=None
    )
    values = np.random.default_rng(0).integers(0, 255, array.shape, "u1")
    array[:] = values
    pair.committed(session_id)

    np.testing.assert_array_equal(pair.group()["a"][:], values)


def test_one_session_is_committed_twice_at_once(pair: Replicas) -> None:
    """All answers are the same, and there is one commit."""
    session_id = pair.begin()
    pair.put(session_id, "g/zarr.json", GROUP)
    before = len(pair.history)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda at: pair.committed(session_id, at % 2), range(4)))

    assert len(set(made)) == 1
    assert pair.history[0] == made[0]
    assert len(pair.history) == before + 1
