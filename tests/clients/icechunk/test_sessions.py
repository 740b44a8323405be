"""Sessions written by real clients through two services, and read by the library."""

import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import httpx
import icechunk
import numpy as np
import pytest
import zarr

from tests.support.clients.filling import CLIENTS
from tests.support.clients.icechunk.repositories import put as put_files
from tests.support.committing import Client, put_array, put_group
from tests.support.deferred import Deferred
from tests.support.faults.sites import asked, client_of, configured, put
from tests.support.gateways import forked
from tests.support.records import replaced
from tests.support.seaweedfs import SeaweedFS
from tests.support.sessions import Replicas, replicas
from tests.support.writable_repositories import Place, new_place

xarray: Any = Deferred("xarray")

SITES: Final = ("folder", pytest.param("seaweedfs", marks=pytest.mark.soak))


@pytest.fixture(params=SITES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Replicas]:
    """Run two services in front of a repository in a folder or in a bucket."""
    seaweedfs = request.getfixturevalue("seaweedfs") if request.param == "seaweedfs" else None
    with replicas(new_place(tmp_path, seaweedfs)) as pair:
        yield pair


@pytest.mark.parametrize(
    ("pair", "client"), [("folder", "obstore"), ("seaweedfs", "s3fs")], indirect=["pair"]
)
def test_library_reads_what_zarr_python_writes_in_a_session(pair: Replicas, client: str) -> None:
    """Changes by zarr-python in one session through two services are read by the library."""
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


def test_node_among_chunks_hides_none_of_them_in_a_session(pair: Replicas) -> None:
    """A node that the library commits among the chunks of an array hides none in a session."""
    session = pair.repo.writable_session("main")
    group = zarr.open_group(session.store)
    options: Any = {"shape": (2, 2), "chunks": (1, 2), "dtype": "u1", "compressors": None}
    group.create_array("a", **options)[...] = [[1, 2], [3, 4]]
    put_files(session.store, {"a/c/0/zarr.json": b'{"zarr_format": 3, "node_type": "group"}'})
    session.commit("a group in an array")

    read = zarr.open_array(pair.store(pair.begin()), path="a", mode="r")

    assert np.asarray(read[...]).tolist() == [[1, 2], [3, 4]]


def test_concurrent_writes_to_a_shard_of_a_session_are_kept(pair: Replicas) -> None:
    """Concurrent writes to inner chunks of a session's shard through two services are kept."""
    session = pair.repo.writable_session("main")
    group = zarr.open_group(session.store)
    options: Any = {"shape": (64,), "shards": (64,), "chunks": (2,), "dtype": "u1"}
    group.create_array("s", compressors=None, **options)[32:] = 99
    session.commit("half of it")
    session_id = pair.begin()

    def put(number: int) -> int:
        body = bytes([number + 1] * 2)
        return pair.put(session_id, f"s/c/{number}", body, number % 2).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(put, range(16))) == {200}
    expected = [n + 1 for n in range(16) for _ in range(2)] + [99] * 32
    for store in (pair.store(session_id, at) for at in (0, 1)):
        there = zarr.open_array(store, path="s", mode="r")
        assert (there.chunks, np.asarray(there[:]).tolist()) == ((2,), expected)
    pair.committed(session_id)
    read = pair.group()["s"]
    assert (read.shards, read[:].tolist()) == ((64,), expected)


def test_xarray_writes_regions_of_a_dataset_in_a_session(pair: Replicas) -> None:
    """Xarray writes regions of a dataset in a session through two services, and appends."""
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


def test_large_chunk_is_uploaded_into_a_session_in_parts(pair: Replicas) -> None:
    """A chunk above 5 MiB, which obstore uploads in parts, is committed with a session."""
    session_id = pair.begin()
    values = np.random.default_rng(0).integers(0, 255, 6 * 2**20, "u1")
    zarr.create_array(pair.store(session_id), name="a", data=values, compressors=None)
    pair.committed(session_id)

    np.testing.assert_array_equal(pair.group()["a"][:], values)


VALUE: Final = bytes([5]) * 1024
"""A chunk of the arrays that :func:`create_array` makes."""


@pytest.fixture
def services(tmp_path: Path) -> Generator[Replicas]:
    """Run two services in front of a repository in a folder."""
    with replicas(new_place(tmp_path)) as services:
        yield services


def create_array(services: Replicas, **options: Any) -> None:
    """Commit an array `a` of two chunks by the library."""
    session = services.repo.writable_session("main")
    told: Any = {"shape": (2048,), "chunks": (1024,), "dtype": "u1", "compressors": None}
    zarr.open_group(session.store).create_array("a", **told, **options)
    session.commit("an array")


def test_garbage_collection_spares_chunks_of_open_sessions(services: Replicas) -> None:
    """Garbage collection of files older than any session spares an open session's chunks."""
    create_array(services)
    session_id = services.begin()
    assert services.put(session_id, "a/c/1", VALUE).status_code == 200
    limit = datetime.now(UTC) - timedelta(days=8)

    services.repo.expire_snapshots(limit)
    services.repo.garbage_collect(limit)

    services.committed(session_id, at=1)
    assert services.group()["a"][1024:].tobytes() == VALUE


def test_commit_of_collected_chunk_files_is_refused_until_they_are_written_again(
    services: Replicas, tmp_path: Path
) -> None:
    """A commit whose chunk files garbage collection removed is 409, and names them; once the
    chunks are written again, the session is committed.
    """
    create_array(services)
    session_id = services.begin()
    assert services.put(session_id, "a/c/1", VALUE).status_code == 200
    services.repo.garbage_collect(datetime.now(UTC) + timedelta(hours=1))
    age(tmp_path)

    refused = services.commit(session_id, at=1)
    assert refused.status_code == 409
    assert "/a: garbage collection has removed" in refused.json()["detail"]
    assert "chunk [1] in chunks/" in refused.json()["detail"]
    assert services.put(session_id, "a/c/1", VALUE).status_code == 200
    services.committed(session_id)
    assert services.group()["a"][1024:].tobytes() == VALUE


def test_lost_shard_of_a_session_is_written_in_another_session(
    services: Replicas, tmp_path: Path
) -> None:
    """Writes into a session's shard that garbage collection removed are 424, and the commit is 409,
    which asks for another session; the chunk is committed with that.
    """
    create_array(services, shards=(2048,))
    session_id, other_id = services.begin(), services.begin()
    assert services.put(session_id, "a/c/1", VALUE).status_code == 200
    services.repo.garbage_collect(datetime.now(UTC) + timedelta(hours=1))
    age(tmp_path)

    written = services.put(session_id, "a/c/0", VALUE, at=1)
    assert (written.status_code, "missing or too short" in written.text) == (424, True)
    assert services.delete(session_id, "a/c/1", at=1).status_code == 424
    refused = services.commit(session_id)
    assert refused.status_code == 409
    assert refused.json()["detail"].endswith("write the chunks of these shards in another session")
    assert services.put(other_id, "a/c/1", VALUE).status_code == 200
    services.committed(other_id)
    assert services.group()["a"][1024:].tobytes() == VALUE


def age(folder: Path) -> None:
    """Let all files be two hours old: those of the last hour are not looked up."""
    two_hours_ago = time.time() - 2 * 3600
    for file in folder.rglob("*"):
        os.utime(file, (two_hours_ago, two_hours_ago))


BRANCHES: Final = ("main", "one")
CHUNKS: Final = 4
"""Number of chunks, few enough for frequent conflicts."""
COMMITS: Final = 2
"""Number of commits of each writer on each branch."""
COMMITS_AS_SOAK: Final = 56


class Told(NamedTuple):
    """Result of the commit of one chunk."""

    parent_id: str
    """Snapshot that the changes are based on."""
    chunk: int
    value: int
    snapshot_id: str | None
    """Id of the new snapshot; `None` for a conflict."""
    actual_parent: str | None = None
    """Tip of the branch in the response to a conflict."""


type Write = Callable[[str, int, int], Told]
"""Function that commits a chunk with a value to a branch."""


@pytest.mark.parametrize(
    "commits", [COMMITS, pytest.param(COMMITS_AS_SOAK, marks=pytest.mark.soak)]
)
def test_commits_conflict_exactly_where_chunks_collide(
    seaweedfs: SeaweedFS, tmp_path: Path, commits: int
) -> None:
    """Concurrent commits by service and library conflict only where the same chunk changed."""
    collide(new_place(tmp_path, seaweedfs), commits, by_library=True)


def test_commits_through_two_gateways_to_a_folder_are_kept(tmp_path: Path) -> None:
    """Concurrent commits through two gateways to a folder are all kept.

    The library would lose commits in a folder.
    """
    collide(new_place(tmp_path), COMMITS, by_library=False)


def collide(place: Place, commits: int, *, by_library: bool) -> None:
    """Run all writers, and check each branch with the library."""
    repo = place.create()
    with ExitStack() as stack:
        gateways = [stack.enter_context(forked(configured(place))) for _ in range(2)]
        clients = [stack.enter_context(client_of(each, place)) for each in gateways]
        clients[0].commit(put_group("/"), put_array("/a", 2 * CHUNKS), message="first")
        for branch in BRANCHES[1:]:
            repo.create_branch(branch, repo.lookup_branch("main"))
        writers = [stateless(clients[0]), by_session(clients[0]), by_session(clients[1])]
        writers += [library(place)] if by_library else [stateless(clients[1])]
        values = count(1)
        with ThreadPoolExecutor(len(writers) * len(BRANCHES)) as pool:
            work = {
                branch: [pool.submit(insist, write, branch, commits, values) for write in writers]
                for branch in BRANCHES
            }
            told = {
                branch: [one for each in some for one in each.result(900)]
                for branch, some in work.items()
            }
    for branch in BRANCHES:
        demand(place.open(), branch, told[branch])
    assert any(each.snapshot_id is None for some in told.values() for each in some)


def insist(write: Write, branch: str, commits: int, values: Iterator[int]) -> list[Told]:
    """Make the given number of commits, and start anew after each conflict."""
    told, done, random = list[Told](), 0, Random()
    while done < commits:
        told.append(write(branch, random.randrange(CHUNKS), next(values)))
        done += told[-1].snapshot_id is not None
    return told


def demand(repo: icechunk.Repository, branch: str, told: list[Told]) -> None:
    """Assert that the branch has each acknowledged commit once, and conflicts were due."""
    ancestors = list(repo.ancestry(branch=branch))[::-1]
    line = [each.id for each in ancestors]
    assert [each.parent_id for each in ancestors][1:] == line[:-1]
    moments = [each.written_at for each in ancestors]
    assert moments == sorted(moments)
    made = {each.snapshot_id: each for each in told if each.snapshot_id is not None}
    assert sorted(made) == sorted(line[2:])
    for before, after in pairwise(line[1:]):
        diff = repo.diff(from_snapshot_id=before, to_snapshot_id=after)
        assert diff.updated_chunks == {"/a": [[made[after].chunk]]}
    at = {snapshot_id: number for number, snapshot_id in enumerate(line)}
    for each in told:
        stop = each.snapshot_id or each.actual_parent
        until = len(line) if stop is None else at[stop] + (each.snapshot_id is None)
        others = line[at[each.parent_id] + 1 : until]
        is_touched = each.chunk in [made[other].chunk for other in others]
        assert is_touched == (each.snapshot_id is None), each
    expected = [0] * CHUNKS
    for snapshot_id in line[2:]:
        expected[made[snapshot_id].chunk] = made[snapshot_id].value
    store = repo.readonly_session(branch).store
    found = np.asarray(zarr.open_array(store, path="a", mode="r")[...])
    assert found.view("<u2").tolist() == expected


def stateless(client: Client) -> Write:
    """Return a writer that commits without a session."""

    def write(branch: str, chunk: int, value: int) -> Told:
        parent_id = client.api.names("branches")[branch]
        chunk_id = client.chunk(_bytes(value))
        reference: dict[str, Any] = {"coords": [chunk], "chunk_id": chunk_id, "length": 2}
        change = {"op": "put_chunks", "path": "/a", "chunks": [reference]}
        options = {"branch": branch, "parent_id": parent_id, "message": f"{value}"}
        answer = client.ask(change, key=f"{branch}-{value}", **options)
        return _told(answer, Told(parent_id, chunk, value, None))

    return write


def by_session(client: Client) -> Write:
    """Return a writer that commits by a session."""

    def write(branch: str, chunk: int, value: int) -> Told:
        begun = client.api.do("POST", "/sessions", {"branch": branch}).json()
        session_id, parent_id = begun["session_id"], begun["parent_id"]
        assert put(client, session_id, f"a/c/{chunk}", _bytes(value)).is_success
        answer = asked(client, session_id, message=f"{value}")
        return _told(answer, Told(parent_id, chunk, value, None))

    return write


def library(place: Place) -> Write:
    """Return a writer that commits by the library and rebases."""
    repo = place.open()

    def write(branch: str, chunk: int, value: int) -> Told:
        session = repo.writable_session(branch)
        told = Told(session.snapshot_id, chunk, value, None)
        array = zarr.open_array(session.store, path="a")
        array[2 * chunk : 2 * chunk + 2] = np.frombuffer(_bytes(value), np.uint8)
        try:
            made = session.commit(f"{value}", rebase_with=icechunk.ConflictDetector())
        except (icechunk.RebaseFailedError, icechunk.ConflictError):
            return told
        return replaced(told, snapshot_id=made)

    return write


def _told(answer: httpx.Response, told: Told) -> Told:
    body = answer.json()
    if answer.status_code == 201:
        return replaced(told, snapshot_id=body["snapshot_id"])
    assert answer.status_code == 409, answer.text
    assert body["expected_parent"] == told.parent_id
    (conflict,) = body["conflicts"]
    assert (conflict["path"], conflict["chunks"]) == ("/a", [[told.chunk]])
    return replaced(told, actual_parent=body["actual_parent"])


def _bytes(value: int) -> bytes:
    return value.to_bytes(2, "little")
