"""The pages of the service in a browser, and a page that tries DNS rebinding."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from html import unescape
from http import HTTPStatus
from pathlib import Path
from time import sleep
from typing import Final
from urllib.parse import urljoin, urlsplit

import httpx
import numpy as np
import pytest
import zarr
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect

from shardgate.settings import DatasetSettings, ServerSettings, Settings
from tests.support.examples import datasets_of
from tests.support.gates import Gate
from tests.support.serving import serving
from tests.support.viewers.browser import REBOUND
from tests.support.viewers.images import put_image
from tests.support.viewers.viewing import decode, picture_when_still

DESK: Final = ViewportSize(width=1200, height=900)
HAND: Final = ViewportSize(width=360, height=740)
VIEW: Final = ViewportSize(width=800, height=600)
PAGES: Final = {
    "start": "/",
    "group": "/everything/",
    "array": "/image/s0/",
    "image": "/ome/",
    "repository": "/history/",
}
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def url(demo_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve the examples, all of them in one folder too, an image of channels and a long URL."""
    put_image(ome := tmp_path_factory.mktemp("ome"))
    paths = {"everything": demo_paths["image"].parent, "ome": ome}
    datasets = {name: DatasetSettings(url=str(path)) for name, path in paths.items()}
    datasets |= datasets_of(demo_paths)
    datasets["away"] = DatasetSettings(url=f"file:///{'nothing-at-all-' * 6}")
    with serving(Settings(datasets=datasets)) as served:
        draw_pictures(served)
        yield served


def draw_pictures(url: str) -> None:
    """Have all pictures of the pages drawn: until then one may be 503, which a browser logs."""
    with httpx.Client(timeout=60, headers={"accept": "text/html"}) as client:
        for page in PAGES.values():
            text = client.get(url + page).text
            for address in re.findall(r'src="([^"]*/preview\.png[^"]*)"', text):
                picture = urljoin(url + page, unescape(address))
                while client.get(picture).status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                    sleep(0.1)


@contextmanager
def opened(browser: Browser, url: str = "about:blank", **options: object) -> Generator[Page]:
    """Open a page in a new window, and assert that it logs no errors."""
    faults: list[str] = []
    with browser.new_context(**options) as context:  # type: ignore[arg-type]  # playwright's names
        page = context.new_page()
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(url)
        yield page
    assert not faults


@pytest.fixture(scope="module")
def desk(browser: Browser) -> Generator[Page]:
    """Open a large window."""
    granted = ["clipboard-read", "clipboard-write"]
    with opened(browser, viewport=DESK, permissions=granted) as page:
        yield page


@pytest.fixture(scope="module")
def hand(browser: Browser) -> Generator[Page]:
    """Open the window of a phone, which is dark, and in which scripts are off."""
    with opened(browser, viewport=HAND, color_scheme="dark", java_script_enabled=False) as page:
        yield page


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_desktop_and_a_phone(
    desk: Page, hand: Page, url: str, pictures: Path, name: str
) -> None:
    """A page is not wider than a window of 1,200 pixels, nor one of 360 with open snippets."""
    desk.goto(url + PAGES[name], wait_until="networkidle")
    on_desk = desk.screenshot(path=pictures / f"page-{name}-desk.png", full_page=True)
    hand.goto(url + PAGES[name])
    for summary in hand.locator("summary").all()[1:]:
        summary.click()
    on_phone = hand.screenshot(path=pictures / f"page-{name}-phone.png", full_page=True)

    assert [decode(each).shape[1] for each in (on_desk, on_phone)] == [1200, 360]


def test_filter_hides_other_datasets(desk: Page, url: str) -> None:
    """Text in the filter box leaves, and counts, the lines of datasets with it in their names."""
    desk.goto(f"{url}/", wait_until="networkidle")
    desk.get_by_role("searchbox").fill("STOR")
    for viewport in (HAND, DESK):
        desk.set_viewport_size(viewport)
        assert desk.locator("tbody tr:visible th").all_inner_texts() == ["history"]
        assert desk.get_by_role("status").inner_text() == "1 of 9"


def test_snippet_is_selected_or_copied_by_one_click(desk: Page, url: str) -> None:
    """A click on a snippet selects all of its code; one on its button copies the same."""
    desk.goto(f"{url}/image/s0/", wait_until="networkidle")
    desk.locator(".snippet code").first.click()
    taken = str(desk.evaluate("String(getSelection())"))
    desk.locator("button.copy").first.click()
    desk.get_by_text("Copied").wait_for()
    copied = str(desk.evaluate("navigator.clipboard.readText()"))

    assert taken.strip() == copied
    assert f'zarr.open_array("{url}/image/@sharded/s0", mode="r")' in copied


def test_slow_dataset_is_filled_in(browser: Browser, tmp_path: Path, pictures: Path) -> None:
    """The line of a dataset whose store is slow is filled in without a reload, still filtered."""
    for name in ("quick", "slow"):
        zarr.create_array(str(tmp_path / name), shape=(4, 6), dtype="uint16")
    datasets = {each.name: DatasetSettings(url=str(each)) for each in tmp_path.iterdir()}
    gate = Gate("slow")
    with (
        serving(Settings(datasets=datasets), wrap=gate.wrap) as url,
        opened(browser, f"{url}/", viewport=DESK) as page,
    ):
        page.screenshot(path=pictures / "start-pending.png")
        page.get_by_role("searchbox").fill("slow")
        gate.open()
        page.locator("[data-name=slow]:not([data-pending])").wait_for()
        page.wait_for_load_state("networkidle")  # else a picture outlives the service
        page.screenshot(path=pictures / "start-filled-in.png")
        (shown,) = page.locator("tbody tr:visible").all_inner_texts()

        assert "slow" in shown
        assert "reading" not in shown


@pytest.mark.soak
def test_hundreds_of_datasets_are_filled_in(browser: Browser, pictures: Path) -> None:
    """The rows of 500 slow datasets are filled in by one request, around one that hangs."""
    names = [f"d{number:03}" for number in range(500)]
    datasets = {name: DatasetSettings(url=f"memory://{name}") for name in [*names, "hanging"]}
    gate = Gate("hanging", read_s=0.3)
    with (
        serving(Settings(datasets=datasets), wrap=gate.wrap) as url,
        opened(browser, f"{url}/", viewport=DESK) as page,
    ):
        pending = page.locator("[data-pending]")
        expect(pending).to_have_count(1, timeout=120_000)
        page.screenshot(path=pictures / "start-500.png")
        (shown,) = pending.all_inner_texts()
        gate.open()
        expect(pending).to_have_count(0, timeout=120_000)
        asked = page.evaluate("performance.getEntriesByType('resource').map(({name}) => name)")

    assert "hanging" in shown
    assert [each for each in asked if "rows" in each] == [f"{url}/?rows"]


@pytest.mark.parametrize(("is_mixed", "told"), [(False, "As of "), (True, "different moments")])
def test_picture_has_its_time(desk: Page, url: str, told: str, *, is_mixed: bool) -> None:
    """The tooltip of a picture has the time of its chunks, and says if they have several."""
    mark = {"x-shardgate-preview": "mixed"} if is_mixed else {}

    def answer(route: Route) -> None:
        fetched = route.fetch()
        route.fulfill(response=fetched, headers={**fetched.headers, **mark})

    desk.route("**/preview.png*", answer)
    desk.goto(f"{url}/image/s0/", wait_until="networkidle")
    title = desk.locator(f"img.plane[title*='{told}']").first.get_attribute("title") or ""
    desk.unroute_all()

    assert ("different" in title) is is_mixed


@pytest.mark.parametrize(
    ("name", "layers"),
    [pytest.param("image", 1, marks=soak), pytest.param("cells", 3, marks=soak), ("nested", 1)],
)
def test_viewer_link_shows_the_data(
    browser: Browser, url: str, pictures: Path, name: str, layers: int
) -> None:
    """A dataset's viewer link shows the data, without requests to other servers."""
    others: list[str] = []

    def stop(route: Route) -> None:
        others.append(route.request.url)
        route.abort()

    here = urlsplit(url).netloc
    with opened(browser, f"{url}/{name}/", viewport=VIEW) as page:
        page.route(lambda asked: urlsplit(asked).netloc not in {here, ""}, stop)
        link = "a.button" if name != "nested" else "table a"
        page.locator(link).first.click()
        if name == "nested":
            page.locator("a.button").click()
        page.wait_for_url("**/viewer/v/page/**")
        while page.evaluate("typeof viewer") == "undefined":
            page.wait_for_timeout(100)
        picture = picture_when_still(page, layers)
        (pictures / f"start-viewer-{name}.png").write_bytes(picture)

    assert not others
    assert len(np.unique(decode(picture)[100:500, 100:700].reshape(-1, 3), axis=0)) > 10


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
