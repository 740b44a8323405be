"""`app.http.api_repositories`: repositories that the real library does not write."""

import json
from pathlib import Path

import pytest
import zarr
from typer.testing import CliRunner

from app.cli import app
from app.formats.icechunk.ids import encode_id
from tests.formats.icechunk.building_repo import FIRST, NOON, U8, U64, Repo, ref, snapshot, update
from tests.serving_repositories import serve

ROUTES = ("", "/branches", "/tags", "/history", "/operations")


@pytest.mark.parametrize("route", ROUTES)
def test_offline(tmp_path: Path, route: str) -> None:
    """A repository out of service is 503, with its reason."""
    repo = Repo(status={0: U8(2), 1: U64(NOON), 2: "being moved"})
    (tmp_path / "repo").write_bytes(repo.file())
    with serve(tmp_path) as api:
        answer = api.client.get(f"/api/datasets/repo{route}")

    assert (answer.status_code, "being moved" in answer.json()["detail"]) == (503, True)


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("POST", "/sessions", {"branch": "main"}),
        ("POST", "/chunks", {"any": "bytes"}),
        ("POST", "/commits", {"branch": "main", "message": "m", "changes": []}),
        ("POST", "/tags", {"name": "t", "snapshot_id": encode_id(FIRST)}),
    ],
)
def test_offline_for_writers(tmp_path: Path, method: str, route: str, body: object) -> None:
    """For writes it is 423 with its reason, like a read-only one."""
    repo = Repo(status={0: U8(2), 1: U64(NOON), 2: "being moved"})
    (tmp_path / "repo").write_bytes(repo.file())
    with serve(tmp_path, writable=True) as api:
        answer = api.client.request(method, f"/api/datasets/repo{route}", json=body)

    assert (answer.status_code, "being moved" in answer.json()["detail"]) == (423, True)


def test_offline_beside_others(tmp_path: Path) -> None:
    """In a bucket it is listed with its reason, beside the other containers."""
    repo = Repo(status={0: U8(2), 1: U64(NOON), 2: "being moved"})
    (tmp_path / "away").mkdir()
    (tmp_path / "away/repo").write_bytes(repo.file())
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


def test_a_damaged_branch(tmp_path: Path) -> None:
    """It is listed as damaged, and its history is 502."""
    (tmp_path / "repo").write_bytes(Repo(branches=(ref("bad", 9), ref("main", 0))).file())
    with serve(tmp_path) as api:
        told = api.tell("/branches")
        answer = api.answer("/history", ref="bad")

    assert [each["name"] for each in told["branches"]] == ["main"]
    assert [each["name"] for each in told["damaged"]] == ["bad"]
    assert answer.status_code == 502


@pytest.mark.parametrize("parent", [0, 1, 7])
def test_parents_that_cannot_be(tmp_path: Path, parent: int) -> None:
    """Cyclic and missing parents are damage."""
    snapshots = (snapshot(FIRST, parent), snapshot(b"z" * 12, 0))
    (tmp_path / "repo").write_bytes(Repo(snapshots=snapshots).file())
    with serve(tmp_path) as api:
        assert api.answer("/history").status_code == 502


def test_operations_out_of_order(tmp_path: Path) -> None:
    """Times grow from operation to operation: a log where they do not is damaged."""
    updates = (update(13, {}, at=NOON), update(1, {}, at=NOON + 1))
    (tmp_path / "repo").write_bytes(Repo(updates=updates).file())
    with serve(tmp_path) as api:
        assert api.answer("/operations").status_code == 502


def test_operations_of_newer_kinds(tmp_path: Path) -> None:
    """They are listed by their number."""
    (tmp_path / "repo").write_bytes(Repo(updates=(update(99, {}),)).file())
    with serve(tmp_path) as api:
        (told,) = api.tell("/operations")["operations"]

    assert (told["kind"], told["fields"]) == ("unknown", {"number": 99})
