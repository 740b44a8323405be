"""The pictures on the page of an array in a browser: sliders, and the grid of chunks."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import zarr
from playwright.sync_api import Browser, Locator, Route, ViewportSize

from shardgate.settings import DatasetSettings, Settings
from tests.support.gates import Gate
from tests.support.processes import wait_until
from tests.support.serving import serving
from tests.support.viewers.images import put_image
from tests.support.viewers.viewing import Pixels, decode

DESK: Final = ViewportSize(width=1200, height=900)
HAND: Final = ViewportSize(width=390, height=800)
LOADED: Final = """name => {
    const picture = document.querySelector(`img.plane[src*="${name}"]`);
    return picture.complete && picture.naturalWidth && !picture.classList.contains("loading")
        && getComputedStyle(picture).opacity === "1";  // it fades in
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a stack of two planes, dark and bright, of which one lacks its left half."""
    root = tmp_path_factory.mktemp("planes")
    data = np.zeros((2, 128, 128), np.uint8)
    data[0] = np.arange(128)
    data[1, :, 64:] = 255 - np.arange(64)
    array = zarr.create_array(
        str(root / "stack"),
        shape=data.shape,
        dtype="u1",
        chunks=(1, 32, 32),
        shards=(1, 64, 64),
        dimension_names=("z", "y", "x"),
        fill_value=0,
    )
    array[...] = data
    put_image(root / "image")
    datasets = {each.name: DatasetSettings(url=str(each)) for each in root.iterdir()}
    with serving(Settings(datasets=datasets)) as served:
        yield served


def shot(picture: Locator) -> Pixels:
    """Return the pixels of a picture as it is shown."""
    return decode(picture.screenshot())


def colour_at(shown: Pixels, left: float, top: float) -> Sequence[int]:
    """Return the colour at a part of the width and the height of a picture."""
    height, width, _ = shown.shape
    return [int(part) for part in shown[int(top * height), int(left * width)]]


@pytest.mark.parametrize("scripts", [True, False])
def test_slider_changes_the_pictures(
    browser: Browser, url: str, pictures: Path, *, scripts: bool
) -> None:
    """A slider shows another plane and its address, at once, or by a button without scripts."""
    with browser.new_context(viewport=DESK, java_script_enabled=scripts) as context:
        page = context.new_page()
        page.goto(f"{url}/stack/?at.z=0", wait_until="networkidle")
        preview = page.locator("img.plane").first
        before = shot(preview)
        page.locator("input[type=range]").focus()
        page.keyboard.press("ArrowRight")
        if scripts:
            page.wait_for_url("**/stack/?at.z=1")
            for name in ("preview.png", "histogram.svg", "grid.svg"):
                page.wait_for_function(LOADED, arg=name)
        else:
            page.get_by_role("button").click()
            page.wait_for_load_state("networkidle")
        after = shot(preview)
        address = page.url
        page.screenshot(path=pictures / f"array-slider-{scripts}.png", full_page=True)

    assert address == f"{url}/stack/?at.z=1"
    assert colour_at(before, 0.3, 0.5) != [0, 0, 0]
    assert colour_at(after, 0.3, 0.5) == [0, 0, 0]
    assert colour_at(after, 0.6, 0.5) != [0, 0, 0]


@pytest.mark.parametrize(
    ("scheme", "viewport"),
    [
        ("light", DESK),
        ("dark", HAND),
        pytest.param("dark", DESK, marks=pytest.mark.soak),
        pytest.param("light", HAND, marks=pytest.mark.soak),
    ],
)
def test_grid_tells_stored_chunks_from_absent_ones(
    browser: Browser, url: str, pictures: Path, scheme: str, viewport: ViewportSize
) -> None:
    """Stored and absent chunks have two colours, and borders of shards a third one."""
    faults: list[str] = []
    options = {"viewport": viewport, "color_scheme": scheme}
    with browser.new_context(**options) as context:  # type: ignore[arg-type]  # playwright's names
        page = context.new_page()
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.goto(f"{url}/stack/?at.z=1", wait_until="networkidle")
        grid = page.locator("img.plane[src*=grid]")
        shown = shot(grid)
        page.locator("img[src*=grid][alt*=stored]").wait_for()
        told = grid.get_attribute("alt")
        page.screenshot(path=pictures / f"array-{scheme}-{viewport['width']}.png", full_page=True)
        page.goto(f"{url}/image/", wait_until="networkidle")
        page.screenshot(path=pictures / f"image-{scheme}-{viewport['width']}.png", full_page=True)
        width = page.evaluate("document.documentElement.scrollWidth")

    absent = {tuple(colour_at(shown, left, top)) for left in (0.1, 0.4) for top in (0.1, 0.7)}
    stored = {tuple(colour_at(shown, left, top)) for left in (0.6, 0.9) for top in (0.1, 0.7)}
    assert told == "8 of 16 inner chunks stored, in 2 of 4 shards"
    assert (len(absent), len(stored), absent & stored) == (1, 1, set())
    assert tuple(colour_at(shown, 0.5, 0.1)) not in absent | stored
    assert width <= viewport["width"]
    assert not faults


def test_grid_of_a_slow_store_is_filled_in(
    browser: Browser, tmp_path: Path, pictures: Path
) -> None:
    """A grid shows chunks as not read while their store hangs, and is renewed by itself: what it
    shows is what it says, also where all became known just after it was loaded.
    """
    array = zarr.create_array(str(tmp_path), shape=(64, 64), dtype="u1", chunks=(16, 16))
    array[...] = 1
    gate = Gate(part="c/3/")
    datasets = {"slow": DatasetSettings(url=str(tmp_path))}
    with (
        serving(Settings(datasets=datasets), wrap=gate.wrap) as url,
        browser.new_context(viewport=DESK) as context,
    ):
        page = context.new_page()
        page.goto(f"{url}/slow/", wait_until="commit")
        page.locator("img[alt='12 of 12 chunks stored']").wait_for()
        page.screenshot(path=pictures / "array-slow.png", full_page=True)

        def answer(route: Route) -> None:
            if route.request.resource_type == "fetch":  # the picture has been loaded before
                gate.open()
            route.continue_()

        page.route("**/grid.svg*", answer)
        grid = page.locator("img[alt='16 of 16 chunks stored']")
        grid.wait_for()
        wait_until(lambda: colour_at(shot(grid), 0.1, 0.75) == colour_at(shot(grid), 0.1, 0.1))
        page.wait_for_load_state("networkidle")  # else a picture outlives the service
