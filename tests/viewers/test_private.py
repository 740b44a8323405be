"""Neuroglancer, and libraries that read over HTTP, show what is private by a token in the path."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import fsspec
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore
import xarray
import zarr
from cloudvolume import CloudVolume

from app.settings import DatasetSettings, Settings
from tests.http.auth.people import TOKENS, caller
from tests.serving import serving
from tests.viewers.viewing import Neuroglancer, sections

SHAPE: Final = (20, 30, 40)
CENTER: Final = (10, 15, 20)
AXES: Final = ("z", "y", "x")
VALUES: Final[npt.NDArray[np.uint16]] = np.arange(1, 24_001, dtype=np.uint16).reshape(SHAPE)


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Give the URL below which Ana's token shows a private dataset."""
    root = tmp_path_factory.mktemp("private")
    _write_zarr(root / "group")
    _write_precomputed(root / "volume")
    settings = Settings(
        callers={"ana": caller(TOKENS["ana"])},
        datasets={"private": DatasetSettings(url=str(root), read=("ana",))},
    )
    with serving(settings) as url:
        yield f"{url}/~{TOKENS['ana']}/private"


def _write_zarr(path: Path) -> None:
    dataset = xarray.Dataset({"a": (AXES, VALUES)})
    encoding = {"a": {"chunks": (8, 8, 8), "shards": (16, 16, 16)}}
    dataset.to_zarr(path, zarr_format=3, consolidated=False, encoding=encoding)


def _write_precomputed(path: Path) -> None:
    info = CloudVolume.create_new_info(
        num_channels=1,
        layer_type="image",
        data_type="uint16",
        encoding="raw",
        resolution=(1, 1, 1),
        voxel_offset=(0, 0, 0),
        chunk_size=(16, 16, 16),
        volume_size=SHAPE[::-1],
    )
    volume = CloudVolume(f"file://{path}", info=info, progress=False, compress=False)
    volume.commit_info()
    volume[:] = VALUES.T


def test_neuroglancer_shows_it(neuroglancer: Neuroglancer, below: str) -> None:
    """All that the page asks for keeps the token, and needs no header."""
    voxels = sections(SHAPE, CENTER)
    state: dict[str, Any] = {
        "dimensions": {axis: [1, ""] for axis in AXES},
        "position": [middle + 0.5 for middle in CENTER],
        "crossSectionScale": 0.25,
        "layers": [{"type": "image", "name": "data", "source": f"{below}/group/a/|zarr3:"}],
        "layout": "4panel",
    }
    view = neuroglancer.look(state, "private", {"data": voxels})

    assert view.values["data"] == VALUES[tuple(voxels.T)].tolist()


def test_zarr_python_reads_it(below: str) -> None:
    """With fsspec, which asks for pages of links too."""
    array = zarr.open_array(f"{below}/group/a", mode="r")

    np.testing.assert_array_equal(array[...], VALUES)


def test_xarray_reads_it(below: str) -> None:
    """Members of a group are found by the page of links."""
    store = fsspec.get_mapper(f"{below}/group").fs
    assert [name.rpartition("/")[2] for name in store.ls(f"{below}/group/", detail=False)]
    dataset = xarray.open_zarr(f"{below}/group", consolidated=False)

    np.testing.assert_array_equal(dataset.a, VALUES)


def test_tensorstore_reads_it(below: str) -> None:
    """Its HTTP driver takes a URL and no header."""
    spec = {"driver": "zarr3", "kvstore": f"{below}/group/a/"}

    np.testing.assert_array_equal(tensorstore.open(spec).result()[...].read().result(), VALUES)


def test_cloud_volume_reads_it(below: str) -> None:
    """It has no query strings."""
    volume = CloudVolume(f"precomputed://{below}/volume", progress=False)

    np.testing.assert_array_equal(np.asarray(volume[:])[..., 0].T, VALUES)
