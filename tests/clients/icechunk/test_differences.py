"""Differences between versions of random histories, compared with those of the library."""

import itertools
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import icechunk
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.support.clients.icechunk.model import Replica, compare_differences, edit_by_library
from tests.support.formats.icechunk.trees import FIRST, MOVES, STEPS, Draft, Step, Tree, by_uid
from tests.support.serving import client_of

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


def compare(repo: icechunk.Repository, replica: Replica, limit: int, *pair: Version) -> None:
    """Assert that both list the same differences; moves are those that the trees show."""
    before, after = pair
    moves = compare_differences(replica, repo, before.snapshot_id, after.snapshot_id, limit)
    old, new = by_uid(before.tree), by_uid(after.tree)
    expected = {(old[uid][0], new[uid][0]) for uid in old.keys() & new.keys()}
    assert moves == {(source, target) for source, target in expected if source != target}


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
