"""References that must not be followed, or that lead to something else by now."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import zarr
from icechunk import Repository

from app.settings import DatasetSettings, Settings, VirtualPrefix
from tests.clients.asking import connect
from tests.clients.icechunk.conftest import bare, lab
from tests.clients.icechunk.repositories import commit, storage
from tests.clients.icechunk.virtual import (
    DATA,
    Elsewhere,
    authorized,
    configuration,
    in_bucket,
    in_folder,
    in_web,
)
from tests.seaweedfs import SeaweedFS
from tests.serving import serving
from tests.storage.faulty import FaultyServer

KINDS: Final = ("none", "etag", "modified")


@dataclass
class Target:
    """The object that references lead to, which the test may change."""

    place: Elsewhere
    replace: Callable[[bytes], object]
    remove: Callable[[], object]


@pytest.fixture(params=["file", "s3", "http"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """Put the object ``data.bin`` somewhere."""
    if request.param == "file":
        file = tmp_path / "data.bin"
        file.write_bytes(DATA)
        status = file.stat()
        etag = f"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"
        return Target(in_folder(tmp_path, etag), file.write_bytes, file.unlink)
    if request.param == "s3":
        seaweedfs: SeaweedFS = request.getfixturevalue("seaweedfs")
        key = f"{tmp_path.name}/data.bin"
        place = in_bucket(seaweedfs, tmp_path.name, bare(seaweedfs.put(key, DATA)))
        return Target(place, lambda data: seaweedfs.put(key, data), lambda: seaweedfs.delete(key))
    web: FaultyServer = request.getfixturevalue("faulty")
    place = in_web(f"{web.url}/web", bare(web.put("web", "data.bin", DATA)))
    return Target(place, lambda data: web.put("web", "data.bin", data), web.objects.clear)


@pytest.fixture
def client(
    request: pytest.FixtureRequest, target: Target, tmp_path: Path
) -> Generator[httpx.Client]:
    """Serve a repository of references to it, as `em`, and as `shut` with none allowed."""
    places = {"lab": target.place}
    repo = Repository.create(
        storage(tmp_path / "repo"),
        config=configuration(places),
        authorize_virtual_chunk_access=authorized(places),
    )
    repo.save_config()
    commit(repo, "references", lambda store: _refer(store, target.place))
    url, stores, name = str(tmp_path / "repo"), {}, None
    if target.place.prefix.startswith("s3"):
        stores, name = {"lab": lab(request.getfixturevalue("seaweedfs"))}, "lab"
    prefix = VirtualPrefix(url=target.place.prefix, store=name)
    neighbour = VirtualPrefix(url=f"{target.place.prefix[:-2]}/", store=name)
    settings = Settings.model_validate(
        {
            "cache": {"ttl_s": 1e-6, "chunk_bytes": 0},
            "stores": stores,
            "datasets": {
                "em": DatasetSettings(url=url, virtual_chunk_prefixes=(prefix,)),
                "shut": DatasetSettings(url=url),
                "beside": DatasetSettings(url=url, virtual_chunk_prefixes=(neighbour,)),
            },
        }
    )
    with serving(settings) as base, connect(base) as opened:
        yield opened


def _refer(store: Any, place: Elsewhere) -> None:
    root = zarr.create_group(store)
    for kind, checksum in {"none": None, "etag": place.etag, "modified": place.modified}.items():
        root.create_array(kind, shape=(12,), chunks=(4,), dtype="u1", compressors=None)
        location = f"{place.prefix}data.bin"
        store.set_virtual_ref(f"{kind}/c/0", location, offset=7, length=4, checksum=checksum)
        relative = "vcc://lab/data.bin"
        store.set_virtual_ref(f"{kind}/c/1", relative, offset=8, length=4, checksum=checksum)
        end = len(DATA) - 4
        store.set_virtual_ref(f"{kind}/c/2", location, offset=end, length=4, checksum=checksum)


def statuses(client: httpx.Client, method: str = "GET") -> dict[str, list[int]]:
    """Return the statuses of the chunks of every kind."""
    return {
        kind: [client.request(method, f"/em/{kind}/c/{at}").status_code for at in range(3)]
        for kind in KINDS
    }


def test_follows_what_holds(client: httpx.Client) -> None:
    """References to unchanged objects are served."""
    assert statuses(client) == dict.fromkeys(KINDS, [200] * 3)
    assert client.get("/em/etag/c/1").content == DATA[8:12]


def test_follows_nothing_unasked(client: httpx.Client, target: Target) -> None:
    """References are followed only below an allowed prefix."""
    for dataset in ("shut", "beside"):
        for key in ("none/c/0", "etag/c/0", "none/c/1"):
            answer = client.get(f"/{dataset}/{key}")
            assert answer.status_code == 403
            assert f" {target.place.prefix} " in answer.json()["detail"]
            assert client.head(f"/{dataset}/{key}").status_code == 403
        assert client.get(f"/{dataset}/none/zarr.json").status_code == 200


def test_modified_object(client: httpx.Client, target: Target) -> None:
    """A wrong checksum is damage; without a checksum the new bytes are served."""
    statuses(client)
    time.sleep(1.0)  # HTTP tells times in whole seconds
    target.replace(DATA[::-1])
    refused = [502] * 3

    assert statuses(client) == {"none": [200] * 3, "etag": refused, "modified": refused}
    assert client.get("/em/none/c/0").content == DATA[::-1][7:11]


def test_object_that_is_too_short(client: httpx.Client, target: Target) -> None:
    """An object shorter than the reference is damage, for GET and HEAD."""
    assert statuses(client) == dict.fromkeys(KINDS, [200] * 3)
    for length in (len(DATA) - 2, 2, 0):
        target.replace(DATA[:length])
        now, heads = statuses(client), statuses(client, "HEAD")

        assert now["none"] == heads["none"] == [200 if length > 12 else 502] * 2 + [502]
        assert now["etag"] == [502] * 3
        assert now["modified"][2] == 502


def test_object_that_is_gone(client: httpx.Client, target: Target) -> None:
    """A missing object is damage: 404 would be read as fill value."""
    target.remove()

    assert statuses(client) == dict.fromkeys(KINDS, [502] * 3)
    assert "data.bin" in client.get("/em/none/c/0").json()["detail"]


def test_checksum_pins_every_read(client: httpx.Client, target: Target) -> None:
    """A range of a chunk is refused once the object has changed."""
    assert client.get("/em/etag/c/0", headers={"Range": "bytes=1-2"}).status_code == 206
    target.replace(DATA + b"!")

    assert client.get("/em/etag/c/0", headers={"Range": "bytes=1-2"}).status_code == 502
