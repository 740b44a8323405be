"""`app.http.start.page`: who is shown what, and where the links on it lead."""

import html
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fastapi import Request

from app.http.credentials.access import Datasets
from app.http.credentials.caller import NOBODY
from app.http.start.figures import Cached, Figures, Traffic
from app.http.start.glances import Glances
from app.http.start.page import StartPage
from app.setting_fields import PUBLIC
from app.storage.memory import MemoryStore
from tests.pages import parse
from tests.resolve.test_inspect import ARRAY, filled
from tests.resolving import reading

FIGURES = Figures(0, Cached(0, 0, 0), Cached(0, 0, 0), Traffic(0, 0, 0, 0))


def request(token: str | None = None, *, host: str = "lab.example", query: bytes = b"") -> Request:
    """Ask for the page, with a token in the path or without."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "path": "/",
        "query_string": query,
        "headers": [(b"host", host.encode())],
        "caller": NOBODY,
    }
    return Request(scope if token is None else {**scope, "token": token})


async def show(
    *names: str,
    asked: Request | None = None,
    has_viewer: bool = True,
    hidden: str = "",
    watchers: Collection[str] = (PUBLIC,),
) -> tuple[str, list[str]]:
    """Give the page of datasets with these *names*, and its links."""
    opened = reading(filled(MemoryStore(), a=ARRAY))
    datasets = {name: replace(opened.dataset, name=name) for name in names}
    if hidden:
        datasets[hidden] = replace(datasets[hidden], readers=frozenset({"somebody"}))
    page = StartPage(
        Datasets(datasets, watchers),
        Glances(opened.resolver),
        lambda: FIGURES,
        has_viewer=has_viewer,
    )
    text = bytes((await page(asked or request())).body).decode()
    return text, [link.attrib["href"] for link in parse(text).iter("a")]


async def test_a_dataset_that_one_may_not_see_is_not_there() -> None:
    """The page is as if there were no such dataset."""
    assert await show("em", "secret", hidden="secret") == await show("em")


async def test_figures_are_for_who_may_watch() -> None:
    """Others see neither those nor a script that asks for them."""
    shown, links = await show("em")
    hidden, fewer = await show("em", watchers=())

    assert "Running for" in shown
    assert "Running for" not in hidden
    assert "<script" not in hidden
    assert set(links) - set(fewer) == {"./metrics"}


async def test_figures_that_one_may_not_see_do_not_come_alone_either() -> None:
    """The answer is empty."""
    opened = reading(MemoryStore())
    page = StartPage(Datasets({}, ()), Glances(opened.resolver), lambda: FIGURES, has_viewer=True)

    assert (await page(request(query=b"figures"))).body == b""


async def test_who_may_see_nothing_is_told_so() -> None:
    """The page is there all the same."""
    text, _ = await show()

    assert "There is no dataset that you may see." in text


async def test_a_token_goes_along() -> None:
    """Links are relative to it, and what is copied from the page has it in its URLs."""
    text, links = await show("em", asked=request("abc"))

    assert "curl -sS 'http://lab.example/~abc/em/a/zarr.json'" in html.unescape(text)
    assert {"./em/", "./em/a/zarr.json"} < set(links)
    (viewer,) = (link for link in links if "viewer" in link)
    assert viewer.startswith("../viewer/v/page/#!")
    assert "http://lab.example/~abc/em/a/" in viewer


async def test_of_very_many_datasets_the_first_are_shown() -> None:
    """And how many there are besides."""
    text, _ = await show(*(f"d{number:03}" for number in range(103)))

    assert text.count("<article") == 100
    assert "And 3 more" in text


async def test_where_no_viewer_can_read() -> None:
    """The page says why there are no links to one."""
    text, links = await show("em", has_viewer=False)

    assert "shardgate[viewer]" in text
    assert not [link for link in links if "#!" in link]


async def test_where_the_public_viewer_can_read() -> None:
    """The links lead there."""
    text, links = await show("em", asked=request(host="localhost:8000"), has_viewer=False)

    assert "shardgate[viewer]" not in text
    assert [link for link in links if link.startswith("https://neuroglancer-demo.appspot.com/#!")]
