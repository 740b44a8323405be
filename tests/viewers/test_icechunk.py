"""Neuroglancer shows the arrays of an Icechunk repository, as the Zarr arrays that they are."""

from collections.abc import Generator
from typing import Any, Final
from urllib.parse import quote

import icechunk
import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from app.settings import DatasetSettings, Settings
from tests.serving import serving
from tests.viewers.test_zarr import AXES, CENTER, INNER, SECTIONS, SHAPE, VALUES, state
from tests.viewers.viewing import Neuroglancer, View

REFS: Final = ("@tag.v1", "@branch.main")
LATER: Final = np.where(VALUES, 252 * 257 - VALUES, 0).astype(np.uint16)
"""The negative of what is tagged, with the same hole."""
STATES: Final = dict(zip(REFS, (VALUES, LATER), strict=True))
LAYOUTS: Final[dict[str, Any]] = {"plain": {}, "sharded": {"shards": (32, 32, 32)}}

type Views = dict[tuple[str, str], View]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a repository of two states, the first tagged, and a folder for each of them."""
    root = tmp_path_factory.mktemp("states")
    storage = icechunk.local_filesystem_storage(str(root / "repository"))
    repository = icechunk.Repository.create(storage)
    datasets = {"repository": DatasetSettings(url=str(root / "repository"))}
    for ref, values in STATES.items():
        session = repository.writable_session("main")
        write(session.store, values)
        snapshot_id = session.commit(ref)
        if ref == "@tag.v1":
            repository.create_tag("v1", snapshot_id=snapshot_id)
        folder = folder_of(ref)
        write(LocalStore(root / folder), values)
        datasets[folder] = DatasetSettings(url=str(root / folder))
    with serving(Settings(datasets=datasets)) as url:
        yield url


def folder_of(ref: str) -> str:
    """Name the folder, and dataset, that has the state of *ref* without a repository."""
    return f"folder-{ref.partition('.')[2]}"


def write(store: Any, values: np.typing.NDArray[np.uint16]) -> None:
    """Write *values* with and without shards."""
    for name, layout in LAYOUTS.items():
        array = zarr.create_array(
            store,
            name=name,
            shape=SHAPE,
            chunks=INNER,
            dtype="u2",
            fill_value=0,
            dimension_names=AXES,
            overwrite=True,
            **layout,
        )
        array[...] = values


@pytest.fixture(scope="module")
def views(neuroglancer: Neuroglancer, service: str) -> Views:
    """Look at both arrays in both states."""
    return {
        (ref, name): neuroglancer.look(
            state(f"{service}/repository/{ref}/{name}"),
            f"icechunk-{ref[1:]}-{name}",
            {"data": SECTIONS},
        )
        for ref in REFS
        for name in LAYOUTS
    }


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ref", REFS)
def test_reads_the_values(views: Views, ref: str, name: str) -> None:
    """Each voxel of the three sections has the value that was committed."""
    assert views[ref, name].values["data"] == STATES[ref][tuple(SECTIONS.T)].tolist()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ref", REFS)
def test_draws_the_values(views: Views, ref: str, name: str) -> None:
    """The first section, four pixels a voxel around its middle, is as bright as the values."""
    z, y = np.indices(SHAPE[:2])
    drawn = views[ref, name].pixels[185 + 4 * (y - CENTER[1]), 200 + 4 * (z - CENTER[0])]
    expected = np.stack([STATES[ref][:, :, CENTER[2]] // 257] * 3, axis=-1)

    np.testing.assert_allclose(drawn, expected, atol=1)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ref", REFS)
def test_every_request_is_answered(views: Views, service: str, ref: str, name: str) -> None:
    """The page escapes the @ and may read all answers; 404 is the chunk that is not there."""
    view, root = views[ref, name], f"{service}/repository/{quote(ref)}/{name}/"
    asked = {(asked.url.removeprefix(root), asked.status) for asked in view.asked}
    chunks = {f"c/{z}/{y}/{x}" for z, y, x in SECTIONS // INNER}

    assert not view.faults
    assert asked == {("zarr.json", 200), ("c/1/1/1", 404)} | {
        (chunk, 200) for chunk in chunks - {"c/1/1/1"}
    }


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ref", REFS)
def test_looks_like_a_folder(
    neuroglancer: Neuroglancer, service: str, views: Views, ref: str, name: str
) -> None:
    """No pixel differs from the same state written without a repository."""
    shown = state(f"{service}/{folder_of(ref)}/{name}")
    folder = neuroglancer.look(shown, f"icechunk-{folder_of(ref)}-{name}")

    np.testing.assert_array_equal(views[ref, name].pixels, folder.pixels)
