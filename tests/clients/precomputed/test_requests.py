"""How often the service asks its store, for data that real writers have written."""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from pydantic import ByteSize

from app.settings import CacheSettings, DatasetSettings, Settings
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.segments import IDS
from tests.serving import serving
from tests.storage.faulty import FaultyServer

VOLUMES = [
    "bits/identity_0_0_0",
    "bits/identity_6_0_0",
    "bits/murmurhash3_x86_128_0_9_1",
    "shards/identity_index_gzip_data_gzip",
    "cloudvolume/identity_index_gzip_data_raw",
]
"""In each of them these two chunks are neighbours in one minishard."""
CHUNK, NEIGHBOUR = "8_8_8/0-4_0-4_0-4", "8_8_8/4-8_0-4_0-4"


@dataclass(frozen=True, slots=True)
class Counted:
    """The service without a chunk cache, and its store, which notes each request."""

    client: httpx.Client
    store: FaultyServer

    def put(self, path: Path, *, at: str = "") -> None:
        """Store the files of the folder *path* as the dataset, below *at*."""
        for file in path.rglob("*"):
            if file.is_file():
                self.store.put("bucket", f"em/{at}{file.relative_to(path)}", file.read_bytes())

    def reads(self, path: str, *, status: int = 200) -> int:
        """Ask for *path*, and count what that took."""
        before = len(self.store.seen)
        assert self.client.get(f"/em/{path}").status_code == status
        return len(self.store.seen) - before


@pytest.fixture
def counted(faulty: FaultyServer) -> Generator[Counted]:
    """Serve a dataset that has yet to be filled, over HTTP."""
    settings = Settings(
        cache=CacheSettings(chunk_bytes=ByteSize(0)),
        datasets={"em": DatasetSettings(url=f"{faulty.url}/bucket/em")},
    )
    with serving(settings) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield Counted(client, faulty)


@pytest.mark.parametrize("name", VOLUMES)
def test_chunk(counted: Counted, written: Written, name: str) -> None:
    """Cold it takes three reads after ``info``: two indexes and the chunk; warm it takes one."""
    counted.put(written.bucket / name)
    counted.reads("info")

    assert counted.reads(CHUNK) == 3
    assert counted.reads(CHUNK) == 1
    if written_in_one_minishard(name):
        assert counted.reads(NEIGHBOUR) == 1


def written_in_one_minishard(name: str) -> bool:
    """Tell whether the first two chunks of *name* share a minishard."""
    return not name.endswith("0_9_1")


def test_absent_chunk(counted: Counted, written: Written) -> None:
    """With the index at hand absence takes no read; a missing shard is asked for once."""
    counted.put(written.bucket / "holes/identity_raw")
    counted.reads(CHUNK)

    assert counted.reads("8_8_8/0-4_4-8_0-4", status=404) <= 2
    assert counted.reads("8_8_8/0-4_4-8_0-4", status=404) == 0
    counted.reads("8_8_8/12-16_0-4_0-4", status=404)
    assert counted.reads("8_8_8/12-16_0-4_0-4", status=404) == 0


def test_chunk_beyond_the_bounds(counted: Counted, written: Written) -> None:
    """What cannot be a chunk is known without a read."""
    counted.put(written.bucket / "bits/identity_1_2_3")
    counted.reads("info")

    assert counted.reads("8_8_8/20-24_0-4_0-4", status=404) == 0


def test_mesh(counted: Counted, written: Written) -> None:
    """Fragments take the manifest before them, once; then any range of them is one read."""
    counted.put(written.bucket / "segments/sharded")
    counted.reads("mesh/info")

    assert counted.reads(f"mesh/{IDS[0]}.index") == 3
    assert counted.reads(f"mesh/{IDS[0]}.index") == 1
    assert counted.reads(f"mesh/{IDS[0]}") == 2
    assert counted.reads(f"mesh/{IDS[0]}") == 1


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("segments/sharded", f"skeletons_mip_0/{IDS[0]}"),
        ("annotations/points", "by_id/1"),
        ("annotations/points", "rel_cells/3"),
        ("annotations/points", "spatial0/0_0_0"),
    ],
)
def test_skeletons_and_annotations(counted: Counted, written: Written, path: str, key: str) -> None:
    """They take as many reads as chunks do."""
    counted.put(written.bucket / path)
    counted.reads("info")
    counted.reads("skeletons_mip_0/info", status=200 if "skeletons" in key else 404)

    assert counted.reads(key) == 3
    assert counted.reads(key) == 1
