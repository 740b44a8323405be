"""Neuroglancer shows a sharded Zarr array."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import zarr

from app.settings import DatasetSettings, ServerSettings, Settings
from tests.serving import serving
from tests.viewers.viewing import Neuroglancer, View, sections

AXES: Final = ("z", "y", "x")
SHAPE: Final = (40, 60, 70)
CENTER: Final = (20, 30, 35)
INNER: Final = (16, 16, 16)
HOLE: Final = (slice(16, 32),) * 3
"""An inner chunk that no shard holds, in sight."""


def stripes() -> npt.NDArray[np.uint16]:
    """Make slanting stripes with a hole."""
    z, y, x = np.indices(SHAPE, np.uint16)
    values = np.asarray(((6 * z + 4 * y + 3 * x) % 251 + 1) * 257, np.uint16)
    values[HOLE] = 0
    return values


VALUES: Final = stripes()


SECTIONS: Final = sections(SHAPE, CENTER)


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


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the array in shards, and the same without any."""
    root = tmp_path_factory.mktemp("bucket")
    layouts: dict[str, dict[str, Any]] = {
        "sharded": {"chunks": INNER, "shards": (32, 32, 32)},
        "plain": {"chunks": INNER},
    }
    for name, layout in layouts.items():
        array = zarr.create_array(
            root / name, shape=SHAPE, dtype="u2", fill_value=0, dimension_names=AXES, **layout
        )
        array[...] = VALUES
    return root


@pytest.fixture(scope="module")
def service(bucket: Path) -> Generator[str]:
    """Serve the folder twice: without shards, and as it is."""
    datasets = {
        "bucket": DatasetSettings(url=str(bucket)),
        "raw": DatasetSettings(url=str(bucket), view="raw"),
    }
    with serving(Settings(datasets=datasets)) as url:
        yield url


@pytest.fixture(scope="module")
def view(neuroglancer: Neuroglancer, service: str) -> View:
    """Look at the array in shards."""
    shown = state(f"{service}/bucket/sharded")
    return neuroglancer.look(shown, "zarr-sharded", {"data": SECTIONS})


def test_reads_the_values(view: View) -> None:
    """Each voxel of the three sections has the value that was written."""
    assert view.values["data"] == VALUES[tuple(SECTIONS.T)].tolist()


def test_draws_the_values(view: View) -> None:
    """The first section, four pixels a voxel around its middle, is as bright as the values."""
    z, y = np.indices(SHAPE[:2])
    drawn = view.pixels[185 + 4 * (y - CENTER[1]), 200 + 4 * (z - CENTER[0])]
    expected = np.stack([VALUES[:, :, CENTER[2]] // 257] * 3, axis=-1)

    np.testing.assert_allclose(drawn, expected, atol=1)


def test_every_request_is_answered(view: View, service: str) -> None:
    """The page may read all answers, and 404 is the chunk that is not there."""
    root = f"{service}/bucket/sharded/"
    asked = {(asked.url.removeprefix(root), asked.status) for asked in view.asked}
    chunks = {f"c/{z}/{y}/{x}" for z, y, x in SECTIONS // INNER}

    assert not view.faults
    assert asked == {("zarr.json", 200), ("c/1/1/1", 404)} | {
        (chunk, 200) for chunk in chunks - {"c/1/1/1"}
    }


@pytest.mark.parametrize("twin", ["bucket/plain", "raw/sharded"])
def test_looks_the_same(neuroglancer: Neuroglancer, service: str, view: View, twin: str) -> None:
    """No pixel differs from the array written without shards, or read from them by the page."""
    other = neuroglancer.look(state(f"{service}/{twin}"), f"zarr-{twin.replace('/', '-')}")

    np.testing.assert_array_equal(view.pixels, other.pixels)


def test_other_pages_see_nothing(neuroglancer: Neuroglancer, bucket: Path) -> None:
    """Where only another origin is allowed, the browser keeps the answers from the page."""
    settings = Settings(
        server=ServerSettings(cors_origins=("https://viewer.example",)),
        datasets={"bucket": DatasetSettings(url=str(bucket))},
    )
    with serving(settings) as url:
        shown = state(f"{url}/bucket/sharded")
        view = neuroglancer.look(shown, "zarr-forbidden", {"data": SECTIONS[:1]})

    assert {asked.status for asked in view.asked} == {None}
    assert "CORS" in view.faults[0]
    assert view.values == {"data": [None]}
