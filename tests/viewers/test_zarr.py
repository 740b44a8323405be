"""Neuroglancer's views of sharded Zarr arrays in folders, a repository and a private dataset."""

from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

import icechunk
import numpy as np
import numpy.typing as npt
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
from tests.support.viewers.viewing import Neuroglancer, View, sections

LATER: Final = np.where(VALUES, 252 * 257 - VALUES, 0).astype(np.uint16)
"""The negative, with the same hole."""
STATES: Final = {"v1": VALUES, "main": LATER}
"""Values by the tag or branch of the repository, and by the folder that holds them as well."""
PATHS: Final = ("v1/sharded", "repository/@tag.v1/plain", "repository/@branch.main/sharded")
TWINS: Final = (
    ("v1/sharded", "v1/plain"),
    ("v1/sharded", "raw/sharded"),
    ("repository/@tag.v1/plain", "v1/plain"),
    pytest.param("repository/@branch.main/sharded", "main/sharded", marks=pytest.mark.soak),
)
"""Arrays, and the same values without shards, as shards, or without a repository."""


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DatasetSettings]:
    """Write a repository of two states, the first tagged, and a folder for each of them."""
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
    found = {name: DatasetSettings(url=str(root / name)) for name in ("repository", *STATES)}
    return found | {"raw": DatasetSettings(url=str(root / "v1"), view="raw")}


@pytest.fixture(scope="module")
def service(datasets: dict[str, DatasetSettings]) -> Generator[str]:
    """Serve all datasets."""
    with serving(Settings(datasets=datasets)) as url:
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
    neuroglancer: Neuroglancer, datasets: dict[str, DatasetSettings]
) -> None:
    """A page whose origin `cors_origins` does not name gets no response."""
    server = ServerSettings(cors_origins=("https://viewer.example",))
    with serving(Settings(server=server, datasets=datasets)) as url:
        shown = state(f"{url}/v1/sharded")
        view = neuroglancer.look(shown, "zarr-forbidden", {"data": SECTIONS[:1]})

    assert {asked.status for asked in view.asked} == {None}
    assert "CORS" in view.faults[0]
    assert view.values == {"data": [None]}


PRIVATE_SHAPE: Final = (20, 30, 40)
PRIVATE_CENTER: Final = (10, 15, 20)
PRIVATE: Final[npt.NDArray[np.uint16]] = np.arange(1, 24_001, dtype=np.uint16).reshape(
    PRIVATE_SHAPE
)


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Return the URL of a private dataset below Ana's token."""
    root = tmp_path_factory.mktemp("private")
    _write_zarr(root / "group")
    scale = Scale(PRIVATE.T[..., np.newaxis], None, chunk=(16, 16, 16), resolution=(1, 1, 1))
    by_cloudvolume(Volume("", by_cloudvolume, [scale]), root / "volume", sharded=False)
    settings = Settings(
        callers={"ana": caller(TOKENS["ana"])},
        datasets={"private": DatasetSettings(url=str(root), read=("ana",))},
    )
    with serving(settings) as url:
        yield f"{url}/~{TOKENS['ana']}/private"


def _write_zarr(path: Path) -> None:
    dataset = xarray.Dataset({"a": (AXES, PRIVATE)})
    encoding = {"a": {"chunks": (8, 8, 8), "shards": (16, 16, 16)}}
    dataset.to_zarr(path, zarr_format=3, consolidated=False, encoding=encoding)


def test_neuroglancer_shows_a_private_array(neuroglancer: Neuroglancer, below: str) -> None:
    """Neuroglancer shows an array of a private dataset by the token in its URL."""
    voxels = sections(PRIVATE_SHAPE, PRIVATE_CENTER)
    private_state = state(f"{below}/group/a", PRIVATE_CENTER)
    view = neuroglancer.look(private_state, "private", {"data": voxels})

    assert view.values["data"] == PRIVATE[tuple(voxels.T)].tolist()


def test_libraries_read_a_private_array(below: str) -> None:
    """zarr, xarray, tensorstore and cloud-volume read a private array by the token in its URL."""
    found = {
        "zarr": zarr.open_array(f"{below}/group/a", mode="r")[...],
        "xarray": xarray.open_zarr(f"{below}/group", consolidated=False).a,
        "tensorstore": tensorstore.open({"driver": "zarr3", "kvstore": f"{below}/group/a/"})
        .result()
        .read()
        .result(),
        "cloud-volume": CloudVolume(f"precomputed://{below}/volume", progress=False)[:][..., 0].T,
    }
    for library, values in found.items():
        np.testing.assert_array_equal(np.asarray(values), PRIVATE, library)
