"""Gateways and the real library commit to one repository, often the same chunks."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import httpx
import icechunk
import numpy as np
import pytest
import zarr

from tests.committing import Client, put_array, put_group
from tests.faults.sites import asked, client_of, configured, put
from tests.gateways import Start, starting
from tests.seaweedfs import SeaweedFS
from tests.writable_repositories import Place, new_place

BRANCHES: Final = ("main", "one", "two")
CHUNKS: Final = 6
"""So few that writers often want the same one."""
COMMITS: Final = 5
"""Of each writer on each branch."""
COMMITS_AS_SOAK: Final = 56


class Told(NamedTuple):
    """Answer to a commit of one chunk."""

    parent_id: str
    """Parent of the changes."""
    chunk: int
    value: int
    snapshot_id: str | None
    """The commit; `None` for a conflict."""
    actual_parent: str | None = None
    """Tip of the branch in the answer to a conflict."""


type Write = Callable[[str, int, int], Told]
"""Commits a chunk of a value to a branch."""


@pytest.fixture(scope="module")
def start() -> Start:
    """Start gateways in processes of their own."""
    return starting()


@pytest.mark.parametrize(
    "commits", [COMMITS, pytest.param(COMMITS_AS_SOAK, marks=pytest.mark.soak)]
)
def test_conflicts_are_where_chunks_collide(
    seaweedfs: SeaweedFS, tmp_path: Path, start: Start, commits: int
) -> None:
    """Stateless commits, sessions and the library, in SeaweedFS."""
    collide(new_place(tmp_path, seaweedfs), start, commits, by_library=True)


def test_conflicts_in_a_folder(tmp_path: Path, start: Start) -> None:
    """Two gateways before one folder are safe; the library would lose commits there."""
    collide(new_place(tmp_path), start, COMMITS, by_library=False)


def collide(place: Place, start: Start, commits: int, *, by_library: bool) -> None:
    """Run all writers, and check the branches with the library."""
    repo = place.create()
    with ExitStack() as stack:
        gateways = [stack.enter_context(closing(start(configured(place)))) for _ in range(2)]
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
    """Commit so many times, and begin anew after each conflict."""
    told, done, random = list[Told](), 0, Random()
    while done < commits:
        told.append(write(branch, random.randrange(CHUNKS), next(values)))
        done += told[-1].snapshot_id is not None
    return told


def demand(repo: icechunk.Repository, branch: str, told: list[Told]) -> None:
    """Check the answers against the branch that the library reads: nothing is lost or doubled."""
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
    """Commit without a session."""

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
    """Commit a session."""

    def write(branch: str, chunk: int, value: int) -> Told:
        begun = client.api.do("POST", "/sessions", {"branch": branch}).json()
        session_id, parent_id = begun["session_id"], begun["parent_id"]
        assert put(client, session_id, f"a/c/{chunk}", _bytes(value)).is_success
        answer = asked(client, session_id, message=f"{value}")
        return _told(answer, Told(parent_id, chunk, value, None))

    return write


def library(place: Place) -> Write:
    """Commit with the real library, which rebases."""
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
        return told._replace(snapshot_id=made)

    return write


def _told(answer: httpx.Response, told: Told) -> Told:
    body = answer.json()
    if answer.status_code == 201:
        return told._replace(snapshot_id=body["snapshot_id"])
    assert answer.status_code == 409, answer.text
    assert body["expected_parent"] == told.parent_id
    (conflict,) = body["conflicts"]
    assert (conflict["path"], conflict["chunks"]) == ("/a", [[told.chunk]])
    return told._replace(actual_parent=body["actual_parent"])


def _bytes(value: int) -> bytes:
    return value.to_bytes(2, "little")
