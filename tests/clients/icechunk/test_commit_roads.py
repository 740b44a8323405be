"""Many processes commit to one branch: by the library through the service, and by sessions."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import icechunk
import numpy as np
import pytest
import zarr

from tests.support.gateways import Gateway, of_dataset, start_gateway
from tests.support.icechunk.committer import library_storage, value_of
from tests.support.processes import ROOT, environ, free_ports
from tests.support.seaweedfs import SeaweedFS

_LONGEST_S: Final = 900


class Crowd(NamedTuple):
    """Processes that commit, how many of them are killed, and whether the service is."""

    processes: int
    each: int
    killed: int = 0
    is_service_killed: bool = False


FEW: Final = Crowd(2, 3)
MANY: Final = Crowd(16, 4, killed=4, is_service_killed=True)


@pytest.mark.parametrize(
    ("site", "crowd", "road"),
    [
        ("folder", FEW, "library"),
        *(
            pytest.param(site, MANY, road, marks=pytest.mark.soak)
            for site in ("folder", "seaweedfs")
            for road in ("library", "session")
        ),
    ],
)
def test_acknowledged_commits_of_many_processes_are_kept(
    request: pytest.FixtureRequest, tmp_path: Path, road: str, site: str, crowd: Crowd
) -> None:
    """No acknowledged commit of several processes is lost, also if some of them, or the service,
    are killed.
    """
    seaweedfs = request.getfixturevalue("seaweedfs") if site == "seaweedfs" else None
    configuration = configured(tmp_path, seaweedfs)
    service = start_gateway(configuration)
    with ExitStack() as stack:
        create_array(service.url, crowd.processes * crowd.each)
        writers = [stack.enter_context(each) for each in started(road, service.url, crowd)]
        for each in writers:
            assert each.stdout is not None
            each.stdout.readline()
        for each in writers:
            each.stdin.write("go\n")  # type: ignore[union-attr]
            each.stdin.flush()  # type: ignore[union-attr]
        acknowledged = {int(line) for each in writers[: crowd.killed] for line in first_of(each)}
        for each in writers[: crowd.killed]:
            each.kill()
        if crowd.is_service_killed:
            service.close()
            service = start_gateway(configuration)
        stack.callback(service.close)
        for each in writers:
            acknowledged |= set(map(int, each.communicate(timeout=_LONGEST_S)[0].split()))
        demand(service, acknowledged)
    left = (crowd.processes - crowd.killed) * crowd.each
    assert left <= len(acknowledged) <= crowd.processes * crowd.each


def configured(folder: Path, seaweedfs: SeaweedFS | None) -> dict[str, str]:
    """Return the variables of a service of one root as ``data``, and as stored as ``raw``."""
    root = str(folder) if seaweedfs is None else f"s3://{seaweedfs.bucket}/{folder.name}"
    return of_dataset(root, seaweedfs) | {
        "SHARDGATE_SERVER__PORT": str(free_ports(1)[0]),
        "SHARDGATE_DATASETS__RAW__URL": root,
        "SHARDGATE_DATASETS__RAW__VIEW": "raw",
        "SHARDGATE_DATASETS__RAW__WRITABLE": "true",
    }


def create_array(url: str, chunks: int) -> None:
    """Create the repository and its array, by the library through the service."""
    session = icechunk.Repository.create(library_storage(url)).writable_session("main")
    options: Any = {"shape": (chunks,), "chunks": (1,), "dtype": "u1"}
    zarr.create_group(session.store).create_array("a", **options)
    session.commit("an array")


def started(road: str, url: str, crowd: Crowd) -> Iterator[subprocess.Popen[str]]:
    """Start the processes, each of which commits chunks of its own."""
    for first in range(0, crowd.processes * crowd.each, crowd.each):
        yield subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.icechunk.committer", road, url),
                *(str(first), str(first + crowd.each)),
            ],
            cwd=ROOT,
            env=environ(PYTHONWARNINGS="ignore"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def first_of(process: subprocess.Popen[str]) -> list[str]:
    """Wait for the first commit of a process, and return its line."""
    assert process.stdout is not None
    return [process.stdout.readline()]


def demand(service: Gateway, acknowledged: set[int]) -> None:
    """Assert that the history and the array have these chunks."""
    repository = icechunk.Repository.open(library_storage(service.url))
    messages = Counter(each.message for each in repository.ancestry(branch="main"))
    read: Any = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
    values = np.asarray(read[:]).tolist()

    assert [n for n in acknowledged if not messages[f"chunk {n}"]] == []
    assert [n for n in acknowledged if values[n] != value_of(n)] == []
