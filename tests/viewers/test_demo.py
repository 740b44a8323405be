"""The examples of the demo in Neuroglancer, and the pictures of them in `docs/pictures`."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest
from PIL import Image

from shardgate import demo
from shardgate.settings import Settings
from tests.support.documents import ROOT
from tests.support.examples import datasets_of
from tests.support.serving import serving
from tests.support.viewers.links import linked_state
from tests.support.viewers.viewing import Neuroglancer, Pixels, View, decode

PICTURES: Final = ROOT / "docs/pictures"
MOST_NBYTES: Final = 200_000
SPACE: Final = np.s_[330:570, 10:390]
"""Rows and columns of the panel with three dimensions, without its buttons."""
SECTION: Final = np.s_[70:320, 50:350]
"""Rows and columns of the first panel."""
STATES: Final = (f"tag.{demo.TAG}", *(f"branch.{name}" for name in demo.BRANCHES))


@pytest.fixture(scope="module")
def url(demo_paths: dict[str, Path]) -> Generator[str]:
    """Serve the examples."""
    with serving(Settings(datasets=datasets_of(demo_paths))) as served:
        yield served


@pytest.fixture(scope="module")
def views(neuroglancer: Neuroglancer, url: str) -> Mapping[str, View]:
    """Open the links of the cells and of the film."""
    return {
        name: neuroglancer.look(linked_state(f"{url}/api/datasets/{name}/viewer"), f"demo-{name}")
        for name in ("cells", "film")
    }


@pytest.fixture(scope="module")
def drawn(views: Mapping[str, View], url: str, pictures: Path) -> Mapping[str, Pixels]:
    """Return the pictures of the documents as they are now, and save them in few colours."""
    previews = f"{url}/api/datasets/history/preview.png"
    answers = [httpx.get(previews, params={"ref": each}, timeout=60) for each in STATES]
    storms = [decode(answer.content) for answer in answers]
    found = {name: view.pixels for name, view in views.items()}
    found["history"] = np.concatenate(storms, axis=1)
    for name, pixels in found.items():
        image = Image.fromarray(pixels.astype(np.uint8)).quantize(256)
        image.save(pictures / f"docs-{name}.png", optimize=True)
    return found


def test_link_of_cells_draws_meshes_in_3d(views: Mapping[str, View]) -> None:
    """A tenth of the panel with three dimensions is in strong colours, which are many."""
    pixels = views["cells"].pixels[SPACE].reshape(-1, 3)
    strong = pixels[np.ptp(pixels, axis=1) > 80]

    assert len(strong) > len(pixels) / 10
    assert len(np.unique(strong // 64, axis=0)) > 10


def test_link_of_cells_draws_segments_over_the_image(views: Mapping[str, View]) -> None:
    """Sections have coloured cells with dark membranes between them."""
    pixels = views["cells"].pixels[SECTION].reshape(-1, 3)

    assert (np.ptp(pixels, axis=1) > 20).mean() > 0.5
    assert (pixels.max(axis=1) < 80).mean() > 0.03


def test_link_of_cells_reads_every_part(views: Mapping[str, View], url: str) -> None:
    """The page reads voxels, meshes, skeletons and annotations, and all requests succeed."""
    view = views["cells"]
    paths = [asked.url.removeprefix(f"{url}/cells/").split("/") for asked in view.asked]

    assert not view.faults
    assert {asked.status for asked in view.asked} == {200, 206}
    parts = {"em", "mesh", "properties", "skeletons", "synapses"}
    assert {path[0] for path in paths} >= parts | {"20_20_40"}


def test_link_of_the_film_draws_both_channels(views: Mapping[str, View]) -> None:
    """The film has nuclei in magenta and membranes in green."""
    red, green, blue = np.moveaxis(views["film"].pixels[SECTION], 2, 0)

    assert ((red > green + 60) & (blue > green + 40)).sum() > 2000
    assert ((green > red + 60) & (green > blue + 20)).sum() > 2000


def test_storm_moves_from_state_to_state(drawn: Mapping[str, Pixels]) -> None:
    """Previews of the tag and of both branches differ in a third of their pixels."""
    tagged, expected, now = np.split(drawn["history"], len(STATES), axis=1)

    for one, other in ((tagged, expected), (tagged, now), (expected, now)):
        assert (np.abs(one - other).max(axis=2) > 20).mean() > 1 / 3


@pytest.mark.parametrize("name", ["cells", "film", "history"])
def test_picture_in_the_documents_shows_the_demo(name: str, drawn: Mapping[str, Pixels]) -> None:
    """A picture in the documents is small, and looks like the one that is drawn now."""
    picture = (PICTURES / f"{name}.png").read_bytes()
    pixels = decode(picture)

    assert len(picture) < MOST_NBYTES
    assert pixels.shape == drawn[name].shape
    assert np.abs(pixels - drawn[name]).mean() < 10
