"""Pages, previews, listings and `/api` of data that are written at the same time."""

import io
import itertools
import json
import threading
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import pytest
import zarr

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from shardgate.web.previews import PLACEHOLDER
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.formats.zarr.building import LITTLE, array_metadata, sharding
from tests.support.pages import open_page
from tests.support.serving import client_of

SIDE: Final = 32
SHARD: Final = 8
CHUNK: Final = 4
CHUNKS: Final = [f"c/{row}/{column}" for row in range(8) for column in range(8)]
VOXELS: Final = ["-1-2_5-8_0-1", "2-5_5-8_0-1"]


def chunk(number: int, nbytes: int = CHUNK**2) -> bytes:
    """Return a chunk that differs from the one of the number before."""
    return bytes((number + at) % 251 for at in range(nbytes))


def archive(number: int) -> bytes:
    """Return an archive with an array of one chunk."""
    with zipfile.ZipFile(made := io.BytesIO(), "w") as opened:
        opened.writestr("a/zarr.json", json.dumps(array_metadata([8, 8], [8, 8], [LITTLE])))
        opened.writestr("a/c/0/0", chunk(number, 64))
    return made.getvalue()


def write(client: httpx.Client, root: Path, repository: Any, number: int) -> None:
    """Write a chunk or more of each dataset."""
    for name in (CHUNKS[number % 64], CHUNKS[number * 9 % 64]):
        client.put(f"/shards/a/{name}", content=chunk(number)).raise_for_status()
    name = VOXELS[number % 2]
    client.put(f"/volume/s0/{name}", content=chunk(number, 9)).raise_for_status()
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a")[...] = number % 251
    session.commit("Write")
    (root / "archive.new").write_bytes(archive(number))
    (root / "archive.new").replace(root / "archive.zip")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve an array of 16 shards, a volume of 2, a repository and an archive, while a thread
    writes to all of them.
    """
    root = tmp_path_factory.mktemp("amid")
    metadata = array_metadata([SIDE, SIDE], [SHARD, SHARD], [sharding([CHUNK, CHUNK], [LITTLE])])
    (root / "shards/a").mkdir(parents=True)
    (root / "shards/a/zarr.json").write_text(json.dumps(metadata))
    (root / "volume").mkdir()
    (root / "volume/info").write_text(json.dumps(volume_info(RAW_SHARDING)))
    storage = icechunk.local_filesystem_storage(str(root / "repository"))
    repository = icechunk.Repository.create(storage)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(SIDE, SIDE), chunks=(8, 8), dtype="u1")
    session.commit("Create")
    (root / "archive.zip").write_bytes(archive(0))
    datasets = {
        "shards": DatasetSettings(url=str(root / "shards"), writable=True),
        "volume": DatasetSettings(url=str(root / "volume"), writable=True),
        "repository": DatasetSettings(url=str(root / "repository")),
        "archive": DatasetSettings(url=str(root / "archive.zip")),
    }
    begun, ended = threading.Event(), threading.Event()

    def work(url: httpx.URL) -> None:
        with httpx.Client(base_url=url, timeout=60) as writer:
            for number in itertools.count():
                write(writer, root, repository, number)
                begun.set()
                if ended.is_set():
                    return

    settings = Settings(datasets=datasets, cache=CacheSettings(ttl_s=0.01))
    with client_of(settings) as opened:
        writing = threading.Thread(target=work, args=(opened.base_url,))
        writing.start()
        try:
            assert begun.wait(60)
            yield opened
            assert writing.is_alive(), "a write failed"
        finally:
            ended.set()
            writing.join()


@pytest.mark.parametrize("node", ["shards/a", "volume", "repository/a", "archive/a"])
def test_array_amid_writes_is_shown(client: httpx.Client, node: str) -> None:
    """An array that is written all the time has a picture, a page, S3 listings and descriptions."""
    dataset, _, path = node.partition("/")
    picture = client.get(f"/api/datasets/{dataset}/preview.png?path={path}")
    listed = client.get(f"/{dataset}?list-type=2&prefix={path}")
    described = client.get(f"/api/datasets/{dataset}").json()

    assert picture.status_code == 200
    assert picture.content != PLACEHOLDER.png
    for folder in (node, dataset):
        assert "uint8" in open_page(client, f"/{folder}/").answer.text
    assert listed.status_code == 200
    assert "<Key>" in listed.text
    assert described["arrays"] != []
    assert described["damaged"] == []
