"""Neuroglancer shows sharded Zarr arrays, of a folder and of an Icechunk repository."""

from collections.abc import Generator
from typing import Any, Final
from urllib.parse import quote

import icechunk
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.storage import LocalStore

from app.settings import DatasetSettings, ServerSettings, Settings
from tests.serving import serving
from tests.viewers.viewing import Neuroglancer, View, sections

AXES: Final = ("z", "y", "x")
SHAPE: Final = (40, 60, 70)
CENTER: Final = (20, 30, 35)
INNER: Final = (16, 16, 16)
HOLE: Final = (slice(16, 32),) * 3
"""An inner chunk that no shard holds, in sight."""
SECTIONS: Final = sections(SHAPE, CENTER)
LAYOUTS: Final[dict[str, Any]] = {"plain": {}, "sharded": {"shards": (32, 32, 32)}}


def stripes() -> npt.NDArray[np.uint16]:
    """Make slanting stripes with a hole."""
    z, y, x = np.indices(SHAPE, np.uint16)
    values = np.asarray(((6 * z + 4 * y + 3 * x) % 251 + 1) * 257, np.uint16)
    values[HOLE] = 0
    return values


VALUES: Final = stripes()
LATER: Final = np.where(VALUES, 252 * 257 - VALUES, 0).astype(np.uint16)
"""The negative, with the same hole."""
STATES: Final = {"v1": VALUES, "main": LATER}
"""Values by the tag or branch of the repository, and by the folder that holds them as well."""
TWINS: Final = {
    "v1/sharded": ("v1/plain", "raw/sharded"),
    "repository/@tag.v1/plain": ("v1/plain",),
    "repository/@tag.v1/sharded": ("v1/sharded",),
    "repository/@branch.main/plain": ("main/plain",),
    "repository/@branch.main/sharded": ("main/sharded",),
}
"""Arrays, and the same values without shards, as shards, or without a repository."""


def state(source: str) -> dict[str, Any]:
    """Show *source*, four pixels a voxel, in sections and in 3-d."""
    return {
        "dimensions": {axis: [1, ""] for axis in AXES},
        "position": [middle + 0.5 for middle in CENTER],
        "crossSectionScale": 0.25,
        "projectionScale": 100,
        "showDefaultAnnotations": False,
        "showAxisLines": False,
        "layers": [{"type": "image", "name": "data", "source": f"{source}/|zarr3:"}],
        "layout": "4panel",
    }


def write(store: Any, values: npt.NDArray[np.uint16]) -> None:
    """Write *values* with and without shards."""
    options: dict[str, Any] = {"shape": SHAPE, "chunks": INNER, "dtype": "u2", "fill_value": 0}
    options |= {"dimension_names": AXES, "overwrite": True}
    for name, layout in LAYOUTS.items():
        zarr.create_array(store, name=name, **options, **layout)[...] = values


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
    """Serve all of it."""
    with serving(Settings(datasets=datasets)) as url:
        yield url


@pytest.fixture(scope="module", params=TWINS)
def path(request: pytest.FixtureRequest) -> str:
    """Choose an array."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def values(path: str) -> npt.NDArray[np.uint16]:
    """Return the values of the array."""
    return LATER if "main" in path else VALUES


@pytest.fixture(scope="module")
def view(neuroglancer: Neuroglancer, service: str, path: str) -> View:
    """Look at the array."""
    return neuroglancer.look(state(f"{service}/{path}"), named(path), {"data": SECTIONS})


def named(path: str) -> str:
    """Name a picture."""
    return f"zarr-{path.replace('/', '-')}"


def test_shows_the_values(view: View, values: npt.NDArray[np.uint16]) -> None:
    """Voxels of three sections have the stored values; the first section is as bright as those."""
    assert view.values["data"] == values[tuple(SECTIONS.T)].tolist()

    z, y = np.indices(SHAPE[:2])
    drawn = view.pixels[185 + 4 * (y - CENTER[1]), 200 + 4 * (z - CENTER[0])]
    expected = np.stack([values[:, :, CENTER[2]] // 257] * 3, axis=-1)
    np.testing.assert_allclose(drawn, expected, atol=1)


def test_every_request_is_answered(view: View, service: str, path: str) -> None:
    """The page escapes the @ and may read all responses; 404 is the absent chunk."""
    root = f"{service}/{quote(path)}/"
    asked = {(asked.url.removeprefix(root), asked.status) for asked in view.asked}
    chunks = {f"c/{z}/{y}/{x}" for z, y, x in SECTIONS // INNER}

    assert not view.faults
    assert asked == {("zarr.json", 200), ("c/1/1/1", 404)} | {
        (chunk, 200) for chunk in chunks - {"c/1/1/1"}
    }


def test_looks_the_same(neuroglancer: Neuroglancer, service: str, view: View, path: str) -> None:
    """No pixel differs from the same values without shards, as shards, or without a repository."""
    for twin in TWINS[path]:
        other = neuroglancer.look(state(f"{service}/{twin}"), named(twin))
        np.testing.assert_array_equal(view.pixels, other.pixels)


def test_other_pages_see_nothing(
    neuroglancer: Neuroglancer, datasets: dict[str, DatasetSettings]
) -> None:
    """Where only another origin is allowed, the browser keeps the responses from the page."""
    server = ServerSettings(cors_origins=("https://viewer.example",))
    with serving(Settings(server=server, datasets=datasets)) as url:
        shown = state(f"{url}/v1/sharded")
        view = neuroglancer.look(shown, "zarr-forbidden", {"data": SECTIONS[:1]})

    assert {asked.status for asked in view.asked} == {None}
    assert "CORS" in view.faults[0]
    assert view.values == {"data": [None]}
