"""Eight processes fill the same shards with zarr-python through the service, and lose nothing."""

import multiprocessing
from typing import Final

import numpy as np
import pytest
import zarr

from tests.clients.filling import CLIENTS, fill, values
from tests.gateways import forked, of_dataset
from tests.labs import Lab

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


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Store sharded arrays without any chunk, one for each client."""
    is_remote = request.param == "seaweedfs"
    lab = Lab(
        tmp_path_factory.mktemp("filled"),
        request.getfixturevalue("seaweedfs") if is_remote else None,
    )
    for name in CLIENTS:
        path = lab.folder / name
        zarr.create_array(path, shape=SHAPE, shards=SHARDS, chunks=CHUNKS, dtype="u4")
        if lab.seaweedfs is not None:
            lab.seaweedfs.upload_folder(path, f"{lab.folder.name}/{name}")
    return lab


@pytest.mark.parametrize(("lab", "client"), PAIRS, indirect=["lab"])
def test_eight_processes_lose_nothing(lab: Lab, client: str) -> None:
    """All write at once, neighbours in the same shards; every value is in the shards in the end."""
    with forked(of_dataset(lab.url, lab.seaweedfs)) as running:
        fill_at_once(running.url, client)
    stored = lab.open(client)

    assert (stored.shards, stored.chunks) == (SHARDS, CHUNKS)
    np.testing.assert_array_equal(np.asarray(stored[...]), values(SHAPE), strict=True)


def fill_at_once(url: str, client: str) -> None:
    """Let processes write, all from one moment on, and wait until they have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([fill.__module__])
    start = context.Barrier(PROCESSES)
    processes = [
        context.Process(
            target=fill,
            args=(client, url, client, start, slice(number, None, PROCESSES)),
        )
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
