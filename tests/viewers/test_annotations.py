"""Neuroglancer shows annotations of several spatial levels out of shards."""

from collections.abc import Generator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.precomputed.segments import BOUND, COLLECTIONS, COUNT, write_annotations
from tests.clients.services import from_folder
from tests.viewers.viewing import Neuroglancer, View, count


def state(source: str, rank: int) -> dict[str, Any]:
    """Show all annotations, those of the finest level, too."""
    return {
        "dimensions": {axis: [1e-9, "m"] for axis in "xyz"[:rank]},
        "position": [BOUND / 2] * rank,
        "crossSectionScale": 0.25,
        "projectionScale": 2 * BOUND,
        "showSlices": False,
        "layers": [
            {
                "type": "annotation",
                "name": "annotations",
                "source": f"precomputed://{source}",
                "projectionAnnotationSpacing": 1,
                "crossSectionAnnotationSpacing": 1,
            }
        ],
        "layout": "4panel",
    }


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write each collection into shards, and without any beside them."""
    root = tmp_path_factory.mktemp("bucket")
    for name, collection in COLLECTIONS.items():
        write_annotations(collection, root / "sharded" / name, root / "plain" / name)
    return root


@pytest.fixture(scope="module")
def service(bucket: Path) -> Generator[str]:
    """Serve the folder twice: without shards, and as it is."""
    with from_folder(bucket) as url:
        yield url


@pytest.fixture(scope="module", params=list(COLLECTIONS))
def name(request: pytest.FixtureRequest) -> str:
    """Give each collection."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def view(neuroglancer: Neuroglancer, service: str, name: str) -> View:
    """Look at a collection in shards."""
    shown = state(f"{service}/bucket/sharded/{name}", COLLECTIONS[name].rank)
    return neuroglancer.look(shown, f"annotations-{name}-sharded")


def test_every_cell_is_answered(view: View, service: str, bucket: Path, name: str) -> None:
    """The page may read all answers, and 404 are the cells without annotations."""
    root = f"{service}/bucket/sharded/{name}/"
    asked = {(each.url.removeprefix(root), each.status) for each in view.asked}
    cells = {
        f"spatial{level}/{'_'.join(map(str, cell))}"
        for level, grid in enumerate(COLLECTIONS[name].grids)
        for cell in product(*map(range, grid))
    }

    assert not view.faults
    assert asked == {("info", 200)} | {
        (cell, 200 if (bucket / "plain" / name / cell).exists() else 404) for cell in cells
    }


def test_draws_in_3d(view: View) -> None:
    """There are that many annotations, each of some pixels in the colour that is the default."""
    assert count("#ffff00", view.pixels[340:585, 40:380]) > 5 * COUNT


@pytest.mark.parametrize("twin", ["bucket/plain", "raw/sharded"])
def test_looks_the_same(
    neuroglancer: Neuroglancer, service: str, view: View, name: str, twin: str
) -> None:
    """No pixel differs from annotations that are not sharded, or read by the page from shards."""
    shown = state(f"{service}/{twin}/{name}", COLLECTIONS[name].rank)
    other = neuroglancer.look(shown, f"annotations-{name}-{twin.replace('/', '-')}")

    np.testing.assert_array_equal(view.pixels, other.pixels)
