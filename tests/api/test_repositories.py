"""`shardgate.api.repositories`: refs, history and operations of repositories."""

import json
from collections.abc import Generator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import icechunk
import pytest
import zarr
from typer.testing import CliRunner

from shardgate.cli import app
from shardgate.formats.icechunk.ids import encode_id
from tests.support.clients.icechunk.model import (
    compare_differences,
    compare_history,
    compare_operations,
)
from tests.support.formats.icechunk.building_repo import (
    FIRST,
    NOON,
    U8,
    U64,
    Repo,
    ref,
    snapshot,
    update,
)
from tests.support.repositories import BUILDERS, ROOT_ID, Written, array, create, eventful, plain
from tests.support.writable_repositories import Api, serve


@pytest.fixture(scope="module", params=BUILDERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return repositories with all kinds of history."""
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def api(written: Written) -> Generator[Api]:
    """Serve a repository of each kind of history."""
    with serve(written.folder) as api:
        yield api


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Generator[Api]:
    """Serve a bucket of repositories and other objects."""
    folder = tmp_path_factory.mktemp("bucket")
    plain(create(folder / "lab1/one"))
    BUILDERS["version-1"](folder / "lab2/old")
    (folder / "lab2/notes.txt").write_text("no repository")
    with serve(folder) as api:
        yield api


@pytest.fixture(scope="module", params=[1, 2])
def young(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Api]:
    """Serve an empty repository of each version."""
    folder = tmp_path_factory.mktemp("young")
    create(folder, spec_version=request.param)
    with serve(folder) as api:
        yield api


def test_refs_equal_those_of_the_library(written: Written, api: Api) -> None:
    """Branches and tags, in pages ordered by name, are those of the icechunk library."""
    repo, branches = written.repo, api.tell("/branches")["branches"]

    assert api.pages("/branches", "branches", limit=1) == branches
    assert api.pages("/tags", "tags", limit=2) == api.tell("/tags")["tags"]
    assert [(each["name"], each["snapshot_id"]) for each in branches] == [
        (name, repo.lookup_branch(name)) for name in sorted(repo.list_branches())
    ]
    assert {each["name"]: each["snapshot_id"] for each in api.tell("/tags")["tags"]} == {
        name: repo.lookup_tag(name) for name in repo.list_tags()
    }


def test_history_equals_that_of_the_library(written: Written, api: Api) -> None:
    """The history of every ref and snapshot, read in pages, is the one that the library returns."""
    repo = written.repo
    branches = {f"@branch.{name.replace('%', '%25')}": name for name in repo.list_branches()}
    refs: dict[str, dict[str, str]] = {ref: {"branch": name} for ref, name in branches.items()}
    refs |= {f"@tag.{name}": {"tag": name} for name in repo.list_tags()}
    ids = {each.id for name in branches.values() for each in repo.ancestry(branch=name)}
    if (info := _listed(written)) is not None:
        ids |= {each["id"] for each in info["snapshots"]}
    refs |= {f"@{each}": {"snapshot_id": each} for each in ids}

    for name, named in refs.items():
        compare_history(api, name, list(repo.ancestry(**named)))
    main = api.tell("/history", ref="@branch.main")
    assert api.tell("/history") == api.tell("/history", ref="main") == main


def _listed(written: Written) -> dict[str, Any] | None:
    if not (written.folder / "repo").exists():
        return None
    return dict(written.repo.inspect_repo_info())


def test_operations_equal_those_of_the_library(written: Written, api: Api) -> None:
    """The operation log, across backups of `repo`, is the library's; version 1 has none: 404."""
    if _listed(written) is None:
        answer = api.answer("/operations")
        assert (answer.status_code, "version 1" in answer.json()["detail"]) == (404, True)
        return
    for limit in (1, 2, 100):
        compare_operations(api, written.repo, limit)


def test_differences_equal_those_of_the_library(
    request: pytest.FixtureRequest, written: Written, api: Api
) -> None:
    """Snapshots differ from the tip as for the library; without a log they are 424."""
    tip, *ancestors = written.snapshots
    if request.node.callspec.params["written"] == "version-1-expired":
        assert ancestors.pop() == ROOT_ID
        refused = api.answer("/diff", **{"from": f"@{ROOT_ID}"})
        assert (refused.status_code, "is lost" in refused.json()["detail"]) == (424, True)
    for each in ancestors:
        compare_differences(api, written.repo, each, tip, 7)
    assert api.tell("/diff", **{"from": "@branch.main"})["changes"] == []


def test_differences_of_other_versions_are_refused(tmp_path: Path) -> None:
    """Versions that are no ancestors, and wrong pages, are 400; a lost log is 424."""
    written = plain(create(tmp_path))
    tip, *_, root = written.snapshots
    with serve(tmp_path) as api:
        first = api.tell("/diff", **{"from": root, "limit": 1})
        written.commit("more", array("more"))
        second = api.tell("/diff", **{"from": root, "limit": 1, "after": first["next"]})
        assert second["to_snapshot_id"] == tip
        for query, status in (
            ({}, 400),
            ({"from": tip, "to": root}, 400),
            ({"from": "none"}, 404),
            ({"from": root, "to": "0" * 20}, 404),
            ({"from": root, "after": "1.0"}, 400),
            ({"from": root, "after": f"{root}.{tip}.٣.0"}, 400),
            ({"from": root, "after": f"{tip}.{root}.1.0"}, 400),
            ({"from": root, "after": f"{root}.{root[::-1]}.1.0"}, 404),
            ({"from": root, "limit": 0}, 400),
        ):
            assert api.answer("/diff", **query).status_code == status, query
        past = api.tell("/diff", **{"from": root, "after": f"{root}.{tip}.999999999.1"})
        assert (past["changes"], past["next"]) == ([], None)
    (tmp_path / "transactions" / tip).unlink()
    with serve(tmp_path) as api:
        lost = api.answer("/diff", **{"from": root})
    assert lost.status_code == 424
    assert tip in lost.json()["detail"]


def test_operation_fields_follow_the_specification(tmp_path: Path) -> None:
    """Operations have the field names of the specification, and a new status its reason."""
    written = eventful(tmp_path)
    read_only = icechunk.RepoAvailability.read_only
    written.repo.set_status(icechunk.RepoStatus(read_only, limited_availability_reason="moving"))
    with serve(tmp_path) as api:
        operations = api.pages("/operations", "operations")
    fields = {each["kind"]: each["fields"] for each in operations}
    status = operations[0]["fields"]["status"]

    assert fields["new_commit"].keys() == {"branch", "new_snap_id"}
    assert fields["commit_amended"].keys() == {"branch", "previous_snap_id", "new_snap_id"}
    assert fields["tag_deleted"] == {"name": "gone", "previous_snap_id": written.snapshots[-2]}
    assert fields["repo_initialized"] == {}
    assert status["availability"] == "read_only"
    assert status["limited_availability_reason"] == "moving"


def test_pages_of_operations_are_stable(tmp_path: Path) -> None:
    """Operations that are added between pages are in neither; `after` also accepts a time."""
    written = plain(create(tmp_path))
    with serve(tmp_path) as api:
        whole = api.tell("/operations", limit=1000)["operations"]
        some = api.tell("/operations", after=whole[4]["updated_at"])["operations"]
        first = api.tell("/operations", limit=2)
        for name in "pqrst":
            written.repo.create_tag(name, ROOT_ID)
        rest = api.tell("/operations", limit=1000, after=first["next"])["operations"]

    assert some == whole[5:]
    assert [(each["kind"], each["updated_at"]) for each in first["operations"] + rest] == [
        (each["kind"], each["updated_at"]) for each in whole
    ]


def test_time_after_which_operations_are_listed_has_any_offset(tmp_path: Path) -> None:
    """A time without an offset is in UTC, also on the pages that follow."""
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    config = icechunk.RepositoryConfig(num_updates_per_repo_info_file=1)
    repo = icechunk.Repository.create(storage, config=config)
    repo.save_config()
    for number in range(110):
        repo.create_tag(f"t{number}", ROOT_ID)
    with serve(tmp_path) as api:
        whole = api.pages("/operations", "operations", limit=1000)
        time = datetime.fromisoformat(whole[-2]["updated_at"])
        for each in (time.replace(tzinfo=None), time.astimezone(timezone(timedelta(hours=-7)))):
            empty = api.tell("/operations", after=each.isoformat())
            rest = api.tell("/operations", after=empty["next"])

            assert (empty["operations"], rest["operations"]) == ([], whole[-1:])


def test_missing_backup_ends_the_operation_log(tmp_path: Path) -> None:
    """A log whose backup is missing ends there and names it; a log in a circle fails with 424."""
    plain(create(tmp_path))
    with serve(tmp_path) as api:
        whole = api.tell("/operations")["operations"]
    backup = tmp_path / "overwritten" / whole[6]["backup"]
    backup.unlink()
    with serve(tmp_path) as api:
        page = api.tell("/operations")

    assert page["operations"] == whole[: len(page["operations"])]
    assert 0 < len(page["operations"]) <= 6
    assert (page["next"], whole[6]["backup"] in page["ends_early"]) == (None, True)
    backup.write_bytes((tmp_path / "repo").read_bytes())
    with serve(tmp_path) as api:
        answer = api.answer("/operations")
    assert (answer.status_code, "came after" in answer.json()["detail"]) == (424, True)


@pytest.mark.parametrize("version", [1, 2])
def test_expired_snapshots_leave_the_history(tmp_path: Path, version: int) -> None:
    """The history is read again after snapshots have expired, and no longer has them."""
    written = plain(create(tmp_path, spec_version=version))
    with serve(tmp_path) as api:
        before = api.tell("/history")["history"]
        written.repo.expire_snapshots(datetime.now(UTC))
        after = list(written.repo.ancestry(branch="main"))
        compare_history(api, "@branch.main", after)

    assert len(before) > len(after) == 2


def test_ref_without_prefix_is_a_branch_or_snapshot(tmp_path: Path) -> None:
    """A ref without `@` names a branch if there is one, and otherwise a snapshot."""
    written = plain(create(tmp_path))
    first, last = written.snapshots[-2], written.snapshots[0]
    written.repo.create_branch(last, first)
    with serve(tmp_path) as api:
        heads = [api.tell("/history", ref=ref)["history"][0] for ref in (first, last, f"@{last}")]

    assert [head["snapshot_id"] for head in heads] == [first, first, last]


@pytest.mark.parametrize(
    "ref",
    [
        "nothing", "@branch.nothing", "@tag.main", "@session.x", "@", "@x", "@branch.%00", "@tag.",
        "@branch.../x", "@1CECHNKREP0F1RSTCMT0/a", "@00000000000000000000", ROOT_ID.lower(),
    ],
)  # fmt: skip
def test_unknown_ref_is_not_found(young: Api, ref: str) -> None:
    """An unknown ref is 404, with the ref in the detail."""
    answer = young.answer("/history", ref=ref)

    assert answer.status_code == 404
    assert ref.removeprefix("@") in answer.json()["detail"]
    assert young.answer("/history", after="00000000000000000000").status_code == 404


def test_repository_in_a_bucket_is_named_by_path(bucket: Api) -> None:
    """`path` names one of several repositories in a bucket, with or without a final slash."""
    for path in ("lab1/one", "lab1/one/", "lab2/old"):
        assert len(bucket.tell("/history", path=path)["history"]) == 8
        assert bucket.tell("/branches", path=path)["branches"][0]["name"] == "dev"


@pytest.mark.parametrize("route", ["/branches", "/tags", "/history", "/operations"])
def test_path_without_a_repository_is_not_found(bucket: Api, route: str) -> None:
    """Each route is 404 where there is no repository; a limit of more than 1,000 fails with 400."""
    for path in ("", "lab2", "lab1/one/refs", "lab2/notes.txt", "nothing"):
        answer = bucket.answer(route, path=path)
        assert (answer.status_code, "repository" in answer.json()["detail"]) == (404, True)
    assert bucket.client.get(f"/api/datasets/nothing{route}").status_code == 404
    assert bucket.answer(route, limit=1001, path="lab1/one").status_code == 400


@pytest.mark.parametrize(
    ("route", "query"),
    [
        *(
            ("/branches", {"path": path})
            for path in ("..", "lab1/../lab2", "/lab1/one", "lab1//one", "a\nb")
        ),
        *(
            ("/operations", {"path": "lab1/one", "after": after})
            for after in (
                "yesterday",
                "0001-01-01T00:00+23:00",
                "~",
                "~../repo",
                "~a/b",
                "2026-01-01~..",
                "~%2e%2e/x",
            )
        ),
    ],
)
def test_invalid_paths_and_markers_are_refused(
    bucket: Api, route: str, query: dict[str, str]
) -> None:
    """A path that is not canonical, or a marker that no page returned, fails with 400."""
    assert bucket.answer(route, **query).status_code == 400


def test_damaged_repository_is_reported(tmp_path: Path) -> None:
    """Routes of a damaged repository answer 424 and name the file; the dataset lists the damage."""
    create(tmp_path)
    (tmp_path / "repo").write_bytes((tmp_path / "repo").read_bytes()[:99])
    with serve(tmp_path) as api:
        answer = api.answer("/history")
        described = api.tell("")
        (tmp_path / "repo").write_bytes(Repo(branches=(ref("bad", 9), ref("main", 0))).file())
        branches = api.answer("/branches")

    assert (answer.status_code, "/repo" in answer.json()["detail"]) == (424, True)
    assert len(described["damaged"]) == 1
    assert branches.status_code == 424


AWAY = Repo(status={0: U8(2), 1: U64(NOON), 2: "being moved"})


def test_offline_repository_is_unavailable(tmp_path: Path) -> None:
    """An offline repository answers 503 to reads and 423 to writes, with the reason."""
    (tmp_path / "repo").write_bytes(AWAY.file())
    with serve(tmp_path, writable=True) as api:
        for method, route, body, status in (
            *(("GET", f"/{each}", None, 503) for each in ("branches", "tags", "history")),
            ("GET", "/operations", None, 503),
            ("POST", "/sessions", {"branch": "main"}, 423),
            ("POST", "/chunks", {"any": "bytes"}, 423),
            ("POST", "/commits", {"branch": "main", "message": "m", "changes": []}, 423),
            ("POST", "/tags", {"name": "t", "snapshot_id": encode_id(FIRST)}, 423),
        ):
            answer = api.send(method, route, body)
            assert (answer.status_code, "being moved" in answer.json()["detail"]) == (status, True)


def test_offline_repository_in_a_bucket_is_listed(tmp_path: Path) -> None:
    """A bucket with an offline repository lists it with its reason, beside the other containers."""
    (tmp_path / "away").mkdir()
    (tmp_path / "away/repo").write_bytes(AWAY.file())
    zarr.create_array(tmp_path / "image", shape=(4,), chunks=(2,), dtype="u1")
    with serve(tmp_path) as api:
        told = api.tell("")
    found = CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"])
    inspected = json.loads(found.stdout)

    assert [each["path"] for each in told["arrays"]] == ["image"]
    assert [(each["path"], "being moved" in each["reason"]) for each in told["damaged"]] == [
        ("away", True)
    ]
    assert [each["path"] for each in inspected["arrays"]] == ["away", "image"]
    assert ["being moved" in each["reason"] for each in inspected["refs"]] == [True]


def test_missing_parent_in_a_history_of_version_1_is_damage(tmp_path: Path) -> None:
    """A history of version 1 whose snapshot has no file of its parent answers 424."""
    written = BUILDERS["version-1"](tmp_path)
    newest, parent, *_ = (each.id for each in written.repo.ancestry(branch="main"))
    (tmp_path / "snapshots" / parent).unlink()
    with serve(tmp_path) as api:
        answer = api.answer("/history", ref=f"@{newest}")

    assert answer.status_code == 424
    assert f"{parent}: does not exist, and is the parent" in answer.json()["detail"]


def test_invalid_history_is_damage(tmp_path: Path) -> None:
    """Invalid parents and falling times are 424; an unknown operation is listed by its number."""
    falling = Repo(updates=(update(13, {}, at=NOON), update(1, {}, at=NOON + 1)))
    with serve(tmp_path) as api:
        for repo, route in (
            *(
                (Repo(snapshots=(snapshot(FIRST, parent), snapshot(b"z" * 12, 0))), "/history")
                for parent in (0, 1, 7)
            ),
            (falling, "/operations"),
        ):
            (tmp_path / "repo").write_bytes(repo.file())
            assert api.answer(route).status_code == 424
        (tmp_path / "repo").write_bytes(Repo(updates=(update(99, {}),)).file())
        (told,) = api.tell("/operations")["operations"]
    assert (told["kind"], told["fields"]) == ("unknown", {"number": 99})
