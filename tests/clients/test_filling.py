"""Eight processes fill the same shards with zarr-python through the service, and lose nothing."""

import multiprocessing
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import zarr

from tests.clients.filling import fill, values
from tests.gateways import forked, of_dataset
from tests.seaweedfs import SeaweedFS

PAIRS: Final = (
    ("folder", "s3fs"),
    pytest.param("folder", "obstore", marks=pytest.mark.soak),
    ("seaweedfs", "obstore"),
    pytest.param("seaweedfs", "s3fs", marks=pytest.mark.soak),
)
"""Stores, and clients that fill arrays in them."""
PROCESSES: Final = 8
SHAPE: Final = (30, 34)
SHARDS: Final = (16, 16)
"""Two by three, those at the end reach past the edge."""
CHUNKS: Final = (4, 4)


@dataclass(frozen=True, slots=True)
class Lab:
    """Where arrays are stored, and the service before it."""

    url: str
    folder: Path
    seaweedfs: SeaweedFS | None

    def new_array(self, name: str) -> None:
        """Store a sharded array without any chunk."""
        path = self.folder / name
        zarr.create_array(path, shape=SHAPE, shards=SHARDS, chunks=CHUNKS, dtype="u4")
        if self.seaweedfs is not None:
            self.seaweedfs.upload_folder(path, f"filled/{name}")

    def open(self, name: str) -> Any:
        """Open it past the service."""
        if self.seaweedfs is None:
            return zarr.open_array(self.folder / name, mode="r")
        return zarr.open_array(self.seaweedfs.zarr_store(f"filled/{name}"), mode="r")


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Run the service in a process of its own."""
    folder, seaweedfs = tmp_path_factory.mktemp("lab"), None
    url = str(folder)
    if request.param == "seaweedfs":
        seaweedfs = request.getfixturevalue("seaweedfs")
        url = f"s3://{seaweedfs.bucket}/filled"
    with forked(of_dataset(url, seaweedfs)) as running:
        yield Lab(running.url, folder, seaweedfs)


@pytest.mark.parametrize(("lab", "client"), PAIRS, indirect=["lab"])
def test_eight_processes_lose_nothing(lab: Lab, client: str) -> None:
    """All write at once, neighbours in the same shards; every value is in the shards in the end."""
    lab.new_array(client)
    fill_at_once(lab, client)
    stored = lab.open(client)

    assert (stored.shards, stored.chunks) == (SHARDS, CHUNKS)
    np.testing.assert_array_equal(np.asarray(stored[...]), values(SHAPE), strict=True)


def fill_at_once(lab: Lab, client: str) -> None:
    """Let processes write, all from one moment on, and wait until they have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([fill.__module__])
    start = context.Barrier(PROCESSES)
    processes = [
        context.Process(
            target=fill,
            args=(client, lab.url, client, start, slice(number, None, PROCESSES)),
        )
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
