"""Virtual references are followed as the library does, or refused."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import zarr
from icechunk import Repository

from shardgate.settings import (
    CacheSettings,
    DatasetSettings,
    Settings,
    StoreSettings,
    VirtualPrefix,
)
from tests.support.clients.icechunk.library import compare_documents, compare_nodes, nodes_of
from tests.support.clients.icechunk.repositories import (
    DATA,
    MANY,
    OFFSETS,
    UNREAD,
    Elsewhere,
    authorized,
    bare,
    commit,
    configuration,
    in_bucket,
    in_folder,
    in_web,
    open_virtual,
    refer_to_parts,
    storage,
)
from tests.support.clients.services import connect
from tests.support.clouds import Azurite, FakeGcs
from tests.support.processes import wait_until
from tests.support.seaweedfs import SeaweedFS
from tests.support.serving import serving
from tests.support.storage.faulty import FaultyServer
from tests.support.storage.reading import az_settings

KEPT = "public, max-age=31536000, immutable"


@pytest.fixture(scope="module")
def client(following: str) -> Generator[httpx.Client]:
    """Open a client of the service."""
    with connect(following) as opened:
        yield opened


@pytest.mark.parametrize(
    ("following", "version"),
    [
        ("local", "migrated"),
        *(
            pytest.param("remote", name, marks=pytest.mark.soak)
            for name in ("v1", "v2", "migrated")
        ),
    ],
    indirect=["following"],
)
def test_virtual_references_read_as_by_the_library(
    client: httpx.Client, version: str, virtual: dict[str, Path], places: Mapping[str, Elsewhere]
) -> None:
    """Every virtual reference has the bytes that the library reads; shards are unsharded."""
    session = open_virtual(storage(virtual[version]), places).readonly_session("main")
    nodes = nodes_of(session, without_chunks=UNREAD)

    compare_documents(client, f"/{version}/@tag.v1", nodes)
    compare_nodes(client, f"/{version}/@tag.v1", nodes, session.store)


@pytest.mark.parametrize(("version", "place"), [("v1", "file"), ("v2", "s3"), ("migrated", "http")])
def test_reference_with_a_valid_checksum_is_read(
    client: httpx.Client, version: str, place: str
) -> None:
    """A reference with a valid ETag or time, or none, has the object's bytes.

    Locations compressed with a dictionary are decoded.
    """
    base = f"/{version}/@tag.v1/{place}"
    for kind in KINDS:
        for at, offset in enumerate(OFFSETS):
            answer = client.get(f"{base}/{kind}/c/{at}")
            assert answer.content == DATA[offset : offset + 4]
            assert (answer.headers["cache-control"] == KEPT) == (kind == "etag")
        assert client.get(f"{base}/{kind}/c/3").status_code == 404
    for at in (0, 1, 2, 511, 512, 777, MANY - 1):
        answer = client.get(f"/{version}/{place}/many/c/{at}")
        assert (answer.status_code, answer.content) == (200, DATA[4 * at : 4 * at + 4])
    assert client.get(f"/{version}/{place}/many/c/{MANY}").status_code == 404


KINDS: Final = ("none", "etag", "modified")


@dataclass
class Target:
    """The object that references lead to, and functions that change it."""

    place: Elsewhere
    replace: Callable[[bytes], object]
    remove: Callable[[], object]


@pytest.fixture(params=["file", "s3", "http"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """Put the object ``data.bin`` into each kind of store."""
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
def referring(
    request: pytest.FixtureRequest, target: Target, tmp_path: Path
) -> Generator[httpx.Client]:
    """Serve a repository of references, with their prefix allowed, another one, and none."""
    places = {"lab": target.place}
    repo = Repository.create(
        storage(tmp_path / "repo"),
        config=configuration(places),
        authorize_virtual_chunk_access=authorized(places),
    )
    repo.save_config()
    commit(repo, "references", lambda store: refer_to_parts(store, "", "lab", target.place))
    url, stores, name = str(tmp_path / "repo"), {}, None
    if target.place.prefix.startswith("s3"):
        stores, name = {"lab": request.getfixturevalue("seaweedfs").settings}, "lab"
    prefix = VirtualPrefix(url=target.place.prefix, store=name)
    neighbour = VirtualPrefix(url=f"{target.place.prefix[:-2]}/", store=name)
    datasets = {
        "em": DatasetSettings(url=url, virtual_chunk_prefixes=(prefix,)),
        "shut": DatasetSettings(url=url),
        "beside": DatasetSettings(url=url, virtual_chunk_prefixes=(neighbour,)),
    }
    cache = CacheSettings(ttl_s=1e-6, chunk_bytes=0)
    settings = Settings(cache=cache, stores=stores, datasets=datasets)
    with serving(settings) as base, connect(base) as opened:
        yield opened


def statuses(client: httpx.Client, method: str = "GET") -> dict[str, list[int]]:
    """Return the statuses of the chunks of every kind of checksum."""
    return {
        kind: [client.request(method, f"/em/{kind}/c/{at}").status_code for at in range(3)]
        for kind in KINDS
    }


def test_reference_outside_of_the_allowed_prefixes_gets_403(
    referring: httpx.Client, target: Target
) -> None:
    """A reference outside of the allowed prefixes gets a 403 that names its prefix."""
    for dataset in ("shut", "beside"):
        for key in ("none/c/0", "etag/c/0", "none/c/1"):
            answer = referring.get(f"/{dataset}/{key}")
            assert answer.status_code == 403
            assert f" {target.place.prefix} " in answer.json()["detail"]
            assert referring.head(f"/{dataset}/{key}").status_code == 403
        assert referring.get(f"/{dataset}/none/zarr.json").status_code == 200


def test_reference_to_a_changed_object_fails_with_424(
    referring: httpx.Client, target: Target
) -> None:
    """A reference to an object that is gone, too short or fails its checksum gets 424.

    Without a checksum, the new bytes are served.
    """
    part = {"Range": "bytes=1-2"}
    assert statuses(referring) == dict.fromkeys(KINDS, [200] * 3)
    assert referring.get("/em/etag/c/0", headers=part).content == DATA[8:10]
    # HTTP tells times in whole seconds.
    wait_until(lambda: datetime.now(UTC) > target.place.modified + timedelta(seconds=1))
    refused = [424] * 3
    for data, expected in (
        (DATA[::-1], [200] * 3),
        (DATA[:-2], [200, 200, 424]),
        *((short, refused) for short in (DATA[:2], b"", None)),
    ):
        if data is None:
            target.remove()
        else:
            target.replace(data)

        found, is_first = statuses(referring), data == DATA[::-1]
        assert (found["none"], found["etag"]) == (expected, refused)
        # One server keeps the modification time of the first object.
        assert found["modified"] == refused or (found["modified"] == expected and not is_first)
        assert statuses(referring, "HEAD")["none"] == expected
        assert referring.get("/em/etag/c/0", headers=part).status_code == 424
        if is_first:
            assert referring.get("/em/none/c/0").content == DATA[::-1][7:11]
    assert "data.bin" in referring.get("/em/none/c/0").json()["detail"]


CLOUDS: Final = ("gs", "az")


def _refer_to_clouds(store: Any) -> None:
    """Write references without a checksum, with a time that holds, and with one that does not."""
    root = zarr.create_group(store)
    now = datetime.now(UTC)
    times = {"none": None, "held": now + timedelta(minutes=1), "past": now - timedelta(days=9)}
    for place in CLOUDS:
        for name, checksum in times.items():
            key = f"{place}-{name}"
            root.create_array(key, shape=(8,), chunks=(4,), dtype=np.uint8, compressors=None)
            location = f"{place}://bucket/elsewhere/data.bin"
            options: dict[str, Any] = {"checksum": checksum, "validate_container": False}
            store.set_virtual_ref(f"{key}/c/1", location, offset=7, length=4, **options)
            outside = f"{place}://bucket/elsewhere-not/data.bin"
            store.set_virtual_ref(f"{key}/c/0", outside, offset=7, length=4, **options)


@pytest.fixture(scope="module")
def cloud_client(
    tmp_path_factory: pytest.TempPathFactory, fake_gcs: FakeGcs, azurite: Azurite
) -> Generator[httpx.Client]:
    """Serve references into both cloud stores, with the prefix ``elsewhere`` allowed."""
    for server in (fake_gcs, azurite):
        server.put("elsewhere/data.bin", DATA)
    folder: Path = tmp_path_factory.mktemp("clouds")
    commit(Repository.create(storage(folder)), "references", _refer_to_clouds)
    prefixes = tuple(
        VirtualPrefix(url=f"{place}://bucket/elsewhere", store=place) for place in CLOUDS
    )
    settings = Settings(
        stores={
            "gs": StoreSettings(endpoint_url=fake_gcs.url, anonymous=True),
            "az": az_settings(azurite),
        },
        datasets={"em": DatasetSettings(url=folder.as_uri(), virtual_chunk_prefixes=prefixes)},
    )
    with serving(settings) as url, httpx.Client(base_url=f"{url}/em/", timeout=20) as opened:
        yield opened


@pytest.mark.parametrize("place", CLOUDS)
def test_references_into_clouds(cloud_client: httpx.Client, place: str) -> None:
    """A reference to an object newer than recorded gets 424; one outside of the prefix 403."""
    for name in ("none", "held"):
        answer = cloud_client.get(f"{place}-{name}/c/1")
        assert (answer.status_code, answer.content) == (200, DATA[7:11])
    younger = cloud_client.get(f"{place}-past/c/1")
    refused = cloud_client.get(f"{place}-none/c/0")

    assert (younger.status_code, refused.status_code) == (424, 403)
    assert "bucket/elsewhere/data.bin" in younger.json()["detail"]
    assert f"{place}://bucket/" in refused.json()["detail"]
