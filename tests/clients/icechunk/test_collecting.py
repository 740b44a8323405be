"""Garbage is collected while sessions go on, in folders and on S3; the library reads the rest."""

import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import icechunk
import pytest
import zarr

from app.formats.icechunk.session_document import SessionDocument, encode_session
from tests.clients.icechunk.library import contents_of, in_seaweedfs
from tests.collecting import FAR_S, age, collect, expire
from tests.seaweedfs import SeaweedFS
from tests.sessions import Replicas, replicas

_CHUNK_NBYTES = 1024
_PAST_S = 1_500_000_000.0


@dataclass(frozen=True)
class Place:
    """Two services in front of a repository, and how to look at what is stored of it."""

    url: str
    services: Replicas
    names: Callable[[], set[str]]
    put: Callable[[str, bytes], Any]
    make_old: Callable[[], None]
    """Lets all files be old, where the store lets us say so."""


mostly_in_a_folder = pytest.mark.parametrize(
    "place", ["folder", pytest.param("seaweedfs", marks=pytest.mark.soak)], indirect=True
)
"""How files are listed and removed elsewhere, two of the tests see."""


@pytest.fixture(params=["folder", "seaweedfs"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[Place]:
    """Serve a repository in a folder, or in a bucket."""
    if request.param == "folder":
        folder = tmp_path / "repo"

        def put(name: str, data: bytes) -> None:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_bytes(data)

        def names() -> set[str]:
            found = (each for each in folder.rglob("*") if each.is_file())
            return {each.relative_to(folder).as_posix() for each in found}

        storage = icechunk.local_filesystem_storage(str(folder))
        with replicas(storage, folder.as_uri()) as services:
            yield Place(str(folder), services, names, put, lambda: age(folder))
        return
    weed: SeaweedFS = request.getfixturevalue("seaweedfs")
    prefix = f"gc-{secrets.token_hex(4)}"
    for name, value in weed.environ.items():
        monkeypatch.setenv(name, value)

    def upload(name: str, data: bytes) -> None:
        weed.client.put_object(Bucket=weed.bucket, Key=f"{prefix}/{name}", Body=data)

    def keys() -> set[str]:
        pages = weed.client.get_paginator("list_objects_v2").paginate(
            Bucket=weed.bucket, Prefix=f"{prefix}/"
        )
        found = (each["Key"] for page in pages for each in page.get("Contents", ()))
        return {key.removeprefix(f"{prefix}/") for key in found}

    url = f"s3://{weed.bucket}/{prefix}"
    with replicas(in_seaweedfs(weed, prefix), url, weed) as services:
        yield Place(url, services, keys, upload, lambda: None)


def _commit(services: Replicas, value: int) -> str:
    session = services.repo.writable_session("main")
    group = zarr.open_group(session.store)
    if "a" not in group:
        group.create_array(
            "a", shape=(4 * _CHUNK_NBYTES,), chunks=(_CHUNK_NBYTES,), dtype="u1", compressors=None
        )
    array: Any = group["a"]
    array[:_CHUNK_NBYTES] = value
    return session.commit(f"commit {value}")


def _chunks(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("chunks/")}


def test_all_that_refs_lead_to_stays(place: Place) -> None:
    """What expired goes, and what was abandoned; the rest is read by the library, and verified."""
    services = place.services
    for value in range(1, 5):
        _commit(services, value)
    services.repo.create_tag("kept", services.history[2])
    session = services.repo.writable_session("main")
    zarr.open_array(session.store, path="a")[_CHUNK_NBYTES:] = 7
    before = contents_of(services.repo)

    expired = expire(place.url)
    found = collect(place.url, FAR_S)

    opened = icechunk.Repository.open(services.repo.storage)
    after = contents_of(opened)
    assert after.items() <= before.items()
    assert len(expired.snapshots) == 3
    assert found.folders["snapshots"].removed.count == 3
    assert len(_chunks(place.names())) == 2
    assert _commit(services, 9) in contents_of(opened).keys() | {services.history[0]}


@mostly_in_a_folder
def test_chunks_of_open_sessions_stay(place: Place) -> None:
    """However young files may be that go, a session that goes on keeps its own."""
    services = place.services
    _commit(services, 1)
    session_id = services.begin()
    body = bytes([5]) * _CHUNK_NBYTES
    assert services.put(session_id, "a/c/2", body).status_code == 200
    before = place.names()

    report = collect(place.url, FAR_S)

    assert report.oldest_session == session_id
    assert _chunks(place.names()) == _chunks(before)
    assert services.get(session_id, "a/c/2", at=1).content == body
    services.committed(session_id, at=1)
    assert services.group()["a"][2 * _CHUNK_NBYTES] == 5
    assert collect(place.url, FAR_S).oldest_session is None
    assert services.group()["a"][2 * _CHUNK_NBYTES] == 5


@mostly_in_a_folder
def test_what_a_session_began_with_stays(place: Place) -> None:
    """Even if the branch was put elsewhere since, and all of it is old."""
    services = place.services
    first = _commit(services, 1)
    _commit(services, 2)
    session_id = services.begin()
    services.repo.reset_branch("main", first)
    place.make_old()
    before = _chunks(place.names())

    report = collect(place.url, FAR_S)

    assert report.snapshots_dropped == 0
    assert _chunks(place.names()) == before
    assert services.get(session_id, "a/c/0", at=1).content == bytes([2]) * _CHUNK_NBYTES


@mostly_in_a_folder
def test_history_since_the_parent_of_a_session_stays(place: Place) -> None:
    """The session is to be put on top of what others commit meanwhile."""
    services = place.services
    for value in range(1, 4):
        parent = _commit(services, value)
    session_id = services.begin()
    body = bytes([5]) * _CHUNK_NBYTES
    services.put(session_id, "a/c/2", body)
    _commit(services, 4)
    _commit(services, 5)

    report = expire(place.url)

    assert report.oldest_session == session_id
    assert parent in services.history
    assert len(services.history) == 4
    services.committed(session_id)
    assert services.group()["a"][2 * _CHUNK_NBYTES] == 5
    assert services.group()["a"][0] == 5


def test_the_branch_of_a_session_stays(place: Place) -> None:
    """Though it is at an old snapshot, and such branches are to go; those of no session go."""
    services = place.services
    first, second, third = (_commit(services, value) for value in range(1, 4))
    services.repo.reset_branch("main", first)
    services.repo.create_branch("gone", second)
    services.repo.create_branch("trial", third)
    session_id = services.begin(branch="trial")

    report = expire(place.url, branches=True)

    assert (report.oldest_session, report.branches) == (session_id, ["gone"])
    collect(place.url, FAR_S)
    assert services.get(session_id, "a/c/0", at=1).content == bytes([3]) * _CHUNK_NBYTES
    assert services.put(session_id, "a/c/2", bytes([5]) * _CHUNK_NBYTES).status_code == 200
    services.committed(session_id)
    assert services.group("trial")["a"][2 * _CHUNK_NBYTES] == 5


def test_sessions_that_expired_are_removed(place: Place) -> None:
    """With all entries of their journals, and no others."""
    services = place.services
    going_on = services.begin()
    ended = "0123456789ABCDEFGHJ0"
    document = SessionDocument("main", services.history[0], 512, _PAST_S, _PAST_S + 60)
    place.put(f"sessions/{ended}.session", encode_session(document))
    place.put(f"sessions/{ended}/000000000000G/1.2", b"x")
    before = place.names()

    told = collect(place.url, execute=False)
    assert place.names() == before
    report = collect(place.url)

    assert told.sessions_removed == report.sessions_removed == 1
    gone = {name for name in before - place.names() if name.startswith("sessions/")}
    assert gone == {name for name in before if ended in name}
    assert services.clients[0].get(f"/api/datasets/data/sessions/{going_on}").status_code == 200
