"""`GET /` for browsers: a line for each dataset, and how long it waits for what is in them."""

import asyncio
import json
import logging
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from shardgate import web
from shardgate.model import ObjectRef
from shardgate.server.responses import csp_digest
from shardgate.settings import DatasetSettings, ServerSettings, Settings
from shardgate.web.start_page import OverviewCache
from tests.support.auth.people import TOKENS, caller
from tests.support.clocks import Clock
from tests.support.examples import datasets_of
from tests.support.formats.zarr.draft import ENTRY_POINT
from tests.support.gates import Gate
from tests.support.pages import Page, open_page
from tests.support.processes import wait_until
from tests.support.read.stores import WatchedStore
from tests.support.resolving import reading
from tests.support.serving import client_of
from tests.support.survey.documents import ARRAY, filled

LONG_S = 60.0
TIMES = "\N{MULTIPLICATION SIGN}"
NOTHING = "\N{EN DASH}"
PENDING = "reading\N{HORIZONTAL ELLIPSIS}"


@pytest.fixture(scope="module")
def client(
    demo_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[httpx.Client]:
    """Serve the examples, an empty folder and unreachable datasets."""
    empty, draft = (tmp_path_factory.mktemp(name) for name in ("empty", "draft"))
    entry_point = ENTRY_POINT | {"metadata_encoding": "of others"}
    (draft / "zarr.json").write_text(json.dumps(entry_point))
    datasets = datasets_of(demo_paths) | {
        "away": DatasetSettings(url=str(empty / "nothing")),
        "down": DatasetSettings(url="http://127.0.0.1:9/nothing"),
        "draft": DatasetSettings(url=str(draft)),
        "raw": DatasetSettings(url=str(empty), view="raw", writable=True),
        "empty": DatasetSettings(url=str(empty)),
    }
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(client: httpx.Client) -> Page:
    """Return the start page once it tells something of each example and of what is down."""
    pages: list[Page] = []

    def is_complete() -> bool:
        pages.append(open_page(client))
        names = ("image", "cells", "history", "nested", "away", "down", "draft")
        cells = [pages[-1].row(name).texts("td[@data-title='Largest array']") for name in names]
        return [NOTHING] not in cells and [PENDING] not in cells

    wait_until(is_complete)
    return pages[-1]


def test_datasets_are_listed_in_order(page: Page) -> None:
    """Datasets are sorted, each with a link to its page; the page has its landmarks."""
    names = page.texts("tbody/tr/th/a")

    assert names == sorted(names)
    assert {"image", "cells", "history", "away", "down"} < set(names)
    assert page.row("image").links("th") == ["./image/"]
    assert [len(page.all(each)) for each in ("h1", "main", "header", "nav[@aria-label]")] == [1] * 4
    assert page.tree.attrib["lang"] == "en"
    for table in page.all("table"):
        assert len(table.findall("thead/tr/th[@scope='col']")) == 6


def test_line_has_format_shape_and_size(page: Page) -> None:
    """A line has the formats, the shape and type of the largest array, and the bytes of all."""
    cells = page.row("image")
    (name,), (_, shown, largest, size, _) = cells.texts("th"), cells.texts("td")

    assert name == "image"
    assert shown == "zarr"
    assert largest == f"160 {TIMES} 256 {TIMES} 256 uint8 and 2 more"
    assert size == "11.4 MiB"
    assert page.row("history").texts("td[@data-title='Format']") == ["icechunk"]
    assert page.row("raw").texts("td[@data-title='Format']") == ["as it is stored"]
    assert page.row("raw").texts("th") == ["raw writable"]


@pytest.mark.parametrize(
    ("name", "reason"), [("away", "No such file"), ("down", "Connection refused")]
)
def test_unreachable_dataset_shows_its_error(page: Page, name: str, reason: str) -> None:
    """The line of an unreadable dataset has the error, no picture, and no link to the viewer."""
    (told,) = page.row(name).texts("span[@class='reason']")

    assert reason in told
    assert not page.row(name).all("img")
    assert page.row(name).links() == [f"./{name}/"]


def test_draft_of_2022_has_no_link_to_the_viewer(page: Page) -> None:
    """Neuroglancer does not read the draft of 2022, so its line has no link to the viewer."""
    assert page.row("draft").links() == ["./draft/"]
    assert "./api/datasets/image/viewer" in page.row("image").links()


def test_links_are_relative_and_can_be_requested(client: httpx.Client, page: Page) -> None:
    """Links and pictures are relative, and answer 200 unless their dataset is unreachable."""
    pictures = [each.attrib["src"] for each in page.all("img")]
    links = {*page.links(), *pictures}
    statuses = {
        link: client.get(urljoin("/", link), follow_redirects=True).status_code for link in links
    }

    assert all(link.startswith("./") for link in links)
    assert {link: status for link, status in statuses.items() if status != 200} == {
        "./away/": 503,
        "./down/": 503,
        "./empty/": 404,
        "./raw/": 404,
    }


def test_security_policy_allows_its_own_parts_only(page: Page) -> None:
    """The policy allows the page's own style and script, by digest, and pictures from here."""
    policy = page.answer.headers["content-security-policy"]
    (style,), (script,) = page.all("style"), page.all("script")

    assert f"style-src '{csp_digest(style.text or '')}'" in policy
    assert f"script-src '{csp_digest(script.text or '')}'" in policy
    assert "img-src 'self' data:" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert page.answer.headers["referrer-policy"] == "no-referrer"
    assert page.answer.headers["x-content-type-options"] == "nosniff"
    assert page.answer.headers["cache-control"] == "no-store"


def test_colours_have_enough_contrast() -> None:
    """Text has a contrast of 4.5 and edges of fields one of 3, in both schemes (WCAG 1.4)."""
    style = (Path(web.__file__).parent / "templates/page.css").read_text()
    for scheme in style.split("prefers-color-scheme"):
        colours = dict(
            pair.strip().removeprefix("--").split(": ")
            for pair in scheme.split(":root {")[1].split("}")[0].split(";")
            if pair.strip()
        )
        for behind in ("ground", "card"):
            for text in ("text", "soft", "link", "bad"):
                assert _contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
            assert _contrast(colours["edge"], colours[behind]) >= 3
        assert _contrast(colours["on-button"], colours["button"]) >= 4.5


def _contrast(one: str, other: str) -> float:
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.fixture(scope="module")
def private() -> Generator[httpx.Client]:
    """Serve 200 datasets and metrics to one caller only."""
    settings = Settings(
        server=ServerSettings(metrics=("ana",)),
        callers={"ana": caller(TOKENS["ana"])},
        datasets={
            f"d{number:03}": DatasetSettings(url=f"memory://d{number}", read=("ana",))
            for number in range(200)
        },
    )
    with client_of(settings) as opened:
        yield opened


def test_page_has_what_the_caller_may_read(private: httpx.Client) -> None:
    """The page lists what the caller may read, all of 200, and `/metrics` for who may read it."""
    nobody = open_page(private)
    bearer = {"authorization": f"Bearer {TOKENS['ana']}"}
    with httpx.Client(base_url=private.base_url, headers=bearer) as client:
        ana = open_page(client)

    assert "There is no dataset that you may see." in nobody.texts("p")
    assert nobody.texts("tbody/tr/th/a") == []
    assert ana.texts("tbody/tr/th/a") == [f"d{number:03}" for number in range(200)]
    assert "./metrics" in set(ana.links()) - set(nobody.links())


def test_page_below_a_token_has_relative_links(private: httpx.Client) -> None:
    """Links of a page below a token are relative to it; that page links no API."""
    page = open_page(private, f"/~{TOKENS['ana']}/")

    assert page.links("main") == [f"./d{number:03}/" for number in range(200)]
    assert page.links("header") == page.links("footer") == ["./"]


def test_slow_datasets_are_shown_later() -> None:
    """Hanging datasets are left out after the wait of one, and are there for the next page."""
    gate = Gate()
    datasets = {f"d{number}": DatasetSettings(url=f"memory://d{number}") for number in range(50)}
    with client_of(Settings(datasets=datasets), wrap=gate.wrap) as client:
        path = "td[@data-title='Largest array']"
        pending = open_page(client)
        assert pending.texts(path) == [PENDING] * 50
        assert [each.attrib["content"] for each in pending.all("noscript/meta")] == ["1"]
        gate.open()
        wait_until(lambda: open_page(client).texts(path) == [NOTHING] * 50)
        assert not open_page(client).all("noscript")


def test_rows_are_sent_as_they_are_known() -> None:
    """Rows are lines of JSON, and one whose store hangs arrives after the others."""
    gate = Gate("slow")
    names = ("slow", "one", "two")
    datasets = {name: DatasetSettings(url=f"memory://{name}") for name in names}
    html = {"accept": "text/html"}
    with (
        client_of(Settings(datasets=datasets), wrap=gate.wrap) as client,
        client.stream("GET", "/?rows", headers=html) as response,
    ):
        lines = response.iter_lines()
        first = [json.loads(next(lines)) for _ in range(2)]
        gate.open()
        (last,) = [json.loads(line) for line in lines]

    assert {row["name"] for row in first} == {"one", "two"}
    assert last["name"] == "slow"
    assert all("data-pending" not in row["html"] for row in (*first, last))
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.headers["cache-control"] == "no-store"


def test_rows_are_those_that_the_caller_may_read(private: httpx.Client) -> None:
    """Rows are sent of datasets that the caller may read only."""
    html = {"accept": "text/html"}
    ana = html | {"authorization": f"Bearer {TOKENS['ana']}"}

    assert client_lines(private, html) == []
    assert len(client_lines(private, ana)) == 200


def client_lines(client: httpx.Client, headers: dict[str, str]) -> list[str]:
    """Return all rows."""
    return client.get("/?rows", headers=headers).text.splitlines()


async def test_overviews_are_shared() -> None:
    """Concurrent requests share the reads of an overview."""
    alone = filled(WatchedStore(), a=ARRAY)
    crowded = filled(WatchedStore(), a=ARRAY)
    opened = reading(alone, ttl_s=0)
    crowd = reading(crowded, ttl_s=0)
    await OverviewCache(opened.resolver, within_s=LONG_S).read([opened.dataset])
    many = OverviewCache(crowd.resolver, within_s=LONG_S)

    await asyncio.gather(*(many.read([crowd.dataset]) for _ in range(20)))

    assert crowded.calls == alone.calls


async def test_old_overview_is_shown_and_renewed() -> None:
    """An overview is kept for 20 s; after that it is shown once more, and renewed."""
    clock = Clock()
    store = filled(WatchedStore(), a=ARRAY)
    opened = reading(store, ttl_s=0)
    overviews = OverviewCache(opened.resolver, within_s=LONG_S, clock=clock)
    first = await overviews.read([opened.dataset])
    reads = len(store.calls)
    assert await overviews.read([opened.dataset]) == first
    assert len(store.calls) == reads
    filled(store, b=ARRAY)
    clock.now += 30

    assert await overviews.read([opened.dataset]) == first
    renewed = [overview async for _, overview in overviews.follow([opened.dataset])]

    assert [each.path for each in renewed[0].collections] == ["a", "b"]
    assert await overviews.read([opened.dataset]) == {opened.dataset.name: renewed[0]}


async def test_internal_error_is_confined_to_its_dataset(caplog: pytest.LogCaptureFixture) -> None:
    """An internal error in one dataset's overview is logged, and other datasets are shown."""
    store = filled(WatchedStore(), a=ARRAY)
    opened = reading(store)
    odd = replace(opened.dataset, name="odd", root=ObjectRef("memory://other", "odd"))
    store.failure = ZeroDivisionError("of ours")

    with caplog.at_level(logging.ERROR, logger="shardgate"):
        cache = OverviewCache(opened.resolver, within_s=LONG_S)
        found = await cache.read([odd, opened.dataset])

    assert found["odd"].reason == "a fault of this service"
    assert [each.path for each in found[opened.dataset.name].collections] == ["a"]
    assert "odd" in caplog.text
