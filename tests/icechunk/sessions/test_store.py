"""Sessions over virtual chunks, and large chunks in sessions, through HTTP."""

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import icechunk
import numpy as np
import pytest
import zarr

from shardgate.settings import DatasetSettings, Settings, VirtualPrefix
from tests.support.serving import client_of
from tests.support.sessions import GROUP, array_document

SESSIONS: Final = "/api/datasets/data/sessions"
LARGE: Final = 5 * 1024**2
"""Size of a chunk that is streamed."""


ARRAYS: Final = {"plain": None, "sharded": (4,), "lost": None}
"""Shape of the shards of each array; tests damage the last one."""


class Service(NamedTuple):
    """A service of a repository that refers to chunks and shards in an archive."""

    client: httpx.Client
    archive: Path
    repo: icechunk.Repository
    base: str
    """Snapshot of ``main``."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """Serve the repository, from which sessions on branches of their own begin."""
    folder = tmp_path_factory.mktemp("store")
    archive = folder / "archive"
    prefix = f"{archive.as_uri()}/"
    config = icechunk.RepositoryConfig()
    store = icechunk.local_filesystem_store(str(archive))
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(prefix, store))
    storage = icechunk.local_filesystem_storage(str(folder / "repo"))
    allowed: Any = {prefix: icechunk.credentials.LocalFileSystemAccess}
    repo = icechunk.Repository.create(storage, config, authorize_virtual_chunk_access=allowed)
    repo.save_config()
    session = repo.writable_session("main")
    group = zarr.create_group(session.store)
    options: Any = {"shape": (8,), "chunks": (2,), "dtype": "u1", "compressors": None}
    for name, shards in ARRAYS.items():
        zarr.create_array(archive / name, shards=shards, **options)[:] = np.arange(1, 9)
        group.create_array(name, shards=shards, **options)
        for file in (archive / name / "c").iterdir():
            key, size = f"{name}/c/{file.name}", file.stat().st_size
            session.store.set_virtual_ref(key, file.as_uri(), offset=0, length=size)
    base = session.commit("virtual")
    dataset = DatasetSettings(
        url=(folder / "repo").as_uri(),
        writable=True,
        virtual_chunk_prefixes=(VirtualPrefix(url=prefix),),
    )
    with client_of(Settings(datasets={"data": dataset})) as client:
        yield Service(client, archive, repo, base)


class Opened:
    """A session on a new branch."""

    def __init__(self, service: Service, branch: str) -> None:
        self.client = service.client
        self.archive = service.archive
        self._repo = service.repo
        self._branch = branch
        service.repo.create_branch(branch, service.base)
        begun = service.client.post(SESSIONS, json={"branch": branch})
        self.session_id = begun.json()["session_id"]

    def url(self, key: str) -> str:
        """Return the path of *key* in the session."""
        return f"/data/@session.{self.session_id}/{key}"

    def commit(self, name: str) -> list[int]:
        """Commit the session, and read an array of the new snapshot with the library."""
        url = f"{SESSIONS}/{self.session_id}/commit"
        answer = self.client.post(url, json={"message": "changed"})
        assert answer.status_code == 201, answer.text
        return values(self._repo.readonly_session(self._branch).store, name)


def values(store: Any, name: str) -> list[int]:
    """Read the array *name* in *store*."""
    found = zarr.open_array(store, path=name, mode="r")
    return [int(value) for value in np.asarray(found[:])]


@pytest.fixture
def opened(service: Service, request: pytest.FixtureRequest) -> Opened:
    """Begin a session."""
    return Opened(service, request.node.name)


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_virtual_chunk_is_read_in_a_session(opened: Opened, name: str) -> None:
    """A session has the bytes, ranges and sizes of virtual chunks, also in virtual shards."""
    url = opened.url(f"{name}/c/1")
    whole, head = opened.client.get(url), opened.client.head(url)
    part = opened.client.get(url, headers={"Range": "bytes=1-5"})
    known = opened.client.get(url, headers={"If-None-Match": whole.headers["etag"]})

    assert (whole.content, head.headers["content-length"]) == (b"\3\4", "2")
    assert (part.status_code, part.content, known.status_code) == (206, b"\4", 304)
    assert whole.headers["etag"] == head.headers["etag"] == part.headers["etag"]


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_virtual_chunks_are_listed_in_a_session(opened: Opened, name: str) -> None:
    """The listing of a session has virtual chunks, also in virtual shards, with their sizes."""
    query = {"list-type": "2", "prefix": f"@session.{opened.session_id}/{name}/c/"}
    listed = opened.client.get("/data", params=query).text

    assert re.findall("/c/([0-9])</Key>.*?<Size>([0-9]+)</Size>", listed) == [
        (str(number), "2") for number in range(4)
    ]


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_virtual_chunk_is_replaced_and_deleted_in_a_session(opened: Opened, name: str) -> None:
    """Virtual chunks, and those in virtual shards, are replaced and deleted by their versions."""
    first, second = opened.url(f"{name}/c/0"), opened.url(f"{name}/c/1")
    versions = [{"If-Match": opened.client.get(url).headers["etag"]} for url in (first, second)]
    for url, other in ((first, versions[1]), (second, versions[0])):
        assert opened.client.put(url, content=b"no", headers=other).status_code == 412
        assert opened.client.delete(url, headers=other).status_code == 412

    assert opened.client.put(first, content=b"\x21\x22", headers=versions[0]).status_code == 200
    if name == "sharded":  # the first write has moved the shard
        versions[1] = {"If-Match": opened.client.get(second).headers["etag"]}
    assert opened.client.delete(second, headers=versions[1]).status_code == 204
    assert opened.client.get(second).status_code == 404
    assert opened.commit(name) == [0x21, 0x22, 0, 0, 5, 6, 7, 8]
    assert values(opened.archive, name) == list(range(1, 9)), "the archive is as it was"


def test_lost_virtual_chunk_is_damage_in_a_session(opened: Opened) -> None:
    """A virtual chunk whose object is shorter than its reference, or missing, is 424."""
    short, missing = opened.archive / "lost/c/0", opened.archive / "lost/c/1"
    short.write_bytes(b"x")
    missing.unlink()
    for file in (short, missing):
        answer = opened.client.get(opened.url(f"lost/c/{file.name}"))

        assert answer.status_code == 424
        assert answer.json()["detail"].startswith(f"{file.as_uri()}: is missing or has changed")


def test_large_chunk_is_streamed_from_a_session(opened: Opened) -> None:
    """A chunk, and a range of it, that are too large to be read whole are streamed."""
    data = np.random.default_rng(7).bytes(LARGE)
    document = json.dumps(array_document((LARGE,), (LARGE,))).encode()
    key = "large/c/0"
    opened.client.put(opened.url("zarr.json"), content=GROUP)
    for name, body in (("large/zarr.json", document), (key, data)):
        assert opened.client.put(opened.url(name), content=body).status_code == 200
    whole = opened.client.get(opened.url(key))
    part = opened.client.get(opened.url(key), headers={"Range": "bytes=7-"})

    assert (whole.status_code, whole.content == data) == (200, True)
    assert (part.status_code, part.content == data[7:]) == (206, True)


def test_failed_precondition_names_the_key_of_the_session(opened: Opened) -> None:
    """A 412 of a session names the key below `@session.`, and no place in the store."""
    headers = {"If-Match": '"other"'}
    bodies = {"plain/c/0": b"\1\2", "sharded/c/0": b"\1\2", "zarr.json": GROUP}
    for key, body in bodies.items():
        answer = opened.client.put(opened.url(key), content=body, headers=headers)

        assert answer.status_code == 412
        assert f"@session.{opened.session_id}/{key.split('/')[0]}" in answer.json()["detail"]
        assert "file:" not in answer.json()["detail"]


def test_keys_of_a_session_are_listed_with_times(opened: Opened) -> None:
    """Keys of a session are listed with a time, also chunks that are virtual or in shards."""
    opened.client.put(opened.url("plain/c/0"), content=b"\7\7")
    query = {"list-type": "2", "prefix": f"@session.{opened.session_id}/"}
    listed = opened.client.get("/data", params=query).text
    times = re.findall("<LastModified>([^<]*)", listed)

    assert len(times) == len(re.findall("<Key>", listed)) > 8
    assert not [time for time in times if time.startswith("1970")]
