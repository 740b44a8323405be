"""Differences between versions of random histories, compared with those of the library."""

import itertools
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

import icechunk
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.support.clients.icechunk.model import Replica, edit_by_library
from tests.support.formats.icechunk.trees import FIRST, MOVES, STEPS, Draft, Step, Tree, by_uid
from tests.support.serving import client_of

SETS: Final = {
    ("created", "group"): "new_groups",
    ("created", "array"): "new_arrays",
    ("deleted", "group"): "deleted_groups",
    ("deleted", "array"): "deleted_arrays",
    ("updated", "group"): "updated_groups",
    ("updated", "array"): "updated_arrays",
}

type Commits = Sequence[tuple[str, list[Step]]]


class Version(NamedTuple):
    """A snapshot, and the tree of it."""

    snapshot_id: str
    tree: Tree


class Lab(NamedTuple):
    """A service in front of a folder of repositories."""

    folder: Path
    client: Any


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Serve a folder, without a lifetime of caches."""
    folder = tmp_path_factory.mktemp("differences")
    datasets = {"repo": DatasetSettings(url=folder.as_uri(), writable=True)}
    with client_of(Settings(datasets=datasets, cache=CacheSettings(ttl_s=1e-6))) as client:
        yield Lab(folder, client)


def write(repo: icechunk.Repository, replica: Replica, commits: Commits) -> list[Version]:
    """Make *commits* on top of one another, by library or service, and return all versions."""
    uids = itertools.count(1)
    versions = [Version(repo.lookup_branch("main"), {})]
    for what, steps in commits:
        draft = Draft(versions[-1].tree, uids)
        edits = draft.take(steps)
        options = {"message": what, "allow_empty": True}
        if what == "service":
            made = replica.commit(edits, inline=8, **options)
            if made.status_code == 400:  # it writes outside of a grid, or moves to a deleted node
                continue
            snapshot_id = made.json()["snapshot_id"]
        else:
            begin = repo.rearrange_session if what == "move" else repo.writable_session
            session = begin("main")
            edit_by_library(session, edits)
            snapshot_id = session.commit(what, allow_empty=True)
        versions.append(Version(snapshot_id, draft.after))
    return versions


def told(changes: Sequence[Any], change: str, node_type: str | None = None) -> list[Any]:
    """Return the changes of a kind."""
    return [
        each
        for each in changes
        if each["change"] == change and node_type in (None, each["node_type"])
    ]


def compare(repo: icechunk.Repository, replica: Replica, limit: int, *pair: Version) -> None:
    """Assert that both list the same differences; moves are those that the trees show."""
    before, after = pair
    refs = {"from": f"@{before.snapshot_id}", "to": f"@{after.snapshot_id}"}
    changes = replica.pages("/diff", "changes", limit=limit, **refs)
    library = repo.diff(from_snapshot_id=before.snapshot_id, to_snapshot_id=after.snapshot_id)
    for (change, node_type), name in SETS.items():
        found = [each["path"] for each in told(changes, change, node_type)]
        assert sorted(found) == sorted(getattr(library, name)), name
    chunks: dict[str, list[list[int]]] = {}
    for each in told(changes, "chunks_updated"):
        chunks.setdefault(each["path"], []).extend(each["chunks"])
    assert chunks == {
        path: [list(at) for at in coords] for path, coords in library.updated_chunks.items()
    }
    old, new = by_uid(before.tree), by_uid(after.tree)
    moved = {(old[uid][0], new[uid][0]) for uid in old.keys() & new.keys()}
    found = {(each["former_path"], each["path"]) for each in told(changes, "moved")}
    assert found == {(source, target) for source, target in moved if source != target}
    ends = {target for _, target in library.moved_nodes}
    assert {target for _, target in found} <= ends
    assert all(len(each["chunks"]) <= limit for each in changes)


@pytest.mark.parametrize(
    "examples", [5, pytest.param(200, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_differences_of_random_histories_are_those_of_the_library(lab: Lab, examples: int) -> None:
    """Between any version and the last one, all pages together are what the library lists, also
    after versions in between have expired.
    """
    commit = st.one_of(
        st.tuples(st.sampled_from(["library", "service"]), STEPS),
        st.tuples(st.sampled_from(["move", "service"]), MOVES),
    )

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(FIRST, st.lists(commit, min_size=1, max_size=6), st.integers(1, 9), st.booleans())
    def check(first: list[Step], commits: Any, limit: int, expires: bool) -> None:  # noqa: FBT001 - drawn
        name = uuid4().hex
        storage = icechunk.local_filesystem_storage(str(lab.folder / name))
        repo = icechunk.Repository.create(storage)
        replica = Replica(lab.client, name)
        versions = write(repo, replica, [("library", first), *commits])
        if expires and len(versions) > 2:
            flushed_at = repo.lookup_snapshot(versions[-2].snapshot_id).written_at
            repo.expire_snapshots(flushed_at + timedelta(microseconds=1))
            del versions[1:-1]
        for each in versions[:-1]:
            compare(repo, replica, limit, each, versions[-1])

    check()
