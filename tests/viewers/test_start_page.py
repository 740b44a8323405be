"""The start page and the demo's links in a browser, and a page that tries DNS rebinding."""

import io
import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, ViewportSize

from shardgate import demo
from shardgate.settings import DatasetSettings, ServerSettings, Settings
from tests.support.serving import serving
from tests.viewers.conftest import REBOUND
from tests.viewers.viewing import Neuroglancer, picture_when_still

DESK: Final = ViewportSize(width=1200, height=900)
HAND: Final = ViewportSize(width=360, height=740)
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve the examples, all of them in one folder too, and a dataset with a long URL."""
    examples = tmp_path_factory.mktemp("examples")
    written = demo.write(examples)
    datasets = {name: DatasetSettings(url=str(path)) for name, path in written.items()}
    datasets["everything"] = DatasetSettings(url=str(examples))
    datasets["away"] = DatasetSettings(url=f"file:///{'nothing-at-all-' * 6}")
    with serving(Settings(datasets=datasets)) as served:
        yield served


def opened(browser: Browser, url: str, **options: object) -> Generator[Page]:
    """Open the page in a new window, and assert that it logs no errors."""
    faults: list[str] = []
    with browser.new_context(**options) as context:  # type: ignore[arg-type]  # playwright's names
        page = context.new_page()
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(f"{url}/")
        yield page
    assert not faults


@pytest.fixture
def desk(browser: Browser, url: str) -> Generator[Page]:
    """Open the page on a large screen."""
    yield from opened(browser, url, viewport=DESK)


@pytest.fixture
def hand(browser: Browser, url: str) -> Generator[Page]:
    """Open the page on a phone, in the dark, without scripts."""
    dark = {"viewport": HAND, "color_scheme": "dark", "java_script_enabled": False}
    yield from opened(browser, url, **dark)


def width(picture: bytes) -> int:
    """Return the width of a picture."""
    with Image.open(io.BytesIO(picture)) as image:
        return image.width


def test_start_page_fits_a_desktop(desk: Page, pictures: Path) -> None:
    """The start page is not wider than a window of 1,200 pixels."""
    assert width(desk.screenshot(path=pictures / "start-desk.png", full_page=True)) == 1200


def test_start_page_fits_a_phone(hand: Page, pictures: Path) -> None:
    """The start page with open snippets, and without scripts, is not wider than 360 pixels."""
    for summary in hand.get_by_text("TensorStore").all() + hand.get_by_text("xarray").all():
        summary.click()

    assert width(hand.screenshot(path=pictures / "start-phone.png", full_page=True)) == 360


def test_snippet_is_selected_by_one_click(desk: Page) -> None:
    """A click on a snippet selects all of its code, and nothing else."""
    desk.locator("#dataset-image ~ .snippets code").first.click()

    taken = str(desk.evaluate("String(getSelection())"))
    assert taken.strip().startswith("curl -sS http://127.0.0.1:")
    assert len(taken.strip().splitlines()) == 1


@pytest.mark.parametrize("name", [pytest.param("image", marks=soak), "cells", "nested"])
def test_viewer_link_shows_the_data(desk: Page, url: str, pictures: Path, name: str) -> None:
    """A dataset's viewer link shows the data, without requests to other servers."""
    others: list[str] = []

    def stop(route: Route) -> None:
        others.append(route.request.url)
        route.abort()

    here = urlsplit(url).netloc
    desk.route(lambda asked: urlsplit(asked).netloc not in {here, ""}, stop)
    desk.locator(f"article[aria-labelledby='dataset-{name}'] .views a").click()
    desk.wait_for_url("**/viewer/v/page/**")
    while desk.evaluate("typeof viewer") == "undefined":
        desk.wait_for_timeout(20)
    with Image.open(io.BytesIO(picture_when_still(desk, 1))) as image:
        image.save(pictures / f"start-viewer-{name}.png")
        pixels = np.asarray(image.convert("RGB"), np.int16)

    assert not others
    middle = pixels[100:800, 400:1100].reshape(-1, 3)
    assert len(np.unique(middle, axis=0)) > 30


@pytest.fixture(scope="module")
def states(url: str) -> dict[str, Any]:
    """Return the states in the demo's links by the names of their first layers."""
    links = re.findall(r"http\S+/#!(\S+)", demo.guide(url))
    found = [json.loads(unquote(link)) for link in links]
    return {state["layers"][0]["name"]: state for state in found}


@pytest.mark.parametrize(
    "name", [pytest.param("image", marks=soak), "cells", "tagged", pytest.param("now", marks=soak)]
)
def test_demo_link_shows_its_example(
    neuroglancer: Neuroglancer, states: dict[str, Any], name: str
) -> None:
    """A link of the demo shows its data, and its requests are 200, 206 or 404."""
    view = neuroglancer.look(states[name], f"demo-{name}")

    assert not view.faults
    assert {asked.status for asked in view.asked} <= {200, 404}, [
        a for a in view.asked if a.status not in (200, 206)
    ]
    assert len(np.unique(view.pixels[70:320].reshape(-1, 3), axis=0)) > 40


SETTINGS: Final = Settings(
    server=ServerSettings(cors_origins=("https://viewer.example",)),
    datasets={"any": DatasetSettings(url="memory://any", writable=True)},
)
ATTACK: Final = """async () => {
    const statuses = [];
    for (const method of ["PUT", "DELETE", "GET"])
        statuses.push((await fetch("/any/k", {method})).status);
    return statuses;
}"""


def test_rebound_page_cannot_write(browser: Browser) -> None:
    """A page whose host name was rebound to the service gets 421 for PUT and DELETE."""
    with serving(SETTINGS) as url, browser.new_context() as context:
        httpx.put(f"{url}/any/k", content=b"x")
        page = context.new_page()
        page.goto(url.replace("127.0.0.1", REBOUND) + "/healthz")

        assert page.evaluate(ATTACK) == [421, 421, 200]
        assert httpx.get(f"{url}/any/k").content == b"x"
