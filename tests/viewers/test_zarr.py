"""Neuroglancer's views of sharded Zarr arrays in folders, a repository and a private dataset."""

from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

import icechunk
import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from cloudvolume import CloudVolume
from zarr.storage import LocalStore

from shardgate.settings import DatasetSettings, ServerSettings, Settings
from tests.support.auth.people import TOKENS, caller
from tests.support.clients.precomputed.volumes import Scale, Volume, by_cloudvolume
from tests.support.serving import serving
from tests.support.viewers.stripes import AXES, CENTER, INNER, SECTIONS, SHAPE, VALUES, state, write
from tests.support.viewers.viewing import Neuroglancer, View

LATER: Final = np.where(VALUES, 252 * 257 - VALUES, 0).astype(np.uint16)
"""The negative, with the same hole."""
STATES: Final = {"v1": VALUES, "main": LATER}
"""Values by the tag or branch of the repository, and by the folder that holds them as well."""
BELOW: Final = f"~{TOKENS['ana']}"
TAGGED: Final = f"{BELOW}/repository/@tag.v1/plain"
BRANCH: Final = f"{BELOW}/repository/@branch.main/sharded"
PATHS: Final = ("v1/sharded", TAGGED, BRANCH)
TWINS: Final = (
    ("v1/sharded", "v1/plain"),
    ("v1/sharded", "raw/sharded"),
    (TAGGED, "v1/plain"),
    pytest.param(BRANCH, "main/sharded", marks=pytest.mark.soak),
)
"""Arrays, and the same values without shards, as shards, or without a repository."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Write a private repository of two states, the first tagged, and a folder for each of them."""
    root = tmp_path_factory.mktemp("states")
    storage = icechunk.local_filesystem_storage(str(root / "repository"))
    repository = icechunk.Repository.create(storage)
    for name, values in STATES.items():
        session = repository.writable_session("main")
        write(session.store, values)
        snapshot_id = session.commit(name)
        if name == "v1":
            repository.create_tag(name, snapshot_id=snapshot_id)
        write(LocalStore(root / name), values)
    datasets = {name: DatasetSettings(url=str(root / name)) for name in STATES}
    datasets["raw"] = DatasetSettings(url=str(root / "v1"), view="raw")
    datasets["repository"] = DatasetSettings(url=str(root / "repository"), read=("ana",))
    return Settings(callers={"ana": caller(TOKENS["ana"])}, datasets=datasets)


@pytest.fixture(scope="module")
def service(settings: Settings) -> Generator[str]:
    """Serve all datasets."""
    with serving(settings) as url:
        yield url


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Choose an array."""
    found: str = request.param
    return found


type Look = Callable[[str], View]


@pytest.fixture(scope="module")
def look(neuroglancer: Neuroglancer, service: str) -> Look:
    """Return a function that opens arrays, each once."""

    @cache
    def look_at(path: str) -> View:
        name = f"zarr-{path.replace('/', '-')}"
        return neuroglancer.look(state(f"{service}/{path}"), name, {"data": SECTIONS})

    return look_at


@pytest.fixture(scope="module")
def view(look: Look, path: str) -> View:
    """Open the array."""
    return look(path)


def test_voxels_have_the_stored_values(view: View, path: str) -> None:
    """Voxels of three sections have the stored values, and the first is drawn as bright."""
    values = LATER if "main" in path else VALUES
    assert view.values["data"] == values[tuple(SECTIONS.T)].tolist()

    z, y = np.indices(SHAPE[:2])
    drawn = view.pixels[185 + 4 * (y - CENTER[1]), 200 + 4 * (z - CENTER[0])]
    expected = np.stack([values[:, :, CENTER[2]] // 257] * 3, axis=-1)
    np.testing.assert_allclose(drawn, expected, atol=1)


def test_requests_are_answered(view: View, service: str, path: str) -> None:
    """Each request of the page is 200, or 404 for the absent chunk; the page escapes the `@`."""
    root = f"{service}/{quote(path)}/"
    asked = {(asked.url.removeprefix(root), asked.status) for asked in view.asked}
    chunks = {f"c/{z}/{y}/{x}" for z, y, x in SECTIONS // INNER}

    assert not view.faults
    assert asked == {("zarr.json", 200), ("c/1/1/1", 404)} | {
        (chunk, 200) for chunk in chunks - {"c/1/1/1"}
    }


@pytest.mark.parametrize(("path", "twin"), TWINS)
def test_view_equals_that_of_its_twin(look: Look, path: str, twin: str) -> None:
    """The view has the same pixels as that of the same values in another layout."""
    np.testing.assert_array_equal(look(path).pixels, look(twin).pixels)


def test_page_of_another_origin_gets_no_data(
    neuroglancer: Neuroglancer, settings: Settings
) -> None:
    """A page whose origin `cors_origins` does not name gets no response."""
    server = ServerSettings(cors_origins=("https://viewer.example",))
    with serving(settings.model_copy(update={"server": server})) as url:
        shown = state(f"{url}/v1/sharded")
        view = neuroglancer.look(shown, "zarr-forbidden", {"data": SECTIONS[:1]})

    assert {asked.status for asked in view.asked} == {None}
    assert "CORS" in view.faults[0]
    assert view.values == {"data": [None]}


def test_libraries_read_a_private_array(tmp_path: Path) -> None:
    """zarr, xarray, tensorstore and cloud-volume read a private array by the token in its URL."""
    expected = VALUES[:16, :24, :32]
    encoding = {"a": {"chunks": (8, 8, 8), "shards": (16, 16, 16)}}
    group = xarray.Dataset({"a": (AXES, expected)})
    group.to_zarr(tmp_path / "group", zarr_format=3, consolidated=False, encoding=encoding)
    scale = Scale(expected.T[..., np.newaxis], None, chunk=(16, 16, 16), resolution=(1, 1, 1))
    by_cloudvolume(Volume("", by_cloudvolume, [scale]), tmp_path / "volume", sharded=False)
    private = {"private": DatasetSettings(url=str(tmp_path), read=("ana",))}
    callers = {"ana": caller(TOKENS["ana"])}
    with serving(Settings(callers=callers, datasets=private)) as url:
        root = f"{url}/{BELOW}/private"
        array = {"driver": "zarr3", "kvstore": f"{root}/group/a/"}
        found = {
            "zarr": zarr.open_array(f"{root}/group/a", mode="r")[...],
            "xarray": xarray.open_zarr(f"{root}/group", consolidated=False).a.to_numpy(),
            "tensorstore": tensorstore.open(array).result().read().result(),
            "cloud-volume": CloudVolume(f"precomputed://{root}/volume", progress=False)[:].T[0],
        }
    for library, values in found.items():
        np.testing.assert_array_equal(np.asarray(values), expected, library)
