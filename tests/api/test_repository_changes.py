"""Changes of refs, status and new repositories over HTTP, compared with the icechunk library."""

import shutil
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import icechunk
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.support.files import write_files
from tests.support.repositories import ROOT_ID, Written, array
from tests.support.seaweedfs import SeaweedFS
from tests.support.serving import client_of
from tests.support.writable_repositories import Api, Place, api, new_place

type Served = tuple[Place, Api]

NAMES = ["née", "a/b", "a b%2Fc", "?#&=", "@tag.x", "x" * 255]


@pytest.fixture(scope="module", params=["local", "s3"])
def server(request: pytest.FixtureRequest) -> SeaweedFS | None:
    """Choose a local folder (`None`) or SeaweedFS."""
    found: SeaweedFS = request.getfixturevalue("seaweedfs")
    return found if request.param == "s3" else None


@pytest.fixture(scope="module")
def served(server: SeaweedFS | None, tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """Serve a repository of two commits to all tests of the module."""
    place = new_place(tmp_path_factory.mktemp("served"), server)
    written = Written(place.create(num_updates_per_repo_info_file=4), place.folder)
    written.commit("one", array("a"))
    with api(place) as opened:
        yield place, opened


def tip(place: Place) -> str:
    """Return the tip of ``main``."""
    return place.open().lookup_branch("main")


@pytest.mark.parametrize("kind", ["branches", "tags"])
def test_refs_are_created_moved_and_deleted(served: Served, kind: str) -> None:
    """Refs change for the library as well; the name of a deleted tag is 409 ever after."""
    place, opened = served

    def found(name: str) -> str | None:
        """Return a ref's snapshot, after asserting that the library has the same."""
        repo = place.open()
        is_there = name in (repo.list_branches() if kind == "branches" else repo.list_tags())
        look_up = repo.lookup_branch if kind == "branches" else repo.lookup_tag
        assert opened.names(kind).get(name) == (look_up(name) if is_there else None)
        return opened.names(kind).get(name)

    for name in NAMES if place.seaweedfs is None else NAMES[:2]:
        path, new = f"/{kind}/{quote(name, safe='')}", {"name": name, "snapshot_id": ROOT_ID}
        made = opened.do("POST", f"/{kind}", new)
        assert (made.status_code, made.json()) == (201, new)
        assert found(name) == ROOT_ID
        assert opened.send("POST", f"/{kind}", new).status_code == 409
        if kind == "branches":
            etag = made.headers["etag"]
            opened.do("PUT", path, {"snapshot_id": tip(place)}, if_match=etag)
            assert found(name) == tip(place)

        assert opened.do("DELETE", path).status_code == 204
        assert found(name) is None
        if kind == "tags":
            again = opened.send("POST", "/tags", new)
            assert (again.status_code, "used again" in again.json()["detail"]) == (409, True)
            with pytest.raises(icechunk.IcechunkError):
                place.open().create_tag(name, ROOT_ID)


def test_branch_reset_needs_the_current_tip(served: Served) -> None:
    """Moving or deleting a branch fails with 412 if `If-Match` is not its tip; moving needs one."""
    place, opened = served
    opened.do("POST", "/branches", {"name": "stays", "snapshot_id": ROOT_ID})
    other = {"snapshot_id": tip(place)}

    assert opened.send("PUT", "/branches/stays", other).status_code == 400
    refused = opened.send("PUT", "/branches/stays", other, if_match=f'"{tip(place)}"')
    assert refused.status_code == 412
    assert ROOT_ID in refused.json()["detail"]
    gone = opened.send("DELETE", "/branches/stays", if_match=f'"{tip(place)}"')
    assert gone.status_code == 412
    assert opened.names("branches")["stays"] == ROOT_ID


@pytest.mark.parametrize(
    ("method", "route", "body", "status"),
    [
        ("POST", "/branches", {"name": "main", "snapshot_id": ROOT_ID}, 409),
        ("POST", "/branches", {"name": "b", "snapshot_id": "0" * 20}, 404),
        ("POST", "/branches", {"name": "b", "snapshot_id": ROOT_ID.lower()}, 400),
        ("POST", "/branches", {"name": "b", "snapshot_id": 7}, 400),
        ("POST", "/branches", {"name": "b"}, 400),
        ("POST", "/branches", {"name": "b", "snapshot_id": ROOT_ID, "x": 1}, 400),
        ("POST", "/branches", [], 400),
        *(
            ("POST", kind, {"name": name, "snapshot_id": ROOT_ID}, 400)
            for kind in ("/branches", "/tags")
            for name in ("", ".", "..", "a\n", "\x7f", "é" * 128)
        ),
        ("POST", "/tags", {"name": "b", "snapshot_id": "0" * 20}, 404),
        ("POST", "/tags", {"name": "x" * 70000, "snapshot_id": ROOT_ID}, 413),
        ("PUT", "/branches/none", {"snapshot_id": ROOT_ID}, 404),
        ("DELETE", "/branches/none", None, 404),
        ("DELETE", "/branches/main%0A", None, 404),
        ("DELETE", "/branches/%FF", None, 400),
        ("DELETE", "/branches/main", None, 409),
        ("DELETE", "/tags/none", None, 404),
        ("POST", "/tags?path=x", {"name": "b", "snapshot_id": ROOT_ID}, 404),
    ],
)
def test_invalid_ref_change_is_refused(
    served: Served, method: str, route: str, body: Any, status: int
) -> None:
    """An invalid change of a ref fails with a 4xx problem, and leaves the repository unchanged."""
    place, opened = served
    before = place.open().inspect_repo_info()

    answer = opened.send(method, route, body, if_match="*")

    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert place.open().inspect_repo_info() == before


def test_locked_repository_refuses_ref_changes(served: Served) -> None:
    """A read-only repository refuses changes of refs with 423, a feature flag with 409."""
    place, opened = served
    repo, read_only = place.open(), icechunk.RepoAvailability.read_only
    repo.set_status(icechunk.RepoStatus(read_only, limited_availability_reason="moving"))
    given = {"name": "locked", "snapshot_id": ROOT_ID}
    for route in ("/branches", "/tags"):
        answer = opened.send("POST", route, given)
        assert (answer.status_code, "moving" in answer.json()["detail"]) == (423, True)
    repo.set_status(icechunk.RepoStatus(icechunk.RepoAvailability.online))
    opened.do("POST", "/branches", given)
    repo.create_tag("flagged", ROOT_ID)
    tag = {"name": "more", "snapshot_id": ROOT_ID}
    for flag, method, route, body in (
        ("create_tag", "POST", "/tags", tag),
        ("delete_tag", "DELETE", "/tags/flagged", None),
    ):
        repo.set_feature_flag(flag, setting=False)
        answer = opened.send(method, route, body)
        assert (answer.status_code, flag in answer.json()["detail"]) == (409, True)
        repo.set_feature_flag(flag, setting=None)
        opened.do(method, route, body)


def test_unwritable_repository_allows_no_changes(tmp_path: Path) -> None:
    """A dataset that is not writable, or of format version 1, answers 405 to each change."""
    place, old = new_place(tmp_path), new_place(tmp_path)
    place.create()
    icechunk.Repository.create(old.storage, spec_version=1)
    given, tip = {"name": "b", "snapshot_id": ROOT_ID}, {"snapshot_id": ROOT_ID}
    bodies: dict[str, Any] = {"commits": {"message": "m", "changes": []}, "sessions": {}}

    for where, writable in ((place, False), (old, True)):
        with api(where, writable=writable) as opened:
            for method, route in (
                *(("POST", f"/{each}") for each in ("branches", "tags", "chunks", *bodies)),
                *(("PUT", "/branches/main"), ("DELETE", "/branches/b"), ("DELETE", "/tags/t")),
            ):
                body = bodies.get(route[1:], tip if method == "PUT" else given)
                answer = opened.send(method, route, body, if_match="*")
                assert answer.status_code == 405, answer.text
                assert answer.headers["allow"] == "GET, HEAD, OPTIONS"


@pytest.fixture
def empty(server: SeaweedFS | None, tmp_path: Path) -> Place:
    """Return an empty place for a repository."""
    return new_place(tmp_path, server)


def create(opened: Api) -> int:
    """Request a repository, and return the status."""
    return opened.client.post("/api/datasets", json={"name": "repo"}).status_code


def test_created_repository_equals_that_of_the_library(empty: Place) -> None:
    """A repository that the service creates has the library's files, and both can write to it."""
    with api(empty) as opened:
        assert opened.send("GET", "/branches").status_code == 404
        made = opened.client.post("/api/datasets", json={"name": "repo"})
        expected = {"name": "repo", "branch": "main", "snapshot_id": ROOT_ID}
        assert (made.status_code, made.json()) == (201, expected)
        assert opened.names("branches") == {"main": ROOT_ID}
        assert create(opened) == 409

        theirs = new_place(empty.folder.parent).create()
        ours = empty.open()
        assert inspect(ours) == inspect(theirs)
        snapshot_id = Written(ours, empty.folder).commit("first", array("a"))
        opened.do("POST", "/tags", {"name": "t", "snapshot_id": snapshot_id})
        assert empty.open().lookup_tag("t") == snapshot_id


def inspect(repo: icechunk.Repository) -> list[Any]:
    """Return the contents of all files of a new repository, as the library prints them."""
    files = (repo.inspect_snapshot(ROOT_ID), repo.inspect_transaction_log(ROOT_ID))
    return [shape(each) for each in (repo.inspect_repo_info(), *files)]


def shape(told: Any) -> Any:
    """Remove times and names of writers."""
    if isinstance(told, list):
        return [shape(each) for each in told]
    if not isinstance(told, dict):
        return told
    varying = ("flushed_at", "updated_at", "set_at", "written_by", "app_name", "app_version")
    return {name: shape(value) for name, value in told.items() if name not in varying}


def test_one_of_concurrent_creators_wins(empty: Place) -> None:
    """One of eight concurrent requests creates the repository; the others fail with 409."""
    with api(empty) as one, api(empty) as two, ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(create, [one, two] * 4))

    assert sorted(statuses) == [201] + [409] * 7
    assert empty.open().lookup_branch("main") == ROOT_ID


def test_repository_is_created_in_an_empty_folder_only(tmp_path: Path) -> None:
    """A repository is created where nothing is but sound files of an interrupted creation."""
    statuses = {"full": 409, "zarr": 409, "fixed": 405, "damaged": 424, "left": 201, "none": 404}
    places = {name: Place(tmp_path / name) for name in statuses if name != "none"}
    other = new_place(tmp_path)
    other.create()
    for name in ("damaged", "left"):
        (places[name].folder / "snapshots").mkdir(parents=True)
    (places["damaged"].folder / "snapshots" / ROOT_ID).write_bytes(bytes(99))
    shutil.copy(other.folder / "snapshots" / ROOT_ID, places["left"].folder / "snapshots")
    write_files({"full/zarr.json": b"{}"}, tmp_path)
    datasets = {
        name: DatasetSettings(
            url=place.folder.as_uri(),
            writable=name != "fixed",
            format="zarr" if name == "zarr" else "auto",
        )
        for name, place in places.items()
    }
    with client_of(Settings(datasets=datasets)) as client:
        answers = {name: client.post("/api/datasets", json={"name": name}) for name in statuses}

    assert {name: answer.status_code for name, answer in answers.items()} == statuses
    assert ROOT_ID in answers["damaged"].json()["detail"]
    assert answers["zarr"].json()["detail"] == "zarr is configured as zarr: not of Icechunk"
    for name, names in (("full", ["zarr.json"]), ("zarr", [])):
        assert sorted(path.name for path in places[name].folder.glob("*")) == names
    assert not (places["damaged"].folder / "repo").exists()
    (snapshot,) = places["left"].open().inspect_repo_info()["snapshots"]
    assert snapshot["flushed_at"] == places["left"].open().inspect_snapshot(ROOT_ID)["flushed_at"]
