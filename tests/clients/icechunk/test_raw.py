"""The real library opens the raw view of a repository through its HTTP storage."""

from pathlib import Path

import icechunk
import pytest

from tests.clients.icechunk.library import nodes_of, refs_of
from tests.clients.icechunk.repositories import VERSIONS, storage

KINDS = ("eventful", "split", "expired")


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Give each version."""
    name: str = request.param
    return name


@pytest.mark.parametrize("kind", KINDS)
def test_library_reads_everything(local: str, written: Path, kind: str, version: str) -> None:
    """Every snapshot has the nodes and chunks over HTTP that it has in the folder."""
    folder = written / kind / version
    repo = icechunk.Repository.open(icechunk.http_storage(f"{local}/raw/{kind}/{version}"))
    here = dict(refs_of(icechunk.Repository.open(storage(folder)), folder))
    by_snapshot = {session.snapshot_id: session for session in here.values()}

    for snapshot_id, session in by_snapshot.items():
        assert nodes_of(repo.readonly_session(snapshot_id=snapshot_id)) == nodes_of(session)
    assert len(by_snapshot) >= 2


def test_library_finds_the_refs(service: str, written: Path, version: str) -> None:
    """Branches and tags are those of the folder; of version 1 it can list none over HTTP."""
    there = icechunk.Repository.open(icechunk.http_storage(f"{service}/raw/eventful/{version}"))
    here = icechunk.Repository.open(storage(written / "eventful" / version))

    if version != "v1":
        assert there.list_branches() == here.list_branches()
        assert there.list_tags() == here.list_tags()
    for branch in here.list_branches():
        assert there.lookup_branch(branch) == here.lookup_branch(branch)
    for tag in here.list_tags():
        assert there.lookup_tag(tag) == here.lookup_tag(tag)
