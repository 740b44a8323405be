"""References that the real library wrote into Google's and Azure's stores, through the service."""

from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import zarr
from icechunk import Repository

from app.settings import DatasetSettings, Settings, StoreSettings, VirtualPrefix
from tests.clients.icechunk.repositories import commit, storage
from tests.clouds import Azurite, FakeGcs
from tests.serving import serving
from tests.storage.conftest import az_settings

PLACES: Final = ("gs", "az")
DATA: Final = bytes(range(256))


def _refer(store: Any) -> None:
    """Refer to parts of ``data.bin``: with no checksum, with a time that holds, with one not."""
    root = zarr.create_group(store)
    now = datetime.now(UTC)
    times = {"none": None, "held": now + timedelta(minutes=1), "past": now - timedelta(days=9)}
    for place in PLACES:
        for name, checksum in times.items():
            key = f"{place}-{name}"
            root.create_array(key, shape=(8,), chunks=(4,), dtype=np.uint8, compressors=None)
            location = f"{place}://bucket/elsewhere/data.bin"
            options: dict[str, Any] = {"checksum": checksum, "validate_container": False}
            store.set_virtual_ref(f"{key}/c/1", location, offset=7, length=4, **options)
            outside = f"{place}://bucket/elsewhere-not/data.bin"
            store.set_virtual_ref(f"{key}/c/0", outside, offset=7, length=4, **options)


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, fake_gcs: FakeGcs, azurite: Azurite
) -> Generator[httpx.Client]:
    """Serve the repository; what is below ``elsewhere`` may be followed in both stores."""
    for server in (fake_gcs, azurite):
        server.put("elsewhere/data.bin", DATA)
    folder: Path = tmp_path_factory.mktemp("clouds")
    commit(Repository.create(storage(folder)), "references", _refer)
    prefixes = tuple(
        VirtualPrefix(url=f"{place}://bucket/elsewhere", store=place) for place in PLACES
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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["none", "held"])
def test_a_reference_is_followed(client: httpx.Client, place: str, name: str) -> None:
    """The bytes are those of the object."""
    answer = client.get(f"{place}-{name}/c/1")

    assert (answer.status_code, answer.content) == (200, DATA[7:11])


@pytest.mark.parametrize("place", PLACES)
def test_an_object_that_is_younger_is_another_one(client: httpx.Client, place: str) -> None:
    """The answer names it."""
    answer = client.get(f"{place}-past/c/1")

    assert answer.status_code == 502
    assert "bucket/elsewhere/data.bin" in answer.json()["detail"]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_allowed_is_refused(client: httpx.Client, place: str) -> None:
    """A folder whose name only begins alike is another one."""
    answer = client.get(f"{place}-none/c/0")

    assert answer.status_code == 403
    assert f"{place}://bucket/" in answer.json()["detail"]
