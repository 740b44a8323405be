"""Gateways, and the real library, that commit to one repository at the same time."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import numpy as np
import pytest
import zarr

from tests.committing import Client, put_array, put_group
from tests.gateways import Start, of_dataset, starting
from tests.seaweedfs import SeaweedFS
from tests.writable_repositories import Api, Place, new_place

BRANCHES: Final = ("main", "one", "two")
COMMITS: Final = 6
"""Of each writer, on each branch."""
ROUNDS_AS_SOAK: Final = 60

type Write = Callable[[str, int], str]
"""Commits the chunk of a number to a branch, and gives the id of the snapshot."""


@pytest.fixture(scope="module")
def start() -> Start:
    """Start gateways in processes of their own."""
    return starting()


def test_two_gateways_and_the_library_commit_together(
    seaweedfs: SeaweedFS, tmp_path: Path, start: Start
) -> None:
    """In SeaweedFS nothing is lost, and nothing is there twice."""
    together(new_place(tmp_path, seaweedfs), start, COMMITS, by_library=True)


@pytest.mark.soak
def test_they_commit_together_for_long(seaweedfs: SeaweedFS, tmp_path: Path, start: Start) -> None:
    """The same, more than 500 times."""
    together(new_place(tmp_path, seaweedfs), start, ROUNDS_AS_SOAK, by_library=True)


def test_two_gateways_commit_together_in_a_folder(tmp_path: Path, start: Start) -> None:
    """There the library would lose commits, its own and others'."""
    together(new_place(tmp_path), start, COMMITS, by_library=False)


def together(place: Place, start: Start, commits: int, *, by_library: bool) -> None:
    """Let all write chunks of their own, and look at what the library makes of it."""
    repo = place.create()
    with ExitStack() as stack:
        clients = [_client(stack, place, start) for _ in range(2)]
        count = commits * (2 + by_library)
        clients[0].commit(put_group("/"), put_array("/a", 2 * count), message="first")
        for branch in BRANCHES[1:]:
            repo.create_branch(branch, repo.lookup_branch("main"))
        writers: list[Write] = [_through(client) for client in clients]
        if by_library:
            writers.append(_by_library(place))
        with ThreadPoolExecutor(len(writers) * len(BRANCHES)) as pool:
            work = [
                (
                    branch,
                    pool.submit(_write, write, branch, range(at * commits, (at + 1) * commits)),
                )
                for (at, write), branch in product(enumerate(writers), BRANCHES)
            ]
            told = [(branch, made) for branch, each in work for made in each.result(600)]
    for branch in BRANCHES:
        _demand(place.open(), branch, count, [made for of, made in told if of == branch])


def _demand(repo: icechunk.Repository, branch: str, count: int, told: list[str]) -> None:
    """Be sure that a branch is one line of just the commits that were *told*."""
    ancestors = list(repo.ancestry(branch=branch))
    assert [each.parent_id for each in ancestors[:-1]] == [each.id for each in ancestors[1:]]
    assert Counter(each.id for each in ancestors[:-2]) == Counter(told)
    moments = [each.written_at for each in ancestors]
    assert moments == sorted(moments, reverse=True)
    store = repo.readonly_session(branch).store
    values = np.asarray(zarr.open_array(store, path="a", mode="r")[...])
    assert values.tolist() == [1 + number % 200 for number in range(count) for _ in range(2)]
    changed = repo.diff(from_snapshot_id=ancestors[-2].id, to_branch=branch).updated_chunks
    assert changed == {"/a": [[number] for number in range(count)]}


def _write(write: Write, branch: str, numbers: range) -> list[str]:
    return [write(branch, number) for number in numbers]


def _client(stack: ExitStack, place: Place, start: Start) -> Client:
    server = place.seaweedfs
    at = place.folder.as_uri() if server is None else f"s3://{server.bucket}/{place.folder.name}"
    told = of_dataset(at, server)
    environ = {name.replace("__DATA__", "__REPO__"): value for name, value in told.items()}
    gateway = stack.enter_context(closing(start(environ)))
    http = stack.enter_context(httpx.Client(base_url=gateway.url, timeout=120))
    return Client(Api(http), place)


def _through(client: Client) -> Write:
    def write(branch: str, number: int) -> str:
        chunk_id = client.chunk(bytes([1 + number % 200]) * 2)
        chunk: dict[str, Any] = {"coords": [number], "chunk_id": chunk_id, "length": 2}
        change = {"op": "put_chunks", "path": "/a", "chunks": [chunk]}
        return client.commit(change, branch=branch, message=f"{number}", key=f"{branch}-{number}")

    return write


def _by_library(place: Place) -> Write:
    repo = place.open()

    def write(branch: str, number: int) -> str:
        session = repo.writable_session(branch)
        array = zarr.open_array(session.store, path="a")
        array[2 * number : 2 * number + 2] = 1 + number % 200
        return session.commit(f"{number}", rebase_with=icechunk.ConflictDetector())

    return write
