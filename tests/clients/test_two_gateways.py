"""What one replica wrote another one reads: at once if it knows nothing of it, else in time."""

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import zarr

from app.settings import CacheSettings, DatasetSettings, Settings
from tests.clients.filling import over_obstore
from tests.seaweedfs import SeaweedFS
from tests.serving import serving

TTL_S: Final = 1.5
LATE_S: Final = 2.0
"""What busy machines may add."""


class Pair(NamedTuple):
    """Two services before the array ``array`` of one store."""

    writer: str
    reader: str


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), "seaweedfs"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Pair]:
    """Store a sharded array of ones, and run the services."""
    stores, url = {}, str(tmp_path)
    array = zarr.create_array(tmp_path / "array", shape=(8,), shards=(8,), chunks=(2,), dtype="u1")
    array[:] = 1
    if request.param == "seaweedfs":
        seaweedfs: SeaweedFS = request.getfixturevalue("seaweedfs")
        seaweedfs.upload_folder(tmp_path, "pair")
        url = f"s3://{seaweedfs.bucket}/pair"
        stores["lab"] = seaweedfs.settings
    data = DatasetSettings(url=url, store="lab" if stores else None, writable=True)
    settings = Settings(stores=stores, datasets={"data": data}, cache=CacheSettings(ttl_s=TTL_S))
    with serving(settings) as writer, serving(settings) as reader:
        yield Pair(writer, reader)


def opened(url: str) -> Any:
    """Open the array as zarr-python does through one of the services."""
    return zarr.open_array(over_obstore(url, "array"), mode="r+")


def test_who_knows_the_old_reads_the_news_in_time(pair: Pair) -> None:
    """Chunks and metadata are the new ones after the time to live; the writer's are at once."""
    reader, writer = opened(pair.reader), opened(pair.writer)
    assert reader[:].tolist() == [1] * 8
    writer[4:6] = 7
    writer.attrs["x"] = 1
    writer.append(np.array([9, 9], "u1"))

    assert opened(pair.writer)[:].tolist() == [1, 1, 1, 1, 7, 7, 1, 1, 9, 9]
    read_in_time(pair.reader, [1, 1, 1, 1, 7, 7, 1, 1, 9, 9])
    assert opened(pair.reader).attrs.asdict() == {"x": 1}


def test_both_write_by_turns(pair: Pair) -> None:
    """Each keeps what the other one wrote, though it knows the shard from before."""
    arrays = [opened(url) for url in pair]
    assert [array[:].tolist() for array in arrays] == [[1] * 8] * 2
    for number in range(4):
        arrays[number % 2][2 * number : 2 * number + 2] = 10 + number

    for url in pair:
        read_in_time(url, [10, 10, 11, 11, 12, 12, 13, 13])


def read_in_time(url: str, expected: list[int]) -> None:
    """Read until all is as it was written, no longer than the time to live."""
    deadline = time.monotonic() + TTL_S + LATE_S
    while opened(url)[:].tolist() != expected:
        assert time.monotonic() < deadline
        time.sleep(0.05)
