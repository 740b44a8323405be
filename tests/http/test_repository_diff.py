"""`/diff`: what changed between two snapshots is what the real library tells."""

from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import icechunk
import pytest

from tests.repositories import (
    BUILDERS,
    FIXTURE_NAMES,
    ROOT_ID,
    Written,
    array,
    create,
    delete,
    every,
    plain,
    write,
)
from tests.serving_repositories import Api, obtain, serve

NODES: Final = (
    *("new_groups", "new_arrays", "deleted_groups", "deleted_arrays"),
    *("updated_groups", "updated_arrays"),
)


@pytest.fixture(scope="module", params=[*BUILDERS, *FIXTURE_NAMES])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Give repositories with all kinds of history."""
    return obtain(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def api(written: Written) -> Generator[Api]:
    """Serve one of them."""
    with serve(written.folder) as api:
        yield api


def by_library(repo: icechunk.Repository, start: str, stop: str) -> dict[str, Any]:
    """Tell the changes as the library does."""
    diff = repo.diff(from_snapshot_id=start, to_snapshot_id=stop)
    return {
        **{name: sorted(getattr(diff, name)) for name in NODES},
        "updated_chunks": diff.updated_chunks,
        "moved_nodes": sorted(diff.moved_nodes),
    }


def by_us(told: dict[str, Any]) -> dict[str, Any]:
    """Bring what we tell into the same form."""
    chunks = {path: each["chunks"] for path, each in told["updated_chunks"].items()}
    assert all(each["count"] == len(each["chunks"]) for each in told["updated_chunks"].values())
    moves = sorted((each["from"], each["to"]) for each in told["moved_nodes"])
    return {**{name: told[name] for name in NODES}, "updated_chunks": chunks, "moved_nodes": moves}


def runs(repo: icechunk.Repository) -> Iterator[tuple[str, str]]:
    """Give every pair of a snapshot of a branch and one of its ancestors."""
    for name in repo.list_branches():
        ids = [each.id for each in repo.ancestry(branch=name)]
        yield from ((start, stop) for stop, start in combinations(ids, 2))


def is_replaced(diff: dict[str, Any]) -> bool:
    """Tell whether an array took the place of one that had changed."""
    return not {*diff["new_arrays"]}.isdisjoint(diff["deleted_arrays"])


def test_every_pair_of_snapshots(written: Written, api: Api) -> None:
    """All that came, went, moved and changed; of an array that replaced another, more chunks."""
    compared = 0
    for start, stop in runs(written.repo):
        expected = by_library(written.repo, start, stop)
        found = by_us(api.tell("/diff", from_=f"@{start}", to=f"@{stop}", limit=1000))
        if is_replaced(expected):
            for path, chunks in expected.pop("updated_chunks").items():
                assert [each for each in chunks if each not in found["updated_chunks"][path]] == []
            found.pop("updated_chunks")
        assert found == expected
        compared += 1
    assert compared


def test_what_is_no_ancestor(written: Written, api: Api) -> None:
    """The other way round nothing can be told: 400, where the library refuses too."""
    for stop, start in list(runs(written.repo))[:10]:
        with pytest.raises(icechunk.InvalidInputError):
            written.repo.diff(from_snapshot_id=start, to_snapshot_id=stop)
        answer = api.answer("/diff", from_=f"@{start}", to=f"@{stop}")
        assert (answer.status_code, "no ancestor" in answer.json()["detail"]) == (400, True)


def test_nothing_between(written: Written, api: Api) -> None:
    """From a snapshot to itself nothing changed."""
    told = api.tell("/diff", from_="main")

    assert told["from_snapshot_id"] == told["to_snapshot_id"] == written.repo.lookup_branch("main")
    assert not any(by_us(told).values())


def test_refs(tmp_path: Path) -> None:
    """They are spelled as everywhere, and told by the ids of their snapshots."""
    written = plain(create(tmp_path))
    with serve(tmp_path) as api:
        told = api.tell("/diff", from_="@tag.v1", to="dev")

    assert told["from_snapshot_id"] == written.repo.lookup_tag("v1")
    assert told["to_snapshot_id"] == written.repo.lookup_branch("dev")
    assert by_us(told)["updated_chunks"] == {"/a": [[2]]}


def test_an_array_in_the_place_of_another(tmp_path: Path) -> None:
    """The changed chunks of both are told; the library leaves those of one out."""
    written = create(tmp_path)
    start = written.commit("one", array("a"))
    written.commit("two", write("a", 0, 7))
    written.commit("three", delete("a"))
    written.commit("four", array("a", (4,)))
    with serve(tmp_path) as api:
        told = by_us(api.tell("/diff", from_=start))

    assert (told["new_arrays"], told["deleted_arrays"]) == (["/a"], ["/a"])
    assert told["updated_chunks"] == {"/a": [[0], [1]]}


def test_moves_are_told_in_their_order(tmp_path: Path) -> None:
    """Whoever repeats them gets there."""
    written = create(tmp_path)
    start = written.commit("one", array("a"))
    for source, target in ("ab", "bc", "ca", "ad"):
        written.move(f"/{source}", f"/{target}")
    with serve(tmp_path) as api:
        moves = api.tell("/diff", from_=start)["moved_nodes"]

    assert [each["from"] + each["to"] for each in moves] == ["/a/b", "/b/c", "/c/a", "/a/d"]


def test_many_chunks(tmp_path: Path) -> None:
    """All are counted; arrays with few changes are told whole, the others share the rest."""
    written = create(tmp_path)
    shapes: dict[str, tuple[int, ...]] = {"big": (100, 60), "few": (8,), "large": (3000,)}
    written.commit("one", every(*(array(name, shape) for name, shape in shapes.items())))
    with serve(tmp_path) as api:
        chunks = api.tell("/diff", from_=ROOT_ID, limit=104)["updated_chunks"]

    assert {path: (each["count"], len(each["chunks"])) for path, each in chunks.items()} == {
        "/big": (1500, 50),
        "/few": (4, 4),
        "/large": (1500, 50),
    }
    assert chunks["/big"]["chunks"][:31] == [*([0, column] for column in range(30)), [1, 0]]


def test_a_deleted_log(tmp_path: Path) -> None:
    """Without it nobody knows what changed: 502, and the file is named."""
    written = create(tmp_path)
    (tmp_path / "transactions" / written.commit("one", array("a"))).unlink()
    with serve(tmp_path) as api:
        answer = api.answer("/diff", from_=ROOT_ID)

    assert (answer.status_code, "/transactions/" in answer.json()["detail"]) == (502, True)


def test_a_deleted_log_of_an_expired_snapshot(tmp_path: Path) -> None:
    """It is named, and what the others tell is told, as the library does."""
    written = create(tmp_path)
    changes: list[Callable[[Any], object]] = [array("a"), write("a", 0, 2), array("b"), array("c")]
    ids = [written.commit("next", change) for change in changes]
    moments = {each.id: each.written_at for each in written.repo.ancestry(branch="main")}
    written.repo.expire_snapshots(moments[ids[2]] + timedelta(microseconds=1))
    (tmp_path / "transactions" / ids[0]).unlink()
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    with serve(tmp_path) as api:
        told = api.tell("/diff", from_=ROOT_ID)

    assert by_us(told) == by_library(icechunk.Repository.open(storage), ROOT_ID, ids[-1])
    assert told["missing_tx_logs"] == [ids[0]]
