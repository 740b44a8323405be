"""What Neuroglancer draws from the links of the service: pixels of each kind of array."""

import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import icechunk
import numpy as np
import pytest
import zarr

from shardgate import demo
from shardgate.settings import DatasetSettings, Settings
from tests.support.commands import run
from tests.support.examples import datasets_of
from tests.support.serving import serving
from tests.support.viewers.images import put_all, put_image
from tests.support.viewers.links import linked_state
from tests.support.viewers.viewing import LOADED, Neuroglancer, Pixels, count

MIDDLE: Final = (slice(180, 184), slice(195, 205))
"""Rows and columns in the ball, in the first panel of four."""
CORNER: Final = (slice(100, 104), slice(60, 70))
"""Rows and columns of the array, outside of the ball."""
DATASETS: Final = ("folder", "repository", "archive", "references")
soak = pytest.mark.soak


def of(*usual: str) -> pytest.MarkDecorator:
    """Let a test draw arrays of the *usual* datasets, and in soak runs of all.

    Every run draws each kind of array, and from each kind of dataset; tests/viewers/test_zarr.py
    draws values of 16 bits.
    """
    others = [pytest.param(each, marks=soak) for each in DATASETS if each not in usual]
    return pytest.mark.parametrize("dataset", [*usual, *others])


@pytest.fixture(scope="module")
def url(demo_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve arrays of each kind: of a folder, and the same in a repository, an archive, and a set
    of references to the chunks of the folder.
    """
    folder, repository, home = map(tmp_path_factory.mktemp, ("folder", "repository", "home"))
    put_all(folder)
    archive = shutil.make_archive(str(home / "archive"), "zip", folder)
    references = home / "references.json"
    run("inspect", "--references", f"--output={references}", str(folder))
    storage = icechunk.local_filesystem_storage(str(repository))
    session = icechunk.Repository.create(storage).writable_session("main")
    put_all(session.store)
    session.commit("Put arrays of each kind")
    paths = {"folder": folder, "repository": repository, "archive": archive}
    datasets = {name: DatasetSettings(url=str(path)) for name, path in paths.items()}
    datasets |= datasets_of(demo_paths)
    datasets["references"] = DatasetSettings(
        url=str(references),
        format="kerchunk",
        virtual_chunk_prefixes=[{"url": f"file://{folder}/"}],
    )
    with serving(Settings(datasets=datasets)) as served:
        yield served


def draw(neuroglancer: Neuroglancer, url: str, dataset: str, path: str) -> Pixels:
    """Return the pixels of the view that the link of a path leads to."""
    state = linked_state(f"{url}/api/datasets/{dataset}/viewer?path={path}")
    state |= {"showAxisLines": False}
    view = neuroglancer.look(state, f"link-{dataset}-{path.replace('/', '-')}")
    assert not view.faults
    return view.pixels


@of("repository")
@pytest.mark.parametrize("path", ["uint8", pytest.param("uint16", marks=soak), "float32"])
def test_image_is_bright_inside_and_dark_outside(
    neuroglancer: Neuroglancer, url: str, dataset: str, path: str
) -> None:
    """An image has white in the middle of its ball, and black around it, whatever its type."""
    pixels = draw(neuroglancer, url, dataset, path)

    assert pixels[MIDDLE].min() > 240
    assert pixels[CORNER].max() < 15


@of("archive")
def test_channels_have_their_colours(neuroglancer: Neuroglancer, url: str, dataset: str) -> None:
    """Balls of two active channels are red and green, yellow where they overlap; one is hidden."""
    pixels = draw(neuroglancer, url, dataset, "image")

    for colour in ("#ff0000", "#00ff00", "#ffff00"):
        assert count(colour, pixels) > 1000
    assert count("#0000ff", pixels) < 100


@of("folder")
def test_map_shows_latitude_and_longitude(
    neuroglancer: Neuroglancer, url: str, dataset: str
) -> None:
    """An array of time, latitude and longitude fills one panel with its first time."""
    state = linked_state(f"{url}/api/datasets/{dataset}/viewer?path=weather")
    assert (state["displayDimensions"], state["layout"]) == (["lon", "lat"], "xy")
    state["position"][2] = 1.5
    pixels = neuroglancer.look(state | {"showAxisLines": False}, f"link-{dataset}-map").pixels

    assert pixels[280:320, 380:420].min() > 240


SPACE: Final = """() => {
    const {names, scales, units, bounds} = viewer.coordinateSpace.value;
    return names.map((name, at) => [
        name, scales[at], units[at], bounds.lowerBounds[at], bounds.upperBounds[at]]);
}"""


def test_level_has_the_scale_of_its_image(neuroglancer: Neuroglancer, tmp_path: Path) -> None:
    """The link of a level shows it where, and as large as, it is in its image."""
    put_image(tmp_path)
    group = zarr.open_group(tmp_path)
    ome: Any = group.attrs["ome"]
    shift = {"type": "translation", "translation": [0, 0, 8, 10, 20]}
    ome["multiscales"][0]["datasets"][1]["coordinateTransformations"].append(shift)
    group.attrs["ome"] = ome
    with serving(Settings(datasets={"d": DatasetSettings(url=str(tmp_path))})) as url:
        state = linked_state(f"{url}/api/datasets/d/viewer?path=1")
        page = neuroglancer.opened(state)
        page.wait_for_function(LOADED, arg=1)
        space = page.evaluate(SPACE)

    assert space == [
        ["x", 2e-6, "m", 9.5, 73.5],
        ["y", 2e-6, "m", 4.5, 52.5],
        ["z", 2e-6, "m", 3.5, 43.5],
        ["t", 1, "s", -0.5, 1.5],
        ["c", 1, "", -0.5, 2.5],
    ]


@of("references")
def test_labels_are_coloured(neuroglancer: Neuroglancer, url: str, dataset: str) -> None:
    """Labels have one colour in the ball and another one around it."""
    pixels = draw(neuroglancer, url, dataset, "labels")
    inside, outside = pixels[MIDDLE].reshape(-1, 3), pixels[CORNER].reshape(-1, 3)

    assert len(np.unique(inside, axis=0)) == len(np.unique(outside, axis=0)) == 1
    assert np.ptp(inside[0]) > 50
    assert (inside[0] != outside[0]).any()


@pytest.mark.parametrize(
    "line",
    [
        "tag.landfall",
        *(pytest.param(each, marks=soak) for each in ("film", "branch.main")),
    ],
)
def test_demo_link_shows_its_example(neuroglancer: Neuroglancer, url: str, line: str) -> None:
    """A link that the demo prints shows its data, and its requests are 200 or 404."""
    (link,) = (each for each in demo.guide(url).split() if "/viewer" in each and line in each)
    view = neuroglancer.look(linked_state(link), f"demo-{line}")

    assert not view.faults
    assert {asked.status for asked in view.asked} <= {200, 404}
    assert len(np.unique(view.pixels[70:320].reshape(-1, 3), axis=0)) > 10
