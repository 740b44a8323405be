"""What Neuroglancer draws of arrays of Zarr v2: the pixels of the same values in Zarr v3."""

from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numcodecs
import numpy as np
import pytest
import zarr

from shardgate.settings import DatasetSettings, Settings
from tests.support.serving import serving
from tests.support.viewers.links import linked_state
from tests.support.viewers.viewing import Neuroglancer, Pixels

ROWS, COLUMNS = np.ogrid[:90, :120]
VALUES: Final = (((ROWS // 10 + COLUMNS // 10) % 5) * 60 + ROWS).astype("u2")
SLASHES: Final = {"name": "v2", "separator": "/"}
WRITTEN: Final[dict[str, dict[str, Any]]] = {
    "zlib": {"compressors": numcodecs.Zlib(), "order": "F", "dtype": ">i2"},
    "blosc": {"compressors": numcodecs.Blosc(shuffle=2), "chunk_key_encoding": SLASHES},
    "gzip": {"compressors": numcodecs.GZip(), "dtype": "<f4"},
    "zstd": {"compressors": numcodecs.Zstd(), "dtype": "<i4", "fill_value": None},
    "plain": {"compressors": None, "dtype": "<i4"},
}
soak = pytest.mark.soak


def write_array(place: Any, name: str, **options: Any) -> None:
    """Write the values."""
    told: dict[str, Any] = {"chunks": (32, 32), "shape": VALUES.shape, "dtype": "<u2"}
    zarr.create_array(place, name=name, **told | options)[...] = VALUES


def write_image(folder: Path, **options: Any) -> None:
    """Write an image of one level: OME-Zarr 0.4 with options of Zarr v2, else 0.5."""
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]
    scale = {"type": "scale", "scale": [2, 0.5]}
    levels = [{"path": "s0", "coordinateTransformations": [scale]}]
    image: dict[str, Any] = {"axes": axes, "datasets": levels}
    group = zarr.open_group(folder, mode="w", zarr_format=options.get("zarr_format", 3))
    if options:
        group.attrs["multiscales"] = [image | {"version": "0.4"}]
    else:
        group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    write_array(folder, "s0", **options)


@pytest.fixture(scope="module")
def look(neuroglancer: Neuroglancer, tmp_path_factory: pytest.TempPathFactory) -> Generator[Any]:
    """Return a function that returns the pixels of the view that the link of a path leads to."""
    folder = tmp_path_factory.mktemp("zarr2")
    for name, options in WRITTEN.items():
        write_array(folder, name, zarr_format=2, **options)
    write_array(folder, "v3")
    write_image(folder / "image", zarr_format=2, **WRITTEN["zlib"])
    write_image(folder / "image3")

    with serving(Settings(datasets={"d": DatasetSettings(url=str(folder))})) as url:

        @cache
        def look_at(path: str) -> Pixels:
            state = linked_state(f"{url}/api/datasets/d/viewer?path={path}")
            state["layers"][0]["name"] = "values"
            view = neuroglancer.look(state, f"zarr2-{path.replace('/', '-')}")
            assert not view.faults
            return view.pixels

        yield look_at


@pytest.mark.parametrize(
    ("path", "twin"),
    [
        ("image", "image3"),
        *(pytest.param(name, "v3", marks=soak) for name in WRITTEN),
        pytest.param("image/s0", "image3/s0", marks=soak),
    ],
)
def test_view_equals_that_of_its_twin(look: Any, path: str, twin: str) -> None:
    """Whatever the order, the type, the separator and the compressor, the view is the same."""
    panel = slice(50, 600)  # below the names of dimensions, which differ
    drawn = look(path)[panel]

    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 50
    np.testing.assert_allclose(drawn, look(twin)[panel], atol=1)
