"""Keys of 1,024 bytes in 500 folders, in every kind of dataset that holds them."""

import json
import re
import zipfile
from collections.abc import Generator
from html import unescape
from pathlib import Path
from typing import Final

import httpx
import icechunk
import pytest
import zarr

from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.support.commands import run
from tests.support.formats.zarr.building import array_metadata, encode_shard, sharding
from tests.support.seaweedfs import SeaweedFS, stored_in
from tests.support.serving import client_of
from tests.support.sessions import GROUP, listed_keys

LONG_S: Final = 60.0
"""Longer than SeaweedFS looks through 500 folders on a busy machine."""
FOLDERS: Final = "a/" * 500
GROUPS: Final = "a/" * 480
"""In a session, whose id is part of each key."""
WRITABLE: Final = ("file", "memory", "s3")
HELD: Final = {
    **dict.fromkeys(WRITABLE, ("d/", "k", "x" * 22)),
    "s3": ("d/", "k", "x" * 19),
    "zip": ("d.zip/", "k", "x" * 18),
    "kerchunk": ("d.json/", "k", "x" * 17),
    "volume": ("d/", "info", "x" * 22),
    "icechunk": ("@branch.main/", "zarr.json", "zarr.json"),
    "session": ("", "zarr.json", "zarr.json"),
}
"""Of each dataset the prefix of its keys, and the names of a key there and of the deep one."""
_SCALE: Final = {
    "key": "1_1_1",
    "encoding": "raw",
    "size": [8, 8, 8],
    "resolution": [1, 1, 1],
    "chunk_sizes": [[8, 8, 8]],
}
_INFO: Final = {
    "@type": "neuroglancer_multiscale_volume",
    "type": "image",
    "data_type": "uint8",
    "num_channels": 1,
    "scales": [_SCALE],
}


def _fill(folder: Path) -> None:
    prefix, name, last = HELD["zip"]
    (folder / "zip").mkdir()
    with zipfile.ZipFile(folder / f"zip/{prefix[:-1]}", "w") as archive:
        archive.writestr("array/zarr.json", json.dumps(array_metadata([4], [4], [sharding([2])])))
        archive.writestr(f"{FOLDERS}{last}", b"1")
        archive.writestr(name, b"2")
    prefix, name, last = HELD["kerchunk"]
    (folder / "kerchunk").mkdir()
    references = {f"{FOLDERS}{last}": "1", name: "2", ".zgroup": '{"zarr_format": 2}'}
    (folder / f"kerchunk/{prefix[:-1]}").write_text(json.dumps(references))
    prefix, name, last = HELD["volume"]
    deep = folder / f"volume/{prefix}{FOLDERS}{last}"
    deep.parent.mkdir(parents=True)
    deep.write_bytes(b"1")
    (folder / f"volume/{prefix}{name}").write_text(json.dumps(_INFO))
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder / "icechunk")))
    session = repo.writable_session("main")
    zarr.create_group(session.store)
    zarr.create_group(session.store, path=GROUPS.removesuffix("/"))
    session.commit("480 groups")


class Deep:
    """A client of a service, and what it serves."""

    def __init__(self, client: httpx.Client, session_id: str, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self._lead = f"@session.{session_id}/"

    def key(self, held: str) -> tuple[str, str, str, str]:
        """Return the dataset, the prefix, the deep key and the key beside it."""
        prefix, name, last = HELD[held]
        dataset = "icechunk" if held == "session" else held
        prefix = self._lead if held == "session" else prefix
        folders = GROUPS if dataset == "icechunk" else FOLDERS
        return dataset, prefix, f"{prefix}{folders}{last}", f"{prefix}{name}"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, seaweedfs: SeaweedFS) -> Generator[Deep]:
    """Serve datasets with a deep key, and a session of one."""
    folder = tmp_path_factory.mktemp("deep")
    _fill(folder)
    stores, bucket = stored_in(folder / "s3", seaweedfs, "s3", writable=True)
    names = ("file", "zip", "kerchunk", "volume", "icechunk")
    datasets = {
        name: DatasetSettings(
            url=(folder / name).as_uri(),
            writable=name in ("file", "icechunk"),
            format="kerchunk" if name == "kerchunk" else "auto",
        )
        for name in names
    }
    (folder / "file").mkdir()
    datasets |= {"memory": DatasetSettings(url="memory://deep", writable=True), "s3": bucket}
    limits = LimitSettings(timeout_s=LONG_S, deadline_s=LONG_S)
    with client_of(Settings(stores=stores, limits=limits, datasets=datasets)) as client:
        answer = client.post("/api/datasets/icechunk/sessions", json={})
        served = Deep(client, answer.json()["session_id"], folder)
        for name in WRITABLE:
            dataset, _, key, beside = served.key(name)
            for each in (key, beside):
                answer = client.put(f"/{dataset}/{each}", content=b"12")
                assert answer.status_code == 200, answer.text
        yield served


@pytest.mark.parametrize("held", HELD)
def test_deep_key_is_read_and_listed_with_the_keys_around_it(deep: Deep, held: str) -> None:
    """A key of 500 folders is read and listed, in pages of one key too, and that beside it."""
    dataset, prefix, key, beside = deep.key(held)
    for method in ("GET", "HEAD"):
        assert deep.client.request(method, f"/{dataset}/{key}").status_code == 200
    page_keys = 1000 if held in ("s3", "icechunk", "session") else 1
    found = listed_keys(deep.client, dataset, prefix, page_keys)
    assert [each for each in found if each in (key, beside)] in ([key, beside], [beside, key])
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("held", HELD)
def test_folders_above_a_deep_key_have_listings_and_pages(deep: Deep, held: str) -> None:
    """A folded listing has the folder below at each level above a key of 500 folders.

    The folders have pages for people and lists of links.
    """
    dataset, prefix, *_ = deep.key(held)
    for levels in (0, 31, 32, 479):
        below = prefix + "a/" * levels
        query = {"list-type": "2", "prefix": below, "delimiter": "/"}
        answer = deep.client.get(f"/{dataset}", params=query)
        folders = re.findall("<CommonPrefixes><Prefix>([^<]*)", answer.text)
        assert f"{below}a/" in map(unescape, folders)
        for accept in ("text/html", "*/*") if levels in (0, 479) else ():
            answer = deep.client.get(f"/{dataset}/{below}", headers={"accept": accept})
            assert answer.status_code == 200


@pytest.mark.parametrize("dataset", ["file", "zip", "kerchunk", "icechunk"])
def test_api_describes_a_dataset_with_a_deep_key(deep: Deep, dataset: str) -> None:
    """A dataset with a key of 500 folders is described by `/api`."""
    assert deep.client.get(f"/api/datasets/{dataset}").status_code == 200


@pytest.mark.parametrize("path", ["zip/d.zip", "kerchunk/d.json", "volume", "icechunk"])
def test_commands_survey_a_dataset_with_a_deep_key(deep: Deep, path: str) -> None:
    """`inspect` and `verify` of a dataset with a key of 500 folders find no damage."""
    for command in ("inspect", "verify"):
        done = run(command, str(deep.folder / path))
        assert done.returncode == 0, done.stderr


LISTED: Final = f"<Delete><Object><Key>e/{FOLDERS}x</Key></Object></Delete>"


@pytest.mark.parametrize(
    ("name", "method", "path", "body"),
    [
        pytest.param("file", "DELETE", f"/e/{FOLDERS}x", "", id="alone"),
        pytest.param("memory", "POST", "?delete", LISTED, id="listed"),
        pytest.param("file", "DELETE", "?prefix=e/", "", id="below a prefix of a folder"),
        pytest.param("memory", "DELETE", "?prefix=e/", "", id="below a prefix of memory"),
        pytest.param("s3", "DELETE", "?prefix=e/", "", id="in S3", marks=pytest.mark.soak),
    ],
)
def test_deep_keys_are_deleted(deep: Deep, name: str, method: str, path: str, body: str) -> None:
    """Keys of 500 folders are deleted alone, below a prefix, and in a list as S3 clients send."""
    assert deep.client.put(f"/{name}/e/{FOLDERS}x", content=b"1").status_code == 200
    answer = deep.client.request(method, f"/{name}{path}", content=body.encode() or None)

    assert answer.is_success, answer.text
    assert "<Error>" not in answer.text
    assert listed_keys(deep.client, name, "e/") == []


def test_session_deletes_480_groups(deep: Deep) -> None:
    """A session deletes the outermost of 480 groups with all in it."""
    client = deep.client
    answer = client.post("/api/datasets/icechunk/sessions", json={})
    lead = f"@session.{answer.json()['session_id']}/"
    for folder in ("b/" * 480, GROUPS):
        assert client.put(f"/icechunk/{lead}{folder}zarr.json", content=GROUP).status_code == 200
        first = folder[:2]
        answer = client.delete("/icechunk", params={"prefix": f"{lead}{first}"})
        assert answer.status_code == 200, answer.text
        assert listed_keys(client, "icechunk", f"{lead}{first}") == []


def test_arrays_and_shards_below_32_folders_are_listed(tmp_path: Path) -> None:
    """A listing has the inner chunks of an array 30 folders deep, and objects 40 folders deep."""
    array = tmp_path / ("a/" * 30)
    (array / "c").mkdir(parents=True)
    (array / "zarr.json").write_text(json.dumps(array_metadata([4], [4], [sharding([2])])))
    (array / "c/0").write_bytes(encode_shard([b"12", b"34"]))
    other = tmp_path / ("b/" * 40)
    other.mkdir(parents=True)
    (other / "zarr.json").write_text(json.dumps(array_metadata([4], [4], [sharding([2])])))
    with client_of(Settings(datasets={"d": DatasetSettings(url=tmp_path.as_uri())})) as client:
        expected = [f"{'a/' * 30}{name}" for name in ("c/0", "c/1", "zarr.json")]
        assert listed_keys(client, "d", "") == [*expected, f"{'b/' * 40}zarr.json"]
