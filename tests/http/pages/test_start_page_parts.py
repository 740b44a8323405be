"""`shardgate.http.pages.start_page` and `dataset_cards`: their parts, without a server."""

import ast
import asyncio
import html
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from fastapi import Request
from hypothesis import example, given
from hypothesis import strategies as st

from shardgate.formats.surveying import Description
from shardgate.http.auth.access import NOBODY, Datasets, ServedDataset
from shardgate.http.pages.links import PUBLIC_VIEWER, VIEWER
from shardgate.http.pages.start_page import (
    Address,
    OverviewCache,
    StartPage,
    address_of,
    format_shape,
    make_snippets,
    visible,
)
from shardgate.http.request import quote_key
from shardgate.model import ObjectRef
from shardgate.settings import PUBLIC
from shardgate.storage.memory import MemoryStore
from shardgate.survey.inspect import CollectionSummary, GroupSummary
from tests.read.stores import Clock, WatchedStore
from tests.support.pages import parse
from tests.support.resolving import ROOT, reading
from tests.survey.test_inspect import ARRAY, filled


def request(token: str | None = None, **headers: str) -> Request:
    """Return a request for the page, with a token in the path or without."""
    scope: dict[str, Any] = {"type": "http", "method": "GET", "scheme": "http", "path": "/"}
    scope |= {"server": ("10.0.0.7", 8000), "query_string": b"", "root_path": ""}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [(name.encode(), value.encode()) for name, value in named.items()]
    return Request(scope | {"headers": lines, "caller": NOBODY, "token": token})


def address(token: str | None = None, *, has_viewer: bool = True, **headers: str) -> Address:
    """Return the address of a request with *headers*."""
    return address_of(request(token, **headers), has_viewer=has_viewer)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "lab.example:8000"}, "http://lab.example:8000"),
        ({"host": "[::1]:80"}, "http://[::1]:80"),
        ({"host": "lab.example", "x_forwarded_proto": "https"}, "https://lab.example"),
        ({"host": "lab.example", "x_forwarded_proto": "javascript"}, "http://lab.example"),
        *(
            ({"host": host}, "http://10.0.0.7:8000")
            for host in ('x"><script>', "lab.example/path", "user@lab.example")
        ),
        ({}, "http://10.0.0.7:8000"),
    ],
)
def test_base_url_follows_the_host_header(headers: dict[str, Any], expected: str) -> None:
    """The base URL has the Host of the request if that is valid, and the token of its path.

    The viewer's address has no token.
    """
    below = address("ab%2Fc", **headers)

    assert address(**headers).base == expected
    assert (below.base, below.viewer) == (f"{expected}/~ab%2Fc", f"../{VIEWER}")


@pytest.mark.parametrize(
    ("host", "proto", "expected"),
    [
        ("lab.example", "https", PUBLIC_VIEWER),
        ("localhost:8000", "http", PUBLIC_VIEWER),
        ("127.0.0.1:8000", "http", PUBLIC_VIEWER),
        ("lab.example", "http", None),
        ("127.0.0.1.example", "http", None),
    ],
)
def test_public_viewer_needs_https_or_localhost(
    host: str, proto: str, expected: str | None
) -> None:
    """A service without the viewer links the public one, if it has https or is localhost."""
    assert address(has_viewer=False, host=host, x_forwarded_proto=proto).viewer == expected


async def test_overview_is_cached() -> None:
    """An overview is cached for a while, and concurrent requests share its reads."""
    clock, store, crowded = Clock(), *(filled(WatchedStore(), a=ARRAY) for _ in range(2))
    opened, crowd = reading(store, ttl_s=0), reading(crowded, ttl_s=0)
    glances = OverviewCache(opened.resolver, clock=clock)
    first = await glances.read_all([opened.dataset])
    reads = len(store.calls)
    many = OverviewCache(crowd.resolver)
    await asyncio.gather(*(many.read_all([crowd.dataset]) for _ in range(20)))
    assert crowded.calls == store.calls

    assert await glances.read_all([opened.dataset]) == first
    assert len(store.calls) == reads
    clock.now += 30
    assert await glances.read_all([opened.dataset]) == first
    assert len(store.calls) > reads


async def test_overviews_are_read_concurrently() -> None:
    """Fifty datasets that hang take no longer than one, and report the timeout."""
    store = filled(WatchedStore(), a=ARRAY)
    store.gate.clear()
    opened = reading(store)
    many = [replace(opened.dataset, name=f"d{n}", root=ROOT.join(str(n))) for n in range(50)]

    async with asyncio.timeout(20):
        seen = await OverviewCache(opened.resolver, within_s=0.5).read_all(many)

    assert {each.reason for each in seen} == {"the store took longer than 0.5 s"}


async def test_internal_error_is_confined_to_its_dataset(caplog: pytest.LogCaptureFixture) -> None:
    """An internal error in one dataset's overview is logged, and other datasets are shown."""
    store = filled(WatchedStore(), a=ARRAY)
    opened = reading(store)
    odd = replace(opened.dataset, name="odd", root=ObjectRef("memory://other", "odd"))
    store.failure = ZeroDivisionError("of ours")

    with caplog.at_level(logging.ERROR, logger="shardgate"):
        broken, sound = await OverviewCache(opened.resolver).read_all([odd, opened.dataset])

    assert broken.reason == "a fault of this service"
    assert [each.path for each in sound.collections] == ["a"]
    assert "odd" in caplog.text


async def show(
    *names: str,
    asked: Request | None = None,
    has_viewer: bool = True,
    watchers: Collection[str] = (PUBLIC,),
) -> tuple[str, list[str]]:
    """Return the page of datasets with these *names*, and its links."""
    opened = reading(filled(MemoryStore(), a=ARRAY))
    plain = opened.dataset
    datasets = {
        name: ServedDataset(name, plain.root, plain.containers, plain.format) for name in names
    }
    overviews = OverviewCache(opened.resolver)
    page = StartPage(Datasets(datasets, watchers), overviews, has_viewer=has_viewer)
    text = bytes((await page(asked or request(host="lab.example"))).body).decode()
    return text, [link.attrib["href"] for link in parse(text).iter("a")]


async def test_metrics_link_needs_permission() -> None:
    """The page links `/metrics` for callers who may read it.

    Without a readable dataset it says so.
    """
    _, links = await show("em")
    _, fewer = await show("em", watchers=())
    assert set(links) - set(fewer) == {"./metrics"}
    text, _ = await show()
    assert "There is no dataset that you may see." in text


async def test_token_is_kept_in_links_and_snippets() -> None:
    """Links of a page below a token are relative to it, and its snippets contain the token."""
    text, links = await show("em", asked=request("abc", host="lab.example"))

    assert "curl -sS 'http://lab.example/~abc/em/a/zarr.json'" in html.unescape(text)
    assert {"./em/", "./em/a/zarr.json"} < set(links)
    (viewer,) = (link for link in links if "viewer" in link)
    assert viewer.startswith("../viewer/v/page/#!")
    assert "http://lab.example/~abc/em/a/" in viewer


async def test_many_datasets_are_truncated() -> None:
    """The page shows the first 100 datasets and the number of further ones."""
    text, _ = await show(*(f"d{number:03}" for number in range(103)))

    assert text.count("<article") == 100
    assert "And 3 more" in text


async def test_viewer_links_need_a_viewer() -> None:
    """A page without its own viewer links the public one, or says why there are no links."""
    text, links = await show("em", asked=request(host="localhost:8000"), has_viewer=False)
    assert ".[viewer]" not in text
    assert [link for link in links if link.startswith("https://neuroglancer-demo.appspot.com/#!")]

    text, links = await show("em", has_viewer=False)
    assert ".[viewer]" in text
    assert not [link for link in links if "#!" in link]


LEVEL = Description("s0", "zarr", "array", (4, 6), "uint8", ("y", "x"), (2, 3))
GROUP = GroupSummary("", is_consolidated=True)
S0 = CollectionSummary("s0", "s0", "s0", GROUP, LEVEL)
URL = "http://host/em"
DAMAGED = Description("a", "", "damaged", why_sharded="it is torn")


def level(name: str, **more: Any) -> CollectionSummary:
    """Return an array in the group of `S0`."""
    return CollectionSummary(name, name, name, GROUP, replace(LEVEL, **more))


UNNAMED = replace(LEVEL, dimension_names=None)
WAYS = ["curl", "zarr-python", "TensorStore"]


def test_xarray_snippet_drops_levels_of_other_shapes() -> None:
    """The xarray snippet drops arrays of the group whose shapes differ from the first."""
    code = make_snippets(URL, (S0, level("s1", shape=(2, 3)), level("mask")))["xarray"]

    assert 'xarray.open_zarr("http://host/em", consolidated=True, drop_variables=["s1"])' in code


@pytest.mark.parametrize(
    ("seen", "titles"),
    [
        ([level("s0", dimension_names=None)], WAYS),
        ([level("s0", dimension_names=("y", None))], WAYS),
        ([level("s0", dimension_names=("x", "x"))], WAYS),
        ([CollectionSummary("", "", "", None, LEVEL)], WAYS),
        ([S0, level("other", dimension_names=None)], WAYS),
        (
            [S0, CollectionSummary("g/a", "g/a", "g/a", GroupSummary("g"), UNNAMED)],
            [*WAYS[:2], "xarray", WAYS[2]],
        ),
        ([CollectionSummary("a", "a", None, None, DAMAGED)], []),
    ],
)
def test_xarray_snippet_needs_dimension_names_and_a_group(
    seen: list[CollectionSummary], titles: list[str]
) -> None:
    """The xarray snippet needs a group whose arrays all have dimension names.

    A damaged array has no snippets.
    """
    assert list(make_snippets(URL, seen)) == titles


def test_snippets_quote_hostile_names() -> None:
    """Snippets of an array with quotes and line breaks in its name are valid ASCII code."""
    name = "\"'); import os;\n\u202e`$(id)`"
    hostile = replace(S0, path=name, container=name, node=name)
    python = make_snippets(URL, [hostile, level(f"{name}2", shape=(9, 9)), S0])
    curl = python.pop("curl")

    assert len(curl.splitlines()) == 1
    assert curl.isascii()
    for title, code in python.items():
        assert code.isascii()
        assert len(ast.parse(code).body) == (4 if title == "TensorStore" else 3)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([S0], "s0/zarr.json"),
        ([CollectionSummary("a", "a", None, None, DAMAGED), S0], "s0/zarr.json"),
        ([replace(S0, path="", container="", node="")], "zarr.json"),
        ([replace(S0, node="@branch.main/s0")], "@branch.main/s0/zarr.json"),
        ([CollectionSummary("draft/a", "draft", None, None, LEVEL)], "draft/zarr.json"),
    ],
)
def test_curl_snippet_reads_the_first_sound_document(
    seen: list[CollectionSummary], expected: str
) -> None:
    """The curl snippet reads the metadata of the first sound array, or of its container."""
    assert make_snippets(URL, seen)["curl"] == f"curl -sS {URL}/{expected}"


TIMES = " \N{MULTIPLICATION SIGN} "


@given(st.text(st.characters(), max_size=300))
@example("plain é🧊 שלום")
def test_visible_text_is_printable(text: str) -> None:
    """`visible` escapes what is not printable, keeps other letters, and cuts at 200 characters."""
    shown = visible(text)

    assert shown.isprintable()
    assert shown.encode().decode() == shown
    assert shown == text or not text.isprintable() or len(text) > 200
    for odd in ("\n", "\u202e", "\ud800", "\x1b"):
        assert visible(f"a{odd}b") == "a" + odd.encode("unicode_escape").decode() + "b"
    assert visible("a" * 201) == "a" * 200 + "…"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_shape(None), ""),
        (format_shape(()), "scalar"),
        (format_shape((0,)), "0"),
        (format_shape((3, 2)), f"3{TIMES}2"),
        (format_shape((1,) * 13), TIMES.join(["1"] * 12 + ["…"])),
        (quote_key("@branch.a%2Fb/x y/100%/#"), "@branch.a%2Fb/x%20y/100%25/%23"),
    ],
)
def test_shapes_and_keys_are_formatted(shown: str, expected: str) -> None:
    """A long shape is cut. A key is percent-encoded, but for names of refs, which are already."""
    assert shown == expected
